//! Statistics that products take of what they write, from the PTX of the kernels.

use super::*;

/// Norms of what products write: samples that meet in a tile, of a few of its rows and of many, channels past the columns and past
/// a block of them, a group a channel and one of all, groups of the convolution.
const COUNTED: [&str; 8] = [
    "n 3, 6x7x8, 64>40, k 3, p 1, bias, relu, gn 8",
    "n 2, 7x7x7, 64>128, k 3, relu, gn 8",
    "n 5, 5x5x6, 32>136, k 1x3x1, p 0x1x0, gn 2, silu",
    "n 2, 5x6x8, 64>32, k 3, s 2, p 1, op 1, bias, relu, gn 32",
    "n 3, 4x6x7, 32>48, k 4x4x3, s 2, p 1, leaky_relu(0.2), gn 1 plain",
    "n 2, 6x6x10, 64>24, k 2x3x3, s 1x1x2, p 0x1x1, op 0x0x1, bias, gn 24",
    "n 3, 9x9x4, 64>40, k 3, s 1x2x2, p 1, op 0x1x1, g 2, bias, relu, gn 4",
    "n 1, 9x8x8, 33>7, k 3, bias, relu, gn 7",
];

/// Cases in each type, in formats and fills in turn.
fn all_right(engine: &Emulated, lines: &[&'static str], formats: &[MemoryFormat]) {
    for (seed, line) in lines.iter().enumerate() {
        let case = Case::parse("counted", line, "statistics in the epilogue").expect("a valid case");
        for (turn, &dtype) in engine.types().iter().enumerate() {
            let format = formats[(seed + turn) % formats.len()];
            let (case, fill) = (Case { format, ..case.clone() }, Fill::ALL[(seed + turn) % 2]);
            right(engine, &case, dtype, fill, seed as u64);
        }
    }
}

#[test]
fn of_what_is_written() {
    engines(Some(Algorithm::GatherGemm), |engine| {
        let engine = saying(engine, "with statistics");
        all_right(&engine, &COUNTED, &FORMATS);
        assert!(engine.said.get() > 7, "{} plans", engine.said.get());
    });
}

/// Norms beside products: a sample of few tiles and of several, groups of one channel and of more than lanes of a warp have; a group with
/// more partial statistics than are merged at once.
const BEHIND: [&str; 5] = [
    "n 4, 4x4x4, 64>32, k 3, bias, relu, gn 8, leaky_relu(0.1)",
    "n 3, 4x6x10, 64>40, k 3, p 1, relu, gn 40 plain",
    "n 2, 4x5x8, 64>32, k 3, s 2, p 1, op 1, bias, gn 2, relu",
    "n 5, 3x6x8, 64>64, k 1x3x3, p 0x1x1, relu, gn 1",
    "n 2, 4x4x8, 8>320, k 2, s 2, relu, gn 1",
];

#[test]
fn of_what_is_normalized_behind() {
    engines(Some(Algorithm::GatherGemm), |engine| {
        let engine = saying(engine, "normalize behind");
        all_right(&engine, &BEHIND, &[MemoryFormat::Contiguous]);
        assert!(engine.said.get() > 3, "{} plans", engine.said.get());
    });
}

/// The same of `halo_gemm`, whose rows may have two outputs of a channel.
#[test]
fn of_what_two_fp16_write() {
    for (multiprocessors, words, lines) in
        [(3, "with statistics", &COUNTED[..]), (2, "normalize behind", &BEHIND[..])]
    {
        engine(multiprocessors, Precision::Ieee, Some(Algorithm::HaloGemm), |engine| {
            let engine = saying(engine, words);
            for (seed, line) in lines.iter().enumerate() {
                let case = Case::parse("counted", line, "statistics in the epilogue").expect("a valid case");
                right(&engine, &case, DType::F32, Fill::ALL[seed % 2], seed as u64);
            }
            assert!(engine.said.get() + 2 >= lines.len(), "{} plans {words}", engine.said.get());
        });
    }
}

/// The same of sweeps: samples that meet among a warp's rows, planes that several blocks share, one plane, more channels than a column
/// block, a group a channel and one of all.
const SWEPT: [&str; 5] = [
    "n 3, 4x13x15, 16>32, k 3, p 1, bias, relu, gn 8",
    "n 2, 5x12x14, 24>40, k 3, leaky_relu(0.1), gn 5, silu",
    "n 1, 6x14x14, 8>20, k 3, p 1, gn 20 plain",
    "n 2, 4x20x12, 16>48, k 3x3x5, p 2x1x2, bias, relu, gn 1",
    "n 1, 1x16x16, 8>36, k 3, p 1, gn 9",
];

#[test]
fn of_what_sweeps_write() {
    engines(Some(Algorithm::HaloGemm), |engine| {
        let engine = saying(engine, "sweep .. with statistics");
        all_right(&engine, &SWEPT, &FORMATS);
        assert!(engine.said.get() >= SWEPT.len(), "{} plans", engine.said.get());
    });
}

/// What training saves of the convolution's output, or its ReLU; also where the definition has written it instead.
#[test]
fn of_what_training_saves() {
    let lines = [
        "n 3, 6x7x8, 64>40, k 3, p 1, bias, relu, gn 8",
        "n 2, 5x6x8, 64>32, k 3, s 2, p 1, op 1, bias, gn 32, silu",
        "n 3, 4x6x7, 32>48, k 4x4x3, s 2, p 1, relu, gn 1 plain",
    ];
    let swept = ["n 3, 4x13x15, 16>32, k 3, p 1, bias, relu, gn 8", SWEPT[2]];
    engines(Some(Algorithm::GatherGemm), |engine| saves(&saying(engine, "with statistics"), &lines));
    engines(Some(Algorithm::HaloGemm), |engine| saves(&saying(engine, "sweep .. with statistics"), &swept));
}

fn saves(engine: &Emulated, lines: &[&'static str]) {
    for (seed, line) in lines.iter().enumerate() {
        let case = Case::parse("saved", line, "statistics in the epilogue").expect("a valid case");
        for (turn, &dtype) in (seed..).zip(engine.types()) {
            let infinite = turn % 3 == 1;
            let format = FORMATS[turn % 2];
            let case = Case { format, ..case.clone() };
            let (mut input, parameters) = case.inputs(dtype, Fill::Normal, seed as u64);
            if infinite {
                let mut values = input.to_f64();
                values[3] = f64::NEG_INFINITY;
                input = with_values(&input, values);
            }
            let layer = engine.layer(&case.block, &parameters).expect("a layer");
            let (output, saved) = engine.forward_for_training(&layer, &input).expect("an output");
            let (geometry, roundoff) = (case.geometry(), engine.operand_roundoff(dtype));
            let expected =
                reference::forward_for_training(&case.block, &geometry, &parameters, &input, roundoff);
            let deviation = compare(&expected, &output);
            assert!(deviation.is_ok(), "{case}, {dtype}: {deviation}");
            // Their statistics are infinite or NaN, which of both does not matter.
            if infinite {
                continue;
            }
            let [convolution, mean, rstd] =
                [saved.convolution, saved.mean, saved.rstd].map(|tensor| tensor.expect("what is saved"));
            let expected = reference::statistics(&case.block, &geometry, &convolution);
            for (expected, got) in expected.iter().zip([mean, rstd]) {
                let deviation = compare(expected, &got);
                assert!(deviation.is_ok(), "{case}, {dtype}: {deviation}");
            }
        }
    }
    assert!(engine.said.get() >= lines.len(), "{} plans", engine.said.get());
}

/// Means that are many times the deviations from them, a channel of one value, and, where the input is not finite, what the
/// definition has written instead of the product.
#[test]
fn of_hostile_values() {
    let line = "n 2, 6x7x7, 33>40, k 3, p 1, bias, leaky_relu(0.5), gn 8";
    let of_types = |engine: &Emulated| engine.types().iter().copied().zip([4096.0, 16.0]).collect::<Vec<_>>();
    engines(Some(Algorithm::GatherGemm), |engine| {
        hostile(engine, ["with statistics", "two-pass norm"], line, &of_types(engine), 0.0);
    });
    engine(3, Precision::Ieee, Some(Algorithm::HaloGemm), |engine| {
        hostile(engine, ["with statistics", "two-pass norm"], line, &[(DType::F32, 4096.0); 2], 0.0);
    });
    let line = "n 2, 3x14x14, 16>40, k 3, p 1, bias, leaky_relu(0.5), gn 8";
    // Of 16 bits sweeps count what is not rounded yet: an output may be the next number.
    engines(Some(Algorithm::HaloGemm), |engine| {
        let ways = ["sweep .. with statistics", "sweep .. two-pass norm"];
        hostile(engine, ways, line, &of_types(engine), 0.0078125);
    });
}

/// Of types, each with a mean: plans that say that they count what they write, and such that read it. `next`: by what share outputs of 16 bits
/// may differ in any case.
fn hostile(
    engine: &Emulated,
    ways: [&'static str; 2],
    line: &'static str,
    types: &[(DType, f64)],
    next: f64,
) {
    let case = Case::parse("hostile", line, "statistics in the epilogue").expect("a valid case");
    let [counting, reading] = ways.map(|words| saying(engine, words));
    for (turn, &(dtype, far)) in types.iter().enumerate() {
        for (at, what) in ["far", "one value", "infinite"].into_iter().enumerate() {
            let format = FORMATS[(at + turn) % 2];
            let case = Case { format, ..case.clone() };
            let (mut input, mut parameters) = case.inputs(dtype, Fill::Normal, 7);
            let replaced = |tensor: &Tensor, value: &dyn Fn(usize, f64) -> f64| {
                let values = tensor.to_f64().into_iter().enumerate().map(|(at, of)| value(at, of)).collect();
                with_values(tensor, values)
            };
            let bias = parameters.bias.as_ref().expect("a bias");
            match what {
                "far" => parameters.bias = Some(replaced(bias, &|_, of| of + far)),
                // All of a group.
                "one value" => {
                    parameters.bias = Some(replaced(bias, &|_, _| far.min(64.0) + 0.3));
                    let [_, out, taps @ ..] = parameters.weight.shape() else { unreachable!("five axes") };
                    let (out, taps) = (*out, taps.iter().product::<usize>());
                    let first = |at: usize| at / taps % out < 5;
                    parameters.weight =
                        replaced(&parameters.weight, &|at, of| if first(at) { 0.0 } else { of });
                }
                _ => input = replaced(&input, &|at, of| if at == 3 { f64::INFINITY } else { of }),
            }
            let outputs = [&counting, &reading].map(|engine| {
                let layer = engine.layer(&case.block, &parameters).expect("a layer");
                engine.forward(&layer, &input).expect("an output")
            });
            let roundoff = engine.operand_roundoff(dtype);
            let expected = reference::forward(&case.block, &case.geometry(), &parameters, &input, roundoff);
            let deviation = compare(&expected, &outputs[0]);
            assert!(deviation.is_ok(), "{what}, {dtype}: {deviation}");
            // The bounds are wide here, as y itself is rounded. But it is the same y, and of one value all are the mean.
            let [counted, read] = outputs.map(|output| output.to_f64());
            let right = if what == "one value" { &expected.values } else { &read };
            let [tolerance, next] = if dtype == DType::F32 { [4e-3, 0.0] } else { [4e-2, next] };
            let voxels = case.geometry().output_voxels();
            for (at, (&one, &other)) in counted.iter().zip(right).enumerate() {
                let near = (one - other).abs() <= tolerance.max(next * other.abs())
                    || one.is_nan() && other.is_nan();
                assert!(
                    near || what == "one value" && at / voxels % 40 >= 5,
                    "{what}, {dtype}: {one}, {other}"
                );
            }
        }
    }
    assert!(counting.said.get() > 2, "{} plans", counting.said.get());
}
