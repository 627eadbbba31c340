//! What plans of `implicit_gemm` compute, and where the family applies.

use super::implicit::Axis;
use super::manifest::devices;
use super::results::{Choice, Example, features, kernels, unnoticed_of};
use super::{FORMATS, fits, launches, request_of, some_of};
use crate::plan::{Plan, Request, Task, implicit_gemm, phases};
use crate::{Algorithm, DeviceInfo, Variant};
use std::collections::BTreeSet;
use volup::testing::{Case, cases, random_case};
use volup::{Activation, ConvSpec, DType, Error, MemoryFormat, Precision};

/// What the table has not, and why.
const ROWS: [(&str, &str); 9] = [
    ("n 2, 2x3x5, 2>70, k 2x3x2, s 2x1x2, relu, gn 7 plain, tanh", "more channel blocks than warps"),
    (
        "n 2, 1x5x3, 5>27, k 3, s 1x4x2, p 0x2x1, bias, gelu_tanh, gn 3",
        "four residues in turns, two tiles of channels",
    ),
    (
        "n 2, 3x4x9, 3>4, k 2x1x9, s 3x1x2, d 1x1x2, p 0x0x8, bias, sigmoid, gn 2",
        "the margin on both sides, no tap of odd columns",
    ),
    (
        "n 2, 4x4x8, 3>4, k 1x4x3, s 1x2x2, d 2x1x4, p 0x1x1, gelu",
        "offsets apart, a curve that is computed once",
    ),
    ("n 1, 2x2x3, 1>2, k 2x9x1, s 8x8x2, leaky_relu(0.5)", "as many residues as there may be, of few taps"),
    ("n 3, 2x2x4, 14>6, k 2x3x2, s 2, g 2, leaky_relu(0.3), gn 3", "groups of odd channels in pairs"),
    (
        "n 2, 5x4x4, 4>4, k 5x1x2, s 3x1x2, d 2x1x1, p 4x0x0, op 1x0x1, bias, relu, gn 4",
        "planes that stand apart",
    ),
    (
        "n 1, 2x3x70, 2>3, k 2x3x5, s 1x2x2, p 0x0x5, gn 1",
        "odd lines of three boxes, and nothing at their ends",
    ),
    ("n 2, 2x2x2, 3>4, k 3, s 2, gn 2, gelu", "a curve behind the normalization"),
];

pub fn own() -> Vec<Case> {
    ROWS.iter().map(|(line, why)| Case::parse("implicit", line, why).expect("a valid case")).collect()
}

/// A few multiprocessors: blocks take several boxes, of several samples and groups.
fn with_multiprocessors(multiprocessors: usize) -> DeviceInfo {
    DeviceInfo { multiprocessors, ..devices()[1].clone() }
}

/// Where the family applies, but for the shared memory of many channels, by what the kernel's file says.
fn applies(request: &Request) -> bool {
    let (block, geometry) = (&request.block, &request.geometry);
    let [depth, height, width] = *geometry.axes();
    let offset = |tap: usize| {
        let at = width.padding as i64 - (tap * width.dilation) as i64;
        at.div_euclid(2) + at.rem_euclid(2)
    };
    let near = (0..width.kernel).all(|tap| (-4..=4).contains(&offset(tap)));
    let once = block.norm().is_some() || block.activation().is_none() || block.post_activation().is_none();
    let long = |activation| matches!(activation, Some(Activation::Gelu | Activation::Tanh));
    let once = once && !long(block.activation()) && !long(block.post_activation());
    // Of NDHWC what a group has of a voxel is whole sectors.
    let voxel = geometry.conv().out_channels() / geometry.conv().groups() * request.dtype.size();
    let formats = match [request.input_format, request.output_format] {
        [_, MemoryFormat::Contiguous] => true,
        [of, last] => of == last && voxel.is_multiple_of(32),
    };
    let classes = depth.stride * height.stride <= 64;
    width.stride == 2
        && width.kernel <= 9
        && near
        && classes
        && once
        && formats
        && request.dtype != DType::F64
}

/// Cases of the table whose weights are more than shared memory holds, in two parts or any.
const TOO_MANY: [&str; 7] = [
    "channels-17-33",
    "few-tiles",
    "k-s-full",
    "last-few-tiles",
    "last-k-s-many",
    "monai-128-32-48-block-small",
    "nnunet-320-256-8-small",
];

/// All plans of the family.
fn plans(request: &Request, device: &DeviceInfo, variants: &[Variant]) -> Vec<Plan> {
    let variants: Vec<&Variant> = variants.iter().collect();
    match Plan::candidates(request, device, &variants, usize::MAX) {
        Ok(plans) => plans.into_iter().filter(|plan| plan.algorithm == Algorithm::ImplicitGemm).collect(),
        // The definition, which it is left to, counts in 32 bits too.
        Err(Error::Overflow { .. }) => Vec::new(),
        Err(error) => panic!("{error}: {request:?}"),
    }
}

/// Runs each `step`th plan of the family for all cases, with all kernels that are chosen, and says what they are like.
fn check(
    device: &DeviceInfo,
    choice: Option<Choice>,
    dtype: DType,
    precision: Precision,
    step: usize,
) -> (BTreeSet<&'static str>, usize) {
    let variants = kernels(device, choice);
    let (mut found, mut count) = (BTreeSet::new(), 0);
    for (index, case) in cases().iter().chain(&own()).filter(|case| case.batch != Some(0)).enumerate() {
        let of = |[input_format, output_format]: [MemoryFormat; 2]| Request {
            task: Task::Forward,
            block: case.block,
            geometry: case.geometry(),
            dtype,
            precision,
            input_format,
            output_format,
            algorithm: Some(Algorithm::ImplicitGemm),
        };
        let [first, last] = FORMATS;
        for request in [[first; 2], [last; 2], [last, first]].map(of) {
            let planned = plans(&request, device, &variants);
            let left = choice.is_some() || TOO_MANY.contains(&case.name);
            let odd = planned.is_empty() == applies(&request);
            assert!(
                !odd || left && planned.is_empty(),
                "{case}; {dtype}, {precision}, {}",
                request.output_format
            );
            if planned.is_empty() {
                continue;
            }
            let example = Example::new(case, dtype, |_, _| {});
            for plan in some_of(&planned, step, index) {
                println!("{case}; {dtype}, {precision}; {plan}");
                example.is_right(plan, &request);
                found.extend(features(plan));
                count += 1;
            }
        }
    }
    (found, count)
}

#[test]
fn implicit_gemm_computes_the_definition() {
    let hopper = with_multiprocessors(132);
    let (mut found, mut count) = (BTreeSet::new(), 0);
    for (device, dtype, precision, step) in [
        (&hopper, DType::F32, Precision::Ieee, 14),
        (&with_multiprocessors(1), DType::F32, Precision::Tf32, 26),
        (&with_multiprocessors(2), DType::F16, Precision::Ieee, 32),
        (&hopper, DType::Bf16, Precision::Ieee, 34),
    ] {
        let (features, plans) = check(device, None, dtype, precision, step);
        found.extend(features);
        count += plans;
    }
    let expected = [
        "blocks of many boxes",
        "boxes past the end",
        "channels last to first, few",
        "channels last, few",
        "channels of a group past a tile",
        "channels that a pair lacks",
        "columns past the end",
        "groups",
        "inputs of one column",
        "lines apart",
        "lines one by one",
        "lines past the end",
        "lines that follow each other",
        "normalized",
        "odd lines",
        "residues without taps",
        "row blocks apart",
        "row blocks that follow each other",
        "statistics",
        "statistics of what is written",
        "units without all row blocks",
        "units without lines",
    ];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
    assert!(count > 250, "{count}");
}

/// A build that has one kernel for each kind of numbers does with it what it has room for.
#[test]
fn implicit_gemm_computes_the_definition_with_a_single_kernel() {
    fn is(kernel: &Variant, segments: i64) -> bool {
        kernel.entry != "implicit_gemm" || kernel.param("SEGMENTS") == Some(segments)
    }
    let few = with_multiprocessors(2);
    let one: Choice = |kernel| is(kernel, 1);
    let two: Choice = |kernel| is(kernel, 2);
    for (choice, dtype) in [(one, DType::F32), (two, DType::F32), (one, DType::F16), (two, DType::Bf16)] {
        let (found, count) = check(&few, Some(choice), dtype, Precision::Ieee, usize::MAX);
        assert!(count >= 40, "{count}");
        assert!(found.contains("blocks of many boxes"), "{found:?}");
    }
}

/// Infinities, NaN and what is too small for two parts, in the input and in the weight: a box is left to the definition,
/// so that what is not among an output's products is not seen in it.
#[test]
fn implicit_gemm_leaves_what_it_cannot_compute_to_the_definition() {
    type Change = fn(&mut Vec<f64>, &mut Vec<f64>);
    let changes: [(&str, Change); 7] = [
        ("a NaN in the input", |x, _| x[3] = f64::NAN),
        ("the last input is infinite", |x, _| *x.last_mut().unwrap() = f64::NEG_INFINITY),
        ("an infinite weight", |_, w| w[1] = f64::INFINITY),
        ("the last weight is NaN", |_, w| *w.last_mut().unwrap() = f64::NAN),
        ("an infinity times zero", |x, w| {
            x[0] = f64::INFINITY;
            w.iter_mut().step_by(3).for_each(|w| *w = 0.0);
        }),
        ("a tiny input", |x, _| x[5..40].iter_mut().for_each(|x| *x *= 1e-36)),
        ("a tiny weight", |_, w| w[7] = 1e-37),
    ];
    let device = with_multiprocessors(2);
    let variants = kernels(&device, None);
    for line in [
        "n 2, 3x5x36, 3>5, k 3, s 2, p 1, silu, gn 5, hardswish",
        "n 2, 3x4x5, 6>8, k 3x2x4, s 2x3x2, p 1x0x2, g 2, bias, relu",
    ] {
        let case = Case::parse("hostile", line, "numbers that are none").unwrap();
        for (dtype, precision) in [
            (DType::F32, Precision::Ieee),
            (DType::F32, Precision::Tf32),
            (DType::F16, Precision::Ieee),
            (DType::Bf16, Precision::Ieee),
        ] {
            for (what, change) in changes {
                let example = Example::new(&case, dtype, change);
                let request = example.request(Algorithm::ImplicitGemm, precision, [FORMATS[0]; 2]);
                for plan in plans(&request, &device, &variants).iter().step_by(16) {
                    println!("{case}; {dtype}, {precision}; {what}; {plan}");
                    let (deviation, _) = example.run(plan, &request);
                    assert!(deviation.is_ok(), "{deviation}");
                }
            }
        }
    }
}

/// A request in float32 for one sample or more of a block.
fn request(line: &str) -> Request {
    Request { algorithm: Some(Algorithm::ImplicitGemm), ..request_of(line) }
}

/// How a request is planned on a Hopper: by this family, with its normalization or without, or by others.
fn ways(request: &Request) -> Vec<&'static str> {
    let device = with_multiprocessors(132);
    let variants = kernels(&device, None);
    let plans = Plan::candidates(request, &device, &variants.iter().collect::<Vec<_>>(), usize::MAX).unwrap();
    let way = |plan: &Plan| {
        let text = plan.to_string();
        let [twice, counted] = ["recomputed for the norm", "with statistics"].map(|what| text.contains(what));
        let after = request.block.norm().is_some() && !twice && !counted;
        let own = plan.algorithm == Algorithm::ImplicitGemm;
        assert_eq!(text.contains("two-pass norm"), after, "{text}");
        let launched = launches(plan).iter().filter(|call| call.kernel() == "implicit_gemm").count();
        assert_eq!(launched, if own { 1 + usize::from(twice) } else { 0 }, "{text}");
        match (own, twice, counted) {
            (true, true, _) => "twice",
            (true, _, true) => "counted",
            (true, ..) => "once",
            _ => "otherwise",
        }
    };
    plans.iter().map(way).collect::<BTreeSet<_>>().into_iter().collect()
}

/// What a call takes that is bound by the memory follows its rate; where the driver does not say, it is that of an H200.
#[test]
fn slower_memory_takes_longer() {
    let request = request("n 16, 32x64x64, 3>16, k 3, s 2, p 1");
    let hopper = with_multiprocessors(132);
    let variants = kernels(&hopper, None);
    let variants = variants.iter().collect::<Vec<_>>();
    let seconds = |memory_rate| {
        let device = DeviceInfo { memory_rate, ..hopper.clone() };
        Plan::new(&request, &device, &variants).unwrap().seconds()
    };
    let [unknown, h200, h100] = [0, 4_917_000_000_000, 3_352_000_000_000].map(seconds);
    assert!((0.99..=1.0).contains(&(unknown / h200)), "{unknown} and {h200}");
    assert!((1.2..1.5).contains(&(h100 / h200)), "{h200} and {h100}");
}

#[test]
fn outputs_are_counted_or_computed_twice_where_a_norm_follows_and_nothing_long() {
    let of = |ending: &str| ways(&request(&format!("n 2, 8x8x8, 3>16, k 3, s 2, p 1{ending}")));
    for ending in ["", ", relu", ", bias, silu"] {
        assert_eq!(of(ending), ["once"], "{ending}");
    }
    for ending in [", gn 4", ", silu, gn 4 plain", ", sigmoid, gn 16, gelu_tanh", ", hardswish, gn 1, relu"] {
        assert_eq!(of(ending), ["counted", "once", "twice"], "{ending}");
    }
    // Two activations in a row are the definition's; erf's and tanh other families'.
    for ending in [
        ", relu, sigmoid",
        ", gelu",
        ", tanh",
        ", gelu, gn 4",
        ", sigmoid, gn 16, gelu",
        ", tanh, gn 4, relu",
    ] {
        assert_eq!(of(ending), ["otherwise"], "{ending}");
    }
}

#[test]
fn only_a_stride_of_two_along_width_applies() {
    let base = request("n 2, 8x8x8, 3>16, k 3, s 2, p 1, gn 4");
    assert!(applies(&base) && ways(&base) == ["counted", "once", "twice"]);
    let other = |request: &Request| {
        assert!(!applies(request), "{request:?}");
        assert_eq!(ways(request), ["otherwise"], "{request:?}");
    };
    let taken = |line: &str| {
        let request = request(&format!("n 2, 8x8x16, {line}"));
        assert!(applies(&request) && ways(&request) == ["once"], "{line}");
    };
    let refused = |line: &str| other(&request(&format!("n 2, 8x8x16, {line}")));
    for stride in ["1", "3", "2x2x1", "2x2x4"] {
        refused(&format!("3>16, k 3, s {stride}"));
    }
    taken("3>16, k 3, s 5x3x2");
    taken("3>5, k 3, s 2, d 3x2x1, g 1, op 1");
    taken("6>10, k 4x1x2, s 1x1x2, g 2");
    // Residues and taps along width that tables hold, inputs that a line's margins do.
    taken("3>4, k 1, s 8x8x2");
    refused("3>4, k 1, s 13x5x2");
    taken("3>4, k 1x1x9, s 2");
    refused("3>4, k 1x1x10, s 2, p 0x0x4");
    taken("3>4, k 1x1x2, s 2, d 1x1x9");
    refused("3>4, k 1x1x2, s 2, d 1x1x10");
    taken("3>4, k 1x1x3, s 2, d 1x1x8, p 0x0x8");
    refused("3>4, k 1x1x3, s 2, d 1x1x8, p 0x0x9");
    taken("3>4, k 1, s 2, p 0x0x8");
    refused("3>4, k 1, s 2, p 0x0x9");

    let [first, last] = FORMATS;
    // Of NDHWC what is whole sectors of each voxel; not counted as it is written.
    let of_last = |request: Request| Request { input_format: last, output_format: last, ..request };
    let alike = of_last(base);
    assert!(applies(&alike) && ways(&alike) == ["once", "twice"]);
    other(&of_last(request("n 2, 8x8x16, 3>12, k 3, s 2")));
    other(&Request { dtype: DType::F16, ..of_last(request("n 2, 8x8x16, 3>24, k 3, s 2")) });
    assert_eq!(ways(&Request { input_format: last, ..base }), ["once", "twice"]);
    other(&Request { input_format: first, output_format: last, ..base });
    other(&Request { dtype: DType::F64, ..base });
    // Another family that is asked for; a device that the kernel is not compiled for.
    let asked = Request { algorithm: Some(Algorithm::BoxGemm), ..base };
    assert_eq!(ways(&asked), ["otherwise"]);
    let [ampere, _, blackwell] = devices();
    for device in [ampere, blackwell] {
        assert_eq!(super::plan(&base, &device, &[]).unwrap().algorithm, Algorithm::LinearGemm);
    }
}

/// What is past 32 bits, or past shared memory, is left to others, and is no error.
#[test]
fn what_is_too_large_is_left_to_others() {
    let device = with_multiprocessors(132);
    let variants = kernels(&device, None);
    let taken = |line: &str| {
        let plans = plans(&request(line), &device, &variants);
        for plan in &plans {
            launches(plan).iter().for_each(|call| fits(call, plan, line));
        }
        !plans.is_empty()
    };
    for (line, is) in [
        // Elements of a sample, of y and of x: 2^31 - 2^25, and twice that.
        ("n 3, 63x512x512, 4>16, k 2, s 2", true),
        ("n 3, 64x512x512, 4>16, k 2, s 2", false),
        ("n 1, 1008x1024x1024, 2>1, k 2, s 2, p 504x512x0", true),
        ("n 1, 1024x1024x1024, 2>1, k 2, s 2, p 512x512x0", false),
        // Partial statistics, of four channels and three units of work a box; there are no more boxes.
        ("n 177000000, 1x1x2, 1>4, k 1, s 1x1x2", true),
        ("n 178000000, 1x1x2, 1>4, k 1, s 1x1x2", false),
        // What inputs are found by: paddings, distances between taps, and strides times those.
        ("n 1, 16777217x1x2, 1>1, k 1, s 60x1x2, p 500000000x0x0", true),
        ("n 1, 67108865x1x2, 1>1, k 1, s 64x1x2, p 2147483620x0x0", false),
        ("n 1, 134217729x1x2, 1>1, k 1, s 64x1x2, p 4294967200x0x0", false),
        ("n 1, 2x2x2, 1>1, k 2x1x1, s 64x1x2, d 20000x1x1, p 10000x0x0", true),
        ("n 1, 2x2x2, 1>1, k 2x1x1, s 64x1x2, d 40000000x1x1, p 20000000x0x0", false),
        ("n 1, 2x2x2, 1>1, k 1x2x1, s 1x64x2, d 1x4611686018427387904x1, p 0x2305843009213693952x0", false),
        ("n 1, 2x2x2, 1>1, k 1, s 2, d 8589934592", false),
        // Shared memory: weights, and inputs of a box that taps far apart make large.
        ("n 1, 4x4x4, 64>64, k 3, s 2, p 1", false),
        ("n 1, 4x400x8, 2>2, k 1x2x2, s 2, d 1x2000x1, p 0x900x0", false),
    ] {
        assert_eq!(taken(line), is, "{line}");
    }
}

/// Every box has partial statistics of every warp: not of the size of the output, but for some megabyte.
#[test]
fn nothing_of_the_size_of_the_output_is_allocated_for_statistics() {
    let hopper = with_multiprocessors(132);
    let variants = kernels(&hopper, None);
    for line in [
        "n 1000, 2x2x4, 3>32, k 3, s 2, gn 8",
        "n 16, 16x32x32, 3>16, k 3, s 2, p 1, silu, gn 4",
        "n 4, 16x64x64, 3>64, k 3, s 2, relu, gn 8",
    ] {
        for dtype in [DType::F32, DType::F16] {
            let request = Request { dtype, ..request(line) };
            let output = request.geometry.output_shape().iter().product::<usize>() * dtype.size();
            for plan in plans(&request, &hopper, &variants) {
                let most = output / 4 + (3 << 19);
                assert!(plan.workspace_bytes <= most, "{plan} for {output} bytes: {line}");
            }
        }
    }
}

/// Few channels are what the family is for; others take what has many.
#[test]
fn it_is_the_plan_of_few_channels() {
    let hopper = with_multiprocessors(132);
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for precision in Precision::ALL {
            let of = |line: &str| {
                let request = Request { algorithm: None, dtype, precision, ..request(line) };
                super::plan(&request, &hopper, &[]).unwrap().algorithm
            };
            let few = "n 128, 16x32x32, 3>16, k 3, s 2, p 1, bias, silu, gn 4, hardswish";
            assert_eq!(of(few), Algorithm::ImplicitGemm, "{dtype}, {precision}");
            let many = "n 4, 16x32x32, 128>128, k 3, s 2, p 1, bias";
            assert_ne!(of(many), Algorithm::ImplicitGemm, "{dtype}, {precision}");
        }
    }
}

#[test]
fn a_wrong_argument_shows() {
    let device = with_multiprocessors(2);
    let variants = kernels(&device, None);
    let sizes = "in_per_group out_per_group groups d_input d_output d_kernel d_stride d_padding d_dilation h_input h_output \
                 h_kernel h_stride h_padding h_dilation w_input w_output w_kernel w_stride w_padding w_dilation box_d \
                 units_h blocks_h boxes_d boxes_h boxes_w samples planes lines x_c entries stages joined linked run_pitch \
                 blocks_of_group x_n y_n has_bias activation \
                 mode norm_groups group_channels";
    let of_counts = [
        ("implicit_gemm", "post_activation"),
        ("partial_merge", "samples groups chunks columns sample_step group_step chunk_step"),
    ];
    let line = "n 2, 4x5x9, 6>20, k 3x4x5, s 2x3x2, p 1x0x2, op 0x1x1, d 2x1x1, g 2, bias, leaky_relu(0.2), gn 5, leaky_relu(0.1)";
    let case = Case::parse("wrong", line, "all arguments matter").unwrap();
    let example = Example::new(&case, DType::F32, |_, _| {});
    let request = example.request(Algorithm::ImplicitGemm, Precision::Ieee, [FORMATS[0]; 2]);
    let plans = plans(&request, &device, &variants);
    for way in ["two-pass norm", "recomputed for the norm", "with statistics"] {
        let plan = plans.iter().find(|plan| plan.to_string().contains(way)).expect("a plan each way");
        let mut unnoticed = unnoticed_of(&example, &request, plan, &[("implicit_gemm", sizes)]);
        let counts = way != "two-pass norm";
        unnoticed.extend(unnoticed_of(&example, &request, plan, if counts { &of_counts } else { &[] }));
        assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
    }
}

/// Axes of all kinds: those of random cases, and of kernels that are their own.
fn axes() -> impl Iterator<Item = volup::Axis> {
    let random = (0..400).flat_map(|seed| *random_case(seed).geometry().axes());
    let mut drawn = Vec::new();
    for kernel in [1, 2, 3, 4, 5, 7] {
        for stride in [1, 2, 3, 4, 6] {
            for dilation in [1, 2, 3, 4] {
                for padding in [0, 1, 2, 3, 5, 8] {
                    let conv = ConvSpec::builder(1, 1, [kernel, 1, 1])
                        .stride([stride, 1, 1])
                        .dilation([dilation, 1, 1])
                        .padding([padding, 0, 0]);
                    let geometry = conv.build().and_then(|conv| conv.geometry(1, [20, 1, 1]));
                    drawn.extend(geometry.into_iter().map(|geometry| geometry.axes()[0]));
                }
            }
        }
    }
    assert!(drawn.len() > 600, "{}", drawn.len());
    random.chain(drawn)
}

/// An axis with input before its first and behind its last, as an output's taps find it.
fn sources(axis: &volup::Axis, outputs: i64) -> Vec<(i64, i64, i64)> {
    let volup::Axis { kernel, stride, padding, dilation, .. } = *axis;
    let all = (0..outputs).flat_map(|o| (0..kernel as i64).map(move |tap| (o, tap)));
    all.filter_map(|(o, tap)| {
        let at = o + padding as i64 - tap * dilation as i64;
        (at.rem_euclid(stride as i64) == 0).then(|| (o, tap, at.div_euclid(stride as i64)))
    })
    .collect()
}

#[test]
fn what_is_counted_along_an_axis_is_what_outputs_take() {
    for axis in axes() {
        let volup::Axis { input, output, kernel, stride, padding, dilation, .. } = axis;
        let [input, output, kernel] = [input, output, kernel].map(|size| size as i64);
        let [stride, padding, dilation] = [stride, padding, dilation].map(|size| size as i64);
        let own = Axis { input, output, kernel, stride, padding, dilation };
        // Taps of residues: each tap is of one.
        let counted = phases::taps_of_residues(axis);
        assert_eq!(counted.iter().sum::<usize>(), axis.kernel, "{axis:?}");
        for (residue, &count) in counted.iter().enumerate() {
            let taps: Vec<i64> = sources(&axis, stride)
                .into_iter()
                .filter_map(|(o, tap, _)| (o == residue as i64).then_some(tap))
                .collect();
            assert_eq!((taps.len(), own.taps(residue as i64).len()), (count, count), "{residue} of {axis:?}");
        }
        // Inputs of a box: those that its outputs find, from the first to the last.
        for positions in [1, 2, 3, 8] {
            let reached = implicit_gemm::reached(axis, (positions * stride) as usize) as i64;
            assert_eq!(reached, own.reached(positions * stride), "{axis:?}");
            let found = sources(&axis, positions * stride);
            let [first, last] = [i64::min, i64::max]
                .map(|most| found.iter().map(|&(.., i)| i).reduce(most).expect("an input"));
            let exact = last - first + 1;
            assert_eq!(reached, exact, "{positions} of {axis:?}");
        }
        // Inputs of two outputs side by side.
        if stride == 2 {
            let of_pair: BTreeSet<i64> = sources(&axis, 2).into_iter().map(|(.., i)| i).collect();
            assert_eq!(implicit_gemm::offsets(axis), of_pair.len(), "{axis:?}");
            assert_eq!(
                own.offsets().into_iter().map(|(i, _)| i).collect::<BTreeSet<_>>(),
                of_pair,
                "{axis:?}"
            );
        }
    }
}

/// Boxes of which each plan has some are those that the kernel would have to have, whatever is asked for.
#[test]
fn plans_of_random_cases_fit() {
    let device = with_multiprocessors(3);
    let variants = kernels(&device, None);
    let mut count = 0;
    for seed in 0..600 {
        let case = random_case(seed);
        let example = || Example::new(&case, DType::F32, |_, _| {});
        let base = request("1x1x1, 1>1, k 1");
        let request = Request { block: case.block, geometry: case.geometry(), ..base };
        let planned = plans(&request, &device, &variants);
        assert!(planned.is_empty() || applies(&request), "{case}");
        for plan in &planned {
            launches(plan).iter().for_each(|call| fits(call, plan, &case.to_string()));
            count += 1;
        }
        if let Some(plan) = planned.first() {
            println!("{case}; {plan}");
            let (deviation, _) = example().run(plan, &request);
            assert!(deviation.is_ok(), "{deviation}");
        }
    }
    assert!(count > 500, "{count}");
}
