//! PyTorch's tensors as C structures, by DLPack's function table where PyTorch has one (2.10 on), else by their
//! attributes: a call of a small volume takes no longer than asking each tensor for a few of these.

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyCapsule, PyTuple, PyType};
use std::ffi::{c_char, c_int, c_void};
use std::ptr::{NonNull, null_mut};

/// Sizes and strides of a tensor, at most: volumes, weights and vectors.
const MOST_AXES: usize = 5;
/// What kernels on a GPU ask of addresses; PyTorch aligns to more, but a view may begin anywhere.
const ALIGNMENT: u64 = 16;

// A tensor's state, as a byte of its description: not given; at an address for vectors, for elements, for neither;
// of a storage that is smaller than the tensor.
const MISSING: u8 = 0;
const READABLE: u8 = 1;
const MISALIGNED: u8 = 2;
const ASKEW: u8 = 3;
const FREED: u8 = 4;

/// DLPack's numbers of the types of devices that calls are planned for.
const CPU: i32 = 1;
const CUDA: i32 = 2;

/// DLPack's `DLTensor`.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// DLPack's `DLManagedTensorVersioned`.
#[repr(C)]
struct DlManaged {
    major: u32,
    minor: u32,
    context: *mut c_void,
    delete: Option<unsafe extern "C" fn(*mut DlManaged)>,
    flags: u64,
    tensor: DlTensor,
}

/// Where an allocation says why it failed: whatever was passed with it, the kind of the error, its text.
type Complaint = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char);

/// DLPack's `DLPackExchangeAPI` of version 1, with the functions that are used here.
#[repr(C)]
struct Exchange {
    major: u32,
    minor: u32,
    previous: *const Exchange,
    allocate:
        Option<unsafe extern "C" fn(*mut DlTensor, *mut *mut DlManaged, *mut c_void, Complaint) -> c_int>,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
    current_stream: *const c_void,
}

/// PyTorch's names that are looked up once.
struct Torch {
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    /// `__torch_dispatch__` of classes whose tensors have memory.
    no_dispatch: Py<PyAny>,
    exchange: Option<&'static Exchange>,
}

// SAFETY: the table is constant, and its functions are called under the GIL.
unsafe impl Send for Torch {}
// SAFETY: as above.
unsafe impl Sync for Torch {}

impl Torch {
    fn get(py: Python<'_>) -> PyResult<&'static Torch> {
        static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
        TORCH.get_or_try_init(py, || {
            let torch = py.import("torch")?;
            let tensor = torch.getattr("Tensor")?.cast_into::<PyType>()?;
            let parameter = torch.getattr("nn")?.getattr("Parameter")?.cast_into::<PyType>()?;
            let no_dispatch = tensor.getattr("__torch_dispatch__")?.unbind();
            let exchange = exchange(&tensor);
            Ok(Torch { tensor: tensor.unbind(), parameter: parameter.unbind(), no_dispatch, exchange })
        })
    }
}

/// The table, if there is one of a version that is known here.
fn exchange(tensor: &Bound<'_, PyType>) -> Option<&'static Exchange> {
    let capsule = tensor.getattr("__dlpack_c_exchange_api__").ok()?.cast_into::<PyCapsule>().ok()?;
    let address = capsule.pointer_checked(Some(c"dlpack_exchange_api")).ok()?;
    // SAFETY: by its name the capsule holds DLPack's table, which lives as long as the process; its head is the
    // same in all versions.
    let exchange = unsafe { address.cast::<Exchange>().as_ref() };
    (exchange.major == 1 && exchange.tensor_from_object.is_some() && exchange.allocate.is_some())
        .then_some(exchange)
}

/// What is asked of a tensor.
struct Facts {
    address: u64,
    /// The type and the device: equal numbers for equal ones.
    dtype: u64,
    device: u64,
    itemsize: i64,
    axes: usize,
    shape: [i64; MOST_AXES],
    strides: [i64; MOST_AXES],
}

impl Facts {
    fn of(torch: &Torch, tensor: &Bound<'_, PyAny>) -> Option<Facts> {
        match torch.exchange {
            Some(exchange) => Facts::exchanged(exchange, tensor),
            None => Facts::of_attributes(tensor).ok()?,
        }
    }

    /// None for a tensor that is no strided array, or of too many axes.
    fn exchanged(exchange: &Exchange, tensor: &Bound<'_, PyAny>) -> Option<Facts> {
        let raw = view(exchange, tensor)?;
        let axes = usize::try_from(raw.ndim).ok().filter(|&axes| axes <= MOST_AXES)?;
        if raw.device_type != CPU && raw.device_type != CUDA {
            return None;
        }
        let (mut shape, mut strides) = ([0; MOST_AXES], [0; MOST_AXES]);
        if axes > 0 {
            if raw.shape.is_null() || raw.strides.is_null() {
                return None;
            }
            // SAFETY: they are of `ndim` numbers, and live as long as the tensor.
            unsafe {
                shape[..axes].copy_from_slice(std::slice::from_raw_parts(raw.shape, axes));
                strides[..axes].copy_from_slice(std::slice::from_raw_parts(raw.strides, axes));
            }
        }
        Some(Facts {
            address: raw.data as u64 + raw.byte_offset,
            dtype: u64::from(raw.code) << 24 | u64::from(raw.bits) << 16 | u64::from(raw.lanes),
            device: (raw.device_type as u32 as u64) << 32 | raw.device_id as u32 as u64,
            itemsize: i64::from(raw.bits / 8),
            axes,
            shape,
            strides,
        })
    }

    fn of_attributes(tensor: &Bound<'_, PyAny>) -> PyResult<Option<Facts>> {
        let sizes: Vec<i64> = tensor.getattr("shape")?.extract()?;
        let steps: Vec<i64> = tensor.call_method0("stride")?.extract()?;
        let axes = sizes.len();
        if axes > MOST_AXES {
            return Ok(None);
        }
        let (mut shape, mut strides) = ([0; MOST_AXES], [0; MOST_AXES]);
        shape[..axes].copy_from_slice(&sizes);
        strides[..axes].copy_from_slice(&steps);
        // Types are single objects, which live as long as the process.
        let dtype = tensor.getattr("dtype")?.as_ptr() as u64;
        let name: String = tensor.getattr("device")?.str()?.extract()?;
        let index = name.strip_prefix("cuda:").and_then(|index| index.parse::<u32>().ok());
        let device = match index {
            Some(index) => 1 + u64::from(index),
            None if name == "cpu" => 0,
            None => return Ok(None),
        };
        let itemsize = tensor.call_method0("element_size")?.extract()?;
        let address = tensor.call_method0("data_ptr")?.extract()?;
        Ok(Some(Facts { address, dtype, device, itemsize, axes, shape, strides }))
    }

    /// Whether its memory can be read, and by what.
    fn state(&self, tensor: &Bound<'_, PyAny>) -> PyResult<u8> {
        if self.shape[..self.axes].contains(&0) {
            return Ok(READABLE);
        }
        // Of a storage that was freed, as that of a sharded parameter between uses, the size tells.
        let last: i64 =
            std::iter::zip(self.shape, self.strides).take(self.axes).map(|(n, step)| (n - 1) * step).sum();
        let py = tensor.py();
        let offset: i64 = method(tensor, pyo3::intern!(py, "storage_offset"))?.extract()?;
        let storage = method(tensor, pyo3::intern!(py, "untyped_storage"))?;
        let bytes: i64 = method(&storage, pyo3::intern!(py, "nbytes"))?.extract()?;
        Ok(match () {
            () if self.address == 0 || (offset + last + 1) * self.itemsize > bytes => FREED,
            () if !self.address.is_multiple_of(self.itemsize as u64) => ASKEW,
            () if !self.address.is_multiple_of(ALIGNMENT) => MISALIGNED,
            () => READABLE,
        })
    }
}

/// A tensor by the table; None where that refuses it.
fn view(exchange: &Exchange, tensor: &Bound<'_, PyAny>) -> Option<DlTensor> {
    let mut raw = std::mem::MaybeUninit::<DlTensor>::uninit();
    let function = exchange.tensor_from_object?;
    // SAFETY: the object is one of PyTorch's tensors, held by the caller along with the GIL; the function fills the
    // structure or says that it has not, with an exception.
    unsafe {
        if function(tensor.as_ptr().cast(), raw.as_mut_ptr()) != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        Some(raw.assume_init())
    }
}

/// Calls a method without arguments, and makes no object of it.
fn method<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, pyo3::types::PyString>,
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the arguments end in a null, and the result is a new reference or an exception.
    unsafe {
        let result =
            ffi::PyObject_CallMethodObjArgs(object.as_ptr(), name.as_ptr(), null_mut::<ffi::PyObject>());
        Bound::from_owned_ptr_or_err(object.py(), result)
    }
}

/// Where a tensor that was described before lies.
pub(crate) fn address(tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
    let torch = Torch::get(tensor.py())?;
    if let Some(exchange) = torch.exchange {
        let refused = || PyRuntimeError::new_err("a tensor has no memory");
        return view(exchange, tensor).map(|raw| raw.data as u64 + raw.byte_offset).ok_or_else(refused);
    }
    tensor.call_method0("data_ptr")?.extract()
}

/// Memory of a GPU that PyTorch's allocator gave for the current stream, and gets back when this is dropped.
pub(crate) struct Scratch(NonNull<DlManaged>);

impl Scratch {
    /// Bytes on a device; None where PyTorch has no table, or has no memory.
    pub(crate) fn new(py: Python<'_>, bytes: usize, ordinal: usize) -> Option<Scratch> {
        unsafe extern "C" fn ignore(_: *mut c_void, _: *const c_char, _: *const c_char) {}
        let allocate = Torch::get(py).ok()?.exchange?.allocate?;
        let mut size = i64::try_from(bytes).ok()?;
        let mut like = DlTensor {
            data: null_mut(),
            device_type: CUDA,
            device_id: i32::try_from(ordinal).ok()?,
            ndim: 1,
            // An unsigned integer.
            code: 1,
            bits: 8,
            lanes: 1,
            shape: &raw mut size,
            strides: null_mut(),
            byte_offset: 0,
        };
        let mut managed = null_mut();
        // SAFETY: `like` describes a vector of bytes and lives until the function returns, which writes a tensor to
        // `managed` or fails.
        let failed = unsafe { allocate(&raw mut like, &raw mut managed, null_mut(), ignore) } != 0;
        if failed {
            drop(PyErr::take(py));
            return None;
        }
        NonNull::new(managed).map(Scratch)
    }

    /// Where it is.
    pub(crate) fn address(&self) -> u64 {
        // SAFETY: it lives until this is dropped.
        let tensor = unsafe { &self.0.as_ref().tensor };
        tensor.data as u64 + tensor.byte_offset
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: nobody else has it, and its function frees it.
        unsafe {
            if let Some(delete) = self.0.as_ref().delete {
                delete(self.0.as_ptr());
            }
        }
    }
}

/// Writes all that a plan depends on of tensors to bytes; false for tensors of which addresses do not say what they hold.
///
/// # Errors
/// Something is no tensor, or none with memory.
pub(crate) fn describe(tensors: &Bound<'_, PyTuple>, grad: bool, to: &mut Vec<u8>) -> PyResult<bool> {
    let py = tensors.py();
    let torch = Torch::get(py)?;
    let mut records = false;
    for tensor in tensors.iter_borrowed() {
        if tensor.is_none() {
            to.push(MISSING);
            continue;
        }
        let class = tensor.get_type();
        if !class.is(&torch.tensor) && !class.is(&torch.parameter) {
            // A class that only adds attributes is like any other; one with __torch_dispatch__ may have no memory.
            if !class.is_subclass(torch.tensor.bind(py))?
                || !class.getattr(pyo3::intern!(py, "__torch_dispatch__"))?.is(&torch.no_dispatch)
            {
                return Ok(false);
            }
        }
        if method(&tensor, pyo3::intern!(py, "is_neg"))?.is_truthy()? {
            return Ok(false);
        }
        if grad && !records {
            records = tensor.getattr(pyo3::intern!(py, "requires_grad"))?.is_truthy()?;
        }
        let Some(facts) = Facts::of(torch, &tensor) else { return Ok(false) };
        to.push(facts.state(&tensor)?);
        to.push(facts.axes as u8);
        to.extend(facts.dtype.to_ne_bytes());
        to.extend(facts.device.to_ne_bytes());
        to.extend_from_slice(bytemuck::cast_slice(&facts.shape[..facts.axes]));
        to.extend_from_slice(bytemuck::cast_slice(&facts.strides[..facts.axes]));
    }
    to.push(u8::from(records));
    Ok(true)
}

/// All that a plan depends on of tensors, where an address says what they hold; else None.
#[pyfunction]
#[pyo3(name = "describe", signature = (tensors, /))]
pub(crate) fn described<'py>(tensors: &Bound<'py, PyTuple>) -> Option<Bound<'py, PyBytes>> {
    let mut bytes = Vec::with_capacity(512);
    let plain = describe(tensors, false, &mut bytes).unwrap_or(false);
    plain.then(|| PyBytes::new(tensors.py(), &bytes))
}
