//! Plans of `weight_gradient_narrow`, run by the kernels' contracts, against the reference; and of rows that lie in panels.

use super::manifest::{devices, variants_for};
use super::results::unnoticed;
use super::training::{Example, planned};
use super::{FORMATS, MULTIPLIED};
use crate::plan::{Request, Task};
use crate::{Algorithm, Variant};
use std::collections::BTreeSet;
use volup::Wanted;
use volup::testing::Case;

const BOTH: Wanted = Wanted { input: true, weight: true, bias: false, norm_weight: false, norm_bias: false };
/// Cases, and what is unusual about them.
const CASES: [(&str, &str); 3] = [
    ("n 2, 3x5x6, 3>16, k 3, s 2, p 1, op 1, relu, gn 4", "all taps of a few classes, tiles of slots"),
    ("n 1, 4x3x9, 2>24, k 3x2x5, d 1x2x1, p 1", "blocks of columns, lines apart"),
    ("n 3, 5x7x6, 1>8, k 4, s 2, p 1, bias, silu", "columns past the last, shares"),
];
/// All that matters to the kernel.
const ARGUMENTS: [(&str, &str); 3] = [
    (
        "weight_gradient_narrow",
        "count shift_d shift_h shift_w group_in group_out slots windows share row panel",
    ),
    ("weight_gradient_narrow", "kernel_d classes_d step_d count_d kernel_h classes_h step_h count_h"),
    ("weight_gradient_narrow", "kernel_w classes_w step_w count_w"),
];

/// The kernels without the others for the weight's gradient.
fn kernels(all: &[Variant]) -> Vec<&Variant> {
    let others = ["weight_gradient", "weight_gradient_lines"];
    all.iter().filter(|variant| !others.contains(&variant.entry)).collect()
}

#[test]
fn gradients_of_few_channels_are_those_of_the_definition() {
    let [_, hopper, _] = devices();
    let all = variants_for(hopper.arch);
    let variants = kernels(&all);
    let mut found = BTreeSet::new();
    for (line, why) in CASES {
        let case = Case::parse("narrow", line, why).expect("a valid case");
        for (dtype, precision) in MULTIPLIED {
            let example = Example::new(&case, dtype, |_| {});
            for (format, algorithm) in FORMATS.into_iter().zip([Algorithm::HaloGemm, Algorithm::Direct]) {
                let request = example.request(Task::Backward(BOTH), precision, [format, FORMATS[0]]);
                let plan =
                    planned(&example, &Request { algorithm: Some(algorithm), ..request }, &hopper, &variants);
                assert!(plan.to_string().contains("of all shifts"), "{plan}");
                found.extend(example.check_backward(&plan, &request));
            }
        }
    }
    let found: BTreeSet<_> = found.into_iter().filter_map(|what| what.strip_prefix("all shifts: ")).collect();
    let expected = ["blocks of columns", "columns past the last", "panels", "shares", "tiles of slots"];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
}

/// What a wrong argument would do.
#[test]
fn a_wrong_argument_of_few_channels_shows() {
    let [_, hopper, _] = devices();
    let all = variants_for(hopper.arch);
    let variants = kernels(&all);
    let line = "n 4, 3x5x6, 3>16, k 3x4x5, s 2x1x2, p 1, relu";
    let case =
        Case::parse("narrow", line, "everything that the kernel is told matters").expect("a valid case");
    for (dtype, precision) in &MULTIPLIED[1..3] {
        let example = Example::new(&case, *dtype, |_| {});
        let request = example.request(Task::Backward(BOTH), *precision, [FORMATS[0]; 2]);
        let request = Request { algorithm: Some(Algorithm::HaloGemm), ..request };
        let plan = planned(&example, &request, &hopper, &variants);
        assert!(plan.to_string().contains("of all shifts"), "{plan}");
        let shown = unnoticed(&plan, &ARGUMENTS, |plan| {
            example.check_backward(plan, &request);
            true
        });
        assert!(shown.is_empty(), "{shown:?} may be wrong: {plan}");
    }
}
