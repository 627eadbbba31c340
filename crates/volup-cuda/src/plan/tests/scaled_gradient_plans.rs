//! Plans of gradients whose operands are scaled to fp16, one in tf32 and two in `ieee`, run by the kernels' contracts, against the reference.

use super::FORMATS;
use super::manifest::{devices, variants_for};
use super::results::unnoticed;
use super::training::{Example, scaled};
use crate::Variant;
use crate::plan::{Plan, Request, Task};
use std::collections::BTreeSet;
use volup::testing::Case;
use volup::{DType, Precision, Wanted};

const BOTH: Wanted = Wanted { input: true, weight: true, bias: false, norm_weight: false, norm_bias: false };
/// Cases, and what is unusual about them.
const CASES: [(&str, &str); 6] = [
    ("n 4, 2x3x8, 16>8, k 3, s 2, p 1, op 1, bias, relu, gn 4", "parts that are made again, by lines"),
    ("n 2, 3x5x6, 3>16, k 3, s 2, p 1, silu, gn 4, hardswish", "few channels of the input, by rows of both"),
    ("n 2, 2x3x16, 8>32, k 3x2x4, p 1", "a bare convolution: the gradient of its output is what it is given"),
    ("n 1, 4x3x8, 24>16, k 2x3x3, d 1x2x1, bias, leaky_relu(3)", "an activation alone, steeper than others"),
    ("n 2, 2x2x8, 32>16, k 3, s 1x2x2, p 1x0x1, relu, gn 2 plain", "tiles of channels, no gamma"),
    ("n 2, 3x2x8, 8>16, k 2, s 2, g 2, gelu, gn 8", "groups, every tap a class of its own"),
];

/// Tasks of a case, each with its scaled plans, in both formats.
fn plans(example: &Example, precision: Precision, variants: &[&Variant]) -> Vec<(Request, Plan)> {
    let [_, hopper, _] = devices();
    let mut all = Vec::new();
    for task in [Task::Backward(BOTH), Task::Recompute(BOTH)] {
        for format in FORMATS {
            let request = example.request(task, precision, [format, format]);
            let plans = scaled(&request, &hopper, variants);
            all.extend(plans.into_iter().map(|plan| (request, plan)));
        }
    }
    all
}

#[test]
fn scaled_gradients_are_those_of_the_definition() {
    let [_, hopper, _] = devices();
    let all = variants_for(hopper.arch);
    let variants: Vec<&Variant> = all.iter().collect();
    let mut found = BTreeSet::new();
    for (line, why) in CASES {
        let case = Case::parse("scaled", line, why).expect("a valid case");
        let example = Example::new(&case, DType::F32, |_| {});
        for precision in Precision::ALL {
            let plans = plans(&example, precision, &variants);
            assert!(!plans.is_empty(), "{case}, {precision}");
            for (request, plan) in &plans {
                println!("{case}; {:?}, {}; {plan}", request.task, request.input_format);
                found.extend(example.check_backward(plan, request));
            }
        }
    }
    let kernels: Vec<_> = found.into_iter().filter(|what| what.starts_with("weight_gradient")).collect();
    let expected = [
        "weight_gradient_lines_2x1x32",
        "weight_gradient_lines_f16_0x1x64",
        "weight_gradient_lines_f16_0x2x32",
        "weight_gradient_narrow_2x3",
        "weight_gradient_narrow_f16_0x3",
    ];
    assert_eq!(kernels, expected);
}

/// Gradients so small or so large that fp16 has none of them, and channels of very different ones.
#[test]
fn scales_follow_the_magnitudes_of_channels() {
    let [_, hopper, _] = devices();
    let all = variants_for(hopper.arch);
    let variants: Vec<&Variant> = all.iter().collect();
    let (line, why) = CASES[2];
    let case = Case::parse("scaled", line, why).expect("a valid case");
    let voxels = case.geometry().output_voxels();
    for exponent in [-80, 0, 60] {
        let example = Example::new(&case, DType::F32, |[x, _, g]| {
            x.iter_mut().for_each(|x| *x *= 2f64.powi(-exponent / 2));
            for (at, g) in g.iter_mut().enumerate() {
                *g *= 2f64.powi(exponent - (at / voxels % 32) as i32);
            }
        });
        let plans = Precision::ALL.into_iter().flat_map(|precision| plans(&example, precision, &variants));
        for (request, plan) in plans {
            example.check_backward(&plan, &request);
        }
    }
}

/// What a wrong argument would do.
#[test]
fn a_wrong_argument_of_what_is_scaled_shows() {
    const ARGUMENTS: [(&str, &str); 3] = [
        ("weight_gradient_sum", "splits taps in_channels group_out group_in part_splits part_bounds"),
        ("half_input", "count"),
        ("gradient_vectors", "samples channels group_channels"),
    ];
    let [_, hopper, _] = devices();
    let all = variants_for(hopper.arch);
    let variants: Vec<&Variant> = all.iter().collect();
    let line = "n 4, 2x3x8, 16>16, k 3, s 2, p 1, op 1, g 2, relu, gn 4";
    let case = Case::parse("scaled", line, "parts of their own bounds, groups").expect("a valid case");
    let example = Example::new(&case, DType::F32, |_| {});
    let plans = plans(&example, Precision::Tf32, &variants);
    let (request, plan) =
        plans.iter().rfind(|(request, _)| request.task == Task::Recompute(BOTH)).expect("a plan in parts");
    let shown = unnoticed(plan, &ARGUMENTS, |plan| {
        example.check_backward(plan, request);
        true
    });
    assert!(shown.is_empty(), "{shown:?} may be wrong: {plan}");
}
