//! What plans of `shuffle_gemm` compute, and where the family applies.

use super::manifest::{devices, with_multiprocessors};
use super::results::{Choice, Example, features, kernels, unnoticed_of};
use super::{FORMATS, request_of, some_of};
use crate::plan::{Plan, Request};
use crate::{Algorithm, DeviceInfo, Variant};
use std::collections::BTreeSet;
use volup::testing::{Case, cases};
use volup::{Activation, DType, MemoryFormat, Precision};

/// What the table has not, and why.
const ROWS: [(&str, &str); 24] = [
    (
        "n 3, 4x6x10, 40>20, k 2, s 2, bias, relu, gn 5, leaky_relu(0.1)",
        "blocks that take many, all that follows",
    ),
    ("n 2, 3x5x7, 33>6, k 1x2x1, s 1x2x1, gn 2 plain, relu", "no runs of four, two chunks"),
    ("n 2, 3x5x8, 7>12, k 2x2x1, s 2x2x1, bias, gn 4", "four positions of a line together"),
    ("n 2, 5x6x10, 20>18, k 1, bias, leaky_relu(0.3), gn 3", "four positions of all"),
    ("n 2, 5x5x5, 12>10, k 2, s 2, bias, gn 5", "odd lines: two residues of a position"),
    ("n 2, 3x2x5, 6>7, k 2, s 2, gn 7", "copies of 4 bytes, an odd number of channels"),
    ("n 2, 2x3x4, 10>9, k 3x1x4, s 3x1x4, bias, gn 3", "a stride along width of NDHWC alone"),
    ("n 5, 2x2x6, 8>40, k 2, s 2, gn 10 plain", "many samples, of few positions each"),
    ("n 2, 2x4x8, 100>96, k 2, s 2, bias, relu", "many row blocks, four chunks"),
    ("n 7, 1x2x2, 5>3, k 1x1x2, s 1x1x2, gn 1", "less than a tile of anything"),
    ("n 2, 9x7x12, 16>8, k 1x1x2, s 1x1x2, bias, gn 2", "many blocks of positions, few rows"),
    ("n 2, 6x6x6, 24>1, k 2, s 2, gn 1", "one channel with all its taps"),
    ("n 1, 1x3x5, 64>130, k 1, gn 13, relu", "a last row block of few channels"),
    ("n 2, 4x4x5, 12>10, k 2, s 2, bias, gn 5", "odd lines, whole vectors of a channel"),
    (
        "n 2, 6x6x8, 35>6, k 1x2x2, s 1x2x2, bias, leaky_relu(0.2), gn 2 plain, relu",
        "two chunks, several items of a sample",
    ),
    (
        "n 3, 6x4x6, 64>24, k 2, s 2, bias, leaky_relu(0.3)",
        "stages of whole chunks, blocks that take several",
    ),
    ("n 2, 4x4x5, 32>10, k 3x1x2, s 3x1x2, bias, gn 5", "the same with odd lines, few channels of y"),
    ("n 1, 2x3x4, 96>12, k 2, s 2, relu", "the same, one block of positions"),
    ("n 2, 2x3x4, 9>16, k 2, s 2, tanh, gn 2, relu", "a curved activation is not for this family"),
    (
        "n 2, 1x3x32, 20>6, k 2, s 2, bias, relu, gn 3, leaky_relu(0.1)",
        "lines that are stored together, two of a part",
    ),
    ("n 2, 2x2x64, 9>5, k 1x2x2, s 1x2x2, bias, gn 5, relu", "lines that are stored together, one of a part"),
    ("n 1, 1x2x128, 17>3, k 2x1x2, s 2x1x2, bias, leaky_relu(0.2)", "lines that are stored in parts"),
    ("n 1, 1x2x32, 5>3, k 1x3x2, s 1x3x2, relu, gn 3", "lines that are stored one by one"),
    ("n 2, 4x2x5, 96>32, k 2, s 2, bias", "many channels, odd lines, whole vectors of channels"),
];

pub fn own() -> Vec<Case> {
    ROWS.iter().map(|(line, why)| Case::parse("shuffle", line, why).expect("a valid case")).collect()
}

fn is_straight(activation: Option<Activation>) -> bool {
    matches!(activation, None | Some(Activation::Relu | Activation::LeakyRelu(_)))
}

/// Where the family applies, whatever its tiles are, by what the kernel's file says.
fn applies(request: &Request) -> bool {
    let (block, geometry) = (&request.block, &request.geometry);
    let conv = geometry.conv();
    let last = request.output_format == MemoryFormat::ChannelsLast3d;
    let one_tap = geometry.axes().iter().all(|axis| {
        let alone = axis.kernel == 1 || axis.dilation == 1;
        axis.kernel == axis.stride && alone && axis.padding == 0 && axis.output == axis.input * axis.stride
    });
    let straight = match (block.norm(), block.activation(), block.post_activation()) {
        (None, Some(_), Some(_)) => false,
        (None, one, other) => is_straight(one.or(other)),
        (Some(_), activation, _) => is_straight(activation),
    };
    let [cout, taps] = [conv.out_channels(), conv.stride().iter().product()];
    let volume: usize = geometry.input_shape()[2..].iter().product();
    let words = |run: usize| (run * request.dtype.size()).is_multiple_of(4);
    let of_last = request.input_format == MemoryFormat::ChannelsLast3d;
    let runs = words(if of_last { conv.in_channels() } else { volume }) && (last || words(cout * taps));
    // Of NDHWC tiles have all taps of some channels; of `shuffle_wgmma`, which wants whole vectors of x, any rows.
    let [cin, bytes] = [conv.in_channels(), request.dtype.size()];
    let split = request.dtype == DType::F32 && request.precision == Precision::Ieee;
    let vectors = (cin * bytes).is_multiple_of(16) && (!split || cin <= 192);
    // It alone goes from NDHWC to NCDHW.
    let strides = match [of_last, last] {
        [_, true] => taps * 16 <= 256 || cout.is_multiple_of(2) && vectors,
        [true, false] => conv.stride()[2] == 2 && vectors,
        _ => conv.stride()[2] <= 2,
    };
    let same = (of_last || !last) && conv.groups() == 1;
    one_tap && straight && runs && strides && same && request.dtype != DType::F64
}

/// The families of kernels that are their stride.
const FAMILIES: [Algorithm; 3] = [Algorithm::ShuffleGemm, Algorithm::ShuffleRing, Algorithm::ShuffleWgmma];

/// The plans of all of them for an example.
fn plans_of(
    example: &Example,
    precision: Precision,
    formats: [MemoryFormat; 2],
    device: &DeviceInfo,
    variants: &[&Variant],
) -> (Request, Vec<Plan>) {
    let request = example.request(Algorithm::ShuffleGemm, precision, formats);
    let mut plans = of_all(&request, device, variants);
    plans.retain(|plan| FAMILIES.contains(&plan.algorithm));
    (request, plans)
}

/// The plans for a request that asks for one of them.
fn of_all(request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Vec<Plan> {
    let of = |algorithm| Request { algorithm: Some(algorithm), ..*request };
    let plans = |algorithm| Plan::candidates(&of(algorithm), device, variants, usize::MAX).unwrap();
    FAMILIES.into_iter().flat_map(plans).collect()
}

/// Runs each `step`th plan of all families for all cases, with all kernels that are chosen, and says what they are like.
fn check(
    device: &DeviceInfo,
    choice: Option<Choice>,
    dtype: DType,
    precision: Precision,
    step: usize,
) -> (BTreeSet<&'static str>, usize) {
    let variants = kernels(device, choice);
    let variants: Vec<&Variant> = variants.iter().collect();
    let (mut found, mut count) = (BTreeSet::new(), 0);
    for (index, case) in cases().iter().chain(&own()).filter(|case| case.batch != Some(0)).enumerate() {
        let example = Example::new(case, dtype, |_, _| {});
        let [first, last] = FORMATS;
        for formats in [[first; 2], [last; 2], [last, first]] {
            let (request, plans) = plans_of(&example, precision, formats, device, &variants);
            assert!(
                choice.is_some() || plans.is_empty() != applies(&request),
                "{case}; {dtype}, {formats:?}"
            );
            for plan in some_of(&plans, step, index) {
                println!("{case}; {dtype}, {precision}, {formats:?}; {plan}");
                example.is_right(plan, &request);
                found.extend(features(plan));
                count += 1;
            }
        }
    }
    (found, count)
}

#[test]
fn shuffle_gemm_computes_the_definition() {
    let hopper = with_multiprocessors(132);
    let (mut found, mut count) = (BTreeSet::new(), 0);
    for (device, dtype, precision) in [
        (&hopper, DType::F32, Precision::Ieee),
        (&with_multiprocessors(1), DType::F32, Precision::Ieee),
        (&with_multiprocessors(3), DType::F32, Precision::Tf32),
        (&hopper, DType::F16, Precision::Ieee),
        (&with_multiprocessors(2), DType::Bf16, Precision::Ieee),
    ] {
        let (features, plans) = check(device, None, dtype, precision, 6);
        found.extend(features);
        count += plans;
    }
    let expected = [
        "blocks of many blocks of positions",
        "blocks without positions of a sample",
        "channels last",
        "channels last to first",
        "channels last, many",
        "channels last, warpgroups",
        "chunks",
        "copies of 16 bytes",
        "copies of 4 bytes",
        "copies of 8 bytes",
        "lines stored alone",
        "lines stored in parts",
        "lines stored together",
        "many channels",
        "neighbours apart",
        "neighbours together",
        "normalized",
        "positions past the end",
        "row blocks",
        "rows past the end",
        "statistics",
        "teams",
        "voxels stored together",
        "warpgroups",
        "weights kept",
        "weights one by one",
    ];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
    assert!(count > 400, "{count}");
}

/// Where a build has one kernel for each kind of numbers, or one more that knows the modes of a normalization, it does
/// for all that it has room for.
#[test]
fn shuffle_gemm_computes_the_definition_with_a_single_kernel() {
    fn is(kernel: &Variant, sizes: [i64; 3]) -> bool {
        let of = ["WARP_ROWS", "ROW_WARPS", "POS_WARPS"].map(|name| kernel.param(name));
        !kernel.entry.starts_with("shuffle_") || kernel.entry == "shuffle_gemm" && of == sizes.map(Some)
    }
    let [long, few] = [132, 2].map(with_multiprocessors);
    // Plans at least, and whether there are such as compute everything twice.
    let all: [(Choice, &DeviceInfo, DType, usize, bool); 5] = [
        (|kernel| is(kernel, [32, 4, 2]), &few, DType::F32, 50, true),
        (|kernel| is(kernel, [64, 2, 4]), &long, DType::F32, 25, false),
        (|kernel| is(kernel, [32, 1, 8]), &few, DType::F16, 20, false),
        (|kernel| is(kernel, [32, 4, 4]), &few, DType::Bf16, 30, false),
        (|kernel| is(kernel, [32, 8, 1]), &few, DType::Bf16, 50, true),
    ];
    for (choice, device, dtype, least, twice) in all {
        let (found, count) = check(device, Some(choice), dtype, Precision::Ieee, 1);
        assert!(count >= least, "{count} of {least}");
        assert_eq!(["statistics", "normalized"].map(|what| found.contains(what)), [twice; 2]);
    }
}

/// Infinities, NaN and what is too small for two parts, in the input and in the weight.
#[test]
fn shuffle_gemm_leaves_what_it_cannot_compute_to_the_definition() {
    type Change = fn(&mut Vec<f64>, &mut Vec<f64>);
    let changes: [(&str, Change); 8] = [
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
        ("nothing but zeros", |x, _| x.fill(0.0)),
    ];
    let lines = [ROWS[0].0, ROWS[4].0, ROWS[17].0, "n 2, 4x3x6, 36>24, k 2, s 2, bias, relu"];
    let device = with_multiprocessors(2);
    let some: Choice = |kernel| kernel.entry != "shuffle_gemm" || kernel.param("ROW_WARPS") == Some(4);
    let variants = kernels(&device, Some(some));
    let variants: Vec<&Variant> = variants.iter().collect();
    for (first, line) in lines.into_iter().enumerate() {
        let case = Case::parse("hostile", line, "numbers that are none").unwrap();
        for (dtype, precision) in [
            (DType::F32, Precision::Ieee),
            (DType::F32, Precision::Tf32),
            (DType::F16, Precision::Ieee),
            (DType::Bf16, Precision::Ieee),
        ] {
            for (turn, (what, change)) in (first..).zip(changes) {
                let example = Example::new(&case, dtype, change);
                let format = FORMATS[(turn + first) / 2 % 2];
                let (request, plans) = plans_of(&example, precision, [format; 2], &device, &variants);
                for plan in some_of(&plans, 6, turn) {
                    println!("{case}; {dtype}, {precision}, {format}; {what}; {plan}");
                    let (deviation, _) = example.run(plan, &request);
                    assert!(deviation.is_ok(), "{deviation}");
                }
            }
        }
    }
}

/// A request in float32 for one sample or more of a block.
fn request(line: &str, format: MemoryFormat) -> Request {
    let algorithm = Some(Algorithm::ShuffleGemm);
    Request { input_format: format, output_format: format, algorithm, ..request_of(line) }
}

/// How a request is planned on a Hopper: by this family, with its normalization or without, or by others.
fn ways(request: &Request) -> BTreeSet<&'static str> {
    let device = with_multiprocessors(132);
    let variants = kernels(&device, None);
    let plans = Plan::candidates(request, &device, &variants.iter().collect::<Vec<_>>(), usize::MAX).unwrap();
    let way = |plan: &Plan| {
        let text = plan.to_string();
        let twice = text.contains("recomputed for the norm");
        assert!(!twice || !text.contains("two-pass norm"), "{text}");
        match (plan.algorithm, twice) {
            (Algorithm::ShuffleGemm, true) => "twice",
            (Algorithm::ShuffleGemm, false) => "once",
            _ => "otherwise",
        }
    };
    plans.iter().map(way).collect()
}

#[test]
fn outputs_are_computed_twice_where_a_norm_and_nothing_curved_follows() {
    let of = |ending: &str| {
        let line = format!("n 2, 8x8x8, 32>16, k 2, s 2{ending}");
        ways(&request(&line, FORMATS[0])).into_iter().collect::<Vec<_>>()
    };
    for ending in ["", ", relu", ", bias, leaky_relu(0.1)"] {
        assert_eq!(of(ending), ["once"], "{ending}");
    }
    for ending in [", gn 4", ", relu, gn 4 plain", ", gn 16, relu", ", relu, gn 1, leaky_relu(0.1)"] {
        assert_eq!(of(ending), ["once", "twice"], "{ending}");
    }
    // What is curved behind the normalization is left to its own kernels, before it to other families.
    for ending in [", gn 4, silu", ", relu, gn 4, tanh"] {
        assert_eq!(of(ending), ["once"], "{ending}");
    }
    for ending in [", silu", ", gelu, gn 4", ", relu, sigmoid", ", relu, relu"] {
        assert_eq!(of(ending), ["otherwise"], "{ending}");
    }
}

#[test]
fn only_one_tap_an_output_applies() {
    let [first, last] = FORMATS;
    let base = request("n 2, 8x8x8, 32>16, k 2, s 2, gn 4", first);
    assert!(applies(&base) && ways(&base).len() == 2);
    let refused = |request: &Request| {
        assert!(!applies(request), "{request:?}");
        assert_eq!(ways(request).into_iter().collect::<Vec<_>>(), ["otherwise"], "{request:?}");
    };
    for line in ["g 2", "p 1", "op 1", "d 2"] {
        refused(&request(&format!("n 2, 8x8x8, 32>16, k 2, s 2, {line}, gn 4"), first));
    }
    for kernel in ["k 3, s 2", "k 1, s 2", "k 2x2x1, s 2"] {
        refused(&request(&format!("n 2, 8x8x8, 32>16, {kernel}, gn 4"), last));
    }
    refused(&Request { dtype: DType::F64, ..base });
    refused(&Request { output_format: last, ..base });
    // Strides along width past what a lane writes, runs that copies cannot start at, taps past a row block and no pairs of channels.
    refused(&request("n 2, 8x8x8, 32>16, k 2x2x3, s 2x2x3", first));
    assert!(applies(&request("n 2, 8x8x8, 32>16, k 2x2x3, s 2x2x3", last)));
    refused(&Request { dtype: DType::F16, ..request("n 2, 3x5x7, 32>16, k 2, s 2", first) });
    refused(&Request { dtype: DType::Bf16, ..request("n 2, 3x5x7, 31>16, k 2, s 2", last) });
    refused(&request("n 2, 4x4x4, 32>15, k 3x3x2, s 3x3x2", last));
    assert!(applies(&request("n 2, 4x4x4, 32>16, k 4x2x2, s 4x2x2", last)));
    // Another family that is asked for.
    let other = Request { algorithm: Some(Algorithm::Interleave), ..base };
    assert_eq!(ways(&other).into_iter().collect::<Vec<_>>(), ["otherwise"]);
}

/// What does not apply is left to others, and what is left to itself takes what is fastest.
#[test]
fn other_families_take_what_is_not_for_this_one() {
    let [hopper, ampere] = [devices()[1].clone(), devices()[0].clone()];
    let of = |request: &Request, device: &DeviceInfo| super::plan(request, device, &[]).unwrap().algorithm;
    let [first, last] = FORMATS;
    let large = request("n 2, 64x64x64, 64>32, k 2, s 2, bias, relu, gn 32", first);
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let free = Request { algorithm: None, dtype, ..large };
        assert_eq!(of(&free, &hopper), Algorithm::ShuffleWgmma);
        assert_eq!(of(&free, &ampere), Algorithm::Interleave);
    }
    assert_eq!(of(&large, &ampere), Algorithm::LinearGemm);
    assert_eq!(of(&request("8x8x8, 32>16, k 3, s 2", first), &hopper), Algorithm::LinearGemm);
    // More weights than shared memory holds; more elements than 32 bits count.
    assert_eq!(of(&request("4x4x4, 4096>16, k 2, s 2", last), &hopper), Algorithm::LinearGemm);
    let far = Request { dtype: DType::Bf16, ..request("256x256x256, 64>64, k 2, s 2", first) };
    assert!(!FAMILIES.contains(&of(&far, &hopper)));
}

/// Every group of blocks has partial statistics of every sample, also of those that it computes nothing of.
#[test]
fn nothing_of_the_size_of_the_output_is_allocated_for_statistics() {
    let hopper = with_multiprocessors(132);
    let variants = kernels(&hopper, None);
    let variants: Vec<&Variant> = variants.iter().collect();
    for line in [
        "n 1000, 2x2x4, 32>32, k 2, s 2, gn 8",
        "n 64, 4x4x4, 64>64, k 2, s 2, relu, gn 8",
        "n 16, 16x16x16, 64>32, k 2, s 2, relu, gn 8",
        "n 2, 64x64x64, 64>32, k 2, s 2, relu, gn 32",
    ] {
        for (format, dtype) in
            FORMATS.into_iter().flat_map(|format| [(format, DType::F32), (format, DType::F16)])
        {
            let request = Request { dtype, ..request(line, format) };
            let plans = of_all(&request, &hopper, &variants);
            let twice = plans.iter().filter(|plan| plan.to_string().contains("recomputed"));
            let output = request.geometry.output_shape().iter().product::<usize>() * dtype.size();
            for plan in twice {
                let most = output / 4 + (1 << 21);
                assert!(plan.workspace_bytes <= most, "{plan} for {output} bytes: {line}");
            }
        }
    }
}

#[test]
fn a_wrong_argument_shows() {
    let device = with_multiprocessors(2);
    let variants = kernels(&device, None);
    let variants: Vec<&Variant> = variants.iter().collect();
    let sizes = "in_channels out_channels volume plane width d_stride h_stride w_stride x_n y_n y_c y_d y_h y_w chunks \
                 pos_blocks items row_blocks w_pitch x_unit whole has_bias activation mode norm_groups group_channels";
    let of_wgmma = "in_channels out_channels volume plane width d_stride h_stride x_n y_n y_c y_d y_h chunks pos_blocks items \
                    row_blocks row_groups stages how has_bias activation norm_groups group_channels";
    let of_first = [("shuffle_gemm", sizes), ("shuffle_gemm", "w_unit")];
    let of_last = [("shuffle_gemm", sizes), ("shuffle_gemm", "channels")];
    let merge = ("partial_merge", "samples groups chunks columns sample_step group_step chunk_step");
    let of_twice = [("shuffle_gemm", "post_activation"), merge];
    let line = "n 3, 4x6x10, 40>20, k 2, s 2, bias, leaky_relu(0.2), gn 5, leaky_relu(0.1)";
    let case = Case::parse("wrong", line, "all arguments matter").unwrap();
    let example = Example::new(&case, DType::F32, |_, _| {});
    for (format, wrong) in FORMATS.into_iter().zip([&of_first[..], &of_last]) {
        let request = example.request(Algorithm::ShuffleGemm, Precision::Ieee, [format; 2]);
        let plans = of_all(&request, &device, &variants);
        for twice in [false, true] {
            let [of_gemm, _, of_wgmma_or_none] = FAMILIES.map(|algorithm| {
                let is_it = |plan: &&Plan| {
                    plan.algorithm == algorithm && plan.to_string().contains("recomputed") == twice
                };
                plans.iter().find(is_it)
            });
            let plan = of_gemm.expect("a plan both ways");
            let mut unnoticed = unnoticed_of(&example, &request, plan, wrong);
            unnoticed.extend(unnoticed_of(&example, &request, plan, if twice { &of_twice } else { &[] }));
            assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
            let Some(plan) = of_wgmma_or_none else {
                assert_eq!(format, FORMATS[1]);
                continue;
            };
            let mut unnoticed = unnoticed_of(&example, &request, plan, &[("shuffle_wgmma", of_wgmma)]);
            let of_twice = [("shuffle_wgmma", "post_activation"), merge];
            unnoticed.extend(unnoticed_of(&example, &request, plan, if twice { &of_twice } else { &[] }));
            assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
        }
    }
    // Of many channels weights pass through the ring or stay.
    let case = Case::parse("wrong", ROWS[15].0, ROWS[15].1).unwrap();
    let example = Example::new(&case, DType::F32, |_, _| {});
    let of_ring = "out_channels volume plane width d_stride h_stride x_n y_n y_c y_d y_h chunks pos_blocks items row_blocks \
                   stages kept whole has_bias activation";
    let of_ring_last = "out_channels volume plane width d_stride h_stride w_stride x_n y_n y_c y_d y_h y_w chunks pos_blocks \
                        items row_blocks stages kept has_bias activation";
    let half = Example::new(&case, DType::Bf16, |_, _| {});
    let [of_half, of_half_last] = [of_ring, of_ring_last].map(|wrong| {
        let kernel = "shuffle_ring_half";
        [(kernel, wrong), (kernel, "in_channels")]
    });
    let [first, last] = FORMATS;
    for (example, format, wrong) in [
        (&example, first, &[("shuffle_ring", of_ring)][..]),
        (&example, last, &[("shuffle_ring_last", of_ring_last)]),
        (&half, first, &of_half),
        (&half, last, &of_half_last),
    ] {
        let request = example.request(Algorithm::ShuffleRing, Precision::Tf32, [format; 2]);
        let plan = Plan::new(&request, &device, &variants).unwrap();
        assert_eq!(plan.algorithm, Algorithm::ShuffleRing);
        let unnoticed = unnoticed_of(example, &request, &plan, wrong);
        assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
    }
    // Where lines are odd, and channels no multiple of four, neighbours do not lie side by side.
    let case = Case::parse("wrong", ROWS[4].0, ROWS[4].1).unwrap();
    let example = Example::new(&case, DType::F32, |_, _| {});
    for format in FORMATS {
        let request = example.request(Algorithm::ShuffleGemm, Precision::Ieee, [format; 2]);
        let plan = Plan::new(&request, &device, &variants).unwrap();
        assert!(features(&plan).contains("neighbours apart"), "{plan}");
        let unnoticed = unnoticed_of(&example, &request, &plan, &[("shuffle_gemm", "whole")]);
        assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
    }
}
