//! What plans of `halo_sweep` compute, and where they apply.

use super::manifest::with_multiprocessors;
use super::results::{Example, kernels, plans_of_kind, unnoticed_of};
use super::{FORMATS, launches, some_of};
use crate::plan::{Plan, Request};
use crate::{Algorithm, DeviceInfo, Variant};
use std::collections::BTreeSet;
use volup::testing::{Case, cases};
use volup::{DType, MemoryFormat, Precision};

/// What the table has not, and why.
const ROWS: [(&str, &str); 8] = [
    ("n 2, 5x9x21, 20>33, k 3, p 1, bias, relu", "padding, gaps at the ends of lines, several column blocks"),
    ("n 3, 4x11x13, 24>16, k 3x2x4, bias", "no padding: rows are voxels"),
    ("n 1, 1x6x40, 8>5, k 3x3x5, d 1x2x1", "one plane of the input, a dilated height"),
    (
        "n 40, 2x3x5, 16>7, k 3x1x1, p 1x0x0, leaky_relu(0.1)",
        "samples smaller than a piece, taps along depth alone",
    ),
    (
        "n 2, 9x16x16, 64>72, k 3, p 2, bias, tanh",
        "chunks, more padding than a kernel's half, a curved activation",
    ),
    ("n 2, 6x8x8, 32>48, k 3, p 1, silu, gn 4", "a norm"),
    ("n 2, 5x6x7, 8>12, k 3, s 2x2x1, d 2x2x1, p 1, bias", "outputs that no tap reaches"),
    ("n 1, 7x30x30, 32>24, k 3, relu", "a part of a piece's planes for each block"),
];

fn own() -> Vec<Case> {
    ROWS.iter().map(|(line, why)| Case::parse("sweep", line, why).expect("a valid case")).collect()
}

/// Blocks whose statistics are taken as they are written, and why.
const COUNTED: [(&str, &str); 6] = [
    (
        "n 3, 5x13x15, 16>32, k 3, p 1, bias, relu, gn 8",
        "samples that meet in a piece, gaps at the ends of lines",
    ),
    ("n 2, 4x12x14, 24>80, k 3, leaky_relu(0.1), gn 5, silu", "several column blocks, rows that are voxels"),
    ("n 1, 9x14x14, 8>20, k 3, p 1, gn 20 plain", "a group a channel, a part of the columns"),
    ("n 2, 3x20x12, 40>64, k 3x3x5, p 2x1x2, bias, relu, gn 1", "one group, planes that are no output"),
    ("n 1, 1x16x16, 8>36, k 3, p 1x1x1, gn 9", "one plane"),
    ("n 5, 6x10x20, 16>32, k 3, d 1x2x1, bias, gn 4", "a dilated height, more pieces than blocks"),
];

/// The plans of this kind that take statistics, or that do not.
fn plans_that(count: bool, request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Vec<Plan> {
    plans_of_kind(request, device, variants, |plan| {
        let text = plan.to_string();
        text.contains("halo_gemm sweep") && text.contains("with statistics") == count
    })
}
fn plans(request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Vec<Plan> {
    plans_that(false, request, device, variants)
}

/// Of each case those that differ in kernel, in chunks, in what stays, and in who packs.
#[test]
fn sweeps_compute_the_definition() {
    let (mut kernels_found, mut features, mut count) = (BTreeSet::new(), BTreeSet::new(), 0);
    let all = kernels(&with_multiprocessors(132), None);
    let all: Vec<&Variant> = all.iter().collect();
    for (multiprocessors, dtype, precision) in [
        (132, DType::F32, Precision::Tf32),
        (132, DType::F32, Precision::Ieee),
        (2, DType::F32, Precision::Ieee),
        (2, DType::F32, Precision::Tf32),
        (3, DType::F16, Precision::Ieee),
        (1, DType::Bf16, Precision::Ieee),
    ] {
        let device = with_multiprocessors(multiprocessors);
        let table = cases().into_iter().filter(|case| case.batch != Some(0));
        for (turn, case) in table.chain(own()).enumerate() {
            let example = Example::new(&case, dtype, |_, _| {});
            let format = FORMATS[turn % 2];
            let request = example.request(Algorithm::HaloGemm, precision, [format; 2]);
            for plan in some_of(&plans(&request, &device, &all), 23, turn) {
                println!("{case}; {dtype}, {precision}, {format}; {plan}");
                example.is_right(plan, &request);
                let call = launches(plan).into_iter().find(|call| call.kernel() == "halo_sweep").expect("it");
                kernels_found.insert(call.variant.name);
                let [resident, ahead, whole, chunks, blocks] =
                    call.ints(["resident", "ahead", "whole", "chunks", "blocks"]);
                let [unit_lines, h_kernel] = call.ints(["unit_lines", "h_kernel"]);
                let alternates = call.has("alternates").then(|| call.int("alternates"));
                let there = [
                    ("stays", resident == 1),
                    ("passes", resident == 0),
                    ("packs along", ahead > 0),
                    ("rows from x", call.int("in_place") > 0),
                    ("whole pieces", whole > 0),
                    ("parts of pieces", whole == 0),
                    ("chunks", chunks > 1),
                    ("column blocks", blocks > 1),
                    ("units of all lines that pass", resident == 0 && unit_lines == h_kernel && h_kernel > 1),
                    ("units one after the other", alternates == Some(1)),
                    ("each unit by itself", alternates == Some(0)),
                ];
                features.extend(there.iter().filter(|(_, there)| *there).map(|(what, _)| *what));
                count += 1;
            }
        }
    }
    let is_it = |kernel: &&&Variant| kernel.entry == "halo_sweep" && kernel.param("COUNTS").is_none();
    let sweeps = all.iter().filter(is_it);
    assert_eq!(kernels_found, sweeps.map(|kernel| kernel.name).collect());
    assert_eq!(features.len(), 11, "{features:?}");
    assert!(count > 60, "{count}");
}

#[test]
fn sweeps_count_what_they_write() {
    let (mut kernels_found, mut shares_found) = (BTreeSet::new(), BTreeSet::new());
    let all = kernels(&with_multiprocessors(132), None);
    let all: Vec<&Variant> = all.iter().collect();
    for (multiprocessors, dtype, precision) in [
        (132, DType::F32, Precision::Tf32),
        (5, DType::F32, Precision::Ieee),
        (3, DType::F16, Precision::Ieee),
        (1, DType::Bf16, Precision::Ieee),
    ] {
        let device = with_multiprocessors(multiprocessors);
        let all_of =
            COUNTED.iter().map(|(line, why)| Case::parse("counted", line, why).expect("a valid case"));
        for (turn, case) in all_of.enumerate() {
            let example = Example::new(&case, dtype, |_, _| {});
            for format in FORMATS {
                let request = example.request(Algorithm::HaloGemm, precision, [format; 2]);
                let plans = plans_that(true, &request, &device, &all);
                assert!(!plans.is_empty(), "{case}; {dtype}, {precision}");
                for plan in some_of(&plans, 5, turn) {
                    println!("{case}; {dtype}, {precision}, {format}; {plan}");
                    example.is_right(plan, &request);
                    let call = launches(plan).into_iter().find(|call| call.kernel() == "halo_sweep");
                    let call = call.expect("a sweep");
                    kernels_found.insert(call.variant.name);
                    shares_found.insert(call.int("part_phases").min(3));
                }
            }
        }
    }
    let is_it = |kernel: &&&Variant| kernel.entry == "halo_sweep" && kernel.param("COUNTS").is_some();
    assert_eq!(kernels_found, all.iter().filter(is_it).map(|kernel| kernel.name).collect());
    assert_eq!(shares_found, BTreeSet::from([1, 2, 3]));
}

#[test]
fn what_is_not_counted_is_left_to_other_kernels() {
    let device = with_multiprocessors(132);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let counts = |line: &str| {
        let case = Case::parse("given", line, "given").expect("a valid case");
        let example = Example::new(&case, DType::F32, |_, _| {});
        let request = example.request(Algorithm::HaloGemm, Precision::Tf32, [MemoryFormat::Contiguous; 2]);
        !plans_that(true, &request, &device, &all).is_empty()
    };
    assert!(counts("n 2, 6x14x14, 16>32, k 3, gn 4"));
    // No norm, a curve before it, samples of fewer rows than a piece has, outputs that are filled.
    for line in [
        "n 2, 6x14x14, 16>32, k 3, relu",
        "n 2, 6x14x14, 16>32, k 3, silu, gn 4",
        "n 2, 6x8x8, 16>32, k 3, gn 4",
        "n 2, 6x14x14, 16>32, k 3, s 2x2x1, d 2x2x1, gn 4",
    ] {
        assert!(!counts(line), "{line}");
    }
}

#[test]
fn what_sweeps_are_not_for_is_left_to_others() {
    let device = with_multiprocessors(132);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let applies = |line: &str, dtype: DType, precision: Precision| {
        let case = Case::parse("given", line, "given").expect("a valid case");
        let example = Example::new(&case, dtype, |_, _| {});
        let formats = [MemoryFormat::Contiguous; 2];
        !plans(&example.request(Algorithm::HaloGemm, precision, formats), &device, &all).is_empty()
    };
    let fits = "n 1, 3x3x9, 8>6, k 3, d 1x2x3";
    assert!(applies(fits, DType::F32, Precision::Tf32) && applies(fits, DType::Bf16, Precision::Ieee));
    assert!(applies(fits, DType::F32, Precision::Ieee) && !applies(fits, DType::F64, Precision::Ieee));
    // Strides, dilated depth, groups, other kernels along depth.
    for line in [
        "n 1, 3x3x9, 8>6, k 3, s 1x1x2",
        "n 1, 3x3x9, 8>6, k 3, s 2x1x1",
        "n 1, 3x3x9, 8>6, k 3, d 2x1x1",
        "n 1, 3x3x9, 8>6, k 3, g 2",
        "n 1, 3x3x9, 8>6, k 2x3x3",
    ] {
        assert!(!applies(line, DType::F32, Precision::Tf32), "{line}");
    }
}

#[test]
fn a_wrong_argument_shows() {
    let device = with_multiprocessors(2);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let line = "n 3, 6x20x19, 40>20, k 3x3x4, p 1, d 1x2x1, bias, relu";
    let case = Case::parse("wrong", line, "all arguments matter").expect("a valid case");
    let of_input = [("halo_sweep", "in_place x_n x_d x_h x_w height width rows ph pw chunks")];
    let wrong = [
        ("halo_pack_weight", "sweeps chunk_panels chunks columns blocks d_kernel h_kernel w_kernel"),
        (
            "halo_sweep",
            "rows a_rows lead ph pw planes d_shift d_out h_kernel back_h h_shift h_out w_kernel w_step",
        ),
        (
            "halo_sweep",
            "w_shift w_out offset chunk_panels chunks blocks channels y_d y_h y_w has_bias a_stages",
        ),
        ("halo_sweep", "stage_rows b_stages whole unit_lines"),
    ];
    for (dtype, format, rows, wrong) in
        [(DType::F32, FORMATS[0], "units", &wrong[..]), (DType::F16, FORMATS[1], "rows from x", &of_input)]
    {
        let example = Example::new(&case, dtype, |_, _| {});
        let request = example.request(Algorithm::HaloGemm, Precision::Tf32, [format; 2]);
        let plan = plans(&request, &device, &all).into_iter().find(|plan| {
            let text = plan.to_string();
            ["x3x16", "passing", rows].iter().all(|words| text.contains(words)) && !text.contains("along")
        });
        let plan = plan.expect("a plan of several column blocks");
        let unnoticed = unnoticed_of(&example, &request, &plan, wrong);
        assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
    }
    let line = "n 3, 5x13x15, 16>40, k 3, p 1, bias, relu, gn 10";
    let case = Case::parse("wrong", line, "all arguments matter").expect("a valid case");
    let example = Example::new(&case, DType::F32, |_, _| {});
    let request = example.request(Algorithm::HaloGemm, Precision::Tf32, [FORMATS[0]; 2]);
    let plan = plans_that(true, &request, &with_multiprocessors(5), &all).into_iter().next();
    let plan = plan.expect("a plan that counts");
    let wrong = [("halo_sweep", "part_chunks part_phases out_channels joined")];
    let unnoticed = unnoticed_of(&example, &request, &plan, &wrong);
    assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
}
