//! What plans of `halo_gemm` compute that write outputs on a lattice with what is between them, and where they apply.

use super::manifest::with_multiprocessors;
use super::results::{Example, kernels, plans_of_kind, unnoticed_of};
use super::{FORMATS, launches, some_of};
use crate::plan::{Plan, Request};
use crate::{Algorithm, DeviceInfo, Variant};
use std::collections::BTreeSet;
use volup::testing::Case;
use volup::{DType, Precision};

/// Layers whose outputs are on lattices, and why.
pub const ROWS: [(&str, &str); 9] = [
    ("n 2, 3x20x33, 9>5, k 3, s 2, p 1, d 2", "planes, lines and outputs apart; several tiles of a plane"),
    ("n 1, 2x30x40, 8>9, k 1x3x3, s 1x2x1, d 1x2x1, bias, relu", "lines apart, planes and outputs are not"),
    ("n 2, 4x3x9, 20>70, k 3x2x2, s 3, p 1x2x0, d 3, bias", "several planes of a tile, two column blocks"),
    ("n 1, 3x5x17, 6>8, k 2, s 4x2x2, p 1x0x1, op 1x0x0, d 2, bias, leaky_relu(0.1)", "residues along depth"),
    ("n 2, 3x4x20, 6>10, k 3, s 2, p 2, d 2, g 2, bias", "groups, whose planes start on a lattice's first"),
    ("n 3, 2x4x11, 4>3, k 1, s 3x2x2, op 2x1x1, bias", "one tap, and what is behind the last output"),
    ("n 1, 1x60x12, 5>3, k 1x5x3, s 2, p 0x3x1, d 1x2x2", "a plane in many tiles"),
    ("n 2, 3x6x30, 40>18, k 2x3x2, s 1x3x2, d 1x3x2, relu, gn 3", "a norm"),
    ("n 1, 2x2x100, 3>6, k 1x2x3, s 2x4x1, d 1x4x1, bias", "few lines of a tile"),
];

fn own() -> Vec<Case> {
    ROWS.iter().map(|(line, why)| Case::parse("between", line, why).expect("a valid case")).collect()
}

/// The plans of this kind.
fn plans(request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Vec<Plan> {
    plans_of_kind(request, device, variants, |plan| plan.to_string().contains("with what is between"))
}

#[test]
fn outputs_and_what_is_between_them_are_those_of_the_definition() {
    let (mut kernels_found, mut count) = (BTreeSet::new(), 0);
    let all = kernels(&with_multiprocessors(132), None);
    let all: Vec<&Variant> = all.iter().collect();
    for (multiprocessors, dtype, precision) in [
        (2, DType::F32, Precision::Tf32),
        (132, DType::F32, Precision::Tf32),
        (3, DType::F16, Precision::Ieee),
        (1, DType::Bf16, Precision::Ieee),
    ] {
        let device = with_multiprocessors(multiprocessors);
        for (turn, case) in own().into_iter().enumerate() {
            let example = Example::new(&case, dtype, |_, _| {});
            let request = example.request(Algorithm::HaloGemm, precision, [FORMATS[turn % 2], FORMATS[0]]);
            let plans = plans(&request, &device, &all);
            assert!(!plans.is_empty(), "{case}; {dtype}, {precision}");
            for plan in some_of(&plans, 4, turn) {
                println!("{case}; {dtype}, {precision}; {plan}");
                example.is_right(plan, &request);
                assert!(launches(plan).iter().all(|call| call.kernel() != "fill_output"), "{plan}");
                let product = launches(plan).into_iter().find(|call| call.kernel() == "halo_gemm");
                kernels_found.extend(product.map(|call| call.variant.name));
                count += 1;
            }
        }
    }
    let own = all.iter().filter(|kernel| kernel.param("BETWEEN").is_some());
    assert_eq!(kernels_found, own.map(|kernel| kernel.name).collect());
    assert!(count > 60, "{count}");
}

#[test]
fn what_has_nothing_between_lines_is_left_to_others() {
    let device = with_multiprocessors(132);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let applies = |line: &str, format: usize| {
        let case = Case::parse("given", line, "given").expect("a valid case");
        let example = Example::new(&case, DType::F32, |_, _| {});
        let request = example.request(Algorithm::HaloGemm, Precision::Tf32, [FORMATS[format]; 2]);
        !plans(&request, &device, &all).is_empty()
    };
    assert!(applies("n 1, 3x3x9, 8>6, k 3, s 2, d 2", 0));
    for (line, format, why) in [
        ("n 1, 3x3x9, 8>6, k 3, s 2", 0, "no lattice"),
        ("n 1, 3x3x9, 8>6, k 3, s 2x1x2, d 2x1x2", 0, "none along height"),
        ("n 1, 3x3x9, 8>6, k 3, s 2x4x2, d 2", 0, "residues along height"),
        ("n 1, 3x3x9, 8>6, k 3, s 2x2x4, d 2", 0, "residues along width"),
        ("n 1, 3x3x9, 8>6, k 3, s 2, d 2, silu", 0, "a curved activation"),
        ("n 1, 3x9x1, 8>6, k 3x3x1, s 2, d 2x2x1", 0, "lines shorter than a sector"),
        ("n 1, 1x1x600, 8>6, k 1x1x2, s 1x2x1, op 0x1x0", 0, "lines longer than a tile"),
        ("n 1, 3x3x9, 8>6, k 3, s 2, d 2", 1, "channels that lie together"),
    ] {
        assert!(!applies(line, format), "{line}: {why}");
    }
}

#[test]
fn a_wrong_argument_shows() {
    let device = with_multiprocessors(2);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let line = "n 2, 3x20x33, 9>5, k 3, s 2, p 1, d 2, bias, relu";
    let case = Case::parse("wrong", line, "all arguments matter").expect("a valid case");
    let example = Example::new(&case, DType::F32, |_, _| {});
    let request = example.request(Algorithm::HaloGemm, Precision::Tf32, [FORMATS[0]; 2]);
    let wrong = [(
        "halo_gemm",
        "n channels advance y_plane y_head y_past place_bytes y_depth y_first y_step pd ph pw y_n y_c y_d y_h y_w",
    )];
    let plan = plans(&request, &device, &all).into_iter().next().expect("a plan");
    let unnoticed = unnoticed_of(&example, &request, &plan, &wrong);
    assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
}
