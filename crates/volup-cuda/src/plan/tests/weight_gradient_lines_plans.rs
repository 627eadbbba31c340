//! Plans of `weight_gradient_lines`, run by the kernels' contracts, against the reference.

use super::manifest::{devices, variants_for};
use super::results::unnoticed;
use super::training::{Example, planned};
use super::{FORMATS, MULTIPLIED};
use crate::Variant;
use crate::plan::Task;
use std::collections::BTreeSet;
use volup::testing::Case;
use volup::{DType, Precision, Wanted};

const WEIGHT: Wanted =
    Wanted { input: false, weight: true, bias: false, norm_weight: false, norm_bias: false };
/// Cases, and what is unusual about them.
const CASES: [(&str, &str); 4] = [
    ("n 1, 2x5x72, 8>8, k 2x4x3, d 1x2x1, p 1", "strips, blocks of taps whose lines are apart"),
    ("n 2, 2x3x40, 16>32, k 2x3x3, s 1x2x2, p 1x0x1, g 2, relu", "groups, classes of taps"),
    ("n 1, 1x2x8, 136>72, k 1x3x2, bias, gn 2", "tiles of channels"),
    ("n 3, 2x2x16, 24>16, k 3, s 2, p 1, op 1", "samples, a kernel that is no multiple of its stride"),
];
/// All that matters to the kernel; `rows_d` only where a part has several samples.
const ARGUMENTS: [(&str, &str); 4] = [
    (
        "weight_gradient_lines",
        "batch depth height width strips steps row panel groups group_in group_out slots",
    ),
    (
        "weight_gradient_lines",
        "rows_d apart_d kernel_d classes_d step_d rows_h apart_h kernel_h classes_h step_h",
    ),
    ("weight_gradient_lines", "rows_w apart_w kernel_w classes_w step_w x_slots g_slots share"),
    ("weight_gradient_lines", "x_n x_c x_d x_h x_w"),
];

#[test]
fn gradients_by_lines_are_those_of_the_definition() {
    let [_, hopper, _] = devices();
    let all = variants_for(hopper.arch);
    let is_by_lines = |variant: &&Variant| variant.entry == "weight_gradient_lines";
    let mut found = BTreeSet::new();
    for (line, why) in CASES {
        let case = Case::parse("lines", line, why).expect("a valid case");
        for (dtype, precision) in MULTIPLIED {
            let example = Example::new(&case, dtype, |_| {});
            for (lines, format) in all.iter().filter(is_by_lines).flat_map(|one| FORMATS.map(|f| (one, f))) {
                let kept = |variant: &&Variant| match variant.entry {
                    "weight_gradient" => false,
                    "weight_gradient_lines" => variant.name == lines.name,
                    _ => true,
                };
                let variants: Vec<&Variant> = all.iter().filter(kept).collect();
                let request = example.request(Task::Backward(WEIGHT), precision, [format, FORMATS[0]]);
                let plan = planned(&example, &request, &hopper, &variants);
                if plan.to_string().contains("weight by lines") {
                    found.extend(example.check_backward(&plan, &request));
                }
            }
        }
    }
    let found: BTreeSet<_> = found.into_iter().filter_map(|what| what.strip_prefix("by lines: ")).collect();
    let expected = [
        "blocks of taps",
        "channels last",
        "groups",
        "line past its end",
        "lines apart",
        "shares",
        "strips",
        "tiles of channels",
    ];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
}

/// What a wrong argument would do.
#[test]
fn a_wrong_argument_of_lines_shows() {
    let [_, hopper, _] = devices();
    let all = variants_for(hopper.arch);
    let variants: Vec<&Variant> = all.iter().filter(|variant| variant.entry != "weight_gradient").collect();
    let line = "n 4, 2x5x24, 16>32, k 3x4x5, s 2x1x2, p 1, g 2, relu";
    let case =
        Case::parse("lines", line, "everything that the kernel is told matters").expect("a valid case");
    for (dtype, format) in [(DType::F32, FORMATS[0]), (DType::F16, FORMATS[1])] {
        let example = Example::new(&case, dtype, |_| {});
        let request = example.request(Task::Backward(WEIGHT), Precision::Ieee, [format, FORMATS[0]]);
        let plan = planned(&example, &request, &hopper, &variants);
        assert!(plan.to_string().contains("weight by lines"), "{plan}");
        let shown = unnoticed(&plan, &ARGUMENTS, |plan| {
            example.check_backward(plan, &request);
            true
        });
        assert!(shown.is_empty(), "{shown:?} may be wrong: {plan}");
    }
}
