//! The CUDA engine on PyTorch's memory and streams.

use crate::arguments::{integer, triple};
use crate::block::{Block, format};
use crate::error::raised;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::Arc;
use volup::{DType, Precision};
use volup_cuda::{Device, Executable, Manifest, Pointers, Request, Stream, Task};

/// A block planned for one shape, type and device; run any number of times.
#[pyclass(frozen, module = "volup._native")]
pub(crate) struct CudaForward {
    device: Arc<Device>,
    forward: Executable,
    presence: Presence,
}

/// Which of the optional tensors the block has.
struct Presence {
    bias: bool,
    affine: bool,
}

#[pymethods]
impl CudaForward {
    /// The input's shape may lack the batch; it is not empty.
    #[new]
    #[pyo3(signature = (
        block, input_shape, dtype, precision, input_channels_last, output_channels_last, ordinal, /
    ))]
    #[allow(clippy::too_many_arguments, reason = "what a plan depends on")]
    fn new(
        py: Python<'_>,
        block: &Block,
        input_shape: Vec<usize>,
        dtype: &str,
        precision: &str,
        input_channels_last: bool,
        output_channels_last: bool,
        ordinal: usize,
    ) -> PyResult<CudaForward> {
        let spec = block.spec;
        let geometry = spec.geometry_of(&input_shape).map_err(raised)?;
        let dtype: DType = dtype.parse().map_err(raised)?;
        let precision = match precision {
            "ieee" => Precision::Ieee,
            "tf32" => Precision::Tf32,
            got => return Err(PyValueError::new_err(format!("no such precision: {got:?}"))),
        };
        let request = Request {
            task: Task::Forward,
            block: spec,
            geometry,
            dtype,
            precision,
            input_format: format(input_channels_last),
            output_format: format(output_channels_last),
            algorithm: None,
        };
        let (device, forward) = py
            .detach(|| {
                let device = device(ordinal)?;
                let forward = Executable::new(&device, &request)?;
                Ok((device, forward))
            })
            .map_err(raised)?;
        let affine = spec.norm().is_some_and(|norm| norm.affine());
        Ok(CudaForward { device, forward, presence: Presence { bias: spec.conv().has_bias(), affine } })
    }

    /// Bytes of scratch memory that a run needs.
    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.forward.workspace_bytes()
    }

    /// Launches the kernels on a stream and returns at once, without holding the GIL.
    ///
    /// Every argument is the device address of a dense tensor of the planned shape, type and format,
    /// 0 for one that the block lacks; then the stream. Whoever calls this sees to it that the memory
    /// outlives the kernels, as PyTorch's allocator does for what is used on its current stream.
    #[pyo3(signature = (input, weight, bias, norm_weight, norm_bias, output, workspace, stream, /))]
    #[allow(clippy::too_many_arguments, reason = "a block's tensors")]
    fn run(
        &self,
        py: Python<'_>,
        input: u64,
        weight: u64,
        bias: u64,
        norm_weight: u64,
        norm_bias: u64,
        output: u64,
        workspace: u64,
        stream: u64,
    ) -> PyResult<()> {
        let Presence { bias: has_bias, affine } = self.presence;
        let required = [
            (input, true),
            (weight, true),
            (bias, has_bias),
            (norm_weight, affine),
            (norm_bias, affine),
            (output, true),
            (workspace, self.forward.workspace_bytes() > 0),
        ];
        if required.iter().any(|&(address, required)| required && address == 0) {
            return Err(PyRuntimeError::new_err("a tensor has no memory"));
        }
        let pointers = Pointers {
            input,
            weight,
            bias,
            norm_weight,
            norm_bias,
            output,
            workspace,
            ..Pointers::default()
        };
        // SAFETY: the package passes the addresses of dense tensors on the planned device, whose
        // shapes, types and formats it has compared with the plan's; the output and the workspace are
        // fresh from torch.empty. The stream is PyTorch's current one on that device, which PyTorch
        // never destroys, and on which its allocator hands the memory out again only in stream order.
        py.detach(|| unsafe { self.forward.run(&pointers, &Stream::borrowed(&self.device, stream)) })
            .map_err(raised)
    }
}

/// Why the engine cannot run on a device; None if it can.
#[pyfunction]
#[pyo3(signature = (ordinal, /))]
pub(crate) fn cuda_status(py: Python<'_>, ordinal: usize) -> Option<String> {
    py.detach(|| device(ordinal)).err().map(|error| error.to_string())
}

/// A block's integers as bytes: equal for arguments that mean the same, however they are given.
///
/// Python's own equality would do except that True equals 1 and 1.0 does, which are refused.
#[pyfunction]
#[pyo3(signature = (stride, padding, output_padding, groups, dilation, norm_groups, /))]
pub(crate) fn integers<'py>(
    py: Python<'py>,
    stride: &Bound<'py, PyAny>,
    padding: &Bound<'py, PyAny>,
    output_padding: &Bound<'py, PyAny>,
    groups: &Bound<'py, PyAny>,
    dilation: &Bound<'py, PyAny>,
    norm_groups: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyBytes>> {
    let mut values = [0i64; 14];
    let triples = [
        ("stride", stride),
        ("padding", padding),
        ("output_padding", output_padding),
        ("dilation", dilation),
    ];
    for (three, (param, value)) in values.chunks_exact_mut(3).zip(triples) {
        three.copy_from_slice(&triple(param, value)?);
    }
    values[12] = integer("groups", "int", groups)?;
    if !norm_groups.is_none() {
        // Every number of groups that is not positive is refused alike.
        values[13] = integer("norm_groups", "int", norm_groups)?.max(0).saturating_add(1);
    }
    Ok(PyBytes::new(py, bytemuck::cast_slice(&values)))
}

/// A device that the engine has kernels for.
fn device(ordinal: usize) -> volup::Result<Arc<Device>> {
    let device = Device::open(ordinal)?;
    Manifest::embedded().for_device(device.info())?;
    Ok(device)
}
