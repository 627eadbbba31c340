//! What plans of `halo_gemm` compute that take statistics of what they write, or normalize it, and where they apply.

use super::manifest::with_multiprocessors;
use super::results::{Example, kernels, plans_of_kind, unnoticed_of};
use super::{FORMATS, launches, some_of};
use crate::plan::{Plan, Request};
use crate::{Algorithm, DeviceInfo, Variant};
use std::collections::BTreeSet;
use volup::testing::Case;
use volup::{DType, MemoryFormat, Precision};

/// Blocks that these are for, and why.
const ROWS: [(&str, &str); 7] = [
    ("n 4, 4x4x4, 64>32, k 3, bias, relu, gn 8, leaky_relu(0.1)", "a norm beside the product"),
    ("n 3, 4x5x6, 9>64, k 3, s 2, p 1, bias, relu, gn 8", "two residues, of which a line's ends have one"),
    ("n 2, 3x5x6, 20>36, k 3, s 2x1x2, p 1, op 1x0x1, gn 4", "residues that end a line, phases"),
    ("n 4, 4x4x6, 12>96, k 3, g 3, gn 12 plain, relu", "slices"),
    (
        "n 9, 2x3x8, 16>24, k 1x2x3, bias, leaky_relu(0.1), gn 24",
        "a group a channel, samples that meet in a tile",
    ),
    ("n 2, 7x6x9, 8>160, k 3, p 1, gn 5", "several column blocks"),
    ("n 3, 5x5x6, 16>64, k 2, s 1x1x2, gn 1", "one group"),
];

fn own() -> Vec<Case> {
    ROWS.iter().map(|(line, why)| Case::parse("statistics", line, why).expect("a valid case")).collect()
}

/// The plans of this kind.
fn plans(request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Vec<Plan> {
    plans_of_kind(request, device, variants, |plan| {
        let text = plan.to_string();
        text.starts_with("halo_gemm") && text.contains("with statistics")
    })
}

#[test]
fn halo_gemm_counts_what_it_writes() {
    let (mut kernels_found, mut warps_found, mut outputs_found) =
        (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let all = kernels(&with_multiprocessors(132), None);
    let all: Vec<&Variant> = all.iter().collect();
    for multiprocessors in [132, 3] {
        let device = with_multiprocessors(multiprocessors);
        for (turn, case) in own().into_iter().enumerate() {
            let example = Example::new(&case, DType::F32, |_, _| {});
            for format in FORMATS {
                let request = example.request(Algorithm::HaloGemm, Precision::Ieee, [format; 2]);
                for plan in some_of(&plans(&request, &device, &all), 9, turn) {
                    println!("{case}; {format}; {plan}");
                    example.is_right(plan, &request);
                    let product = launches(plan).into_iter().find(|call| call.kernel() == "halo_gemm");
                    let product = product.expect("a product");
                    kernels_found.insert(product.variant.name);
                    warps_found.insert(product.int("norm_warps"));
                    outputs_found.insert((format == FORMATS[0], product.int("outputs")));
                }
            }
        }
    }
    let is_it = |kernel: &&&Variant| kernel.entry == "halo_gemm" && kernel.param("COUNTS").is_some();
    assert_eq!(kernels_found, all.iter().filter(is_it).map(|kernel| kernel.name).collect());
    assert_eq!(warps_found, BTreeSet::from([0, 2, 3]));
    assert_eq!(outputs_found, BTreeSet::from([(false, 1), (true, 1), (true, 2)]));
}

#[test]
fn what_is_not_counted_is_left_to_other_kernels() {
    let device = with_multiprocessors(132);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let of = |line: &str, format: MemoryFormat, dtype, precision| {
        let case = Case::parse("given", line, "given").expect("a valid case");
        let example = Example::new(&case, dtype, |_, _| {});
        plans(&example.request(Algorithm::HaloGemm, precision, [format; 2]), &device, &all).len()
    };
    let (f32, ieee, ncdhw) = (DType::F32, Precision::Ieee, FORMATS[0]);
    assert!(of("n 2, 6x6x6, 16>32, k 3, gn 4", ncdhw, f32, ieee) > 0);
    // No norm, a curve before it, one part, another type, a lattice of which outputs are filled, residues of NDHWC.
    assert_eq!(of("n 2, 6x6x6, 16>32, k 3, relu", ncdhw, f32, ieee), 0);
    assert_eq!(of("n 2, 6x6x6, 16>32, k 3, silu, gn 4", ncdhw, f32, ieee), 0);
    assert_eq!(of("n 2, 6x6x6, 16>32, k 3, gn 4", ncdhw, f32, Precision::Tf32), 0);
    assert_eq!(of("n 2, 6x6x6, 16>32, k 3, gn 4", ncdhw, DType::Bf16, ieee), 0);
    assert_eq!(of("n 2, 6x6x6, 16>32, k 1, s 2, gn 4", ncdhw, f32, ieee), 0);
    assert_eq!(of("n 2, 6x6x6, 16>32, k 3, s 2, gn 4", FORMATS[1], f32, ieee), 0);
}

#[test]
fn a_wrong_argument_shows() {
    let device = with_multiprocessors(2);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let of_statistics = [
        ("halo_gemm", "part_chunks part_phases out_channels joined"),
        ("group_merge", "groups group_channels joined chunks phases rows tile_rows warpgroups"),
    ];
    let of_norm = [("halo_gemm", "norm_groups y_voxels out_channels joined")];
    // Samples of the first are whole tiles.
    for (line, behind, wrong) in [
        ("n 3, 7x7x7, 9>36, k 3, s 2, p 1, op 1, bias, relu, gn 6", false, &of_statistics[..]),
        ("n 4, 4x4x4, 64>32, k 3, bias, relu, gn 8", true, &of_norm),
    ] {
        let case = Case::parse("wrong", line, "all arguments matter").expect("a valid case");
        let example = Example::new(&case, DType::F32, |_, _| {});
        let request = example.request(Algorithm::HaloGemm, Precision::Ieee, [FORMATS[0]; 2]);
        let plans = plans(&request, &device, &all);
        let is_it = |plan: &&Plan| plan.to_string().contains("normalize behind") == behind;
        let plan = plans.iter().find(is_it).expect("a plan");
        let unnoticed = unnoticed_of(&example, &request, plan, wrong);
        assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
    }
}

/// Where the product does not stand, the definition is normalized instead, or statistics are taken of it.
#[test]
fn the_definition_may_stand_instead() {
    let device = with_multiprocessors(2);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let line = "n 4, 4x4x4, 64>32, k 3, bias, relu, gn 8, leaky_relu(0.1)";
    let case = Case::parse("normalized", line, "a norm beside the product").expect("a valid case");
    let mut found = BTreeSet::new();
    for (bad, is_needed) in [(f64::INFINITY, true), (1.0, false)] {
        let example = Example::new(&case, DType::F32, |x, _| x[7] = bad);
        let request = example.request(Algorithm::HaloGemm, Precision::Ieee, [FORMATS[0]; 2]);
        for plan in plans(&request, &device, &all).iter().step_by(7) {
            found.insert((is_needed, plan.to_string().contains("normalize behind")));
            let (deviation, needed) = example.run(plan, &request);
            assert!(deviation.is_ok() && needed == is_needed, "{deviation}: {plan}");
        }
    }
    assert_eq!(found.len(), 4);
}
