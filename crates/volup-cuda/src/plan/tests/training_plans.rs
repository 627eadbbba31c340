//! What plans of training ask of the kernels, when there is one, and what of it would show if it were wrong.

use super::manifest::{devices, source, variants_for};
use super::results::{features, unnoticed};
use super::training::{Example, Turn, planned, wanted_of};
use super::{FORMATS, fits, implicit_plans, launches, shuffle_plans};
use crate::plan::{Argument, Buffer, Plan, Request, Step, Task};
use crate::{Algorithm, DeviceInfo, Variant};
use std::collections::BTreeSet;
use std::ops::Range;
use volup::testing::{Case, cases, published};
use volup::{DType, Error, Precision, Wanted};

/// No gradient.
const NONE: Wanted =
    Wanted { input: false, weight: false, bias: false, norm_weight: false, norm_bias: false };

/// The kernels that compute the gradient of the weight on tensor cores.
const OF_WEIGHT: [&str; 3] = ["weight_gradient", "weight_gradient_lines", "weight_gradient_narrow"];

/// The device that the kernels are for, and these.
fn hopper() -> DeviceInfo {
    let [_, hopper, _] = devices();
    hopper
}

fn all() -> Vec<Variant> {
    variants_for(hopper().arch)
}

/// Everything that can be asked of the passes of a case, in turn with each pair of formats.
fn requests(case: &Case, turn: usize) -> Vec<Request> {
    let mut requests = Vec::new();
    let wanted = [
        Wanted::ALL,
        Wanted { input: false, ..Wanted::ALL },
        Wanted { input: true, weight: true, ..NONE },
        Wanted { input: true, ..NONE },
        Wanted { input: false, weight: false, ..Wanted::ALL },
        NONE,
    ];
    let wanted = wanted.map(|wanted| wanted_of(&case.block, wanted));
    let backward = wanted.into_iter().flat_map(|wanted| [Task::Backward(wanted), Task::Recompute(wanted)]);
    for (task, (dtype, precision)) in [Task::Training].into_iter().chain(backward).flat_map(|task| {
        DType::ALL.into_iter().flat_map(move |dtype| Precision::ALL.map(|p| (task, (dtype, p))))
    }) {
        let Turn { formats: [input_format, output_format], .. } = Turn::new(turn + requests.len());
        requests.push(Request {
            task,
            block: case.block,
            geometry: case.geometry(),
            dtype,
            precision,
            input_format,
            output_format,
            algorithm: None,
        });
    }
    requests
}

fn asks_for_nothing(request: &Request) -> bool {
    matches!(request.task, Task::Backward(NONE) | Task::Recompute(NONE))
}

/// Words are cleared before they are raised or read, what is given is there, launches overlap where both know of it, and
/// numbers are rounded for those that multiply rounded ones.
fn check(plan: &Plan, request: &Request, what: &str) {
    let bare = request.block.is_bare();
    let norm = request.block.norm().is_some();
    let (wanted, training, saved) = match request.task {
        Task::Training => (NONE, true, true),
        Task::Backward(wanted) => (wanted, false, !bare),
        Task::Recompute(wanted) => (wanted, false, false),
        Task::Forward => unreachable!("no pass of training"),
    };
    let is_there = |buffer| match buffer {
        Buffer::Output => training,
        Buffer::GradOutput => !training,
        Buffer::Convolution => saved,
        Buffer::Mean | Buffer::Rstd => saved && norm,
        Buffer::GradInput => wanted.input,
        Buffer::GradWeight => wanted.weight,
        Buffer::GradBias => wanted.bias,
        Buffer::GradNormWeight => wanted.norm_weight,
        Buffer::GradNormBias => wanted.norm_bias,
        // Those that the block lacks are address 0.
        Buffer::Input | Buffer::Weight | Buffer::Bias | Buffer::NormWeight | Buffer::NormBias => true,
        Buffer::Workspace => plan.workspace_bytes > 0,
        Buffer::Packed => false,
        Buffer::Unless => true,
    };
    let mut cleared = Vec::new();
    let mut previous: Option<&Variant> = None;
    for step in &plan.steps {
        let Step::Launch { variant, arguments, overlap, .. } = step else {
            let &Step::Clear { at, words } = step else { unreachable!("a step") };
            assert!(at + 4 * words as u64 <= plan.workspace_bytes as u64 && at.is_multiple_of(4), "{what}");
            cleared.push(at..at + 4 * words as u64);
            previous = None;
            continue;
        };
        let pointers = arguments.iter().filter_map(|argument| match argument {
            Argument::Pointer(buffer, at) => Some((*buffer, *at)),
            _ => None,
        });
        assert!(pointers.clone().all(|(buffer, _)| is_there(buffer)), "{} of {what}", variant.name);
        let before = previous.is_some_and(|previous| source(previous).contains("let_next_start();"));
        let waits = source(variant).contains(" await_previous();");
        assert!(!overlap || before && waits, "{} of {what}", variant.name);
        previous = Some(variant);
    }
    for call in &launches(plan) {
        let of_gradients = call.variant.family == "gradient";
        for name in ["control", "asked", "largest", "unless"].into_iter().filter(|name| call.has(name)) {
            let Some(at) = call.given(name).filter(|_| of_gradients || name == "unless") else { continue };
            let both = name == "unless" || name == "control" && call.kernel().starts_with("direct_");
            let (at, bytes) = (at.at as u64, if both { 8 } else { 4 });
            let is_cleared = |words: &Range<u64>| words.contains(&at) && at + bytes <= words.end;
            assert!(cleared.iter().any(is_cleared), "{name} of {} of {what}", call.variant.name);
        }
        if !of_gradients {
            continue;
        }
        let tf32 = request.dtype == DType::F32 && request.precision == Precision::Tf32;
        let kind = call.variant.param("KIND").expect("a kind of numbers");
        // What is fp16 needs no rounding, nor does what that is made of.
        let halves = call.variant.types == ["f16"] || [2, 5].contains(&kind);
        let rounded = i64::from(tf32 && !halves);
        assert!(!call.has("round") || call.int("round") == rounded, "{what}");
        let right = match request.dtype {
            DType::F64 => kind == 4,
            DType::F32 if call.kernel() == "shuffle_gradient" || OF_WEIGHT.contains(&call.kernel()) => {
                if tf32 { kind == 1 || halves && kind == 0 } else { [2, 3].contains(&kind) }
            }
            DType::F32 => kind == 1 || halves && !(tf32 && kind == 2),
            _ => kind == 0 || call.kernel() == "gradient_merge" && kind == 1,
        };
        assert!(right, "{} of {what}", call.variant.name);
    }
}

#[test]
fn kernels_get_what_they_ask_for() {
    let variants = all();
    let variants: Vec<&Variant> = variants.iter().collect();
    for (turn, case) in super::planned().iter().enumerate() {
        // Fewer multiprocessors have fewer shares and splits.
        let multiprocessors = if turn.is_multiple_of(2) { 132 } else { 3 };
        let device = DeviceInfo { multiprocessors, ..hopper() };
        for request in requests(case, turn) {
            let what = format!("{case}, {request:?}");
            let plan =
                Plan::new(&request, &device, &variants).unwrap_or_else(|error| panic!("{error}: {what}"));
            launches(&plan).iter().for_each(|call| fits(call, &plan, &what));
            check(&plan, &request, &what);
            // Of float64 by the definition alone.
            let names: BTreeSet<&str> = launches(&plan).iter().map(|call| call.kernel()).collect();
            let fast = OF_WEIGHT.iter().chain(&["gradient_weight"]).any(|name| names.contains(name));
            assert!(request.dtype != DType::F64 || plan.algorithm == Algorithm::Direct && !fast, "{plan}");
            assert_eq!(plan.steps.is_empty(), asks_for_nothing(&request), "{plan}");
        }
    }
}

/// The fastest is the plan; each is another, and the last one takes no tile.
#[test]
fn candidates_are_a_tile_each() {
    let variants = all();
    let variants: Vec<&Variant> = variants.iter().collect();
    for case in cases().iter().filter(|case| ["k3", "k-s", "k-long-w"].contains(&case.name)) {
        for request in requests(case, 0).iter().filter(|request| request.dtype != DType::F64) {
            let Task::Backward(wanted @ Wanted { weight: true, .. }) = request.task else { continue };
            let first = Plan::new(request, &hopper(), &variants).expect("a plan");
            let plans = Plan::candidates(request, &hopper(), &variants, 16).expect("plans");
            let texts: Vec<String> = plans.iter().map(ToString::to_string).collect();
            assert_eq!(plans[0], first);
            // They are in the order of the time that both gradients take.
            let both = Task::Backward(Wanted { input: true, ..wanted });
            let of_both = Plan::candidates(&Request { task: both, ..*request }, &hopper(), &variants, 16);
            let of_both = of_both.expect("plans");
            assert!(of_both.is_sorted_by(|one, other| one.seconds() <= other.seconds()), "{texts:#?}");
            let by = |plan: &Plan| {
                plan.to_string().split("; ").find(|part| part.starts_with("weight by")).map(String::from)
            };
            assert!(plans.iter().map(by).eq(of_both.iter().map(by)), "{texts:#?}");
            assert_eq!(texts.iter().collect::<BTreeSet<_>>().len(), plans.len(), "{texts:#?}");
            assert!(plans.len() > 1, "{texts:#?}");
        }
    }
}

#[test]
fn an_empty_batch_asks_for_nothing() {
    let variants = all();
    let variants: Vec<&Variant> = variants.iter().collect();
    for case in cases().iter().filter(|case| case.batch == Some(0)) {
        for request in requests(case, 0) {
            let plan = Plan::new(&request, &hopper(), &variants).expect("a plan");
            assert!(plan.steps.is_empty() && plan.workspace_bytes == 0, "{plan}");
        }
    }
}

#[test]
fn a_missing_kernel_is_named() {
    let case = cases().into_iter().find(|case| case.name == "everything").expect("a row of the table");
    let [ampere, _, small] = devices();
    for request in requests(&case, 0).iter().filter(|request| !asks_for_nothing(request)) {
        // The kernels are for one architecture.
        for device in [&ampere, &small] {
            let error = super::plan(request, device, &[]).unwrap_err();
            assert!(
                matches!(&error, Error::MissingKernel { arch, .. } if *arch == device.arch.to_string()),
                "{error}"
            );
        }
        let variants = all();
        let with = |kept: &dyn Fn(&Variant) -> bool| {
            let variants: Vec<&Variant> = variants.iter().filter(|variant| kept(variant)).collect();
            Plan::new(request, &hopper(), &variants)
        };
        let whole = with(&|_| true).expect("a plan");
        for call in launches(&whole).iter().filter(|call| call.variant.family == "gradient") {
            match with(&|variant| variant.entry != call.variant.entry) {
                Ok(other) => {
                    let others = launches(&other);
                    assert!(OF_WEIGHT.contains(&call.kernel()), "{other}");
                    assert!(others.iter().all(|other| other.kernel() != call.kernel()), "{other}");
                }
                Err(Error::MissingKernel { name, arch }) => {
                    assert!(name.contains(call.kernel()) && arch == "sm_90", "{name} for {arch}");
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Where tiles would spill there are fewer: one of each kind is enough.
#[test]
fn plans_make_do_with_one_kernel_of_a_kind() {
    let all = all();
    let mut variants: Vec<&Variant> = Vec::new();
    for variant in &all {
        if !variants.iter().any(|other| super::does_the_same(other, variant)) {
            variants.push(variant);
        }
    }
    for (turn, case) in super::planned().iter().enumerate() {
        for request in requests(case, turn) {
            let plan = Plan::new(&request, &hopper(), &variants).expect("a plan");
            launches(&plan).iter().for_each(|call| fits(call, &plan, &format!("{case}")));
        }
    }
}

/// Runs the backward pass by all kernels.
fn runs(example: &Example, request: &Request) -> BTreeSet<&'static str> {
    let variants = all();
    let variants: Vec<&Variant> = variants.iter().collect();
    example.check_backward(&planned(example, request, &hopper(), &variants), request)
}

#[test]
fn each_gradient_alone_is_what_it_is_with_the_others() {
    let alone = [
        Wanted { input: true, ..NONE },
        Wanted { weight: true, ..NONE },
        Wanted { bias: true, ..NONE },
        Wanted { norm_weight: true, ..NONE },
        Wanted { norm_bias: true, ..NONE },
        NONE,
    ];
    for case in cases().iter().filter(|case| ["last-block", "everything", "bias"].contains(&case.name)) {
        for dtype in DType::ALL {
            let example = Example::new(case, dtype, |_| {});
            for wanted in alone.map(|wanted| wanted_of(&case.block, wanted)) {
                for task in [Task::Backward(wanted), Task::Recompute(wanted)] {
                    runs(&example, &example.request(task, Precision::Ieee, FORMATS));
                }
            }
        }
    }
}

/// What a kernel that is asked for does not compute is what it is beside it.
#[test]
fn a_kernel_that_is_asked_for_leaves_the_other_gradient_alone() {
    let variants = all();
    let variants: Vec<&Variant> = variants.iter().collect();
    for case in ["k3", "last-s2", "g2"].map(|name| cases().into_iter().find(|case| case.name == name)) {
        let example = Example::new(&case.expect("a row of the table"), DType::F32, |_| {});
        for kernel in ["weight_gradient", "weight_gradient_lines", "weight_gradient_narrow"] {
            let of = |wanted: Wanted| {
                let request = example.request(Task::Backward(wanted), Precision::Tf32, FORMATS);
                let request = Request { algorithm: Some(Algorithm::HaloGemm), ..request };
                Plan::with_kernel(&request, &hopper(), &variants, kernel).expect("a plan")
            };
            assert!(of(NONE).is_none());
            let both = Wanted { input: true, weight: true, ..NONE };
            let (Some(both), Some(alone)) = (of(both), of(Wanted { input: true, ..NONE })) else { continue };
            assert!(both.launches(kernel) && !alone.launches(kernel), "{both}; {alone}");
            assert_eq!(both.algorithm, alone.algorithm);
            let products = |plan: &Plan| {
                let calls = launches(plan).into_iter().filter(|call| call.kernel().contains("_gemm"));
                calls.map(|call| call.variant.name).collect::<Vec<_>>()
            };
            assert_eq!(products(&both), products(&alone), "{both}; {alone}");
        }
    }
}

/// What the fast paths cannot multiply is multiplied by the definition, and nothing else is.
#[test]
fn the_guards_notice_what_is_no_number() {
    type Change = fn([&mut Vec<f64>; 3]);
    let changes: [(Change, [bool; 2]); 4] = [
        (|[x, ..]| x[3] = f64::NAN, [false, true]),
        (|[_, w, _]| *w.last_mut().expect("a weight") = f64::NEG_INFINITY, [true, false]),
        (|[.., g]| *g.last_mut().expect("a gradient") = f64::INFINITY, [true, true]),
        (|[.., g]| g[0] = f64::NAN, [true, true]),
    ];
    let names = ["k3", "g2", "s2-d3", "p-crops-input", "k-s"];
    for (turn, case) in cases().iter().filter(|case| names.contains(&case.name)).enumerate() {
        for (dtype, precision) in
            [DType::F32, DType::Bf16].into_iter().flat_map(|dtype| Precision::ALL.map(|p| (dtype, p)))
        {
            for (change, expected) in changes {
                let example = Example::new(case, dtype, change);
                let Turn { formats, algorithm, .. } = Turn::new(turn);
                let task = Task::Backward(wanted_of(&case.block, Wanted::ALL));
                let request = Request { algorithm, ..example.request(task, precision, formats) };
                let found = runs(&example, &request);
                let done = ["the input by the definition", "the weight by the definition"]
                    .map(|what| found.contains(what));
                assert_eq!(done, expected, "{case}");
            }
        }
    }
}

/// Of classes that lack taps along every axis only those that are there are multiplied.
#[test]
fn gradients_by_the_taps_that_are_there_are_those_of_the_definition() {
    let mut variants = all();
    variants.retain(|variant| match variant.entry {
        "halo_gemm" => variant.param("SHORT").is_some(),
        entry => entry != "halo_sweep",
    });
    let variants: Vec<&Variant> = variants.iter().collect();
    let wrong = [("halo_gemm", "class_panels classes_h classes_w")];
    for line in ["n 2, 2x3x3, 3>16, k 3x4x5, s 2x3x2, p 1", "n 1, 3x2x4, 9>16, k 5x3x3, s 2, d 1x3x1, relu"] {
        let case = Case::parse("short", line, "classes that lack taps").expect("a valid case");
        for (dtype, precision) in
            [(DType::F32, Precision::Ieee), (DType::F32, Precision::Tf32), (DType::F16, Precision::Ieee)]
        {
            let example = Example::new(&case, dtype, |_| {});
            let task = Task::Backward(Wanted { input: true, ..NONE });
            let request = example.request(task, precision, FORMATS);
            let request = Request { algorithm: Some(Algorithm::HaloGemm), ..request };
            let plan = planned(&example, &request, &hopper(), &variants);
            assert!(example.check_backward(&plan, &request).contains("taps that are there"), "{plan}");
            let shown = unnoticed(&plan, &wrong, |plan| {
                example.check_backward(plan, &request);
                true
            });
            assert!(shown.is_empty(), "{shown:?} may be wrong: {plan}");
        }
    }
}

/// The plans of a request that take statistics of what the convolution's launch writes, in that launch.
fn counting(request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Vec<Plan> {
    let mut plans = Plan::candidates(request, device, variants, usize::MAX).expect("plans");
    plans.retain(|plan| plan.to_string().contains("with statistics"));
    for plan in &plans {
        let names: Vec<&str> = launches(plan).iter().map(|call| call.kernel()).collect();
        let merge = match plan.algorithm {
            Algorithm::GatherGemm | Algorithm::HaloGemm => "group_merge",
            _ => "partial_merge",
        };
        assert!(names.len() > 2 && names.ends_with(&[merge, "block_output"]), "{plan}");
    }
    plans
}

#[test]
fn statistics_of_what_is_written_are_those_of_the_definition() {
    let variants = all();
    let variants: Vec<&Variant> = variants.iter().collect();
    let (mut found, mut count) = (BTreeSet::new(), 0);
    let table = cases().into_iter().chain(implicit_plans::own()).chain(shuffle_plans::own());
    for (turn, case) in table.filter(|case| case.batch != Some(0)).enumerate() {
        // Fewer multiprocessors take several items of several samples each.
        let multiprocessors = [132, 2, 1][turn % 3];
        let device = DeviceInfo { multiprocessors, ..hopper() };
        for (dtype, precision) in [
            (DType::F32, Precision::Ieee),
            (DType::F32, Precision::Tf32),
            (DType::F16, Precision::Ieee),
            (DType::Bf16, Precision::Ieee),
        ] {
            let example = Example::new(&case, dtype, |_| {});
            let request = example.request(Task::Training, precision, [FORMATS[0]; 2]);
            let plans = counting(&request, &device, &variants);
            // All of `shuffle_wgmma`, of boxes some.
            let by_boxes = |plan: &&Plan| plan.algorithm == Algorithm::ImplicitGemm;
            let boxes = plans.iter().filter(by_boxes).skip(turn % 4).step_by(14);
            for plan in plans.iter().filter(|plan| !by_boxes(plan)).chain(boxes) {
                println!("{case}; {dtype}, {precision}; {plan}");
                launches(plan).iter().for_each(|call| fits(call, plan, &format!("{request:?}")));
                check(plan, &request, &format!("{case}; {plan}"));
                example.check_forward(plan, &request);
                found.extend(features(plan));
                count += 1;
            }
        }
    }
    for feature in [
        "blocks of many blocks of positions",
        "blocks of many boxes",
        "blocks without positions of a sample",
        "boxes past the end",
        "channels of a group past a tile",
        "columns past the end",
        "groups",
        "lines past the end",
        "neighbours apart",
        "neighbours together",
        "odd lines",
        "positions past the end",
        "row blocks",
        "rows past the end",
        "statistics of what is written",
        "teams",
        "warpgroups",
    ] {
        assert!(found.contains(feature), "{feature}");
    }
    assert!(count > 400, "{count}");
}

/// Curves that take long are left to a pass of their own; so is what is not normalized.
#[test]
fn statistics_are_taken_where_the_activation_is_plain() {
    let variants = all();
    let variants: Vec<&Variant> = variants.iter().collect();
    let families = |ending: &str| -> BTreeSet<String> {
        let case = Case::parse("given", &format!("n 2, 8x8x8, 32>16, k 2, s 2{ending}"), "given");
        let example = Example::new(&case.expect("a valid case"), DType::F32, |_| {});
        let request = example.request(Task::Training, Precision::Tf32, [FORMATS[0]; 2]);
        let plans = counting(&request, &hopper(), &variants);
        plans.iter().map(|plan| plan.algorithm.to_string()).collect()
    };
    // The slope of leaky ReLU is rounded where y is not.
    for (ending, count) in
        [(", gn 4", 3), (", relu, gn 4 plain, tanh", 3), (", leaky_relu(0.1), gn 2, gelu", 2)]
    {
        assert_eq!(families(ending).len(), count, "{ending}");
    }
    for ending in [", silu, gn 4", ", hardswish, gn 4 plain, tanh"] {
        assert_eq!(families(ending).into_iter().collect::<Vec<_>>(), ["implicit_gemm"], "{ending}");
    }
    for ending in [", gelu, gn 4", ", tanh, gn 4", ", relu", ", silu, relu"] {
        assert!(families(ending).is_empty(), "{ending}");
    }
}

/// A large block's statistics cost no pass of their own, but those of sweeps in `ieee`, whose product is faster by more than that.
#[test]
fn statistics_of_large_blocks_are_taken_of_what_is_written() {
    let variants = all();
    let variants: Vec<&Variant> = variants.iter().collect();
    for name in ["kb2-60-block", "nnunet-64-32-64-block", "kb2-61-block", "monai-128-32-48-block"] {
        let case = published().into_iter().find(|case| case.name == name).expect("a published shape");
        for request in requests(&case, 0) {
            let request = Request { input_format: FORMATS[0], output_format: FORMATS[0], ..request };
            if request.task != Task::Training || request.dtype == DType::F64 {
                continue;
            }
            let plan = Plan::new(&request, &hopper(), &variants).expect("a plan");
            let sweeps = plan.launches("halo_sweep") && request.precision == Precision::Ieee;
            assert!(sweeps || !plan.launches("channel_statistics"), "{plan}");
        }
    }
}

/// What a wrong argument of the launch that counts what it writes would do.
#[test]
fn a_wrong_argument_of_what_is_counted_shows() {
    let line = "n 3, 4x6x10, 40>20, k 2, s 2, bias, leaky_relu(0.2), gn 5, leaky_relu(0.1)";
    let case = Case::parse("wrong", line, "all arguments matter").expect("a valid case");
    let device = DeviceInfo { multiprocessors: 2, ..hopper() };
    let variants = all();
    let variants: Vec<&Variant> = variants.iter().collect();
    let merge = ("partial_merge", "samples groups chunks columns sample_step group_step chunk_step");
    let of_wgmma = [
        (
            "shuffle_wgmma",
            "in_channels out_channels volume plane width d_stride h_stride x_n y_n y_c y_d y_h",
        ),
        ("shuffle_wgmma", "chunks pos_blocks items row_blocks row_groups stages how has_bias activation"),
        ("shuffle_wgmma", "norm_groups group_channels post_activation"),
        merge,
    ];
    let of_boxes = [
        ("implicit_gemm", "in_per_group out_per_group groups d_input d_output d_kernel d_stride d_padding"),
        ("implicit_gemm", "h_input h_output h_kernel h_stride h_padding w_input w_output w_kernel w_stride"),
        (
            "implicit_gemm",
            "box_d units_h blocks_h boxes_d boxes_h boxes_w samples planes lines x_c entries stages joined linked run_pitch",
        ),
        ("implicit_gemm", "x_n y_n has_bias activation mode norm_groups group_channels post_activation"),
        merge,
    ];
    let of_rows = [
        ("gather_gemm", "rows voxels pd ph pw channels part_chunks part_phases out_channels relus"),
        ("group_merge", "groups group_channels joined chunks phases rows tile_rows warpgroups"),
    ];
    let relu = Case::parse("wrong", "n 3, 4x8x8, 40>36, k 3, s 2, p 1, op 1, bias, relu, gn 6", "all matter");
    let [leaky, relu] =
        [case, relu.expect("a valid case")].map(|case| Example::new(&case, DType::F32, |_| {}));
    for (algorithm, example, precision, wrong) in [
        (Algorithm::ShuffleWgmma, &leaky, Precision::Ieee, &of_wgmma[..]),
        (Algorithm::ImplicitGemm, &leaky, Precision::Ieee, &of_boxes),
        (Algorithm::GatherGemm, &relu, Precision::Tf32, &of_rows),
    ] {
        let request = example.request(Task::Training, precision, [FORMATS[0]; 2]);
        let plans = counting(&request, &device, &variants);
        let plan = plans.iter().find(|plan| plan.algorithm == algorithm).expect("a plan of each family");
        let shown = unnoticed(plan, wrong, |plan| {
            example.check_forward(plan, &request);
            true
        });
        assert!(shown.is_empty(), "{shown:?} may be wrong: {plan}");
    }
}

/// What a wrong argument of the passes would do.
#[test]
fn a_wrong_argument_shows() {
    let line = "n 4, 3x4x5, 6>8, k 3x4x5, s 2x3x2, d 1x2x3, p 1x2x1, g 2, bias, silu, gn 4, leaky_relu(0.1)";
    let case = Case::parse("wrong", line, "everything that kernels are told matters").expect("a valid case");
    let chunks = "voxels channels chunks channel_blocks activation";
    let rows = [
        (
            "gradient_rows",
            "channels group_channels activation post groups group_in slots x_n x_c x_d x_h x_w",
        ),
        ("gradient_rows", "size_d rows_d classes_d stride_d padding_d dilation_d"),
        ("gradient_rows", "size_h rows_h classes_h stride_h padding_h dilation_h"),
        ("gradient_rows", "size_w rows_w classes_w stride_w padding_w dilation_w row panel"),
        ("gradient_sums", chunks),
        ("gradient_sums", "group_channels post"),
        ("gradient_merge", "rows chunks"),
        ("gradient_vectors", "samples channels group_channels"),
        ("weight_gradient_sum", "splits taps in_channels group_out"),
    ];
    let fast = [
        ("gradient_weight", "groups group_in group_out slots kernel_d classes_d step_d count_d"),
        ("gradient_weight", "kernel_h classes_h step_h count_h kernel_w classes_w step_w count_w"),
        ("weight_gradient", "count x_pitch pitch shift_d shift_h shift_w groups group_in group_out slots"),
        ("weight_gradient", "kernel_d classes_d step_d count_d kernel_h classes_h step_h count_h"),
        ("weight_gradient", "kernel_w classes_w step_w count_w splits share"),
    ];
    // An output more would be read as a zero.
    let axes = "d_input d_stride d_padding d_dilation d_rows d_classes d_step d_apart \
                h_input h_stride h_padding h_dilation h_kernel h_rows h_classes h_step h_apart \
                w_input w_stride w_dilation w_kernel w_rows w_classes w_step w_apart";
    // A share or a tap more of the weight's gradient would go where nobody reads.
    let defined = [
        ("direct_input_gradient", "n groups group_in group_out slots x_n x_c x_d x_h x_w d_kernel"),
        ("direct_input_gradient", axes),
        ("direct_weight_gradient", "n groups group_in group_out slots x_n x_c x_d x_h x_w"),
        ("direct_weight_gradient", axes),
    ];
    let of_forward =
        [("channel_statistics", chunks), ("block_output", chunks), ("block_output", "group_channels post")];
    let variants = all();
    let variants: Vec<&Variant> = variants.iter().collect();
    for (dtype, more) in [(DType::F32, &fast[..]), (DType::F64, &defined)] {
        let example = Example::new(&case, dtype, |_| {});
        for formats in [[FORMATS[0], FORMATS[1]], [FORMATS[1], FORMATS[0]]] {
            let of = |task| example.request(task, Precision::Ieee, formats);
            let request = of(Task::Backward(wanted_of(&case.block, Wanted::ALL)));
            let plan = planned(&example, &request, &hopper(), &variants);
            let wrong: Vec<_> = rows.iter().chain(more).copied().collect();
            let shown = unnoticed(&plan, &wrong, |plan| {
                example.check_backward(plan, &request);
                true
            });
            assert!(shown.is_empty(), "{shown:?} may be wrong: {plan}");
            let request = of(Task::Training);
            let plan = planned(&example, &request, &hopper(), &variants);
            let shown = unnoticed(&plan, &of_forward[..], |plan| {
                example.check_forward(plan, &request);
                true
            });
            assert!(shown.is_empty(), "{shown:?} may be wrong: {plan}");
        }
    }
}
