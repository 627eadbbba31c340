//! The suite for engines with gradients: the same table, the backward pass.

use super::conformance::{Outcome, Rule, Run, refuses, report, same_bits, with_value};
use super::{Case, Fill, cases, compare, random_case, tensor};
use crate::reference::{Expected, backward, forward, forward_for_training, statistics};
use crate::{
    Activation, BlockSpec, ConvSpec, DType, Error, Gradients, MemoryFormat, NormSpec, Result, Saved, Tensor,
    Training, Wanted,
};

/// Runs the suite of the backward pass on an engine: the errors, sums over many voxels, then the table in all types and fills,
/// each row run twice, with and without the convolution's output saved, for each gradient alone, and
/// with NaN and Inf.
///
/// # Panics
/// At the first failure, with what and where it is.
pub fn training_conformance<E: Training>(engine: &E) {
    report(engine, suite(engine, &cases()));
}

/// Checks the gradients of `count` random cases, each in one type and fill.
///
/// # Panics
/// At the first failure, with its seed: `random_case(seed)` is the case.
pub fn random_training_runs<E: Training>(engine: &E, count: u64) {
    let runs = || {
        for seed in 0..count {
            let case = random_case(seed);
            let (dtype, fill) = (DType::ALL[seed as usize % 4], Fill::ALL[seed as usize / 4 % 2]);
            let run = TrainingRun::new(&case, dtype, fill, seed);
            run.passes(engine).map_err(|failure| format!("seed {seed}: {failure}"))?;
        }
        Ok(())
    };
    report(engine, runs());
}

/// Checks the passes of training of a case: the output, what is saved and all gradients, each computed twice.
///
/// # Errors
/// What is wrong and where it is, or why it could not be computed.
pub fn check_gradients<E: Training>(
    engine: &E,
    case: &Case,
    dtype: DType,
    fill: Fill,
    seed: u64,
) -> std::result::Result<(), String> {
    TrainingRun::new(case, dtype, fill, seed).passes(engine)
}

fn suite<E: Training>(engine: &E, cases: &[Case]) -> Outcome {
    errors(engine)?;
    long_sums(engine)?;
    table(engine, cases)
}

fn table<E: Training>(engine: &E, cases: &[Case]) -> Outcome {
    for case in cases {
        for dtype in DType::ALL {
            for fill in Fill::ALL {
                TrainingRun::new(case, dtype, fill, 1).passes(engine)?;
            }
        }
        TrainingRun::new(case, DType::F32, Fill::Normal, 3).each_alone(engine)?;
        special_values(engine, case)?;
    }
    Ok(())
}

/// A case with its tensors and a gradient of its output.
struct TrainingRun<'a> {
    run: Run<'a>,
    grad_output: Tensor,
}

/// The names of the gradients and the gradients, in one order.
fn named<T>(gradients: Gradients<T>) -> [(&'static str, Option<T>); 5] {
    let Gradients { input, weight, bias, norm_weight, norm_bias } = gradients;
    [
        ("input", input),
        ("weight", weight),
        ("bias", bias),
        ("norm_weight", norm_weight),
        ("norm_bias", norm_bias),
    ]
}

impl<'a> TrainingRun<'a> {
    fn new(case: &'a Case, dtype: DType, fill: Fill, seed: u64) -> TrainingRun<'a> {
        let shape = case.output_shape();
        let grad_output = tensor(&shape, dtype, case.format, fill, 1.0, seed ^ (5 << 56));
        TrainingRun { run: Run::new(case, dtype, fill, seed), grad_output }
    }

    fn layer<E: Training>(&self, engine: &E) -> Result<E::Layer> {
        engine.layer(&self.run.case.block, &self.run.parameters)
    }

    /// The output and what is saved, on the host.
    fn forward<E: Training>(&self, engine: &E, layer: &E::Layer) -> Result<(Tensor, Saved<Tensor>)> {
        let input = engine.upload(self.run.input.clone())?;
        let (output, Saved { convolution, mean, rstd }) = engine.forward_for_training(layer, &input)?;
        let host = |tensor: Option<E::Tensor>| tensor.map(|tensor| engine.download(tensor)).transpose();
        let saved = Saved { convolution: host(convolution)?, mean: host(mean)?, rstd: host(rstd)? };
        let output = self.run.expect("output", engine.download(output)?, &self.run.case.output_shape())?;
        Ok((output, saved))
    }

    fn backward<E: Training>(
        &self,
        engine: &E,
        layer: &E::Layer,
        saved: &Saved<Tensor>,
        wanted: Wanted,
    ) -> Result<Gradients<Tensor>> {
        let device = |tensor: &Option<Tensor>| tensor.clone().map(|tensor| engine.upload(tensor)).transpose();
        let Saved { convolution, mean, rstd } = saved;
        let saved = Saved { convolution: device(convolution)?, mean: device(mean)?, rstd: device(rstd)? };
        let input = engine.upload(self.run.input.clone())?;
        let grad_output = engine.upload(self.grad_output.clone())?;
        let gradients = engine.backward(layer, &input, &saved, &grad_output, wanted)?;
        let host = |tensor: Option<E::Tensor>| tensor.map(|tensor| engine.download(tensor)).transpose();
        let Gradients { input, weight, bias, norm_weight, norm_bias } = gradients;
        let mut input = host(input)?;
        if let Some(gradient) = input {
            input = Some(self.run.expect("input", gradient, &self.run.case.input_shape())?);
        }
        Ok(Gradients {
            input,
            weight: host(weight)?,
            bias: host(bias)?,
            norm_weight: host(norm_weight)?,
            norm_bias: host(norm_bias)?,
        })
    }

    fn expected_output<E: Training>(&self, engine: &E) -> Expected {
        let Run { case, input, parameters, .. } = &self.run;
        let roundoff = engine.operand_roundoff(input.dtype());
        let geometry = case.geometry();
        let expected = forward_for_training(&case.block, &geometry, parameters, input, roundoff);
        if self.run.exact { self.run.rounded_once(expected) } else { expected }
    }

    fn expected<E: Training>(&self, engine: &E, saved: &Saved<Tensor>) -> Gradients<Expected> {
        let Run { case, input, parameters, .. } = &self.run;
        let roundoff = engine.operand_roundoff(input.dtype());
        let geometry = case.geometry();
        backward(&case.block, &geometry, parameters, input, saved, &self.grad_output, roundoff)
    }

    /// Output, saved tensors and gradients are right, and the same bits when they are computed again.
    fn passes<E: Training>(&self, engine: &E) -> Outcome {
        let failed = |error: Error| self.run.failure(&error.to_string());
        let layer = self.layer(engine).map_err(failed)?;
        let (output, saved) = self.forward(engine, &layer).map_err(failed)?;
        self.within("output", &self.expected_output(engine), &output)?;
        self.check_saved(engine, &saved)?;
        let first = self.backward(engine, &layer, &saved, Wanted::ALL).map_err(failed)?;
        self.compare(self.expected(engine, &saved), first.clone())?;
        let again = self.backward(engine, &layer, &saved, Wanted::ALL).map_err(failed)?;
        self.same("a second run gives other bits", first.clone(), again)?;
        if saved.convolution.is_some() {
            let less = Saved { convolution: None, ..saved };
            let again = self.backward(engine, &layer, &less, Wanted::ALL).map_err(failed)?;
            self.same("without the convolution's output the bits are others", first, again)?;
        }
        Ok(())
    }

    fn within(&self, what: &str, expected: &Expected, got: &Tensor) -> Outcome {
        if expected.values.len() != got.data().len() {
            return Err(self.run.failure(&format!("{what} has shape {:?}", got.shape())));
        }
        let deviation = compare(expected, got);
        if deviation.is_ok() { Ok(()) } else { Err(self.run.failure(&format!("{what}: {deviation}"))) }
    }

    /// What the oracle of the backward pass takes for granted.
    fn check_saved<E: Training>(&self, engine: &E, saved: &Saved<Tensor>) -> Outcome {
        let Run { case, input, parameters, .. } = &self.run;
        let bare = BlockSpec::from(*case.block.conv());
        let Saved { convolution, mean, rstd } = saved;
        let is_bare = case.block.is_bare();
        let normalizes = case.block.norm().is_some();
        if [convolution.is_none(), mean.is_none(), rstd.is_none()] != [is_bare, !normalizes, !normalizes] {
            return Err(self.run.failure("what is saved is more or less than is needed"));
        }
        let Some(convolution) = convolution else { return Ok(()) };
        let roundoff = engine.operand_roundoff(input.dtype());
        let expected = forward(&bare, &case.geometry(), parameters, input, roundoff);
        let expected = if self.run.exact { self.run.rounded_once(expected) } else { expected };
        self.within("the convolution's output", &expected, convolution)?;
        if let (Some(mean), Some(rstd)) = (mean, rstd) {
            let [of_mean, of_rstd] = statistics(&case.block, &case.geometry(), convolution);
            self.within("mean", &of_mean, mean)?;
            self.within("rstd", &of_rstd, rstd)?;
        }
        Ok(())
    }

    fn compare(&self, expected: Gradients<Expected>, got: Gradients<Tensor>) -> Outcome {
        for ((name, expected), (_, got)) in named(expected).into_iter().zip(named(got)) {
            let what = format!("gradient of {name}");
            let (expected, got) = match (expected, got) {
                (Some(expected), Some(got)) => (expected, got),
                (None, None) => continue,
                (_, got) => {
                    let is = if got.is_some() { "is there" } else { "is missing" };
                    return Err(self.run.failure(&format!("{what} {is}")));
                }
            };
            let exact = if self.run.exact { self.run.rounded_once(expected) } else { expected };
            self.within(&what, &exact, &got)?;
        }
        Ok(())
    }

    fn same(&self, otherwise: &str, first: Gradients<Tensor>, again: Gradients<Tensor>) -> Outcome {
        for ((name, first), (_, again)) in named(first).into_iter().zip(named(again)) {
            let same = match (&first, &again) {
                (Some(first), Some(again)) => same_bits(first, again),
                (first, again) => first.is_none() == again.is_none(),
            };
            if !same {
                return Err(self.run.failure(&format!("gradient of {name}: {otherwise}")));
            }
        }
        Ok(())
    }

    /// A gradient alone is what it is with the others, and the others are not there.
    fn each_alone<E: Training>(&self, engine: &E) -> Outcome {
        let failed = |error: Error| self.run.failure(&error.to_string());
        let layer = self.layer(engine).map_err(failed)?;
        let (_, saved) = self.forward(engine, &layer).map_err(failed)?;
        let none = Wanted { input: false, weight: false, bias: false, norm_weight: false, norm_bias: false };
        let all = self.backward(engine, &layer, &saved, Wanted::ALL).map_err(failed)?;
        let mut all = named(all).map(|(_, gradient)| gradient);
        for (index, wanted) in [
            Wanted { input: true, ..none },
            Wanted { weight: true, ..none },
            Wanted { bias: true, ..none },
            Wanted { norm_weight: true, ..none },
            Wanted { norm_bias: true, ..none },
        ]
        .into_iter()
        .enumerate()
        {
            let mut only = Gradients::default();
            let slots = [
                &mut only.input,
                &mut only.weight,
                &mut only.bias,
                &mut only.norm_weight,
                &mut only.norm_bias,
            ];
            for (slot, which) in slots.into_iter().zip(0..) {
                if which == index {
                    *slot = all[index].take();
                }
            }
            let got = self.backward(engine, &layer, &saved, wanted).map_err(failed)?;
            self.same("alone it is another, or not alone", only, got)?;
        }
        Ok(())
    }
}

/// One NaN or Inf in the output's gradient, the input or the weight reaches exactly the gradients of
/// the voxels and taps that the definition multiplies it with. Behind a normalization it would reach
/// all of its group, and the smooth activations have no gradient at infinity.
fn special_values<E: Training>(engine: &E, case: &Case) -> Outcome {
    let smooth = |function: Option<Activation>| !matches!(function, None | Some(Activation::Relu));
    if smooth(case.block.activation())
        || smooth(case.block.post_activation())
        || case.block.norm().is_some()
        || case.batch == Some(0)
    {
        return Ok(());
    }
    for dtype in [DType::F32, DType::Bf16] {
        let TrainingRun { run, grad_output } = TrainingRun::new(case, dtype, Fill::Normal, 2);
        let (outputs, voxels) = (grad_output.data().len(), run.input.data().len());
        let weights = run.parameters.weight.data().len();
        for (param, value, at) in [
            ("grad_output", f64::NAN, outputs / 2),
            ("grad_output", f64::INFINITY, outputs - 1),
            ("grad_output", f64::NEG_INFINITY, 0),
            ("input", f64::NAN, voxels / 2),
            ("input", f64::INFINITY, 0),
            ("weight", f64::NAN, weights / 2),
            ("weight", f64::NEG_INFINITY, weights - 1),
        ] {
            let what = format!("{dtype}, {param} element {at} is {value}");
            let (input, parameters) = (run.input.clone(), run.parameters.clone());
            let mut changed = TrainingRun {
                run: Run { case, what, input, parameters, exact: false },
                grad_output: grad_output.clone(),
            };
            let tensor = match param {
                "grad_output" => &mut changed.grad_output,
                "input" => &mut changed.run.input,
                _ => &mut changed.run.parameters.weight,
            };
            *tensor = with_value(tensor, at, value).map_err(|error| error.to_string())?;
            let gradients = || -> Result<_> {
                let layer = changed.layer(engine)?;
                let (_, saved) = changed.forward(engine, &layer)?;
                let got = changed.backward(engine, &layer, &saved, Wanted::ALL)?;
                Ok((saved, got))
            };
            let (saved, got) = gradients().map_err(|error| changed.run.failure(&error.to_string()))?;
            changed.compare(changed.expected(engine, &saved), got)?;
        }
    }
    Ok(())
}

/// Sums over so many equal values that one running sum would drift.
fn long_sums<E: Training>(engine: &E) -> Outcome {
    let failed = |error: Error| format!("long sums: {error}");
    let conv = ConvSpec::builder(1, 2, 1).bias(true).build().map_err(failed)?;
    for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast3d] {
        let case = Case {
            name: "long sums",
            why: "a million values must not go into one running sum",
            block: conv.into(),
            batch: Some(4),
            input: [64; 3],
            format,
        };
        let TrainingRun { run, grad_output } = TrainingRun::new(&case, DType::F32, Fill::Normal, 7);
        let constant = |tensor: &Tensor| {
            Tensor::new(tensor.shape(), vec![1.1f32; tensor.data().len()])?.cast(DType::F32, format)
        };
        let input = constant(&run.input).map_err(failed)?;
        let grad_output = constant(&grad_output).map_err(failed)?;
        TrainingRun { run: Run { input, ..run }, grad_output }.passes(engine)?;
    }
    Ok(())
}

/// The engine refuses what does not belong to the forward pass.
fn errors<E: Training>(engine: &E) -> Outcome {
    let failed = |error: Error| format!("errors: {error}");
    let conv = ConvSpec::builder(4, 6, 3).bias(true).build().map_err(failed)?;
    let norm = NormSpec::new(2, 1e-5, true).map_err(failed)?;
    let block = BlockSpec::new(conv, Some(Activation::Relu), Some(norm), None).map_err(failed)?;
    let case = Case {
        name: "errors",
        why: "",
        block,
        batch: Some(1),
        input: [2; 3],
        format: MemoryFormat::Contiguous,
    };
    let right = TrainingRun::new(&case, DType::F32, Fill::Normal, 4);
    let layer = right.layer(engine).map_err(failed)?;
    let (_, saved) = right.forward(engine, &layer).map_err(failed)?;
    let zeros =
        |shape: &[usize], dtype| tensor(shape, dtype, MemoryFormat::Contiguous, Fill::Integer, 0.0, 0);
    let run = |input: Option<Tensor>, saved: &Saved<Tensor>, grad_output: Option<Tensor>| {
        let Run { input: usual, parameters, .. } = Run::new(&case, DType::F32, Fill::Normal, 4);
        let run = TrainingRun {
            run: Run {
                case: &case,
                what: String::new(),
                input: input.unwrap_or(usual),
                parameters,
                exact: false,
            },
            grad_output: grad_output.unwrap_or_else(|| right.grad_output.clone()),
        };
        run.backward(engine, &layer, saved, Wanted::ALL).map(drop)
    };
    let without = |change: fn(&mut Saved<Tensor>)| {
        let mut less = saved.clone();
        change(&mut less);
        less
    };
    let other = |shape: &[usize], dtype| Some(zeros(shape, dtype));

    use Error as E;
    let shape = [1, 6, 4, 4, 4];
    let attempts: [(&str, Result<()>, Rule); 9] = [
        ("a gradient of another shape", run(None, &saved, other(&[1, 6, 4, 4, 5], DType::F32)), |e| {
            matches!(e, E::Shape { param: "grad_output", .. })
        }),
        ("a gradient of another rank", run(None, &saved, other(&shape[1..], DType::F32)), |e| {
            matches!(e, E::Shape { param: "grad_output", .. })
        }),
        ("a gradient of another type", run(None, &saved, other(&shape, DType::F64)), |e| {
            matches!(e, E::DTypeMismatch { param: "grad_output", .. })
        }),
        ("an input of other channels", run(other(&[1, 5, 2, 2, 2], DType::F32), &saved, None), |e| {
            matches!(e, E::Channels { got: 5, expected: 4 })
        }),
        ("an input of another type", run(other(&[1, 4, 2, 2, 2], DType::F16), &saved, None), |e| {
            matches!(e, E::DTypeMismatch { param: "input", .. })
        }),
        (
            "a convolution's output of another shape",
            run(None, &Saved { convolution: other(&[1, 6, 4, 4, 3], DType::F32), ..saved.clone() }, None),
            |e| matches!(e, E::Shape { param: "convolution", .. }),
        ),
        ("no mean", run(None, &without(|saved| saved.mean = None), None), |e| {
            matches!(e, E::Presence { param: "mean", expected: true })
        }),
        ("no rstd", run(None, &without(|saved| saved.rstd = None), None), |e| {
            matches!(e, E::Presence { param: "rstd", expected: true })
        }),
        (
            "an rstd of another type",
            run(None, &Saved { rstd: other(&[1, 2], DType::F64), ..saved.clone() }, None),
            |e| matches!(e, E::DTypeMismatch { param: "rstd", .. }),
        ),
    ];
    refuses(attempts)
}

#[cfg(test)]
#[path = "training_tests.rs"]
mod tests;
