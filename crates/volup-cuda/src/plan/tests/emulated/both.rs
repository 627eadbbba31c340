//! `shuffle_gradient` on gradients of float32 as two fp16.

use super::*;

/// Rows and channels of all sizes, tails, lines and channels in pieces, with and without a normalization; the last of more tiles than
/// blocks.
const CASES: [&str; 9] = [
    "n 2, 3x5x6, 64>32, k 2, s 2, bias, relu, gn 8",
    "n 3, 3x5x7, 7>5, k 3x2x2, s 3x2x2, bias, silu, gn 5, relu",
    "n 3, 4x3x9, 5>9, k 2x1x2, s 2x1x2, leaky_relu(0.1), tanh",
    "n 2, 2x5x12, 10>12, k 1x2x2, s 1x2x2, bias, gelu",
    "n 2, 7x5x6, 6>17, k 2, s 2",
    "n 1, 8x8x9, 2>3, k 2, s 2, gn 1, relu",
    "n 2, 1x1x150, 3>128, k 1x1x2, s 1x1x2, relu, gn 128",
    "n 2, 1x1x1, 4>1, k 16x8x2, s 16x8x2, gelu_tanh",
    "n 2, 8x8x8, 33>16, k 2, s 2, bias",
];

fn engine(of: &Emulated) -> Emulated {
    let new = Emulated::new(of.device.multiprocessors, of.precision, None);
    Emulated { kernel: Some("shuffle_gradient"), ..new }
}

/// Runs cases on kernels of so many rows.
fn each(rows: &[i64], what: impl Fn(&Emulated, &Case, u64)) {
    engines(None, |of| {
        if of.precision == Precision::Tf32 {
            return;
        }
        let mut engine = engine(of);
        engine.variants.retain(|variant| variant.param("ROWS").is_none_or(|count| rows.contains(&count)));
        for (seed, line) in CASES.into_iter().enumerate() {
            let case = Case::parse("both", line, "two fp16").expect("a valid case");
            let all = case.block.conv().out_channels() * case.block.conv().stride().iter().product::<usize>();
            if all as i64 <= rows[0] {
                what(&engine, &case, seed as u64);
            }
        }
    });
}

#[test]
fn both_gradients_of_two_fp16() {
    for (turn, rows) in [256, 128].into_iter().enumerate() {
        each(&[rows], |engine, case, seed| {
            let fill = Fill::ALL[(seed as usize + turn) % 2];
            check_gradients(engine, case, DType::F32, fill, seed).unwrap_or_else(|what| panic!("{what}"));
        });
    }
}

/// What the norm of a gradient is off by, of the elements that are asked for.
fn off(expected: &reference::Expected, got: &Tensor, asked: impl Fn(usize) -> bool) -> f64 {
    let [mut off, mut all] = [0.0; 2];
    for (at, (&expected, got)) in
        expected.values.iter().zip(got.to_f64()).enumerate().filter(|(at, _)| asked(*at))
    {
        assert!(expected.is_finite() && got.is_finite(), "{got} instead of {expected} at {at}");
        off += (expected - got).powi(2);
        all += expected.powi(2);
    }
    (off / all).sqrt()
}

/// How the gradients of a position of the input are changed, and whether two fp16 do for them.
#[derive(Clone, Copy, PartialEq)]
enum Change {
    Nothing,
    /// They are so much smaller than others.
    Times(f64),
    Infinity,
}

/// Gradients of ordinary numbers, and those of which a position has others than all others.
#[test]
fn gradients_of_other_magnitudes_are_right() {
    each(&[256, 128], |engine, case, seed| {
        if case.block.norm().is_some() {
            return;
        }
        let (input, parameters) = case.inputs(DType::F32, Fill::Normal, seed);
        let layer = engine.layer(&case.block, &parameters).expect("a layer");
        let (_, saved) = engine.forward_for_training(&layer, &input).expect("an output");
        let [batch, channels, depth, height, width] =
            <[usize; 5]>::try_from(&case.output_shape()[..]).expect("five sizes");
        let stride = case.block.conv().stride();
        let inputs: [usize; 3] = std::array::from_fn(|axis| [depth, height, width][axis] / stride[axis]);
        // The last position of the first sample.
        let voxels: usize = inputs.iter().product();
        for change in [Change::Nothing, Change::Times(1e-3), Change::Times(1e-14), Change::Infinity] {
            let fill = |_: ()| {
                volup::testing::tensor(
                    &case.output_shape(),
                    DType::F32,
                    case.format,
                    Fill::Normal,
                    3e-7,
                    seed + 1,
                )
            };
            let mut values = fill(()).to_f64();
            for (at, value) in values.iter_mut().enumerate() {
                let (voxel, sample) =
                    (at % (depth * height * width), at / (channels * depth * height * width));
                let [d, h, w] = [voxel / (height * width), voxel / width % height, voxel % width];
                let position = (d / stride[0] * inputs[1] + h / stride[1]) * inputs[2] + w / stride[2];
                if sample == 0 && position == voxels - 1 {
                    *value = match change {
                        Change::Nothing => *value,
                        Change::Times(by) => *value * by,
                        Change::Infinity if at % 3 == 0 => f64::INFINITY,
                        Change::Infinity => *value,
                    };
                }
            }
            let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
            let grad_output = Tensor::new(&case.output_shape(), values).expect("a tensor");
            let wanted =
                Wanted { input: true, weight: true, bias: false, norm_weight: false, norm_bias: false };
            let got = engine.backward(&layer, &input, &saved, &grad_output, wanted).expect("gradients");
            let expected = reference::backward(
                &case.block,
                &case.geometry(),
                &parameters,
                &input,
                &saved,
                &grad_output,
                0.0,
            );
            let (of_input, of_weight) =
                (expected.input.expect("a gradient"), expected.weight.expect("a gradient"));
            let (got_input, got_weight) = (got.input.expect("a gradient"), got.weight.expect("a gradient"));
            let is_changed =
                |at: usize| at % voxels == voxels - 1 && at / voxels < case.block.conv().in_channels();
            let rest = off(&of_input, &got_input, |at| {
                !(is_changed(at) && change == Change::Infinity) && (!is_changed(at) || voxels * batch > 1)
            });
            if change == Change::Infinity {
                for (expected, got) in of_input
                    .values
                    .iter()
                    .zip(got_input.to_f64())
                    .chain(of_weight.values.iter().zip(got_weight.to_f64()))
                {
                    assert!(
                        expected.is_finite() == got.is_finite() && expected.is_nan() == got.is_nan(),
                        "{expected}: {got}"
                    );
                }
                println!("{case}: an infinity, others off by {rest:.1e}");
                continue;
            }
            let [own, weight] =
                [off(&of_input, &got_input, is_changed), off(&of_weight, &got_weight, |_| true)];
            println!("{case}: input off by {rest:.1e}, what is changed by {own:.1e}, weight {weight:.1e}");
            assert!([rest, own, weight].iter().all(|&off| off < 1e-6), "{case}");
        }
    });
}
