use super::super::forward;
use super::*;
use crate::testing::{Case, Fill, cases, tensor};
use crate::{DType, MemoryFormat};

/// What the forward pass of an engine without rounding saves.
fn saved(case: &Case, parameters: &Parameters, input: &Tensor) -> Saved<Tensor> {
    let geometry = case.geometry();
    if case.block.is_bare() {
        return Saved::default();
    }
    let bare = BlockSpec::from(*case.block.conv());
    let convolution = forward(&bare, &geometry, parameters, input, 0.0).values;
    let convolution = Tensor::new(&geometry.output_shape(), convolution).unwrap();
    let statistics = case.block.norm().map(|norm| {
        let shape = [geometry.batch(), norm.groups()];
        statistics(&case.block, &geometry, &convolution)
            .map(|expected| Tensor::new(&shape, expected.values).unwrap())
    });
    let (mean, rstd) = statistics.map(|[mean, rstd]| (mean, rstd)).unzip();
    Saved { convolution: Some(convolution), mean, rstd }
}

fn nudged(tensor: &Tensor, at: usize, by: f64) -> Tensor {
    let mut values = tensor.to_f64();
    values[at] += by;
    Tensor::new(tensor.shape(), values).unwrap()
}

/// Every gradient against central differences of `sum(dz * z)`, at a few elements each.
#[test]
fn gradients_are_the_slopes_of_the_forward_pass() {
    const STEP: f64 = 1e-5;
    // A group of two values is normalized to plus and minus one whatever they are, but for eps.
    for case in cases().iter().filter(|case| case.batch != Some(0) && case.name != "gn-two-values") {
        let geometry = case.geometry();
        let (input, parameters) = case.inputs(DType::F64, Fill::Normal, 8);
        let input = Tensor::new(&geometry.input_shape(), input.to_f64()).unwrap();
        let dz =
            tensor(&geometry.output_shape(), DType::F64, MemoryFormat::Contiguous, Fill::Normal, 1.0, 99);
        let loss = |parameters: &Parameters, input: &Tensor| -> f64 {
            let z = forward(&case.block, &geometry, parameters, input, 0.0).values;
            z.iter().zip(dz.to_f64()).map(|(z, dz)| z * dz).sum()
        };
        let saved = saved(case, &parameters, &input);
        let got = backward(&case.block, &geometry, &parameters, &input, &saved, &dz, 0.0);
        let check = |what: &str, gradient: &Expected, nudge: &dyn Fn(usize, f64) -> f64| {
            let count = gradient.values.len();
            for at in [0, count / 3, count - 1] {
                let slope = (nudge(at, STEP) - nudge(at, -STEP)) / (2.0 * STEP);
                let (value, scale) = (gradient.values[at], gradient.values[at].abs().max(1.0));
                assert!((value - slope).abs() < 2e-5 * scale, "{case}: {what}[{at}] = {value}, not {slope}");
                assert!(
                    gradient.bounds[at] < 1e-6 * scale,
                    "{case}: {what}[{at}] +- {}",
                    gradient.bounds[at]
                );
            }
        };
        let at_input = |at, by| loss(&parameters, &nudged(&input, at, by));
        check("input", got.input.as_ref().unwrap(), &at_input);
        type Pick = fn(&mut Parameters) -> Option<&mut Tensor>;
        let parts: [(&str, &Option<Expected>, Pick); 4] = [
            ("weight", &got.weight, |parameters| Some(&mut parameters.weight)),
            ("bias", &got.bias, |parameters| parameters.bias.as_mut()),
            ("norm_weight", &got.norm_weight, |parameters| parameters.norm_weight.as_mut()),
            ("norm_bias", &got.norm_bias, |parameters| parameters.norm_bias.as_mut()),
        ];
        for (what, gradient, pick) in parts {
            assert_eq!(gradient.is_some(), pick(&mut parameters.clone()).is_some(), "{case}: {what}");
            let Some(gradient) = gradient else { continue };
            check(what, gradient, &|at, by| {
                let mut parameters = parameters.clone();
                let tensor = pick(&mut parameters).expect("a parameter with a gradient");
                *tensor = nudged(tensor, at, by);
                loss(&parameters, &input)
            });
        }
    }
}

#[test]
fn kinks_are_pytorchs() {
    let leaky = Activation::leaky_relu(0.25).unwrap();
    let inf = f64::INFINITY;
    for (function, x, g, expected) in [
        (Activation::Relu, 0.0, 2.0, 0.0),
        (Activation::Relu, -1.0, inf, 0.0),
        (Activation::Relu, f64::NAN, 2.0, 2.0),
        (leaky, 0.0, 2.0, 0.5),
        (leaky, f64::NAN, 2.0, 0.5),
        (Activation::Hardswish, -3.0, 2.0, 0.0),
        (Activation::Hardswish, 3.0, 2.0, 2.0),
        (Activation::Hardswish, 0.0, 2.0, 1.0),
    ] {
        assert_eq!(activation_gradient(function, x, g), expected, "{function} at {x}");
    }
}

/// The bound on a slope's change holds for slopes sampled densely.
#[test]
fn slopes_change_no_faster_than_their_bound() {
    for name in Activation::NAMES.split(", ") {
        let function = Activation::from_name(name).unwrap();
        for at in -8000..8000 {
            let x = f64::from(at) * 1e-3;
            for error in [1e-4, 1e-2, 0.3] {
                for other in [x - error, x + error, x + 0.5 * error] {
                    let change = (slope(function, other) - slope(function, x)).abs();
                    let bound = slope_change(function, x, error);
                    assert!(change <= bound + 1e-12, "{name} from {x} to {other}: {change} > {bound}");
                }
            }
        }
    }
}
