//! The CUDA engine on PyTorch's memory and streams.

use crate::arguments::{integer, triple};
use crate::block::{Block, format};
use crate::error::raised;
use crate::tensors::{Scratch, address, describe};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};
use std::sync::{Arc, OnceLock};
use volup::{BlockSpec, DType, Precision, Wanted};
use volup_cuda::{Device, Executable, Manifest, Pointers, Request, Stream, Task};

/// A pass of a block, planned for one shape, type and device; run any number of times.
#[pyclass(frozen, module = "volup._native")]
pub(crate) struct CudaPass {
    device: Arc<Device>,
    executable: Executable,
    /// What packs the weight and what computes the rest, of a forward pass that is asked to.
    prepacked: OnceLock<Option<[Executable; 2]>>,
    /// Which tensors it cannot do without, in the order of the fields of [`Pointers`].
    needed: Vec<bool>,
    is_forward: bool,
}

/// The place of the packed weight among the fields of [`Pointers`].
const PACKED: usize = 16;

/// A pass by its name, and which gradients are wanted of it: those of the input, the weight, the bias and the
/// normalization's weight and bias.
fn task(name: &str, wanted: [bool; 5]) -> PyResult<Task> {
    let [input, weight, bias, norm_weight, norm_bias] = wanted;
    let wanted = Wanted { input, weight, bias, norm_weight, norm_bias };
    match name {
        "forward" => Ok(Task::Forward),
        "training" => Ok(Task::Training),
        "backward" => Ok(Task::Backward(wanted)),
        "recompute" => Ok(Task::Recompute(wanted)),
        got => Err(PyValueError::new_err(format!("no such pass: {got:?}"))),
    }
}

#[pymethods]
impl CudaPass {
    /// The input's shape may lack the batch; it is not empty.
    #[new]
    #[pyo3(signature = (
        name, wanted, block, input_shape, dtype, precision, input_channels_last, output_channels_last, ordinal, /
    ))]
    #[allow(clippy::too_many_arguments, reason = "what a plan depends on")]
    fn new(
        py: Python<'_>,
        name: &str,
        wanted: [bool; 5],
        block: &Block,
        input_shape: Vec<usize>,
        dtype: &str,
        precision: &str,
        input_channels_last: bool,
        output_channels_last: bool,
        ordinal: usize,
    ) -> PyResult<CudaPass> {
        let (task, spec) = (task(name, wanted)?, block.spec);
        let geometry = spec.geometry_of(&input_shape).map_err(raised)?;
        let dtype: DType = dtype.parse().map_err(raised)?;
        let precision: Precision = precision.parse().map_err(raised)?;
        let request = Request {
            task,
            block: spec,
            geometry,
            dtype,
            precision,
            input_format: format(input_channels_last),
            output_format: format(output_channels_last),
            algorithm: None,
        };
        let (device, executable) = py
            .detach(|| {
                let device = device(ordinal)?;
                let executable = Executable::new(&device, &request)?;
                Ok((device, executable))
            })
            .map_err(raised)?;
        let needed = needed(task, &spec, executable.workspace_bytes() > 0);
        let is_forward = task == Task::Forward;
        Ok(CudaPass { device, executable, prepacked: OnceLock::new(), needed, is_forward })
    }

    /// Bytes of scratch memory that a run needs.
    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.executable.workspace_bytes()
    }

    /// How the weight is packed, and into how many bytes: passes of which this is equal may share it. None if it is not packed.
    #[getter]
    fn packing(&self, py: Python<'_>) -> PyResult<Option<(String, usize)>> {
        let packing = py.detach(|| self.prepacked()).map_err(raised)?.as_ref().map(|[packing, _]| packing);
        Ok(packing.map(|packing| (format!("{:?}", packing.plan().steps), packing.workspace_bytes())))
    }

    /// Packs a weight, as `packing` says; done when this returns.
    #[pyo3(signature = (weight, packed, stream, /))]
    fn pack(
        &self,
        py: Python<'_>,
        weight: &Bound<'_, PyAny>,
        packed: &Bound<'_, PyAny>,
        stream: u64,
    ) -> PyResult<()> {
        let pointers =
            Pointers { weight: address(weight)?, workspace: address(packed)?, ..Pointers::default() };
        py.detach(|| {
            let Some([packing, _]) = self.prepacked()? else { return Ok(()) };
            // SAFETY: as of `run`; the memory is fresh from torch.empty, of as many bytes as `packing` says.
            let stream = unsafe { Stream::borrowed(&self.device, stream) };
            // SAFETY: as before.
            unsafe { packing.run(&pointers, &stream) }?;
            stream.synchronize()
        })
        .map_err(raised)
    }

    /// Launches the kernels on a stream and returns at once, without holding the GIL.
    ///
    /// The tensors are dense, on the device, of the planned shapes, types and formats. For each there is a byte: its
    /// place among the fields of [`Pointers`], or 255 for one that the pass has no use for. With a packed weight, which `pack`
    /// wrote, that is taken in the weight's place. Scratch memory that is not
    /// among them comes from PyTorch's allocator, in a faster way than Python's; where there is none, that is a
    /// `MemoryError`. Whoever calls this
    /// sees to it that the memory outlives the kernels, as PyTorch's allocator does for what is used on its
    /// current stream.
    #[pyo3(signature = (tensors, slots, stream, /))]
    fn run(&self, py: Python<'_>, tensors: &Bound<'_, PyList>, slots: &[u8], stream: u64) -> PyResult<()> {
        let mut addresses = [0; 17];
        for (tensor, &slot) in std::iter::zip(tensors.iter(), slots) {
            if let Some(to) = addresses.get_mut(usize::from(slot)) {
                *to = address(&tensor)?;
            }
        }
        let prepacked =
            if addresses[PACKED] == 0 { None } else { self.prepacked().map_err(raised)?.as_ref() };
        let executable = prepacked.map_or(&self.executable, |[_, block]| block);
        let scratch = executable.workspace_bytes();
        let scratch = if scratch > 0 && addresses[15] == 0 {
            let scratch = Scratch::new(py, scratch, self.device.ordinal());
            Some(scratch.ok_or_else(|| PyMemoryError::new_err("no scratch memory"))?)
        } else {
            None
        };
        if let Some(scratch) = &scratch {
            addresses[15] = scratch.address();
        }
        if std::iter::zip(&self.needed, addresses).any(|(&needed, address)| needed && address == 0) {
            return Err(PyRuntimeError::new_err("a tensor has no memory"));
        }
        let [input, weight, bias, norm_weight, norm_bias, output, rest @ ..] = addresses;
        let [convolution, mean, rstd, grad_output, grad_input, grad_weight, rest @ ..] = rest;
        let [grad_bias, grad_norm_weight, grad_norm_bias, workspace, packed] = rest;
        let pointers = Pointers {
            input,
            weight,
            bias,
            norm_weight,
            norm_bias,
            output,
            convolution,
            mean,
            rstd,
            grad_output,
            grad_input,
            grad_weight,
            grad_bias,
            grad_norm_weight,
            grad_norm_bias,
            workspace,
            packed,
        };
        // SAFETY: the package passes the addresses of dense tensors on the planned device, whose
        // shapes, types and formats it has compared with the plan's; what is written and the workspace
        // are fresh from torch.empty. The stream is PyTorch's current one on that device, which PyTorch
        // never destroys, and on which its allocator hands the memory out again only in stream order.
        py.detach(|| unsafe { executable.run(&pointers, &Stream::borrowed(&self.device, stream)) })
            .map_err(raised)
    }
}

impl CudaPass {
    /// The pass in two, if it is a forward pass that packs its weight.
    fn prepacked(&self) -> volup::Result<&Option<[Executable; 2]>> {
        if let Some(known) = self.prepacked.get() {
            return Ok(known);
        }
        let found = if self.is_forward { self.executable.prepacked(&self.device)? } else { None };
        Ok(self.prepacked.get_or_init(|| found))
    }
}

/// Which tensors a pass needs, in the order of the fields of [`Pointers`].
fn needed(task: Task, block: &BlockSpec, workspace: bool) -> Vec<bool> {
    let bias = block.conv().has_bias();
    let norm = block.norm().is_some();
    let affine = block.norm().is_some_and(|norm| norm.affine());
    let followed = norm || block.activation().is_some() || block.post_activation().is_some();
    let gradients = |wanted: Wanted| {
        let vectors = [wanted.bias && bias, wanted.norm_weight && affine, wanted.norm_bias && affine];
        [true, wanted.input, wanted.weight, vectors[0], vectors[1], vectors[2]]
    };
    // Of input, weight and bias; of the output and what is saved; of the gradients.
    let (factors, results, gradients) = match task {
        Task::Forward => ([true, true, bias], [true, false, false, false], [false; 6]),
        Task::Training => ([true, true, bias], [true, true, norm, norm], [false; 6]),
        // The gradient of one of the convolution's factors is made of the other.
        Task::Backward(wanted) => {
            ([wanted.weight, wanted.input, false], [false, followed, norm, norm], gradients(wanted))
        }
        Task::Recompute(wanted) => ([true, true, bias], [false; 4], gradients(wanted)),
    };
    [&factors[..], &[affine, affine], &results, &gradients, &[workspace]].concat()
}

/// Why the engine cannot run on a device; None if it can.
#[pyfunction]
#[pyo3(signature = (ordinal, /))]
pub(crate) fn cuda_status(py: Python<'_>, ordinal: usize) -> Option<String> {
    py.detach(|| device(ordinal)).err().map(|error| error.to_string())
}

/// All that is known of a call beside names and eps, as bytes: equal for tensors that are alike and arguments that mean
/// the same, however they are given. None for what is wrong, and for tensors whose memory says nothing.
///
/// `grad` is whether tensors that require gradients matter; the arguments begin with stride, padding, output_padding,
/// groups, dilation and norm_groups. Python's own equality would do for these except that True equals 1 and 1.0 does,
/// which are refused.
#[pyfunction]
#[pyo3(signature = (tensors, grad, arguments, /))]
pub(crate) fn kind<'py>(
    tensors: &Bound<'py, PyTuple>,
    grad: bool,
    arguments: &Bound<'py, PyTuple>,
) -> Option<Bound<'py, PyBytes>> {
    let mut bytes = Vec::with_capacity(512);
    let triples = [("stride", 0), ("padding", 1), ("output_padding", 2), ("dilation", 4)];
    for (param, at) in triples {
        let value = arguments.get_borrowed_item(at).ok()?;
        bytes.extend_from_slice(bytemuck::cast_slice(&triple(param, &value).ok()?));
    }
    let groups = arguments.get_borrowed_item(3).ok()?;
    bytes.extend(integer("groups", "int", &groups).ok()?.to_ne_bytes());
    let norm_groups = arguments.get_borrowed_item(5).ok()?;
    // Every number of groups that is not positive is refused alike.
    let of_norm = || Some(integer("norm_groups", "int", &norm_groups).ok()?.max(0).saturating_add(1));
    let of_norm = if norm_groups.is_none() { 0 } else { of_norm()? };
    bytes.extend(of_norm.to_ne_bytes());
    let plain = describe(tensors, grad, &mut bytes).unwrap_or(false);
    plain.then(|| PyBytes::new(tensors.py(), &bytes))
}

/// A device that the engine has kernels for.
fn device(ordinal: usize) -> volup::Result<Arc<Device>> {
    let device = Device::open(ordinal)?;
    Manifest::embedded().for_device(device.info())?;
    Ok(device)
}
