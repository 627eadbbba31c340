//! Plans of gradients in `ieee` whose operands are two fp16, run by the kernels' contracts, against the reference: by each kernel, and of
//! numbers that two fp16 are too coarse for.

use super::FORMATS;
use super::manifest::{devices, variants_for};
use super::results::unnoticed;
use super::training::{Example, scaled};
use crate::Variant;
use crate::plan::{Plan, Request, Task};
use std::collections::BTreeSet;
use volup::testing::Case;
use volup::{DType, MemoryFormat, Precision, Wanted};

const BOTH: Wanted = Wanted { input: true, weight: true, bias: false, norm_weight: false, norm_bias: false };
/// What is found where launches did something that are there for such numbers, and where those did that go by the definition.
const DONE: [&str; 3] =
    ["rows that two fp16 are too coarse for", "the input by the definition", "the weight by the definition"];
/// Channels whose bounds are one where channels lie together: `gradient_sums` has largest magnitudes of a vector.
const BOUNDED: usize = 4;
/// Cases of numbers that two fp16 are too coarse for: nothing makes of some what others are.
const CASES: [(&str, &str); 4] = [
    ("n 2, 2x3x8, 16>16, k 3, s 2, p 1, op 1, bias, relu", "parts, by lines, classes that lack taps"),
    ("n 2, 3x5x6, 3>16, k 3, s 2, p 1", "few channels of the input, by rows of both"),
    ("n 1, 2x3x8, 16>16, k 2, s 2, bias", "every tap a class of its own"),
    ("n 2, 3x2x8, 8>16, k 3, p 1, g 2, leaky_relu(0.2)", "groups"),
];
/// Changes an input, a weight and a gradient.
type Change = fn([&mut Vec<f64>; 3]);

/// A device's kernels.
fn all() -> Vec<Variant> {
    variants_for(devices()[1].arch)
}

/// Plans of a case, in one format, with their requests.
fn plans(example: &Example, format: MemoryFormat, variants: &[&Variant]) -> Vec<(Request, Plan)> {
    let [_, hopper, _] = devices();
    let of = |task| {
        let request = example.request(task, Precision::Ieee, [format; 2]);
        scaled(&request, &hopper, variants).into_iter().map(move |plan| (request, plan))
    };
    [Task::Backward(BOTH), Task::Recompute(BOTH)].into_iter().flat_map(of).collect()
}

/// Every kernel for the input's gradient that there may be a plan of; numbers like most take no other launches.
#[test]
fn gradients_by_each_kernel_of_two_fp16_are_those_of_the_definition() {
    let cases = [
        ("n 2, 2x3x8, 16>16, k 3, s 2, p 1, op 1, relu", "classes that lack taps, few columns"),
        (
            "n 1, 2x2x8, 40>8, k 3x4x5, s 2x3x2, p 1, bias",
            "more columns, classes that lack taps along each axis",
        ),
        ("n 1, 1x2x8, 136>16, k 1x3x3, d 1x2x1", "blocks of columns, one class"),
        ("n 2, 2x2x8, 16>16, k 2, s 2, g 2", "groups, as many classes as taps"),
        ("n 1, 2x3x8, 3>16, k 3, p 1, silu", "few channels of the input, by rows of both"),
    ];
    let all = all();
    let by_halves = |variant: &&Variant| {
        let of_forward = ["COUNTS", "SPLIT", "BETWEEN"].iter().any(|name| variant.param(name).is_some());
        variant.entry == "halo_gemm" && variant.param("KIND") == Some(2) && !of_forward
    };
    let mut found = BTreeSet::new();
    for (turn, (line, why)) in cases.into_iter().enumerate() {
        let case = Case::parse("halves", line, why).expect("a valid case");
        let example = Example::new(&case, DType::F32, |_| {});
        for kernel in all.iter().filter(by_halves) {
            let kept = |variant: &&Variant| !by_halves(variant) || variant.name == kernel.name;
            let variants: Vec<&Variant> = all.iter().filter(kept).collect();
            for (request, plan) in plans(&example, FORMATS[turn % 2], &variants) {
                println!("{case}; {:?}, {}; {plan}", request.task, request.input_format);
                found.extend(example.check_backward(&plan, &request));
            }
        }
    }
    assert!(DONE.iter().all(|what| !found.contains(what)), "{found:?}");
    // Taps are no columns where the input is packed by somebody else.
    let kernels = all.iter().filter(|variant| by_halves(variant) && variant.param("TAPS").is_none());
    let weights = ["weight_gradient_lines_2x1x32", "weight_gradient_narrow_2x3"];
    let expected: BTreeSet<_> = kernels.map(|variant| variant.name).chain(weights).collect();
    found.retain(|what| what.starts_with("halo_gemm") || what.starts_with("weight_gradient"));
    assert_eq!(found, expected);
}

/// A number of each magnitude from 1e-20 to 1e20 in its place.
fn spread(values: &mut [f64]) {
    for (at, value) in values.iter_mut().enumerate() {
        let share = f64::from((at as u32).wrapping_mul(2_654_435_761)) / f64::from(u32::MAX);
        *value = f64::from((value.signum() * 10f64.powf(40.0 * share - 20.0)) as f32);
    }
}

/// Runs all cases with a change; what of [`DONE`] is expected of each.
fn changed(change: Change, expected: [bool; 3]) {
    let all = all();
    let variants: Vec<&Variant> = all.iter().collect();
    for (line, why) in CASES {
        let case = Case::parse("coarse", line, why).expect("a valid case");
        for (format, together) in FORMATS.into_iter().zip([1, BOUNDED]) {
            let example = Example::new(&case, DType::F32, change).together(together);
            let plans = plans(&example, format, &variants);
            // Groups of few channels of the input are read by no vectors where channels lie together.
            assert!(!plans.is_empty() || case.block.conv().groups() > 1 && together > 1, "{case}, {format}");
            for (request, plan) in &plans {
                println!("{case}; {:?}, {format}; {plan}", request.task);
                let found = example.check_backward(plan, request);
                assert_eq!(DONE.map(|what| found.contains(what)), expected, "{case}, {format}; {plan}");
            }
        }
    }
}

#[test]
fn gradients_of_any_magnitudes_are_those_of_the_definition() {
    changed(|[.., g]| spread(g), [true, false, false]);
    changed(|[.., g]| g.iter_mut().step_by(3).for_each(|g| *g *= 1e-15), [true, false, false]);
    // Of channels that are alike.
    changed(|[.., g]| g.iter_mut().for_each(|g| *g *= 1e-30), [false; 3]);
    changed(|[.., g]| g.iter_mut().for_each(|g| *g *= 1e30), [false; 3]);
    // Nothing is coarse in what is zero.
    changed(|[.., g]| g.iter_mut().for_each(|g| *g = g.max(0.0)), [false; 3]);
    changed(|[.., g]| g.fill(0.0), [false; 3]);
}

/// One number that is far larger than all others: those of other channels, and their weights, are what they were.
#[test]
fn gradients_beside_one_far_larger_are_those_of_the_definition() {
    for change in [|[.., g]: [&mut Vec<f64>; 3]| g[7] = 1e12, |[.., g]: [&mut Vec<f64>; 3]| g[7] = 1e20] {
        changed(change, [true, false, false]);
    }
}

#[test]
fn inputs_and_weights_of_any_magnitudes_are_multiplied() {
    changed(|[x, ..]| x[7] = 1e20, [false; 3]);
    changed(|[x, ..]| spread(x), [false; 3]);
    changed(|[_, w, _]| spread(w), [false; 3]);
}

#[test]
fn what_is_no_number_is_left_to_the_definition() {
    changed(|[.., g]| g[7] = f64::NEG_INFINITY, [true; 3]);
    changed(|[.., g]| *g.last_mut().expect("a gradient") = f64::NAN, [true; 3]);
    changed(|[x, ..]| x[7] = f64::INFINITY, [true, false, true]);
    changed(|[x, ..]| *x.last_mut().expect("a number") = f64::NAN, [true, false, true]);
    changed(|[_, w, _]| w[7] = f64::INFINITY, [true, true, false]);
    changed(|[_, w, _]| *w.last_mut().expect("a weight") = f64::NAN, [true, true, false]);
}

/// What is an infinity when it is rounded to tf32 is left to the definition, which reads rows of float32.
#[test]
fn what_tf32_does_not_hold_is_left_to_the_definition() {
    const LARGEST: f64 = f32::MAX as f64;
    changed(|[_, w, _]| w[7] = LARGEST, [true, true, false]);
    changed(|[_, w, g]| (w[7], g[7]) = (LARGEST, g[7] * 1e-9), [true, true, false]);
    changed(|[x, ..]| x[7] = LARGEST, [true, false, true]);
}

/// Eight samples of channels, and with them all that is scaled, of magnitudes of their own.
fn apart(values: &mut [f64], channels: usize) {
    let voxels = values.len() / 8 / channels;
    for (at, value) in values.iter_mut().enumerate() {
        let (row, sample) = (at / voxels % channels, at / voxels / channels);
        *value *= 2f64.powi((3 * row % 7 + 2 * sample) as i32);
    }
}

/// What a wrong argument would do, or words at another place.
#[test]
fn a_wrong_argument_of_two_fp16_shows() {
    const TAPS: &str = "apart_d kernel_d classes_d step_d apart_h kernel_h classes_h step_h apart_w kernel_w classes_w step_w";
    let by_lines = [
        ("channel_largest", "volume channels chunks last largest"),
        ("half_input_2", "count low inner channels largest"),
        (
            "gradient_rows_2",
            "channels group_channels activation groups group_in slots x_n x_c x_d x_h x_w row panel low bounds",
        ),
        (
            "gradient_rows_2",
            "size_d rows_d classes_d stride_d padding_d dilation_d size_w rows_w classes_w stride_w padding_w",
        ),
        ("gradient_weight_2", "bounds groups group_in group_out slots"),
        (
            "weight_gradient_lines_2",
            "batch depth height width strips steps groups group_in group_out slots share",
        ),
        (
            "weight_gradient_lines_2",
            "rows_d rows_h rows_w x_n x_c x_d x_h x_w row panel x_low g_low x_slots g_slots",
        ),
        ("weight_gradient_lines_2", TAPS),
        (
            "weight_gradient_sum",
            "splits taps in_channels group_out group_in part_splits part_bounds bounds control",
        ),
    ];
    let short = [
        ("halo_gemm_2", "a_rows pd ph pw d_kernel h_kernel w_steps chunk_panels chunks blocks"),
        ("halo_gemm_2", "class_panels classes_h classes_w scale_w"),
    ];
    let narrow = [
        ("gradient_rows_f16", "channels groups group_in slots x_n x_c x_d x_h x_w row panel out"),
        (
            "weight_gradient_narrow_2",
            "count shift_d shift_h shift_w group_in group_out slots windows share row panel g_low x",
        ),
        ("weight_gradient_narrow_2", "kernel_d classes_d step_d count_d kernel_h classes_h step_h count_h"),
        ("weight_gradient_narrow_2", "kernel_w classes_w step_w count_w"),
    ];
    let coarse = [
        ("gradient_rows_1", "unless channels groups group_in slots x_n x_c x_d x_h x_w row panel"),
        ("halo_pack_input_3", "unless"),
        ("halo_gemm_3", "unless"),
    ];
    let infinite = [
        ("channel_largest", "asked"),
        (
            "direct_weight_gradient_2",
            "n groups group_in group_out slots x_n x_c x_d x_h x_w row panel bounds largest",
        ),
        ("direct_weight_gradient_2", "d_input d_stride d_rows h_rows w_stride w_rows w_apart"),
    ];
    type Wrong<'a> = &'a [(&'static str, &'static str)];
    let cases: [(&str, Change, Wrong<'_>); 5] = [
        (
            "n 8, 2x5x8, 16>16, k 3, s 2, p 1, op 1, g 2, leaky_relu(0.2)",
            |[x, _, g]| [x, g].into_iter().for_each(|values| apart(values, 16)),
            &by_lines,
        ),
        ("n 8, 2x3x8, 16>16, k 3, s 2, p 1, op 1", |[.., g]| apart(g, 16), &short),
        (
            "n 8, 3x5x6, 3>16, k 3x4x5, s 2x1x2, p 1, relu",
            |[x, _, g]| [(x, 3), (g, 16)].into_iter().for_each(|(values, channels)| apart(values, channels)),
            &narrow,
        ),
        (
            "n 8, 2x3x8, 16>16, k 3, s 2, p 1, op 1",
            // Each channel's few numbers that are not far smaller.
            |[.., g]| g.chunks_mut(4 * 6 * 16).for_each(|g| g[100..].iter_mut().for_each(|g| *g *= 1e-12)),
            &coarse,
        ),
        (
            "n 8, 2x3x8, 16>16, k 3, s 2, p 1, op 1",
            |[x, _, g]| {
                [&mut *x, g].into_iter().for_each(|values| apart(values, 16));
                x[7] = f64::INFINITY;
            },
            &infinite,
        ),
    ];
    for (line, change, wrong) in cases {
        // Of taps that channels lack where that is asked for.
        let is_short = wrong.iter().any(|(_, names)| names.contains("class_panels"));
        let mut all = all();
        let kept = |variant: &Variant| variant.entry != "halo_gemm" || variant.param("SHORT").is_some();
        all.retain(|variant| !is_short || kept(variant));
        let variants: Vec<&Variant> = all.iter().collect();
        let case =
            Case::parse("wrong", line, "everything that kernels are told matters").expect("a valid case");
        let example = Example::new(&case, DType::F32, change).together(1);
        // In parts, where something is made again of their own bounds; else nothing is allowed for that.
        let mut plans = plans(&example, FORMATS[0], &variants);
        plans.retain(|(request, _)| matches!(request.task, Task::Backward(_)) == case.block.is_bare());
        let (request, plan) = plans.first().expect("a plan");
        println!("{case}; {plan}");
        example.check_backward(plan, request);
        let shown = unnoticed(plan, wrong, |plan| {
            example.check_backward(plan, request);
            true
        });
        assert!(shown.is_empty(), "{shown:?} may be wrong: {plan}");
    }
}
