//! What plans of `gather_gemm` compute, and where they apply.

use super::manifest::with_multiprocessors;
use super::results::{Example, kernels, plans_of_kind, unnoticed_of};
use super::{FORMATS, launches, some_of};
use crate::plan::{Plan, Request};
use crate::{Algorithm, DeviceInfo, Variant};
use std::collections::BTreeSet;
use volup::testing::{Case, cases};
use volup::{DType, MemoryFormat, Precision};

/// What the table has not, and why.
const ROWS: [(&str, &str); 14] = [
    (
        "n 5, 6x6x6, 9>7, k 3, s 2, p 1, op 1, bias, relu",
        "voxels that the first position does not reach, many tiles",
    ),
    (
        "n 3, 4x5x6, 70>9, k 4, s 2, p 1, bias",
        "two chunks; pairs of taps of which the first and the last lack one",
    ),
    (
        "n 3, 4x4x5, 9>70, k 3x2x5, s 2x1x2, p 0x1x2, bias",
        "two column blocks, an even padding, positions past the input",
    ),
    (
        "n 2, 4x3x5, 8>6, k 5x1x3, s 3x2x2, p 2x0x1, d 1x1x3, bias",
        "residues without taps, taps of residues that lie apart",
    ),
    ("n 2, 5x4x7, 24>18, k 3, s 2, p 1, g 3, leaky_relu(0.1)", "groups"),
    ("n 2, 4x9x8, 6>5, k 3x5x6, p 2x4x5, bias", "a cropped output, fewer of which there are than voxels"),
    ("n 2, 3x4x9, 8>6, k 2x3x3, d 2x1x2, tanh, gn 3", "a curved activation, and a norm"),
    ("n 4, 3x9x9, 8>6, k 3x3x1, s 1x1x2, bias", "a lattice along width"),
    ("n 9, 2x3x3, 8>6, k 10x1x2, bias", "the most taps along an axis"),
    ("n 3, 5x6x7, 9>36, k 3, s 2, p 1, op 1, bias, relu, gn 6", "a norm, samples that meet in a tile"),
    (
        "n 4, 4x4x4, 64>32, k 3, bias, relu, gn 8, leaky_relu(0.1)",
        "a norm beside the product, which all channels fill",
    ),
    ("n 2, 6x6x6, 8>34, k 3, s 1x2x2, p 1, leaky_relu(0.1), gn 17", "groups across eights of channels"),
    ("n 2, 7x5x8, 8>33, k 2, s 2, bias, gn 3", "a norm of a kernel that is its stride"),
    ("n 5, 4x6x6, 9>20, k 4, s 2, p 1, g 1, relu, gn 20 plain", "a group a channel"),
];

fn own() -> Vec<Case> {
    ROWS.iter().map(|(line, why)| Case::parse("gather", line, why).expect("a valid case")).collect()
}

/// The plans of this family.
fn plans(request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Vec<Plan> {
    plans_of_kind(request, device, variants, |plan| plan.algorithm == Algorithm::GatherGemm)
}

#[test]
fn gather_gemm_computes_the_definition() {
    let (mut kernels_found, mut count) = (BTreeSet::new(), 0);
    let (mut by_work, mut in_place) = (BTreeSet::new(), BTreeSet::new());
    let all = kernels(&with_multiprocessors(132), None);
    let all: Vec<&Variant> = all.iter().collect();
    for (multiprocessors, dtype, precision) in [
        (132, DType::F32, Precision::Tf32),
        (5, DType::F32, Precision::Ieee),
        (3, DType::F16, Precision::Ieee),
        (1, DType::Bf16, Precision::Ieee),
    ] {
        let device = with_multiprocessors(multiprocessors);
        let table = cases().into_iter().filter(|case| case.batch != Some(0));
        for (turn, case) in table.chain(own()).enumerate() {
            let example = Example::new(&case, dtype, |_, _| {});
            let format = FORMATS[turn % 3 / 2];
            let request = example.request(Algorithm::GatherGemm, precision, [format; 2]);
            for (index, plan) in plans(&request, &device, &all).iter().enumerate() {
                let product =
                    launches(plan).into_iter().find(|call| call.kernel() == "gather_gemm").expect("one");
                // Each twelfth, and the first of each kernel.
                let is_new = kernels_found.insert(product.variant.name);
                if !is_new && !(index + turn).is_multiple_of(12) {
                    continue;
                }
                println!("{case}; {dtype}, {precision}, {format}; {plan}");
                example.is_right(plan, &request);
                by_work.insert(product.int("by_work"));
                in_place.insert(product.int("in_place") > 0);
                count += 1;
            }
        }
    }
    let of_family =
        all.iter().filter(|kernel| kernel.entry == "gather_gemm" && kernel.param("SPLIT").is_none());
    assert!(
        of_family.map(|kernel| kernel.name).all(|name| kernels_found.contains(name)),
        "{kernels_found:?}"
    );
    assert!(count > 100 && by_work.len() == 2 && in_place.len() == 2, "{count}, {by_work:?}, {in_place:?}");
}

/// What few tiles are: phases of which some are in parts, parts of chunks and of taps, groups, a norm, tiles at edges whose parts lack
/// some of their stages.
const PARTS: [&str; 5] = [
    "n 1, 3x4x5, 140>40, k 3, s 2, p 1, op 1, bias, relu",
    "n 2, 4x4x4, 70>20, k 3, p 1, bias",
    "n 1, 5x5x5, 40>70, k 4, s 2, p 1, bias, gn 7",
    "n 1, 3x6x7, 66>34, k 5x3x2, p 2x1x0, g 2, leaky_relu(0.1)",
    "n 3, 2x8x9, 16>9, k 7x2x3, p 3x0x1",
];

#[test]
fn tiles_in_parts_compute_the_definition() {
    let device = with_multiprocessors(132);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let mut found = BTreeSet::new();
    for (turn, line) in PARTS.into_iter().enumerate() {
        let case = Case::parse("parts", line, "tiles in parts").expect("a valid case");
        for (dtype, precision, format) in [
            (DType::F32, Precision::Tf32),
            (DType::F32, Precision::Ieee),
            (DType::F16, Precision::Ieee),
            (DType::Bf16, Precision::Ieee),
        ]
        .into_iter()
        .flat_map(|(dtype, precision)| FORMATS.map(|format| (dtype, precision, format)))
        {
            let example = Example::new(&case, dtype, |_, _| {});
            let request = example.request(Algorithm::GatherGemm, precision, [format; 2]);
            let plans = plans(&request, &device, &all);
            let plans: Vec<_> = plans.iter().filter(|plan| plan.to_string().contains(", in ")).collect();
            assert!(!plans.is_empty(), "{case}, {dtype}, {format}");
            for (index, plan) in plans.into_iter().enumerate() {
                let call =
                    launches(plan).into_iter().find(|call| call.kernel() == "gather_gemm").expect("one");
                // Each third, and the first of each kernel.
                let is_new = found.insert(call.variant.name);
                if !is_new && !(index + turn).is_multiple_of(3) {
                    continue;
                }
                println!("{case}; {dtype}, {format}; {plan}");
                example.is_right(plan, &request);
                if turn == 0 {
                    let wrong =
                        [("gather_gemm", "rows pd ph pw d_kernel h_kernel w_kernel chunks blocks channels")];
                    let unnoticed = unnoticed_of(&example, &request, plan, &wrong);
                    assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
                }
            }
        }
    }
    let of_parts =
        all.iter().filter(|kernel| kernel.entry == "gather_gemm" && kernel.param("SPLIT").is_some());
    assert_eq!(found, of_parts.map(|kernel| kernel.name).collect());
}

/// The same of `halo_gemm`, by two fp16.
#[test]
fn halo_gemm_computes_tiles_in_parts() {
    let device = with_multiprocessors(132);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let mut found = 0;
    for (turn, line) in PARTS.into_iter().enumerate() {
        let case = Case::parse("parts", line, "tiles in parts").expect("a valid case");
        let example = Example::new(&case, DType::F32, |_, _| {});
        for format in FORMATS {
            let request = example.request(Algorithm::HaloGemm, Precision::Ieee, [format; 2]);
            let mut plans = Plan::candidates(&request, &device, &all, usize::MAX).expect("plans");
            plans.retain(|plan| plan.to_string().contains("tiles in "));
            for plan in some_of(&plans, 14, turn) {
                println!("{case}; {format}; {plan}");
                example.is_right(plan, &request);
                found += 1;
            }
        }
    }
    assert!(found >= 4, "{found}");
}

#[test]
fn what_gather_gemm_is_not_for_is_left_to_others() {
    let device = with_multiprocessors(132);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let of = |line: &str, format: MemoryFormat, dtype: DType, precision: Precision| {
        let case = Case::parse("given", line, "given").expect("a valid case");
        let example = Example::new(&case, dtype, |_, _| {});
        plans(&example.request(Algorithm::GatherGemm, precision, [format; 2]), &device, &all)
    };
    let strided = "n 1, 3x3x9, 8>6, k 3, s 2";
    for format in FORMATS {
        assert!(!of(strided, format, DType::F32, Precision::Tf32).is_empty());
        assert!(!of(strided, format, DType::F32, Precision::Ieee).is_empty());
        // What the tensor cores cannot multiply.
        assert!(of(strided, format, DType::F64, Precision::Tf32).is_empty());
    }
    // Residues of NDHWC are no neighbours, nor are those of other strides.
    let pairs = |line: &str, format| {
        of(line, format, DType::Bf16, Precision::Ieee).iter().any(|plan| plan.to_string().contains("/2,"))
    };
    assert!(pairs(strided, FORMATS[0]) && !pairs(strided, FORMATS[1]));
    assert!(
        !pairs("n 1, 3x3x9, 8>6, k 3", FORMATS[0]) && !pairs("n 1, 3x3x9, 8>6, k 3, s 2, d 3", FORMATS[0])
    );
    // Outputs that no tap reaches, more phases or taps than there are tables for.
    for line in ["n 1, 3x3x9, 8>6, k 1, s 2", "n 1, 3x3x9, 8>6, k 5, s 5", "n 1, 3x3x9, 8>6, k 1x1x11"] {
        assert!(of(line, FORMATS[0], DType::F32, Precision::Tf32).is_empty(), "{line}");
    }
}

#[test]
fn a_wrong_argument_shows() {
    let device = with_multiprocessors(2);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let of_product = [
        ("halo_pack_input", "pd ph pw n slices slice_in panels"),
        ("gather_gemm", "rows voxels a_rows pd ph pw in_d in_h in_w back_d back_h back_w"),
        ("gather_gemm", "d_kernel d_stride d_dilation d_step d_inverse d_padding d_out"),
        ("gather_gemm", "h_kernel h_stride h_dilation h_step h_inverse h_padding h_out"),
        ("gather_gemm", "w_kernel w_stride w_dilation w_padding w_out chunks slices blocks channels"),
        ("gather_gemm", "y_n y_c y_d y_h y_w has_bias a_stages stage_rows b_stages"),
    ];
    let of_statistics = [
        ("gather_gemm", "part_chunks part_phases out_channels joined"),
        ("group_merge", "groups group_channels joined chunks phases rows tile_rows warpgroups"),
    ];
    let of_norm = [("gather_gemm", "norm_groups y_voxels norm_warps out_channels joined")];
    let of_input = [("gather_gemm", "rows voxels in_place x_w in_d in_h in_w chunks slices")];
    let first = (DType::F32, FORMATS[0]);
    // The second has samples that are a tile each.
    for (line, (dtype, format), words, least, wrong) in [
        (
            "n 2, 3x4x5, 40>70, k 3x4x3, s 2, p 1, op 0x1x0, bias, relu",
            first,
            " 128x128/",
            2,
            &of_product[..],
        ),
        (
            "n 3, 4x8x8, 9>36, k 3, s 2, p 1, op 1, bias, relu, gn 6",
            first,
            "with statistics; ",
            3,
            &of_statistics,
        ),
        ("n 4, 4x4x4, 64>32, k 3, bias, relu, gn 8", first, "normalize behind", 2, &of_norm),
        (
            "n 2, 3x4x5, 80>36, k 3, s 2, p 1, op 1, g 2, bias",
            (DType::F16, FORMATS[1]),
            "rows from x",
            2,
            &of_input,
        ),
    ] {
        let case = Case::parse("wrong", line, "all arguments matter").expect("a valid case");
        let example = Example::new(&case, dtype, |_, _| {});
        let request = example.request(Algorithm::GatherGemm, Precision::Tf32, [format; 2]);
        let plans = plans(&request, &device, &all);
        let some: Vec<&Plan> = plans.iter().filter(|plan| plan.to_string().contains(words)).collect();
        assert!(some.len() >= least, "{words}: {} plans", some.len());
        for plan in some {
            let unnoticed = unnoticed_of(&example, &request, plan, wrong);
            assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
        }
    }
}

/// Where the product does not stand, the definition is normalized instead; the product's output is not what remains.
#[test]
fn what_is_normalized_behind_may_be_the_definition() {
    let device = with_multiprocessors(2);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let line = "n 4, 4x4x4, 64>32, k 3, bias, relu, gn 8, leaky_relu(0.1)";
    let case = Case::parse("normalized", line, "a norm beside the product").expect("a valid case");
    let mut found = 0;
    for (bad, is_needed) in [(f64::INFINITY, true), (1.0, false)] {
        let example = Example::new(&case, DType::F32, |x, _| x[7] = bad);
        let request = example.request(Algorithm::GatherGemm, Precision::Tf32, [FORMATS[0]; 2]);
        for plan in plans(&request, &device, &all) {
            if !plan.to_string().contains("normalize behind") {
                continue;
            }
            found += 1;
            let (deviation, needed) = example.run(&plan, &request);
            assert!(deviation.is_ok() && needed == is_needed, "{deviation}: {plan}");
        }
    }
    assert!(found >= 4, "{found}");
}
