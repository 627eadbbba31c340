//! The passes of training on the host: what the operators of `volup/_operators.py` call.
//!
//! Every tensor is (address, shape, type's name), batched; the parameters are contiguous. Whoever calls
//! these keeps the tensors alive meanwhile, and no one else refers to those that are written.

use crate::block::{Block, engine, expect_tensors, format};
use crate::error::raised;
use crate::memory::RawTensor;
use pyo3::prelude::*;
use std::mem::MaybeUninit;
use volup::{DType, Geometry, with_element};
use volup_cpu::{CpuLayer, EpilogueGradients, ParametersRef, SavedMut, SavedRef, Storage, Volume};

/// A tensor and whether its channels lie last.
type RawVolume = (RawTensor, bool);

/// # Safety
/// As [`RawTensor::elements`].
unsafe fn volume<'a, T: Storage>((tensor, channels_last): &RawVolume) -> PyResult<Volume<'a, T>> {
    // SAFETY: the caller's contract.
    Ok(Volume { values: unsafe { tensor.elements::<T>()? }, format: format(*channels_last) })
}

/// # Safety
/// As [`RawTensor::elements_mut`].
unsafe fn written<'a, T: Storage>(tensor: &Option<RawTensor>) -> PyResult<Option<&'a mut [MaybeUninit<T>]>> {
    // SAFETY: the caller's contract.
    tensor.as_ref().map(|tensor| unsafe { tensor.elements_mut::<T>() }).transpose()
}

/// # Safety
/// As [`RawTensor::elements`].
unsafe fn vector<'a, T: Storage>(tensor: &Option<RawTensor>) -> PyResult<Option<&'a [T]>> {
    // SAFETY: the caller's contract.
    tensor.as_ref().map(|tensor| unsafe { tensor.elements::<T>() }).transpose()
}

fn geometry(block: &Block, input_shape: &[usize]) -> PyResult<Geometry> {
    block.spec.geometry_of(input_shape).map_err(raised)
}

/// Applies a block and keeps what the backward pass needs; without an output, only that.
#[pyfunction]
#[pyo3(signature = (
    block, threads, input, weight, bias, norm_weight, norm_bias, convolution, mean, rstd, output,
    channels_last, /
))]
#[allow(clippy::too_many_arguments, reason = "a block's tensors")]
pub(crate) fn forward_for_training(
    py: Python<'_>,
    block: &Block,
    threads: usize,
    input: RawVolume,
    weight: RawTensor,
    bias: Option<RawTensor>,
    norm_weight: Option<RawTensor>,
    norm_bias: Option<RawTensor>,
    convolution: RawTensor,
    mean: RawTensor,
    rstd: RawTensor,
    output: Option<RawTensor>,
    channels_last: bool,
) -> PyResult<()> {
    let geometry = geometry(block, input.0.shape())?;
    expect_tensors(&block.spec, &input.0, &weight, [&bias, &norm_weight, &norm_bias])?;
    let dtype = input.0.dtype()?;
    for (name, tensor) in [("convolution", Some(&convolution)), ("output", output.as_ref())] {
        tensor.map_or(Ok(()), |tensor| tensor.expect(name, &geometry.output_shape(), dtype))?;
    }
    let statistics = block.spec.norm().map(|norm| [geometry.batch(), norm.groups()]);
    let statistics = statistics.as_ref().map_or(&[0][..], |shape| &shape[..]);
    for (name, tensor) in [("mean", &mean), ("rstd", &rstd)] {
        tensor.expect(name, statistics, dtype.accumulator())?;
    }
    let engine = engine(threads);
    with_element!(dtype, T => {
        type A = <T as volup::Element>::Acc;
        // SAFETY: this module's contract; `expect` compared shapes and types with what is read and
        // written here. The statistics were zeros before.
        let (parameters, input, convolution, mean, rstd, output) = unsafe {
            let parameters = ParametersRef {
                weight: weight.elements::<T>()?,
                bias: vector(&bias)?,
                norm_weight: vector(&norm_weight)?,
                norm_bias: vector(&norm_bias)?,
            };
            let (mean, rstd) = (mean.elements_mut::<A>()?, rstd.elements_mut::<A>()?);
            let mean = &mut *(std::ptr::from_mut(mean) as *mut [A]);
            let rstd = &mut *(std::ptr::from_mut(rstd) as *mut [A]);
            let convolution = convolution.elements_mut::<T>()?;
            (parameters, volume::<T>(&input)?, convolution, mean, rstd, written::<T>(&output)?)
        };
        py.detach(|| {
            let layer = CpuLayer::new(&block.spec, parameters)?;
            let saved = SavedMut { convolution, mean, rstd };
            engine.forward_for_training_into(&layer, &geometry, input, saved, output, format(channels_last))
        })
        .map_err(raised)
    })
}

/// The gradient of a convolution's input.
#[pyfunction]
#[pyo3(signature = (block, threads, grad_output, weight, grad_input, /))]
pub(crate) fn input_gradient(
    py: Python<'_>,
    block: &Block,
    threads: usize,
    grad_output: RawVolume,
    weight: RawTensor,
    grad_input: RawVolume,
) -> PyResult<()> {
    let geometry = geometry(block, grad_input.0.shape())?;
    let dtype = grad_output.0.dtype()?;
    grad_output.0.expect("grad_output", &geometry.output_shape(), dtype)?;
    weight.expect("weight", &geometry.conv().weight_shape(), dtype)?;
    grad_input.0.expect("grad_input", &geometry.input_shape(), dtype)?;
    let engine = engine(threads);
    with_element!(dtype, T => {
        // SAFETY: as in `forward_for_training`.
        let (grad_output, weight, to) = unsafe {
            (volume::<T>(&grad_output)?, weight.elements::<T>()?, grad_input.0.elements_mut::<T>()?)
        };
        let format = format(grad_input.1);
        py.detach(|| engine.input_gradient_into(&geometry, weight, grad_output, to, format)).map_err(raised)
    })
}

/// The type of gradients of parameters: that of the tensors, or float64, in which those of parts of a batch are added up.
fn type_of_gradients<const N: usize>(dtype: DType, given: [Option<&RawTensor>; N]) -> PyResult<DType> {
    let first = given.into_iter().flatten().next().map(RawTensor::dtype).transpose()?;
    Ok(if first == Some(DType::F64) { DType::F64 } else { dtype })
}

/// Runs code with a type `$V` for gradients of parameters: float64 if that is what they are in, else `$T`.
macro_rules! with_gradient {
    ($dtype:expr, $T:ident, $V:ident => $body:expr) => {
        if $dtype == DType::F64 {
            type $V = f64;
            $body
        } else {
            type $V = $T;
            $body
        }
    };
}

/// The gradient of a convolution's weight, in its own type or in float64.
#[pyfunction]
#[pyo3(signature = (block, threads, input, grad_output, grad_weight, /))]
pub(crate) fn weight_gradient(
    py: Python<'_>,
    block: &Block,
    threads: usize,
    input: RawVolume,
    grad_output: RawVolume,
    grad_weight: RawTensor,
) -> PyResult<()> {
    let geometry = geometry(block, input.0.shape())?;
    let dtype = input.0.dtype()?;
    input.0.expect("input", &geometry.input_shape(), dtype)?;
    grad_output.0.expect("grad_output", &geometry.output_shape(), dtype)?;
    let of_parameters = type_of_gradients(dtype, [Some(&grad_weight)])?;
    grad_weight.expect("grad_weight", &geometry.conv().weight_shape(), of_parameters)?;
    let engine = engine(threads);
    with_element!(dtype, T => with_gradient!(of_parameters, T, V => {
        // SAFETY: as in `forward_for_training`.
        let (input, grad_output, to) = unsafe {
            (volume::<T>(&input)?, volume::<T>(&grad_output)?, grad_weight.elements_mut::<V>()?)
        };
        py.detach(|| engine.weight_gradient_into(&geometry, input, grad_output, to)).map_err(raised)
    }))
}

/// The gradients of what follows the convolution in a block, those that are asked for; those of parameters in their own
/// type or all in float64.
#[pyfunction]
#[pyo3(signature = (
    block, threads, input_shape, convolution, mean, rstd, norm_weight, norm_bias, grad_output,
    grad_convolution, grad_bias, grad_norm_weight, grad_norm_bias, /
))]
#[allow(clippy::too_many_arguments, reason = "a block's tensors")]
pub(crate) fn epilogue_gradient(
    py: Python<'_>,
    block: &Block,
    threads: usize,
    input_shape: Vec<usize>,
    convolution: RawVolume,
    mean: RawTensor,
    rstd: RawTensor,
    norm_weight: Option<RawTensor>,
    norm_bias: Option<RawTensor>,
    grad_output: RawVolume,
    grad_convolution: Option<RawVolume>,
    grad_bias: Option<RawTensor>,
    grad_norm_weight: Option<RawTensor>,
    grad_norm_bias: Option<RawTensor>,
) -> PyResult<()> {
    let geometry = geometry(block, &input_shape)?;
    let dtype = grad_output.0.dtype()?;
    let shape = geometry.output_shape();
    grad_output.0.expect("grad_output", &shape, dtype)?;
    convolution.0.expect("convolution", &shape, dtype)?;
    grad_convolution.as_ref().map_or(Ok(()), |(to, _)| to.expect("grad_convolution", &shape, dtype))?;
    let channels = [geometry.conv().out_channels()];
    let vectors = [&grad_bias, &grad_norm_weight, &grad_norm_bias].map(Option::as_ref);
    let of_parameters = type_of_gradients(dtype, vectors)?;
    for (name, tensor, dtype) in [
        ("norm_weight", &norm_weight, dtype),
        ("norm_bias", &norm_bias, dtype),
        ("grad_bias", &grad_bias, of_parameters),
        ("grad_norm_weight", &grad_norm_weight, of_parameters),
        ("grad_norm_bias", &grad_norm_bias, of_parameters),
    ] {
        tensor.as_ref().map_or(Ok(()), |tensor| tensor.expect(name, &channels, dtype))?;
    }
    for (name, tensor) in [("mean", &mean), ("rstd", &rstd)] {
        tensor.expect(name, tensor.shape(), dtype.accumulator())?;
    }
    let engine = engine(threads);
    with_element!(dtype, T => with_gradient!(of_parameters, T, V => {
        // SAFETY: as in `forward_for_training`; the engine compares the lengths of the statistics.
        let (saved, grad_output, gradients) = unsafe {
            let saved = SavedRef::<T> {
                convolution: volume(&convolution)?,
                mean: mean.elements()?,
                rstd: rstd.elements()?,
                norm_weight: vector(&norm_weight)?,
                norm_bias: vector(&norm_bias)?,
            };
            let of_convolution = match &grad_convolution {
                Some((tensor, channels_last)) => Some((tensor.elements_mut::<T>()?, format(*channels_last))),
                None => None,
            };
            let gradients = EpilogueGradients {
                convolution: of_convolution,
                bias: written::<V>(&grad_bias)?,
                norm_weight: written::<V>(&grad_norm_weight)?,
                norm_bias: written::<V>(&grad_norm_bias)?,
            };
            (saved, volume::<T>(&grad_output)?, gradients)
        };
        py.detach(|| engine.epilogue_gradient_into(&block.spec, &geometry, saved, grad_output, gradients))
            .map_err(raised)
    }))
}
