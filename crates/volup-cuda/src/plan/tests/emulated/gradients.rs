//! Backward passes, from the PTX of the kernels.

use super::*;

/// The backward pass, by the kernels that the plan chooses and by each that it seldom does.
#[test]
fn gradients() {
    let kernels = [
        None,
        Some("shuffle_gradient"),
        Some("weight_gradient"),
        Some("weight_gradient_lines"),
        Some("weight_gradient_narrow"),
    ];
    engines(None, |engine| {
        for (seed, kernel) in (0..25).zip(kernels.into_iter().cycle()) {
            let types = engine.types();
            let (case, dtype) = (random_case(seed), types[seed as usize % types.len()]);
            let engine = Emulated {
                kernel,
                variants: engine.variants.clone(),
                device: engine.device.clone(),
                said: Cell::new(0),
                ..*engine
            };
            if case.batch != Some(0) {
                check_gradients(&engine, &case, dtype, Fill::Normal, seed)
                    .unwrap_or_else(|what| panic!("{what}"));
            }
        }
    });
}

/// The backward pass by two fp16, also of gradients that these are too coarse for.
#[test]
fn gradients_by_two_fp16() {
    let lines = [
        "n 2, 2x3x8, 16>16, k 3, s 2, p 1, op 1, bias, relu",
        "n 1, 3x5x6, 3>16, k 3, s 2, p 1",
        "n 2, 3x2x8, 8>16, k 2, s 2, g 2, silu, gn 4",
    ];
    let changes: [fn(&mut [f64]); 3] =
        [|_| {}, |g| g.iter_mut().step_by(3).for_each(|g| *g *= 1e-15), |g| g[7] = f64::NAN];
    engines(None, |engine| {
        let engine = saying(engine, "backward, two fp16");
        for (seed, line) in lines.into_iter().enumerate() {
            let case = Case::parse("halves", line, "by two fp16").expect("a valid case");
            for format in FORMATS {
                let case = Case { format, ..case.clone() };
                check_gradients(&engine, &case, DType::F32, Fill::Normal, seed as u64)
                    .unwrap_or_else(|what| panic!("{what}"));
            }
            let (input, parameters) = case.inputs(DType::F32, Fill::Normal, 1);
            let layer = engine.layer(&case.block, &parameters).expect("a layer");
            let (output, saved) = engine.forward_for_training(&layer, &input).expect("an output");
            for change in changes.into_iter().filter(|_| case.block.norm().is_none()) {
                let mut values =
                    volup::testing::tensor(output.shape(), DType::F64, output.format(), Fill::Normal, 1.0, 9)
                        .to_f64();
                change(&mut values);
                let gradient = with_values(&output, values);
                let wanted =
                    Wanted { input: true, weight: false, bias: false, norm_weight: false, norm_bias: false };
                let got = engine.backward(&layer, &input, &saved, &gradient, wanted).expect("gradients");
                let (geometry, roundoff) = (case.geometry(), engine.operand_roundoff(DType::F32));
                let expected = reference::backward(
                    &case.block,
                    &geometry,
                    &parameters,
                    &input,
                    &saved,
                    &gradient,
                    roundoff,
                );
                let (expected, got) = expected.input.zip(got.input).expect("both");
                let deviation = compare(&expected, &got);
                assert!(deviation.is_ok(), "{case}: {deviation}");
            }
        }
        assert!(engine.precision == Precision::Tf32 || engine.said.get() > 5, "{} plans", engine.said.get());
    });
}
