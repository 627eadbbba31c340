//! What plans of the kernels that normalize by vectors compute, and where they apply.

use super::manifest::devices;
use super::results::{Example, kernels, unnoticed_of};
use super::{FORMATS, fits, group_norm, launches};
use crate::plan::{Plan, Request, Task};
use crate::{Algorithm, Variant};
use std::collections::BTreeSet;
use volup::testing::{Case, cases};
use volup::{DType, MemoryFormat, Precision};

/// What the table has not, and why. The convolutions are as small as they can be.
const ROWS: [(&str, &str); 19] = [
    ("n 3, 5x7x9, 2>6, k 1, gn 3, relu", "rows of an odd number of voxels; channels no multiple of a vector"),
    ("n 3, 3x5x7, 1>8, k 1, gn 1, leaky_relu(0.1)", "one group, one half vector of channels"),
    ("n 2, 3x5x7, 1>8, k 1, gn 8 plain, silu", "a group a channel, an odd number of voxels"),
    ("n 1, 3x5x7, 2>24, k 1, gn 4", "six channels a group; a thread without channels"),
    ("n 2, 2x3x5, 1>24, k 1, relu, gn 8, tanh", "three channels a group"),
    ("n 2, 3x3x3, 1>12, k 1, gn 2", "a multiple of four channels, not of eight"),
    ("n 2, 2x3x5, 1>1024, k 1, gn 32", "the most channels of float32"),
    ("n 2, 1x3x3, 1>2048, k 1, gn 64, gelu", "the most of 2 bytes, too many of 4"),
    ("n 1, 1x2x3, 1>2064, k 1, gn 8", "too many channels"),
    ("n 2, 1x3x3, 1>1032, k 1, gn 3", "nearly half of a block without channels"),
    ("n 5, 1x1x1, 3>8, k 1, gn 2, relu", "one voxel: less than a vector of everything but channels"),
    ("n 3, 1x1x3, 2>5, k 1, gn 5", "three voxels: vectors of several rows, the last one not whole"),
    ("n 1, 16x16x32, 1>2, k 1, gn 2", "rows of exactly a chunk of float32, and of half of one"),
    ("n 2, 16x32x32, 1>2, k 1, gn 2 plain, silu", "rows of exactly a chunk of 2 bytes"),
    ("n 2, 13x29x45, 1>2, k 1, gn 2, sigmoid", "rows that start in a vector and take two chunks"),
    ("n 1, 8x1025x5, 1>2, k 1, gn 1", "a group of two channels, past three chunks"),
    ("n 2, 33x41x29, 1>8, k 1, gn 2, hardswish", "many chunks and parts of odd sizes"),
    ("n 2, 2x4x4, 1>520, k 1, gn 520", "more groups than threads; a chunk of few positions"),
    ("n 2, 2x2x2, 1>1024, k 1, gn 1024", "a group a channel of many, and few voxels"),
];

fn own() -> Vec<Case> {
    ROWS.iter().map(|(line, why)| Case::parse("vectors", line, why).expect("a valid case")).collect()
}

fn case(line: &str) -> Case {
    Case::parse("given", line, "given").expect("a valid case")
}

/// Where the kernels apply, on the architecture that they are for, by what their files say.
fn applies(request: &Request) -> bool {
    let [samples, channels, ..] = request.geometry.output_shape();
    let voxels = request.geometry.output_voxels();
    let fits = voxels < 1 << 30 && samples * channels <= 1 << 30 && request.dtype != DType::F64;
    let whole = channels.is_multiple_of(16 / request.dtype.size()) && channels * request.dtype.size() <= 4096;
    fits && (request.output_format == MemoryFormat::Contiguous || whole)
}

/// Whether a plan's normalization is by vectors; if not it is by tiles, and there is no third way.
fn is_by_vectors(plan: &Plan) -> bool {
    let names: BTreeSet<&str> = launches(plan).iter().map(|call| call.kernel()).collect();
    let by = |kernels: [&str; 2]| kernels.map(|kernel| names.contains(kernel)) == [true; 2];
    let vectors = by(["group_statistics", "group_scale"]);
    let tiles =
        by(["norm_stats_rows", "norm_apply_rows"]) || by(["norm_stats_columns", "norm_apply_columns"]);
    let is_norm = |name: &&&str| name.starts_with("norm_") || name.starts_with("group_");
    let norms = names.iter().filter(is_norm).count() + usize::from(names.contains("partial_merge"));
    let merges = names.contains("norm_merge") != names.contains("partial_merge");
    assert!(vectors != tiles && norms == 3 && merges, "{names:?}");
    vectors
}

/// A convolution by the definition, or the family that is asked for, then the normalization.
fn request(case: &Case, dtype: DType, output_format: MemoryFormat) -> Request {
    Request {
        task: Task::Forward,
        block: case.block,
        geometry: case.geometry(),
        dtype,
        precision: Precision::Ieee,
        input_format: MemoryFormat::Contiguous,
        output_format,
        algorithm: Some(Algorithm::Direct),
    }
}

#[test]
fn normalization_computes_the_definition() {
    let (mut found, mut of_vectors, mut of_tiles) = (BTreeSet::new(), 0, 0);
    let [_, hopper, small] = devices();
    let table = cases().into_iter().filter(|case| case.batch != Some(0) && case.block.norm().is_some());
    for case in table.chain(own()) {
        for dtype in DType::ALL {
            let example = Example::new(&case, dtype, |_, _| {});
            for (device, format) in [&hopper, &small].into_iter().flat_map(|d| FORMATS.map(|f| (d, f))) {
                let request = request(&case, dtype, format);
                let plan = super::plan(&request, device, &[]).unwrap();
                println!("{case}; {dtype}, {format}; {plan} on {device}");
                let by_vectors = is_by_vectors(&plan);
                assert_eq!(by_vectors, device == &hopper && applies(&request));
                *(if by_vectors { &mut of_vectors } else { &mut of_tiles }) += 1;
                let calls = launches(&plan);
                calls.iter().for_each(|call| fits(call, &plan, &format!("{request:?}")));
                let (deviation, _) = example.run(&plan, &request);
                assert!(deviation.is_ok(), "{deviation}");
                let calls = calls.iter().filter(|call| call.kernel().starts_with("group_"));
                found.extend(calls.flat_map(group_norm::features));
            }
        }
    }
    let expected = [
        "a chunk without elements",
        "a curved activation",
        "a last chunk of few positions",
        "a last part of few positions",
        "a straight activation",
        "blocks of NCDHW",
        "chunks of a row",
        "chunks of a sample",
        "groups across vectors",
        "groups of a vector's part",
        "groups of vectors",
        "less than a vector",
        "more groups than warps",
        "parts of a sample",
        "rows apart",
        "samples",
        "threads without channels",
        "vectors of many rows",
        "vectors of two rows",
        "vectors past the end",
    ];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
    assert!(of_vectors > 100 && of_tiles > 100, "{of_vectors}, {of_tiles}");
}

/// Infinities and NaN are their groups' alone.
#[test]
fn what_is_no_number_stays_in_its_group() {
    let case = case("n 2, 3x5x7, 8>8, k 1, gn 4, relu");
    for dtype in [DType::F32, DType::F16] {
        for bad in [f64::NAN, f64::INFINITY] {
            // One channel's weights make the values of one group.
            let example = Example::new(&case, dtype, |_, w| w[3] = bad);
            for format in FORMATS {
                let request = request(&case, dtype, format);
                let plan = super::plan(&request, &devices()[1], &[]).unwrap();
                assert!(is_by_vectors(&plan), "{plan}");
                let (deviation, _) = example.run(&plan, &request);
                assert!(deviation.is_ok(), "{deviation}");
            }
        }
    }
}

#[test]
fn tiles_take_what_vectors_do_not() {
    let [ampere, hopper, _] = devices();
    let [first, last] = FORMATS;
    let by_vectors = |line: &str, dtype, format, without: &[&str]| {
        let plan = super::plan(&request(&case(line), dtype, format), &hopper, without).unwrap();
        is_by_vectors(&plan)
    };
    let of = |line: &str, dtype, format| by_vectors(line, dtype, format, &[]);
    let line = "n 2, 3x5x7, 1>8, k 1, gn 4";
    for format in FORMATS {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            assert!(of(line, dtype, format));
            let plan = super::plan(&request(&case(line), dtype, format), &ampere, &[]).unwrap();
            assert!(!is_by_vectors(&plan));
            // Both or none.
            for without in ["group_statistics", "group_scale"] {
                assert!(!by_vectors(line, dtype, format, &[without]));
            }
        }
        assert!(!of(line, DType::F64, format));
    }
    // Whole vectors of channels, as many as a block has threads.
    for (channels, dtype, is) in [
        (4, DType::F32, true),
        (6, DType::F32, false),
        (12, DType::F16, false),
        (24, DType::Bf16, true),
        (1024, DType::F32, true),
        (1028, DType::F32, false),
        (2048, DType::F16, true),
        (2056, DType::F16, false),
    ] {
        let line = format!("n 2, 2x2x2, 1>{channels}, k 1, gn 2");
        assert_eq!(of(&line, dtype, last), is, "{line}, {dtype}");
        assert!(of(&line, dtype, first), "{line}, {dtype}");
    }
    // Voxels are counted up to 2^30, and rows.
    for (line, is) in [
        ("n 1, 1024x1024x1023, 1>8, k 1, gn 2", true),
        ("n 1, 1024x1024x1024, 1>8, k 1, gn 2", false),
        ("n 134217728, 1x1x1, 1>8, k 1, gn 2", true),
        ("n 134217729, 1x1x1, 1>8, k 1, gn 2", false),
    ] {
        for format in FORMATS {
            assert_eq!(of(line, DType::F16, format), is, "{line}, {format}");
        }
    }
}

/// A block of NDHWC has few positions of many channels, but statistics of all their groups.
#[test]
fn nothing_of_the_size_of_the_output_is_allocated_for_statistics() {
    for (channels, dtype) in [512, 520, 1024, 2048]
        .into_iter()
        .flat_map(|channels| [(channels, DType::F32), (channels, DType::F16)])
    {
        for (groups, format) in [1, channels / 4, channels / 2, channels]
            .into_iter()
            .flat_map(|groups| FORMATS.map(|format| (groups, format)))
        {
            let case = case(&format!("n 2, 32x32x32, 1>{channels}, k 1, gn {groups}"));
            let request = request(&case, dtype, format);
            let plan = super::plan(&request, &devices()[1], &[]).unwrap();
            let output = request.geometry.output_shape().iter().product::<usize>() * dtype.size();
            let most = output / 4 + (1 << 17);
            assert!(plan.workspace_bytes <= most, "{plan} for {output} bytes: {case}, {dtype}, {format}");
        }
    }
}

#[test]
fn a_wrong_argument_shows() {
    let hopper = devices()[1].clone();
    let variants = kernels(&hopper, None);
    let variants: Vec<&Variant> = variants.iter().collect();
    let merge = ("partial_merge", "samples groups chunks columns sample_step group_step chunk_step");
    let of_first = [
        ("group_statistics", "length rows chunks"),
        ("group_scale", "count voxels channels group_channels activation"),
        merge,
    ];
    let of_last = [
        ("group_statistics", "length rows chunks channels groups group_channels"),
        ("group_scale", "voxels channels group_channels parts activation"),
        merge,
    ];
    // Some chunks and parts of both.
    let case = case("n 3, 33x41x29, 1>8, k 1, gn 4, leaky_relu(0.1)");
    for dtype in [DType::F32, DType::F16] {
        let example = Example::new(&case, dtype, |_, _| {});
        for (format, wrong) in FORMATS.into_iter().zip([&of_first, &of_last]) {
            let request = request(&case, dtype, format);
            let plan = Plan::new(&request, &hopper, &variants).unwrap();
            assert!(is_by_vectors(&plan), "{plan}");
            let unnoticed = unnoticed_of(&example, &request, &plan, &wrong[..]);
            assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
        }
    }
    // The kernels in tiles.
    let ampere = devices()[0].clone();
    let variants = kernels(&ampere, None);
    let variants: Vec<&Variant> = variants.iter().collect();
    let wrong = [
        [
            ("norm_stats_rows", "rows length chunks"),
            ("norm_apply_rows", "samples channels group_channels voxels"),
            ("norm_merge", merge.1),
        ],
        [
            ("norm_stats_columns", "samples length width chunks"),
            ("norm_apply_columns", "samples channels group_channels voxels"),
            (
                "norm_merge",
                "samples groups chunks repeats columns sample_step group_step chunk_step repeat_step",
            ),
        ],
    ];
    let example = Example::new(&case, DType::F32, |_, _| {});
    for (format, wrong) in FORMATS.into_iter().zip(&wrong) {
        let request = request(&case, DType::F32, format);
        let plan = Plan::new(&request, &ampere, &variants).unwrap();
        assert!(!is_by_vectors(&plan), "{plan}");
        let unnoticed = unnoticed_of(&example, &request, &plan, wrong);
        assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong: {plan}");
    }
}
