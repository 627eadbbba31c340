//! What plans of `plane_gradient` compute, and where it applies.

use super::machine::Call;
use super::manifest::{devices, variants_for, with_multiprocessors};
use super::results::unnoticed;
use super::training::{Example, NONE, case, plan_of, wanted_of};
use super::{FORMATS, launches};
use crate::plan::{Plan, Request, Task};
use crate::{Algorithm, DeviceInfo, Variant};
use std::collections::BTreeSet;
use volup::testing::{Case, cases, random_case};
use volup::{DType, Precision, Wanted};

/// What the table has not, and why.
const CASES: [(&str, &str); 9] = [
    ("n 3, 5x6x7, 3>16, k 3, s 2, p 1, bias, silu, gn 4, hardswish", "all of a first layer of a decoder"),
    ("n 2, 4x9x10, 5>13, k 3x2x3, s 2, p 1x0x1, op 1, bias, relu, gn 13", "channels past the last"),
    ("n 1, 7x3x17, 8>32, k 2x3x4, s 1, p 2x1x0, d 2, silu", "all channels, planes apart"),
    ("n 5, 1x2x3, 1>4, k 4, s 2, p 1, gn 2 plain, sigmoid", "64 taps, many small samples"),
    ("n 2, 3x5x4, 2>3, k 2, s 3, leaky_relu(0.1), tanh", "outputs that nothing reads, two activations"),
    ("n 2, 9x2x3, 4>8, k 1x3x3, p 0x1x1, bias", "planes without a halo, a convolution alone"),
    ("n 1, 12x5x6, 3>16, k 5x1x1, s 2x1x1, p 2x0x0, gelu, gn 1", "many planes at once"),
    ("n 1, 2x40x9, 2>24, k 3, p 1, relu, gn 8", "many lines"),
    ("n 4, 2x3x70, 3>16, k 1x1x3, s 1x1x2, gn 4", "long lines"),
];
/// Types and precisions that there are kernels for.
const NUMBERS: [(DType, Precision); 3] =
    [(DType::F16, Precision::Ieee), (DType::Bf16, Precision::Ieee), (DType::F32, Precision::Tf32)];

/// A request of the backward pass, in bfloat16.
fn request_of(case: &Case) -> Request {
    Request {
        task: Task::Backward(wanted_of(&case.block, Wanted::ALL)),
        block: case.block,
        geometry: case.geometry(),
        dtype: DType::Bf16,
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
    let (plan, first) = plan_of("plane_gradient", request, device, variants)?;
    assert_eq!(plan.algorithm, Algorithm::ImplicitGemm, "{plan}");
    Some((plan, first))
}

/// Where it applies, by what the kernel's file says, to sizes whose shared memory does not matter.
fn applies(request: &Request) -> bool {
    let conv = request.geometry.conv();
    let taps: usize = conv.kernel_size().into_iter().product();
    let small = conv.in_channels() <= 8 && conv.groups() == 1;
    let fits = [(16, 32), (32, 32), (16, 64)]
        .iter()
        .any(|&(channels, most)| conv.out_channels() <= channels && taps <= most);
    let numbers = NUMBERS.iter().any(|&(dtype, precision)| {
        request.dtype == dtype && (dtype != DType::F32 || request.precision == precision)
    });
    small && fits && numbers
}

/// Runs all cases in which it applies; says what the plans are like, and how many there are.
fn check(multiprocessors: usize, wanted: Wanted) -> (BTreeSet<&'static str>, usize) {
    let device = with_multiprocessors(multiprocessors);
    let variants = variants_for(device.arch);
    let variants: Vec<&Variant> =
        variants.iter().filter(|variant| variant.entry != "shuffle_gradient").collect();
    let (mut found, mut count) = (BTreeSet::new(), 0);
    let own = CASES.iter().map(|(line, why)| Case::parse("planes", line, why).expect("a valid case"));
    for (turn, case) in own.chain(cases()).filter(|case| case.batch != Some(0)).enumerate() {
        let (dtype, precision) = NUMBERS[turn % NUMBERS.len()];
        let wanted = wanted_of(&case.block, wanted);
        let task = if turn % 4 == 3 { Task::Recompute(wanted) } else { Task::Backward(wanted) };
        for output_format in FORMATS {
            let input_format = FORMATS[turn % 2];
            let request =
                Request { task, dtype, precision, input_format, output_format, ..request_of(&case) };
            let Some((plan, _)) = plan(&request, &device, &variants) else {
                assert!(!applies(&request), "{case}");
                continue;
            };
            assert!(applies(&request), "{case}");
            found.extend(Example::new(&case, dtype, |_| {}).check_backward(&plan, &request));
            count += 1;
        }
    }
    (found, count)
}

#[test]
fn gradients_by_planes_are_those_of_the_definition() {
    let (mut found, mut count) = (BTreeSet::new(), 0);
    for (multiprocessors, wanted) in [
        (132, Wanted::ALL),
        (1, Wanted::ALL),
        (2, Wanted { input: true, ..NONE }),
        (3, Wanted { weight: true, ..NONE }),
    ] {
        let (features, plans) = check(multiprocessors, wanted);
        found.extend(features);
        count += plans;
    }
    let found: BTreeSet<_> = found.into_iter().filter_map(|what| what.strip_prefix("planes: ")).collect();
    let expected = [
        "blocks of many items",
        "blocks of many samples",
        "channels past the last",
        "channels together",
        "channels together, no vectors",
        "lines past the last",
        "only the input's gradient",
        "only the weight's gradient",
        "outputs that nothing reads",
        "segments",
        "segments past the last",
        "several steps of channels",
        "taps outside",
        "the convolution alone",
        "voxels past the last",
    ];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
    assert!(count > 100, "{count}");
}

#[test]
fn gradients_by_planes_of_random_cases_are_those_of_the_definition() {
    let device = with_multiprocessors(2);
    let variants = variants_for(device.arch);
    let variants: Vec<&Variant> =
        variants.iter().filter(|variant| variant.entry != "shuffle_gradient").collect();
    let cases = (0..20_000).map(|seed| (seed, random_case(seed))).filter(|(_, case)| case.batch != Some(0));
    let mut count = 0;
    for (seed, case) in cases.filter(|(_, case)| applies(&request_of(case))).take(60) {
        let (dtype, precision) = NUMBERS[count % NUMBERS.len()];
        println!("seed {seed}");
        let request = Request { dtype, precision, ..request_of(&case) };
        let (plan, _) = plan(&request, &device, &variants).expect("a plan");
        Example::new(&case, dtype, |_| {}).check_backward(&plan, &request);
        count += 1;
    }
    assert!(count > 20, "{count}");
}

#[test]
fn what_is_not_by_planes_is_left_to_others() {
    let [_, hopper, _] = devices();
    let variants = variants_for(hopper.arch);
    let variants: Vec<&Variant> = variants.iter().collect();
    let taken = |request: &Request| plan(request, &hopper, &variants).is_some();
    let base = request("n 2, 8x8x8, 3>16, k 3, s 2, p 1, gn 4");
    for request in [base, Request { algorithm: Some(Algorithm::ImplicitGemm), ..base }] {
        assert!(taken(&request) && applies(&request), "{request:?}");
    }
    for line in [
        "n 2, 8x8x8, 9>16, k 3, gn 4",
        "n 2, 8x8x8, 3>33, k 3",
        "n 2, 8x8x8, 3>17, k 4",
        "n 2, 8x8x8, 3>16, k 5",
        "n 2, 8x8x8, 4>16, k 3, g 2, gn 4",
        // A line takes more memory than a block may have.
        "n 1, 3x3x3000, 3>16, k 3",
    ] {
        assert!(!taken(&request(line)), "{line}");
    }
    for request in [
        Request { dtype: DType::F64, ..base },
        Request { dtype: DType::F32, ..base },
        Request { task: Task::Backward(Wanted { bias: true, ..NONE }), ..base },
    ] {
        assert!(!taken(&request), "{request:?}");
    }
    for algorithm in Algorithm::ALL.into_iter().filter(|&other| other != Algorithm::ImplicitGemm) {
        assert!(!taken(&Request { algorithm: Some(algorithm), ..base }), "{algorithm}");
    }
}

/// Few channels of many outputs are what it is for.
#[test]
fn it_is_the_plan_where_channels_are_few() {
    let [_, hopper, _] = devices();
    let variants = variants_for(hopper.arch);
    let variants: Vec<&Variant> = variants.iter().collect();
    for (line, fastest) in [
        ("n 128, 16x32x32, 3>16, k 3, s 2, p 1, bias, silu, gn 8, hardswish", true),
        ("n 16, 32x32x32, 2>16, k 3, p 1, relu, gn 4", true),
    ] {
        for (dtype, precision) in NUMBERS {
            let request = Request { dtype, precision, ..request(line) };
            let (plan, first) = plan(&request, &hopper, &variants).expect("a plan");
            assert_eq!(first, fastest, "{plan}");
        }
    }
}

#[test]
fn a_wrong_argument_of_planes_shows() {
    let sizes = "in_channels out_channels group_channels lines planes items activation post";
    let axes = [
        "input_d output_d kernel_d stride_d padding_d dilation_d",
        "input_h output_h kernel_h stride_h padding_h dilation_h",
        "input_w output_w kernel_w stride_w padding_w dilation_w",
        "x_n x_c x_d x_h x_w y_n y_c y_d y_h y_w",
    ];
    let wrong: Vec<_> = [sizes].into_iter().chain(axes).map(|names| ("plane_gradient", names)).collect();
    let device = with_multiprocessors(2);
    let variants = variants_for(device.arch);
    let variants: Vec<&Variant> = variants.iter().collect();
    let case = case(
        "n 3, 5x6x7, 3>16, k 3x2x3, s 2x1x2, p 1, d 1x2x1, bias, leaky_relu(0.2), gn 4, leaky_relu(0.1)",
    );
    for (dtype, precision) in &NUMBERS[1..] {
        let example = Example::new(&case, *dtype, |_| {});
        let request = Request { dtype: *dtype, precision: *precision, ..request_of(&case) };
        let (plan, _) = plan(&request, &device, &variants).expect("a plan");
        let shown = unnoticed(&plan, &wrong, |plan| {
            example.check_backward(plan, &request);
            true
        });
        assert!(shown.is_empty(), "{shown:?} may be wrong: {plan}");
    }
}

/// Each block has a share of the gradient of the weight at least, and there are no more blocks than items.
#[test]
fn blocks_of_planes_are_as_many_as_have_something_to_do() {
    let variants = variants_for(devices()[1].arch);
    let variants: Vec<&Variant> = variants.iter().collect();
    for (line, multiprocessors, blocks) in [
        ("n 128, 16x32x32, 3>16, k 3, s 2, p 1, silu, gn 8", 132, 264),
        ("n 1, 1x2x8, 3>16, k 3, relu", 132, 2),
    ] {
        let device = with_multiprocessors(multiprocessors);
        let (plan, _) = plan(&request(line), &device, &variants).expect("a plan");
        let calls: Vec<Call<'_>> = launches(&plan);
        let of = |name| calls.iter().find(|call| call.kernel() == name).expect("a launch");
        assert_eq!(of("plane_gradient").grid, [blocks, 1, 1], "{plan}");
        assert_eq!(of("weight_gradient_sum").int("splits"), blocks, "{plan}");
    }
}
