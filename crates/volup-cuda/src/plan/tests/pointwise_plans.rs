//! What plans of `pointwise` compute, and where they apply.

use super::manifest::with_multiprocessors;
use super::results::{Example, kernels, plans_of_kind, unnoticed_of};
use super::{FORMATS, launches, pointwise};
use crate::plan::{Plan, Request};
use crate::{Algorithm, DeviceInfo, Variant};
use std::collections::BTreeSet;
use volup::testing::{Case, cases};
use volup::{DType, MemoryFormat, Precision};

/// What the table has not, and why.
const ROWS: [(&str, &str); 14] = [
    ("n 2, 3x5x7, 3>5, k 1, bias, relu", "an odd number of channels, few voxels"),
    ("n 1, 6x9x10, 13>20, k 1, leaky_relu(-0.75)", "several stages, and not a whole one"),
    ("n 3, 4x8x8, 24>40, k 1, g 2, bias, silu", "groups, row blocks, a curved activation"),
    ("n 2, 8x9x12, 2>33, k 1, bias", "channels that start at whole sectors"),
    ("n 2, 7x9x12, 13>33, k 1, bias, relu", "channels that start within 32 bytes, past whole rows"),
    ("n 1, 7x9x11, 5>18, k 1, d 2, leaky_relu(0.1)", "voxels that no copy of several takes"),
    ("n 1, 11x13x15, 5>18, k 1, d 2, tanh", "more of them"),
    ("n 2, 3x4x5, 9>6, k 1, s 2, op 1x0x1, bias, relu", "one item for all planes"),
    ("n 2, 3x5x6, 9>6, k 1, s 2, op 1x0x1, bias, relu", "outputs past the last voxel's, and not"),
    ("n 1, 5x7x9, 20>17, k 1, s 3x1x2, op 2x0x0, bias, silu", "lines of an odd number of outputs"),
    ("n 1, 5x7x10, 20>17, k 1, s 3x1x2, op 2x0x0, bias, tanh", "a stride along some axes"),
    ("n 2, 2x9x11, 6>24, k 1, s 1x2x3, op 0x1x2, g 3, bias", "groups with a stride"),
    (
        "n 2, 2x9x11, 6>24, k 1, s 1x2x3, op 0x1x2, g 3, bias, leaky_relu(0.1)",
        "what is between through an activation",
    ),
    ("n 2, 3x5x8, 16>8, k 1, s 2, silu, gn 4", "a norm"),
];

pub fn own() -> Vec<Case> {
    ROWS.iter().map(|(line, why)| Case::parse("points", line, why).expect("a valid case")).collect()
}

fn plans(request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Vec<Plan> {
    plans_of_kind(request, device, variants, |plan| plan.algorithm == Algorithm::Pointwise)
}

#[test]
fn points_compute_the_definition() {
    let (mut kernels_found, mut features, mut count) = (BTreeSet::new(), BTreeSet::new(), 0);
    let all = kernels(&with_multiprocessors(132), None);
    let all: Vec<&Variant> = all.iter().collect();
    for (multiprocessors, dtype, precision) in [
        (132, DType::F32, Precision::Ieee),
        (1, DType::F32, Precision::Tf32),
        (3, DType::F16, Precision::Ieee),
        (1, DType::Bf16, Precision::Ieee),
    ] {
        let device = with_multiprocessors(multiprocessors);
        let table = cases().into_iter().filter(|case| case.batch != Some(0));
        for case in table.chain(own()) {
            let example = Example::new(&case, dtype, |_, _| {});
            let request = example.request(Algorithm::Pointwise, precision, [FORMATS[0]; 2]);
            for plan in plans(&request, &device, &all) {
                println!("{case}; {dtype}, {precision}; {plan}");
                example.is_right(&plan, &request);
                let calls = launches(&plan);
                let call = calls.iter().find(|call| call.kernel() == "pointwise").expect("it");
                kernels_found.insert(call.variant.name);
                features.extend(pointwise::features(call));
                count += 1;
            }
        }
    }
    let points = all.iter().filter(|kernel| kernel.entry == "pointwise");
    assert_eq!(kernels_found, points.map(|kernel| kernel.name).collect());
    assert_eq!(features.len(), 10, "{features:?}");
    assert!(count > 60, "{count}");
}

#[test]
fn what_points_are_not_for_is_left_to_others() {
    let device = with_multiprocessors(132);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let applies = |line: &str, dtype: DType, format: MemoryFormat| {
        let case = Case::parse("given", line, "given").expect("a valid case");
        let example = Example::new(&case, dtype, |_, _| {});
        let request = example.request(Algorithm::Pointwise, Precision::Ieee, [format; 2]);
        !plans(&request, &device, &all).is_empty()
    };
    let fits = "n 1, 3x4x9, 8>6, k 1";
    assert!(applies(fits, DType::F32, FORMATS[0]) && applies(fits, DType::Bf16, FORMATS[0]));
    assert!(!applies(fits, DType::F64, FORMATS[0]) && !applies(fits, DType::F32, FORMATS[1]));
    // Half a word of 16 bits, other kernels, outputs past a stride.
    assert!(!applies("n 1, 3x3x9, 8>6, k 1", DType::F16, FORMATS[0]));
    for line in ["n 1, 3x4x9, 8>6, k 1x1x2", "n 1, 3x4x9, 8>6, k 1, d 2, op 1x0x0"] {
        assert!(!applies(line, DType::F32, FORMATS[0]), "{line}");
    }
    // What shared memory does not hold.
    assert!(!applies("n 1, 3x4x9, 512>512, k 1", DType::F32, FORMATS[0]));
}

#[test]
fn a_wrong_argument_shows() {
    let device = with_multiprocessors(1);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    for (line, names) in [
        ("n 2, 7x9x13, 12>36, k 1, g 2, bias, relu", "channels out_channels groups has_bias"),
        (
            "n 2, 7x9x13, 12>18, k 1, s 2, op 1, bias, relu",
            "plane width d_stride h_stride w_stride depth_out height_out width_out",
        ),
    ] {
        let case = Case::parse("wrong", line, "all arguments matter").expect("a valid case");
        let example = Example::new(&case, DType::F32, |_, _| {});
        let request = example.request(Algorithm::Pointwise, Precision::Ieee, [FORMATS[0]; 2]);
        let plan = plans(&request, &device, &all).into_iter().next().expect("a plan");
        let unnoticed = unnoticed_of(&example, &request, &plan, &[("pointwise", names)]);
        assert!(unnoticed.is_empty(), "{unnoticed:?}");
    }
}
