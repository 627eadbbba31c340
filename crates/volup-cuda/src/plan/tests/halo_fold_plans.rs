//! What plans of `halo_gemm` compute whose columns are the taps along width, and where they apply.

use super::manifest::with_multiprocessors;
use super::results::{Example, kernels, plans_of_kind, unnoticed_of};
use super::{FORMATS, launches, some_of};
use crate::plan::{Plan, Request};
use crate::{Algorithm, DeviceInfo, Variant};
use std::collections::BTreeSet;
use volup::testing::{Case, cases};
use volup::{DType, MemoryFormat, Precision};

/// What the table has not, and why.
const ROWS: [(&str, &str); 5] = [
    ("n 2, 5x9x21, 20>33, k 3, p 1, bias, relu", "many tiles, two column blocks"),
    ("n 1, 3x4x40, 6>5, k 2x3x5, d 1x1x2, bias", "eight rows ahead, the most there are"),
    ("n 3, 4x5x12, 9>7, k 3x2x4, s 2x1x2, p 1x0x1, op 1x0x0, bias, leaky_relu(0.1)", "two residues"),
    ("n 2, 2x6x17, 40>18, k 1x5x3, s 1x2x2, d 1x1x3, g 2", "residues whose taps lie apart, groups"),
    ("n 1, 2x3x9, 8>6, k 1x1x4, tanh, gn 3", "a curved activation, and a norm"),
];

fn own() -> Vec<Case> {
    ROWS.iter().map(|(line, why)| Case::parse("fold", line, why).expect("a valid case")).collect()
}

/// The plans of this kind.
fn plans(request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Vec<Plan> {
    plans_of_kind(request, device, variants, |plan| plan.to_string().contains("taps as columns"))
}

/// Of each case those that differ in kernel, and in what is together in a stage or stays.
#[test]
fn taps_as_columns_compute_the_definition() {
    let (mut kernels_found, mut count) = (BTreeSet::new(), 0);
    let all = kernels(&with_multiprocessors(132), None);
    let all: Vec<&Variant> = all.iter().collect();
    for (multiprocessors, dtype, precision) in [
        (132, DType::F32, Precision::Ieee),
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
            for plan in some_of(&plans(&request, &device, &all), 7, turn) {
                println!("{case}; {dtype}, {precision}, {format}; {plan}");
                example.is_right(plan, &request);
                let product = launches(plan).into_iter().find(|call| call.kernel() == "halo_gemm");
                kernels_found.extend(product.map(|call| call.variant.name));
                count += 1;
            }
        }
    }
    let folds = all.iter().filter(|kernel| kernel.entry == "halo_gemm" && kernel.param("TAPS").is_some());
    assert_eq!(kernels_found, folds.map(|kernel| kernel.name).collect());
    assert!(count > 120, "{count}");
}

#[test]
fn what_taps_as_columns_are_not_for_is_left_to_others() {
    let device = with_multiprocessors(132);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let [first, last] = FORMATS;
    let applies = |line: &str, format: MemoryFormat, dtype: DType| {
        let case = Case::parse("given", line, "given").expect("a valid case");
        let example = Example::new(&case, dtype, |_, _| {});
        !plans(&example.request(Algorithm::HaloGemm, Precision::Tf32, [format; 2]), &device, &all).is_empty()
    };
    for line in ["n 1, 3x3x9, 8>6, k 3", "n 1, 3x3x9, 8>6, k 5, d 2", "n 1, 3x3x9, 8>6, k 1x1x2"] {
        assert!(applies(line, first, DType::F32) && applies(line, last, DType::Bf16), "{line}");
    }
    // Residues of NDHWC are no neighbours.
    let strided = "n 1, 3x3x9, 8>6, k 3, s 2";
    assert!(applies(strided, first, DType::F32) && !applies(strided, last, DType::F32));
    // One tap, more taps than there are kernels for, taps farther apart than a warp's neighbours, other strides.
    for line in [
        "n 1, 3x3x9, 8>6, k 3x3x1",
        "n 1, 3x3x9, 8>6, k 1x1x6",
        "n 1, 3x3x9, 8>6, k 1x1x5, d 1x1x3",
        "n 1, 3x3x9, 8>6, k 2, s 2",
        "n 1, 3x3x9, 8>6, k 4, s 3",
    ] {
        assert!(!applies(line, first, DType::F32), "{line}");
    }
    assert!(!applies("n 1, 3x3x9, 8>6, k 3", first, DType::F64));
}

#[test]
fn a_wrong_argument_shows() {
    let device = with_multiprocessors(2);
    let all = kernels(&device, None);
    let all: Vec<&Variant> = all.iter().collect();
    let line = "n 2, 6x20x19, 12>10, k 2x3x4, s 2, p 1, bias, relu";
    let case = Case::parse("wrong", line, "all arguments matter").expect("a valid case");
    let example = Example::new(&case, DType::F32, |_, _| {});
    let request = example.request(Algorithm::HaloGemm, Precision::Ieee, [FORMATS[0]; 2]);
    let wrong = [
        (
            "halo_pack_weight",
            "run each chunk_panels chunks columns blocks channels slice_in d_kernel h_kernel w_kernel",
        ),
        ("halo_pack_weight", "taps w_steps"),
        ("halo_gemm", "a_rows lead pd ph pw outputs w_shift w_out w_low channels advance w_dilation w_reach"),
    ];
    let plan = plans(&request, &device, &all).into_iter().find(|plan| plan.to_string().contains("256x32"));
    let plan = plan.expect("a plan of a kernel for a stride of 2");
    let unnoticed = unnoticed_of(&example, &request, &plan, &wrong);
    assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
}
