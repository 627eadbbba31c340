//! Decoder files, whose format is the core's: blocks and their parameters, in and out.

use crate::arguments::activation_to_python;
use crate::block::Block;
use crate::error::raised;
use crate::memory::RawTensor;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict, PyList};
use std::path::PathBuf;
use volup::decoder::{Decoder, DecoderBlock, Normalize, Skip};
use volup::{Error, Parameters, Tensor, with_element};

/// A block's tensors: weight, bias, norm's weight, norm's bias.
type RawParameters = (RawTensor, Option<RawTensor>, Option<RawTensor>, Option<RawTensor>);

/// Writes a decoder's file, whole or not at all. The blocks are (name, block, tensors); the tensors
/// are contiguous and kept alive by the caller.
#[pyfunction]
pub(crate) fn write_decoder(
    py: Python<'_>,
    path: PathBuf,
    blocks: Vec<(String, PyRef<'_, Block>, RawParameters)>,
    skip: Option<&str>,
    normalize: Option<&str>,
) -> PyResult<()> {
    let blocks = blocks.into_iter().map(|(name, block, parameters)| {
        let parameters = owned(&parameters)?;
        Ok(DecoderBlock { name, spec: block.spec, parameters })
    });
    let decoder =
        Decoder::new(blocks.collect::<PyResult<Vec<_>>>()?, skip_of(skip)?, normalize_of(normalize)?)
            .map_err(raised)?;
    py.detach(|| decoder.write(path)).map_err(raised)
}

/// Reads a decoder's file: each block as the parameters of
/// `ConvTranspose3dBlock` and its state, whose tensors are (bytes, shape, type's name); then
/// skip and normalize.
#[pyfunction]
pub(crate) fn read_decoder(
    py: Python<'_>,
    path: PathBuf,
) -> PyResult<(Bound<'_, PyList>, Option<&'static str>, Option<&'static str>)> {
    let decoder = py.detach(|| Decoder::read(path)).map_err(raised)?;
    let blocks = PyList::empty(py);
    for DecoderBlock { spec, parameters, .. } in decoder.blocks() {
        let state = PyDict::new(py);
        let Parameters { weight, bias, norm_weight, norm_bias } = parameters;
        for (key, tensor) in [
            ("conv.weight", Some(weight)),
            ("conv.bias", bias.as_ref()),
            ("norm.weight", norm_weight.as_ref()),
            ("norm.bias", norm_bias.as_ref()),
        ] {
            if let Some(tensor) = tensor {
                state.set_item(key, tensor_to_python(py, tensor))?;
            }
        }
        blocks.append((block_to_python(py, spec)?, state))?;
    }
    let skip = decoder.skip().map(|Skip::Trilinear| "trilinear");
    let normalize = decoder.normalize().map(|Normalize::Max| "max");
    Ok((blocks, skip, normalize))
}

/// A block's description under the names of `ConvTranspose3dBlock`'s parameters.
pub(crate) fn block_to_python<'py>(py: Python<'py>, spec: &volup::BlockSpec) -> PyResult<Bound<'py, PyDict>> {
    let (conv, norm) = (spec.conv(), spec.norm());
    let block = PyDict::new(py);
    block.set_item("in_channels", conv.in_channels())?;
    block.set_item("out_channels", conv.out_channels())?;
    block.set_item("kernel_size", conv.kernel_size())?;
    block.set_item("stride", conv.stride())?;
    block.set_item("padding", conv.padding())?;
    block.set_item("output_padding", conv.output_padding())?;
    block.set_item("groups", conv.groups())?;
    block.set_item("dilation", conv.dilation())?;
    block.set_item("bias", conv.has_bias())?;
    block.set_item("activation", activation_to_python(py, spec.activation())?)?;
    block.set_item("norm_groups", norm.map(|norm| norm.groups()))?;
    block.set_item("eps", norm.map_or(1e-5, |norm| norm.eps()))?;
    block.set_item("affine", norm.is_none_or(|norm| norm.affine()))?;
    block.set_item("post_activation", activation_to_python(py, spec.post_activation())?)?;
    Ok(block)
}

type TensorParts<'py> = (Bound<'py, PyByteArray>, Vec<usize>, String);

fn tensor_to_python<'py>(py: Python<'py>, tensor: &Tensor) -> TensorParts<'py> {
    let bytes = with_element!(tensor.dtype(), T => {
        PyByteArray::new(py, bytemuck::cast_slice(tensor.as_slice::<T>().unwrap_or_default()))
    });
    (bytes, tensor.shape().to_vec(), tensor.dtype().to_string())
}

/// Copies a block's tensors, which a decoder owns.
fn owned((weight, bias, norm_weight, norm_bias): &RawParameters) -> PyResult<Parameters> {
    let optional = |tensor: &Option<RawTensor>| tensor.as_ref().map(copy).transpose();
    Ok(Parameters {
        weight: copy(weight)?,
        bias: optional(bias)?,
        norm_weight: optional(norm_weight)?,
        norm_bias: optional(norm_bias)?,
    })
}

fn copy(tensor: &RawTensor) -> PyResult<Tensor> {
    with_element!(tensor.dtype()?, T => {
        // SAFETY: the package passes the address of a contiguous tensor of this shape and type,
        // which it holds on to; the GIL is held, and the slice does not outlive this line.
        let values = unsafe { tensor.elements::<T>()? }.to_vec();
        Tensor::new(tensor.shape(), values).map_err(raised)
    })
}

fn skip_of(name: Option<&str>) -> PyResult<Option<Skip>> {
    match name {
        None => Ok(None),
        Some("trilinear") => Ok(Some(Skip::Trilinear)),
        Some(got) => Err(unknown("skip", got, "trilinear")),
    }
}

fn normalize_of(name: Option<&str>) -> PyResult<Option<Normalize>> {
    match name {
        None => Ok(None),
        Some("max") => Ok(Some(Normalize::Max)),
        Some(got) => Err(unknown("normalize", got, "max")),
    }
}

fn unknown(param: &'static str, got: &str, expected: &'static str) -> PyErr {
    raised(Error::UnknownName { param, got: got.into(), expected })
}
