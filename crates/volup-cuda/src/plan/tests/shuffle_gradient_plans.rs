//! What plans of `shuffle_gradient` compute, and where it applies.

use super::machine::Call;
use super::manifest::{devices, variants_for, with_multiprocessors};
use super::results::unnoticed;
use super::training::{Example, NONE, case, has, plan_of, wanted_of};
use super::{FORMATS, MULTIPLIED, launches, some_of};
use crate::plan::{Plan, Request, Task};
use crate::{Algorithm, DeviceInfo, Variant};
use std::collections::BTreeSet;
use volup::testing::{Case, cases, random_case};
use volup::{DType, MemoryFormat, Precision, Wanted};

/// What the table has not, and why.
const ROWS: [(&str, &str); 10] = [
    ("n 3, 3x5x7, 7>5, k 3x2x2, s 3x2x2, bias, silu, gn 5, relu", "odd sizes, a stride of 3 along depth"),
    ("n 3, 4x3x9, 5>9, k 2x1x2, s 2x1x2, leaky_relu(0.1), tanh", "two activations, no normalization"),
    ("n 5, 1x2x3, 3>4, k 1x1x2, s 1x1x2, gn 2 plain, sigmoid", "many samples of less than a tile"),
    ("n 2, 2x5x12, 10>12, k 1x2x2, s 1x2x2, bias, gelu", "lines of vectors, one curved activation"),
    ("n 2, 7x5x6, 6>17, k 2, s 2", "many tiles of a convolution alone, rows past the last"),
    ("n 3, 3x3x4, 9>16, k 2, s 2, bias, hardswish, gn 4", "lines of vectors, channels of x in pieces"),
    ("n 1, 8x8x9, 2>3, k 2, s 2, gn 1, relu", "channels of vectors, lines in pieces"),
    ("n 2, 1x1x150, 3>128, k 1x1x2, s 1x1x2, relu, gn 128", "all rows of two taps each: the most channels"),
    ("n 2, 3x5x6, 64>32, k 2, s 2, bias, relu, gn 8", "all channels and rows of a tile"),
    ("n 2, 1x1x1, 4>1, k 16x8x2, s 16x8x2, gelu_tanh", "all rows of one channel, one position"),
];

/// A request of the backward pass in float32.
fn request_of(case: &Case) -> Request {
    Request {
        task: Task::Backward(wanted_of(&case.block, Wanted::ALL)),
        block: case.block,
        geometry: case.geometry(),
        dtype: DType::F32,
        precision: Precision::Ieee,
        input_format: FORMATS[0],
        output_format: FORMATS[0],
        algorithm: None,
    }
}

fn request(line: &str) -> Request {
    request_of(&case(line))
}

/// The plan of this kernel, if there is one, and whether it is expected to be the fastest.
fn plan(request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Option<(Plan, bool)> {
    let (plan, first) = plan_of("shuffle_gradient", request, device, variants)?;
    assert_eq!(plan.algorithm, Algorithm::ShuffleGemm, "{plan}");
    Some((plan, first))
}

fn is_it(plan: &Plan) -> bool {
    has(plan, "shuffle_gradient")
}

/// Where it applies, by what the kernel's file says.
fn applies(request: &Request) -> bool {
    let geometry = &request.geometry;
    let conv = geometry.conv();
    let one_tap = geometry.axes().iter().all(|axis| {
        let alone = axis.kernel == 1 || axis.dilation == 1;
        axis.kernel == axis.stride && alone && axis.padding == 0 && axis.output == axis.input * axis.stride
    });
    let rows = conv.out_channels() * conv.stride().iter().product::<usize>();
    let first = [request.input_format, request.output_format] == [MemoryFormat::Contiguous; 2];
    let small = rows <= 256 && conv.in_channels() <= 64 && conv.groups() == 1;
    one_tap && conv.stride()[2] == 2 && small && first && request.dtype != DType::F64
}

/// Runs all cases in which it applies on so many multiprocessors, with those of its kernels whose rows are chosen, and of two fp16 if
/// these are, in half of the types; says what the plans are like, and how many there are.
fn check(
    multiprocessors: usize,
    rows: &[i64],
    halves: bool,
    wanted: Wanted,
) -> (BTreeSet<&'static str>, usize) {
    let device = with_multiprocessors(multiprocessors);
    let all = variants_for(device.arch);
    let chosen = |variant: &&Variant| {
        let kind = |kind| variant.param("KIND") == Some(kind);
        variant.entry != "shuffle_gradient"
            || rows.contains(&variant.param("ROWS").unwrap()) && (halves || !kind(2))
    };
    let variants: Vec<&Variant> = all.iter().filter(chosen).collect();
    let (mut found, mut count) = (BTreeSet::new(), 0);
    let own = ROWS.iter().map(|(line, why)| Case::parse("shuffle", line, why).expect("a valid case"));
    for (turn, case) in cases().into_iter().chain(own).filter(|case| case.batch != Some(0)).enumerate() {
        let wanted = wanted_of(&case.block, wanted);
        let tasks = [Task::Backward(wanted), Task::Recompute(wanted)];
        for (task, &(dtype, precision)) in tasks
            .into_iter()
            .flat_map(|task| some_of(&MULTIPLIED, 2, turn).map(move |numbers| (task, numbers)))
        {
            let request = Request { task, dtype, precision, ..request_of(&case) };
            let plan = plan(&request, &device, &variants);
            assert_eq!(plan.is_some(), applies(&request), "{case}");
            let Some((plan, _)) = plan else { continue };
            let example = Example::new(&case, dtype, |_| {});
            found.extend(example.check_backward(&plan, &request));
            count += 1;
        }
    }
    (found, count)
}

#[test]
fn both_gradients_are_those_of_the_definition() {
    let (mut found, mut count) = (BTreeSet::new(), 0);
    for (multiprocessors, rows, halves, wanted) in [
        (132, &[128, 256][..], true, Wanted::ALL),
        (132, &[128, 256], false, Wanted::ALL),
        (3, &[128, 256], true, Wanted { input: true, ..NONE }),
        (2, &[128, 256], false, Wanted { weight: true, ..NONE }),
        (2, &[128, 256], true, Wanted { weight: true, ..NONE }),
        (1, &[256], true, Wanted { input: true, weight: true, ..NONE }),
    ] {
        let (features, plans) = check(multiprocessors, rows, halves, wanted);
        found.extend(features);
        count += plans;
    }
    let all = variants_for(devices()[1].arch);
    let kernels = all.iter().filter(|variant| variant.entry == "shuffle_gradient");
    let kernels: BTreeSet<&str> = kernels.map(|variant| variant.name).collect();
    assert!(kernels.len() == 10 && kernels.is_subset(&found), "{kernels:?} of {found:?}");
    for what in [
        "all channels of a tile",
        "all rows of a tile",
        "blocks of many samples",
        "blocks of many tiles",
        "channels of vectors",
        "channels of x in pieces",
        "lines of vectors",
        "lines of y in pieces",
        "only the input's gradient",
        "only the weight's gradient",
        "positions past the end",
        "shares of positions",
        "shares without positions",
        "terms of a normalization",
        "the convolution alone",
        "tiles of a sample",
    ] {
        assert!(found.contains(what), "{what}");
    }
    let wide = ["tiles by the definition", "tiles that two fp16 are too coarse for"];
    assert!(wide.iter().all(|what| !found.contains(what)) && count > 100, "{count}");
}

#[test]
fn both_gradients_of_random_cases_are_those_of_the_definition() {
    let variants = variants_for(devices()[1].arch);
    let variants: Vec<&Variant> = variants.iter().collect();
    let cases = (0..20_000).map(|seed| (seed, random_case(seed))).filter(|(_, case)| case.batch != Some(0));
    let mut count = 0;
    for (seed, case) in cases.filter(|(_, case)| applies(&request_of(case))) {
        let (dtype, precision) = MULTIPLIED[count % MULTIPLIED.len()];
        let request = Request { dtype, precision, ..request_of(&case) };
        println!("seed {seed}");
        let (plan, _) =
            plan(&request, &with_multiprocessors([132, 1, 3][count % 3]), &variants).expect("a plan");
        Example::new(&case, dtype, |_| {}).check_backward(&plan, &request);
        count += 1;
    }
    assert!(count > 20, "{count}");
}

/// Infinities and NaN: of two parts, tiles that hold one are multiplied in float32, and no others are.
#[test]
fn what_is_no_number_goes_where_the_definition_has_it() {
    type Change = fn([&mut Vec<f64>; 3]);
    let changes: [(Change, bool); 6] = [
        (|[x, ..]| x[3] = f64::NAN, true),
        (|[_, w, _]| *w.last_mut().expect("a weight") = f64::NEG_INFINITY, true),
        (|[.., g]| *g.last_mut().expect("a gradient") = f64::INFINITY, true),
        (|[.., g]| g[0] = f64::NAN, true),
        // An infinity as tf32.
        (|[x, ..]| x[0] = f64::from(f32::MAX), true),
        (|[.., g]| g.fill(0.0), false),
    ];
    let device = with_multiprocessors(2);
    let variants = variants_for(device.arch);
    let variants: Vec<&Variant> = variants.iter().collect();
    for line in ["n 2, 5x6x7, 9>5, k 2, s 2, bias, relu", "n 3, 3x5x8, 4>17, k 2, s 2"] {
        let case = case(line);
        for ((dtype, precision), (change, defined)) in
            MULTIPLIED.into_iter().flat_map(|numbers| changes.map(|change| (numbers, change)))
        {
            let example = Example::new(&case, dtype, change);
            let request = Request { dtype, precision, ..request_of(&case) };
            let (plan, _) = plan(&request, &device, &variants).expect("a plan");
            let found = example.check_backward(&plan, &request);
            let parts = (dtype, precision) == (DType::F32, Precision::Ieee);
            assert_eq!(found.contains("tiles by the definition"), parts && defined, "{plan}");
        }
    }
}

/// Gradients of a position, inputs and weights of other magnitudes than all others: of two tf32 where two fp16 are too coarse for them, with
/// as many shares.
#[test]
fn numbers_of_any_magnitudes_are_multiplied() {
    type Change = fn([&mut Vec<f64>; 3]);
    let changes: [(Change, bool); 9] = [
        // Lines of two residues along width, each position's.
        (|[.., g]| g.iter_mut().skip(4).step_by(16).for_each(|g| *g *= 1e-14), false),
        (|[.., g]| g.chunks_mut(16).for_each(|g| g[4..6].iter_mut().for_each(|g| *g *= 1e-14)), true),
        (|[.., g]| g.iter_mut().for_each(|g| *g *= 1e-30), false),
        (|[.., g]| g.iter_mut().for_each(|g| *g *= 1e20), false),
        (|[.., g]| g[7] = 1e12, true),
        (|[x, ..]| x.iter_mut().step_by(3).for_each(|x| *x *= 1e-10), false),
        (|[x, ..]| x[5] = 1e25, true),
        (|[_, w, _]| w.iter_mut().step_by(3).for_each(|w| *w *= 1e-10), false),
        (|[_, w, _]| w.iter_mut().for_each(|w| *w *= 1e-35), true),
    ];
    let device = with_multiprocessors(2);
    let variants = variants_for(device.arch);
    let variants: Vec<&Variant> = variants.iter().collect();
    for line in ["n 2, 5x6x8, 9>5, k 2, s 2, bias", "n 3, 3x5x8, 4>17, k 2, s 2, relu"] {
        let case = case(line);
        for (at, (change, wide)) in changes.into_iter().enumerate() {
            let example = Example::new(&case, DType::F32, change);
            let request = request_of(&case);
            let (plan, _) = plan(&request, &device, &variants).expect("a plan");
            let found = example.check_backward(&plan, &request);
            assert_eq!(found.contains("tiles that two fp16 are too coarse for"), wide, "{at} of {plan}");
        }
    }
}

#[test]
fn what_it_is_not_for_is_left_to_others() {
    let hopper = with_multiprocessors(132);
    let variants = variants_for(hopper.arch);
    let variants: Vec<&Variant> = variants.iter().collect();
    let taken = |request: &Request| plan(request, &hopper, &variants).is_some();
    let base = request("n 2, 8x8x8, 64>32, k 2, s 2, gn 4");
    let rows = |rows: usize| request(&format!("n 2, 8x8x8, 64>{}, k 1x1x2, s 1x1x2", rows / 2));
    for request in [base, rows(256), Request { algorithm: Some(Algorithm::ShuffleGemm), ..base }] {
        assert!(taken(&request) && applies(&request), "{request:?}");
    }
    for line in [
        "n 2, 8x8x8, 65>32, k 2, s 2, gn 4",
        "n 2, 8x8x8, 64>33, k 2, s 2",
        "n 2, 8x8x8, 16>16, k 2x2x3, s 2x2x3, gn 4",
        "n 2, 8x8x8, 16>16, k 2x2x1, s 2x2x1, gn 4",
        "n 2, 8x8x8, 16>16, k 3x2x2, s 2, gn 4",
        "n 2, 8x8x8, 16>16, k 1x2x2, s 2, gn 4",
        "n 2, 8x8x8, 16>16, k 2, s 2, p 1, gn 4",
        "n 2, 8x8x8, 16>16, k 2, s 2, op 1x0x0, gn 4",
        "n 2, 8x8x8, 16>16, k 2, s 2, d 2, gn 4",
        "n 2, 8x8x8, 16>16, k 2, s 2, g 2, gn 4",
    ] {
        assert!(!taken(&request(line)) && !applies(&request(line)), "{line}");
    }
    let [_, last] = FORMATS;
    for request in [
        rows(258),
        Request { dtype: DType::F64, ..base },
        Request { input_format: last, ..base },
        Request { output_format: last, ..base },
    ] {
        assert!(!taken(&request) && !applies(&request), "{request:?}");
    }
    for task in [Wanted { bias: true, ..NONE }, NONE] {
        assert!(!taken(&Request { task: Task::Backward(task), ..base }));
    }
    for algorithm in Algorithm::ALL.into_iter().filter(|&other| other != Algorithm::ShuffleGemm) {
        assert!(!taken(&Request { algorithm: Some(algorithm), ..base }), "{algorithm}");
    }
}

/// Where a channel's rows begin in y is counted in 32 bits.
#[test]
fn far_lines_are_left_to_others() {
    let hopper = with_multiprocessors(132);
    let variants = variants_for(hopper.arch);
    let variants: Vec<&Variant> = variants.iter().collect();
    for (line, is) in [
        ("n 2, 255x256x127, 64>32, k 2, s 2, relu", true),
        ("n 1, 256x256x128, 64>32, k 2, s 2, relu", false),
        ("n 1, 512x512x512, 1>8, k 1x1x2, s 1x1x2, relu", false),
    ] {
        let request = Request { dtype: DType::Bf16, ..request(line) };
        assert_eq!(plan(&request, &hopper, &variants).is_some(), is, "{line}");
    }
}

/// A tile takes as long with few rows as with all: of many tiles that are nearly empty others are faster.
#[test]
fn it_is_the_plan_where_tiles_are_full_or_few() {
    let hopper = with_multiprocessors(132);
    let variants = variants_for(hopper.arch);
    // What is for few channels may be as fast where there are few.
    let variants: Vec<&Variant> =
        variants.iter().filter(|variant| variant.entry != "plane_gradient").collect();
    for (line, fastest) in [
        ("n 2, 64x64x64, 64>32, k 2, s 2, bias, relu, gn 32", true),
        ("n 2, 32x32x32, 64>32, k 2, s 2, bias", true),
        ("n 2, 64x64x64, 32>16, k 2, s 2, silu, gn 4", true),
        ("n 2, 3x4x5, 4>6, k 2, s 2, bias", true),
        ("n 2, 128x128x128, 8>1, k 1x1x2, s 1x1x2", false),
    ] {
        for (dtype, precision) in MULTIPLIED {
            let request = Request { dtype, precision, ..request(line) };
            let (plan, first) = plan(&request, &hopper, &variants).expect("a plan");
            assert_eq!(first, fastest, "{plan}");
            assert_eq!(is_it(&Plan::new(&request, &hopper, &variants).expect("a plan")), fastest, "{line}");
        }
    }
}

#[test]
fn a_wrong_argument_shows() {
    let sizes = "in_channels out_channels group_channels volume plane width d_stride h_stride tiles items";
    let wrong = [("shuffle_gradient", sizes), ("shuffle_gradient", "y_whole x_whole activation post")];
    let device = with_multiprocessors(2);
    let variants = variants_for(device.arch);
    let variants: Vec<&Variant> = variants.iter().collect();
    for line in [
        "n 3, 3x5x7, 7>6, k 3x2x2, s 3x2x2, bias, leaky_relu(0.2), gn 3, leaky_relu(0.1)",
        "n 2, 4x6x8, 16>8, k 2, s 2, bias, silu, gn 4, hardswish",
    ] {
        let case = case(line);
        for (dtype, precision) in MULTIPLIED {
            let example = Example::new(&case, dtype, |_| {});
            let request = Request { dtype, precision, ..request_of(&case) };
            let (plan, _) = plan(&request, &device, &variants).expect("a plan");
            let shown = unnoticed(&plan, &wrong, |plan| {
                example.check_backward(plan, &request);
                true
            });
            assert!(shown.is_empty(), "{shown:?} may be wrong: {plan}");
        }
        // Each channel of another magnitude; then one position, too.
        let apart: fn([&mut Vec<f64>; 3]) = |[.., g]| {
            g.chunks_mut(48)
                .enumerate()
                .for_each(|(at, g)| g.iter_mut().for_each(|g| *g *= 2f64.powi(at as i32 % 7)));
        };
        let coarse: fn([&mut Vec<f64>; 3]) = |[x, _, g]| {
            g.iter_mut().zip(0..).for_each(|(g, at)| *g *= 2f64.powi(at / 48 % 7));
            x[3] = 1e25;
        };
        let shares = "unless shares in_channels out_channels volume tiles items";
        for (change, wrong) in
            [(apart, [("shuffle_gradient_2", "bounds")]), (coarse, [("shuffle_gradient_3", shares)])]
        {
            let example = Example::new(&case, DType::F32, change);
            let request = request_of(&case);
            let (plan, _) = plan(&request, &device, &variants).expect("a plan");
            example.check_backward(&plan, &request);
            let shown = unnoticed(&plan, &wrong, |plan| {
                example.check_backward(plan, &request);
                true
            });
            assert!(shown.is_empty(), "{shown:?} may be wrong: {plan}");
        }
    }
}

/// Each block has a share of the gradient of the weight at least, and there are no more blocks than tiles.
#[test]
fn blocks_are_as_many_as_have_something_to_do() {
    let variants = variants_for(devices()[1].arch);
    let variants: Vec<&Variant> = variants.iter().collect();
    for (line, multiprocessors, blocks) in [
        ("n 2, 64x64x64, 64>32, k 2, s 2, relu", 132, 132),
        ("n 2, 2x4x8, 64>32, k 2, s 2, relu", 132, 4),
        ("n 2, 2x4x8, 64>32, k 2, s 2, relu", 3, 3),
    ] {
        let device = with_multiprocessors(multiprocessors);
        let (plan, _) = plan(&request(line), &device, &variants).expect("a plan");
        let calls: Vec<Call<'_>> = launches(&plan);
        let of = |name| calls.iter().find(|call| call.kernel() == name).expect("a launch");
        assert_eq!(of("shuffle_gradient").grid, [blocks, 1, 1], "{plan}");
        assert_eq!(of("weight_gradient_sum").int("splits"), blocks, "{plan}");
    }
}
