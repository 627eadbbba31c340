//! The suite that every engine has to pass.

use super::{Case, Deviation, Fill, cases, compare, random_case};
use crate::reference::{Expected, forward};
use crate::{
    Activation, BlockSpec, ConvSpec, DType, Element, Engine, Error, MemoryFormat, NormSpec, Parameters,
    Result, Tensor, with_element,
};

/// Runs a case on an engine and compares the output with the oracle's.
///
/// On [`Fill::Integer`] a convolution (with ReLU at most) must be exact: the true value, rounded
/// once to the output's type.
///
/// # Errors
/// What the engine reports; [`Error::Shape`], [`Error::DTypeMismatch`] and [`Error::Format`] about
/// `output` if it is not of the input's rank, type and memory format and the right size.
pub fn check<E: Engine>(engine: &E, case: &Case, dtype: DType, fill: Fill, seed: u64) -> Result<Deviation> {
    Run::new(case, dtype, fill, seed).deviation(engine)
}

/// Runs the whole suite on an engine: the errors, one layer on inputs of several sizes, statistics of
/// values far from zero, and the table in all types and fills, each row run twice and with NaN and
/// Inf in its input.
///
/// # Panics
/// At the first failure, with what and where it is.
pub fn conformance<E: Engine>(engine: &E) {
    report(engine, suite(engine, &cases()));
}

/// Runs cases that are not in the table as the suite does those that are: for what an engine does only with certain sizes.
///
/// # Panics
/// At the first failure, with what and where it is.
pub fn conformance_of<E: Engine>(engine: &E, cases: &[Case]) {
    report(engine, each_of(engine, cases));
}

/// Checks `count` random cases, each in one type and fill.
///
/// # Panics
/// At the first failure, with its seed: `random_case(seed)` is the case.
pub fn random_runs<E: Engine>(engine: &E, count: u64) {
    report(engine, random_suite(engine, count));
}

pub(super) fn report<E: Engine>(engine: &E, outcome: Outcome) {
    if let Err(failure) = outcome {
        panic!("{failure}\nengine: {:?}", engine.describe());
    }
}

/// Nothing, or what failed and where.
pub(super) type Outcome = std::result::Result<(), String>;

/// Cheap checks first, so that an engine at its start fails fast.
fn suite<E: Engine>(engine: &E, cases: &[Case]) -> Outcome {
    errors(engine)?;
    sizes_in_turn(engine)?;
    far_from_zero(engine)?;
    each_of(engine, cases)
}

fn each_of<E: Engine>(engine: &E, cases: &[Case]) -> Outcome {
    for case in cases {
        for dtype in DType::ALL {
            for fill in Fill::ALL {
                Run::new(case, dtype, fill, 1).passes(engine)?;
            }
            special_values(engine, case, dtype)?;
        }
    }
    Ok(())
}

fn random_suite<E: Engine>(engine: &E, count: u64) -> Outcome {
    for seed in 0..count {
        let case = random_case(seed);
        let dtype = DType::ALL[seed as usize % 4];
        let fill = Fill::ALL[seed as usize / 4 % 2];
        Run::new(&case, dtype, fill, seed)
            .passes(engine)
            .map_err(|failure| format!("seed {seed}: {failure}"))?;
    }
    Ok(())
}

/// One case with its tensors.
pub(super) struct Run<'a> {
    pub case: &'a Case,
    pub what: String,
    pub input: Tensor,
    pub parameters: Parameters,
    pub exact: bool,
}

impl<'a> Run<'a> {
    pub fn new(case: &'a Case, dtype: DType, fill: Fill, seed: u64) -> Run<'a> {
        let (input, parameters) = case.inputs(dtype, fill, seed);
        let exact = fill == Fill::Integer && case.is_exact_on_integers();
        Run { case, what: format!("{dtype}, {fill:?}"), input, parameters, exact }
    }

    pub fn expected<E: Engine>(&self, engine: &E) -> Expected {
        let roundoff = engine.operand_roundoff(self.input.dtype());
        let geometry = self.case.geometry();
        let expected = forward(&self.case.block, &geometry, &self.parameters, &self.input, roundoff);
        if self.exact { self.rounded_once(expected) } else { expected }
    }

    /// The one right result where every sum is exact.
    pub fn rounded_once(&self, expected: Expected) -> Expected {
        let round = |&value: &f64| with_element!(self.input.dtype(), T => T::from_f64(value).to_f64());
        let values = expected.values.iter().map(round).collect();
        Expected { values, bounds: vec![0.0; expected.bounds.len()] }
    }

    fn output<E: Engine>(&self, engine: &E, layer: &E::Layer) -> Result<Tensor> {
        let output = engine.download(engine.forward(layer, &engine.upload(self.input.clone())?)?)?;
        self.expect("output", output, &self.case.output_shape())
    }

    /// The tensor, if it is of a shape and of the input's type and memory format.
    pub fn expect(&self, param: &'static str, tensor: Tensor, expected: &[usize]) -> Result<Tensor> {
        if tensor.shape() != expected {
            let (got, expected) = (tensor.shape().to_vec(), expected.to_vec());
            return Err(Error::Shape { param, got, expected });
        }
        if tensor.dtype() != self.input.dtype() {
            return Err(Error::DTypeMismatch { param, got: tensor.dtype(), expected: self.input.dtype() });
        }
        if tensor.format() != self.input.format() {
            return Err(Error::Format { param, got: tensor.format(), expected: self.input.format() });
        }
        Ok(tensor)
    }

    fn deviation<E: Engine>(&self, engine: &E) -> Result<Deviation> {
        let layer = engine.layer(&self.case.block, &self.parameters)?;
        Ok(compare(&self.expected(engine), &self.output(engine, &layer)?))
    }

    /// The result is right, and the same bits when the same layer runs again.
    fn passes<E: Engine>(&self, engine: &E) -> Outcome {
        let twice = || -> Result<_> {
            let layer = engine.layer(&self.case.block, &self.parameters)?;
            Ok((self.output(engine, &layer)?, self.output(engine, &layer)?))
        };
        let (first, second) = twice().map_err(|error| self.failure(&error.to_string()))?;
        let deviation = compare(&self.expected(engine), &first);
        if !deviation.is_ok() {
            return Err(self.failure(&deviation.to_string()));
        }
        if !same_bits(&first, &second) {
            return Err(self.failure("a second run gives other bits"));
        }
        Ok(())
    }

    pub fn failure(&self, what: &str) -> String {
        format!("{} ({}; {}): {what}", self.case, self.what, self.case.why)
    }
}

pub(super) fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    with_element!(a.dtype(), T => {
        let bytes = |tensor| Tensor::as_slice::<T>(tensor).map(bytemuck::cast_slice::<T, u8>);
        bytes(a) == bytes(b)
    })
}

/// A copy of a tensor with one element, by its contiguous index, replaced.
pub(super) fn with_value(tensor: &Tensor, at: usize, value: f64) -> Result<Tensor> {
    let mut values = tensor.to_f64();
    values[at] = value;
    Tensor::new(tensor.shape(), values)?.cast(tensor.dtype(), tensor.format())
}

/// One NaN or Inf in the input or the weight reaches exactly the outputs that its voxel or tap does:
/// not through a multiplication by a zero that was inserted or lies beyond a border, not into another
/// group, and ReLU does not swallow it.
///
/// The smooth activations are left out: at minus infinity they are NaN by PyTorch's formula and not
/// by others.
fn special_values<E: Engine>(engine: &E, case: &Case, dtype: DType) -> Outcome {
    let smooth = |function: Option<Activation>| !matches!(function, None | Some(Activation::Relu));
    if smooth(case.block.activation()) || smooth(case.block.post_activation()) || case.batch == Some(0) {
        return Ok(());
    }
    let Run { what, input, parameters, .. } = Run::new(case, dtype, Fill::Normal, 2);
    let (voxels, weights) = (input.data().len(), parameters.weight.data().len());
    let attempts = [
        ("input", f64::NAN, voxels / 2),
        ("input", f64::INFINITY, voxels - 1),
        ("input", f64::NEG_INFINITY, 0),
        ("weight", f64::NAN, weights / 2),
        ("weight", f64::INFINITY, weights - 1),
    ];
    for (param, value, at) in attempts {
        let what = format!("{what}, {param} element {at} is {value}");
        let mut run = Run { case, what, input: input.clone(), parameters: parameters.clone(), exact: false };
        let tensor = if param == "input" { &mut run.input } else { &mut run.parameters.weight };
        *tensor = with_value(tensor, at, value).map_err(|error| error.to_string())?;
        let deviation = run.deviation(engine).map_err(|error| run.failure(&error.to_string()))?;
        if !deviation.is_ok() {
            return Err(run.failure(&deviation.to_string()));
        }
    }
    Ok(())
}

/// A layer is made once and used on inputs of any size, rank and memory format, in any order.
fn sizes_in_turn<E: Engine>(engine: &E) -> Outcome {
    let failed = |error: Error| format!("sizes in turn: {error}");
    let conv = ConvSpec::builder(4, 6, 3).stride(2).padding(1).bias(true).build().map_err(failed)?;
    let norm = NormSpec::new(2, 1e-5, true).map_err(failed)?;
    let block = BlockSpec::new(conv, Some(Activation::Relu), Some(norm), None).map_err(failed)?;
    let case = |batch, input, format| Case {
        name: "sizes in turn",
        why: "a layer must not remember the size that it first saw",
        block,
        batch,
        input,
        format,
    };
    let cases = [
        case(Some(2), [3, 4, 5], MemoryFormat::Contiguous),
        case(Some(1), [5, 9, 20], MemoryFormat::ChannelsLast3d),
        case(None, [1, 1, 2], MemoryFormat::Contiguous),
        case(Some(0), [4, 4, 4], MemoryFormat::Contiguous),
        case(Some(2), [3, 4, 5], MemoryFormat::Contiguous),
    ];
    // The parameters depend on the seed and not on the size.
    let (_, parameters) = cases[0].inputs(DType::F32, Fill::Normal, 6);
    let layer = engine.layer(&block, &parameters).map_err(failed)?;
    for case in &cases {
        let run = Run::new(case, DType::F32, Fill::Normal, 6);
        let output = run.output(engine, &layer).map_err(|error| run.failure(&error.to_string()))?;
        let deviation = compare(&run.expected(engine), &output);
        if !deviation.is_ok() {
            return Err(run.failure(&deviation.to_string()));
        }
    }
    Ok(())
}

/// Statistics of values whose mean is thousands of times their spread: the mean of the squares minus
/// the square of the mean has no correct digit there.
fn far_from_zero<E: Engine>(engine: &E) -> Outcome {
    let block = || {
        let conv = ConvSpec::builder(1, 4, 1).bias(true).build()?;
        BlockSpec::new(conv, None, Some(NormSpec::new(2, 1e-5, false)?), None)
    };
    for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast3d] {
        for dtype in [DType::F32, DType::F64] {
            let case = Case {
                name: "far from zero",
                why: "the variance must come from the deviations from the mean",
                block: block().map_err(|error| error.to_string())?,
                batch: Some(2),
                input: [8, 12, 16],
                format,
            };
            let run = Run::new(&case, dtype, Fill::Normal, 3);
            let far = if dtype == DType::F32 { 4096.0 } else { 1e8 };
            let bias = Tensor::new(&[4], vec![far; 4]).and_then(|bias| bias.cast(dtype, bias.format()));
            let bias = Some(bias.map_err(|error| error.to_string())?);
            let parameters = Parameters { bias, ..run.parameters };
            Run { parameters, ..run }.passes(engine)?;
        }
    }
    Ok(())
}

/// The engine refuses what a block cannot take, with the error of the rule that is broken.
fn errors<E: Engine>(engine: &E) -> Outcome {
    let failed = |error: Error| format!("errors: {error}");
    let conv = ConvSpec::builder(4, 6, 3).padding(2).bias(true).build().map_err(failed)?;
    let norm = NormSpec::new(6, 1e-5, true).map_err(failed)?;
    let block = BlockSpec::new(conv, None, Some(norm), None).map_err(failed)?;
    let case = Case {
        name: "errors",
        why: "",
        block,
        batch: Some(1),
        input: [4; 3],
        format: MemoryFormat::Contiguous,
    };
    let (_, parameters) = case.inputs(DType::F32, Fill::Normal, 4);
    let layer = engine.layer(&block, &parameters).map_err(failed)?;
    let forward = |shape: &[usize], dtype: DType| -> Result<()> {
        let input = super::tensor(shape, dtype, MemoryFormat::Contiguous, Fill::Normal, 1.0, 5);
        engine.forward(&layer, &engine.upload(input)?).map(drop)
    };
    let layer = |parameters: Parameters| engine.layer(&block, &parameters).map(drop);
    let of = |dtype, tensor: &Tensor| tensor.cast(dtype, tensor.format()).map_err(failed);

    use Error as E;
    let attempts: [(&str, Result<()>, Rule); 10] = [
        ("an input of other channels", forward(&[1, 5, 4, 4, 4], DType::F32), |e| {
            matches!(e, E::Channels { got: 5, expected: 4 })
        }),
        ("an input of rank 3", forward(&[4, 4, 4], DType::F32), |e| matches!(e, E::Rank { got: 3, .. })),
        ("an input of rank 2", forward(&[4, 4], DType::F32), |e| matches!(e, E::Rank { got: 2, .. })),
        ("an input of another type", forward(&[1, 4, 4, 4, 4], DType::F16), |e| {
            matches!(e, E::DTypeMismatch { got: DType::F16, expected: DType::F32, .. })
        }),
        ("an input without height", forward(&[1, 4, 4, 0, 4], DType::F32), |e| {
            matches!(e, E::EmptyInput { axis: "height" })
        }),
        ("an input smaller than the padding", forward(&[1, 4, 4, 4, 1], DType::F32), |e| {
            matches!(e, E::OutputTooSmall { axis: "width", .. })
        }),
        ("one value to normalize", forward(&[1, 4, 3, 3, 3], DType::F32), |e| {
            matches!(e, E::SingleValueNorm { .. })
        }),
        ("no bias", layer(Parameters { bias: None, ..parameters.clone() }), |e| {
            matches!(e, E::Presence { param: "bias", expected: true })
        }),
        (
            "a weight of another shape",
            layer(Parameters { weight: parameters.bias.clone().ok_or("no bias")?, ..parameters.clone() }),
            |e| matches!(e, E::Shape { param: "weight", .. }),
        ),
        (
            "parameters of two types",
            layer(Parameters { weight: of(DType::F64, &parameters.weight)?, ..parameters.clone() }),
            |e| matches!(e, E::DTypeMismatch { .. }),
        ),
    ];
    refuses(attempts)
}

/// Whether an error is the right one.
pub(super) type Rule = fn(&Error) -> bool;

/// Whether each attempt ends with the error that its rule asks for.
pub(super) fn refuses<const N: usize>(attempts: [(&str, Result<()>, Rule); N]) -> Outcome {
    for (what, outcome, is_right) in attempts {
        match outcome {
            Ok(()) => return Err(format!("errors: the engine accepts {what}")),
            Err(error) if !is_right(&error) => {
                return Err(format!("errors: for {what} the engine says: {error:?}"));
            }
            Err(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "conformance_tests.rs"]
mod tests;
