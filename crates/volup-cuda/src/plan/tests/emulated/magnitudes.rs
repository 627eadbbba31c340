//! Numbers of all magnitudes, for `implicit_gemm`, which multiplies float32 as two fp16 of scales of their own.

use super::*;

/// Changes the input, then the weight.
type Change = fn([&mut [f64]; 2]);

/// Numbers of magnitudes from 1e-18 to 1e18, none like its neighbours.
fn spread(values: &mut [f64]) {
    for (at, value) in values.iter_mut().enumerate() {
        *value *= 10f64.powi((at * 7 % 37) as i32 - 18);
    }
}

fn scale(values: &mut [f64], by: f64) {
    values.iter_mut().for_each(|value| *value *= by);
}

/// Leaves a few.
fn thin_out(values: &mut [f64]) {
    values.iter_mut().enumerate().filter(|(at, _)| at % 23 > 0).for_each(|(_, value)| *value = 0.0);
}

const CHANGES: [(&str, Change); 13] = [
    ("inputs of all magnitudes", |[x, _]| spread(x)),
    ("weights of all magnitudes", |[_, w]| spread(w)),
    ("both of all magnitudes", |[x, w]| (spread(x), spread(w)).0),
    ("one input far larger than all others", |[x, _]| x[21] = 1e20),
    ("one weight far larger than all others", |[_, w]| w[5] = -1e20),
    ("one weight far smaller than all others", |[_, w]| w[5] = 1e-37),
    ("inputs that are no normal numbers", |[x, _]| scale(x, 1e-40)),
    ("inputs of which only some differ from zero", |[x, _]| thin_out(x)),
    ("such inputs, and weights of all magnitudes", |[x, w]| (thin_out(x), spread(w)).0),
    ("an input of zeros", |[x, _]| x.fill(0.0)),
    ("products below normal numbers", |[x, w]| (scale(x, 1e-22), scale(w, 1e-22)).0),
    ("large inputs and small weights", |[x, w]| (scale(x, 1e35), scale(w, 1e-35)).0),
    ("small inputs and large weights", |[x, w]| (scale(x, 1e-35), scale(w, 1e35)).0),
];

#[test]
fn implicit_gemm_of_all_magnitudes() {
    let lines = [
        "n 2, 3x5x36, 3>5, k 3, s 2, p 1, bias, relu",
        "n 1, 3x4x5, 6>20, k 3x2x4, s 2x3x2, p 1x0x2, g 2, silu",
    ];
    engines(Some(Algorithm::ImplicitGemm), |engine| {
        let engine = saying(engine, "implicit_gemm");
        for (seed, line) in lines.into_iter().enumerate() {
            let case = Case::parse("magnitudes", line, "two fp16").expect("a valid case");
            for (what, change) in CHANGES {
                let (input, mut parameters) = case.inputs(DType::F32, Fill::Normal, seed as u64);
                let [mut x, mut w] = [&input, &parameters.weight].map(Tensor::to_f64);
                change([&mut x, &mut w]);
                let input = with_values(&input, x);
                parameters.weight = with_values(&parameters.weight, w);
                let layer = engine.layer(&case.block, &parameters).expect("a layer");
                let got = engine.forward(&layer, &input).expect("an output");
                let (geometry, roundoff) = (case.geometry(), engine.operand_roundoff(DType::F32));
                let expected = reference::forward(&case.block, &geometry, &parameters, &input, roundoff);
                let deviation = compare(&expected, &got);
                assert!(deviation.is_ok(), "{case}: {what}: {deviation}");
            }
        }
        assert!(engine.said.get() > 20, "{} plans", engine.said.get());
    });
}
