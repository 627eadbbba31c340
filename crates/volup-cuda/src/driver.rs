//! The CUDA driver: the only module that calls it.
//!
//! The driver's library is looked for when a device is first asked for; nothing of it is linked. Every
//! function here may be called from any thread: it makes the device's context current for as long as
//! it needs it, and leaves the caller's as it was.

mod arguments;
mod graph;
mod stream;

pub use arguments::Arguments;
pub(crate) use graph::{Graph, Launch};
pub use stream::{DeviceMemory, Stream};

use crate::device::driver_name;
use crate::{Arch, DeviceInfo, Tuning, Variant, tuning};
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_int};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use volup::{Error, Result};

/// The oldest driver that loads the kernels.
const OLDEST_DRIVER: i32 = 13000;
/// The same in words.
const OLDEST_DRIVER_NAME: &str = "13.0 (r580)";

/// Calls a function of the driver by its name in CUDA's headers.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::driver::checked(stringify!($function), ::cudarc::driver::sys::$function($($argument),*))
    };
}
use call;

/// A result of the driver as ours.
#[inline]
fn checked(call: &'static str, result: sys::CUresult) -> Result<()> {
    if result == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failed(call, result)) }
}

#[cold]
fn failed(call: &'static str, result: sys::CUresult) -> Error {
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded, since it gave the result; `text` is where it puts an address.
    let known = unsafe { sys::cuGetErrorString(result, &mut text) };
    let message = if known == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
        // SAFETY: the driver's texts are constants that end in a NUL.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        "unknown error".into()
    };
    Error::Cuda { call, code: result as u32, message }
}

/// Whether a driver will do: `present` is whether its library was found, `version` what that says.
fn check_driver(present: bool, version: i32) -> Result<()> {
    if !present {
        return Err(Error::NoDriver);
    }
    if version < OLDEST_DRIVER {
        return Err(Error::OldDriver { got: driver_name(version), expected: OLDEST_DRIVER_NAME });
    }
    Ok(())
}

/// Starts the driver; its version and the number of devices.
fn start() -> Result<(i32, usize)> {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: opens libcuda by its name, as any CUDA program does when it starts.
    let present = *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() });
    let mut version = 0;
    if present {
        // SAFETY: the library is there, and `version` is where the driver puts a number.
        unsafe { call!(cuDriverGetVersion(&mut version)) }?;
    }
    check_driver(present, version)?;
    // SAFETY: starts the driver; any number of times does no harm.
    let result = unsafe { sys::cuInit(0) };
    if result == sys::CUresult::CUDA_ERROR_NO_DEVICE {
        return Ok((version, 0));
    }
    checked("cuInit", result)?;
    let mut count = 0;
    // SAFETY: the driver is started, and `count` is where it puts a number.
    unsafe { call!(cuDeviceGetCount(&mut count)) }?;
    Ok((version, usize::try_from(count).unwrap_or(0)))
}

/// All CUDA devices of the system.
///
/// # Errors
/// [`Error::NoDriver`], [`Error::OldDriver`], [`Error::Cuda`].
pub fn devices() -> Result<Vec<DeviceInfo>> {
    let (version, count) = start()?;
    (0..count).map(|ordinal| info(device(ordinal)?, version)).collect()
}

/// The handle of a device; the ordinal is below the count.
fn device(ordinal: usize) -> Result<sys::CUdevice> {
    let mut device = 0;
    // SAFETY: the driver is started, and `device` is where it puts the handle.
    unsafe { call!(cuDeviceGet(&mut device, ordinal as c_int)) }?;
    Ok(device)
}

fn info(device: sys::CUdevice, driver_version: i32) -> Result<DeviceInfo> {
    use sys::CUdevice_attribute as A;
    let attribute = |attribute: A| {
        let mut value = 0;
        // SAFETY: `device` is a device of the started driver, `value` where it puts a number.
        unsafe { call!(cuDeviceGetAttribute(&mut value, attribute, device)) }?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    let mut name = [0; 256];
    // SAFETY: the driver writes at most that many characters, the last of them a NUL.
    unsafe { call!(cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device)) }?;
    let mut memory_bytes = 0;
    // SAFETY: `device` is a device of the started driver, `memory_bytes` where it puts a number.
    unsafe { call!(cuDeviceTotalMem_v2(&mut memory_bytes, device)) }?;
    let name = name.map(|byte| byte as u8);
    // In kHz, two bits of a wire each; in bits.
    let [clock, width] =
        [A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH]
            .map(|what| attribute(what).map_or(0, u64::from));
    Ok(DeviceInfo {
        name: CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned(),
        arch: Arch {
            major: attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        },
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
        l2_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        memory_bytes,
        memory_rate: 2 * 1000 * clock / 8 * width,
        driver_version,
    })
}

/// A CUDA device with its primary context, the one that PyTorch uses too.
pub struct Device {
    ordinal: usize,
    info: DeviceInfo,
    handle: sys::CUdevice,
    /// Retained and never released: devices are kept for the life of the process.
    context: sys::CUcontext,
    kernels: Mutex<BTreeMap<(Arch, &'static str), Kernel>>,
    tuning: OnceLock<Tuning>,
}

// SAFETY: the driver's handles are not tied to a thread.
unsafe impl Send for Device {}
// SAFETY: the driver locks for itself; what changes here is behind a mutex.
unsafe impl Sync for Device {}

impl Device {
    /// The device of a number, counted as CUDA does.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::OldDriver`], [`Error::NoDevice`], [`Error::Cuda`].
    pub fn open(ordinal: usize) -> Result<Arc<Device>> {
        static OPEN: Mutex<BTreeMap<usize, Arc<Device>>> = Mutex::new(BTreeMap::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.get(&ordinal) {
            return Ok(device.clone());
        }
        let (version, count) = start()?;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let handle = device(ordinal)?;
        let info = info(handle, version)?;
        let mut context = null_mut();
        // SAFETY: `handle` is a device of the started driver, `context` where it puts the context.
        unsafe { call!(cuDevicePrimaryCtxRetain(&mut context, handle)) }?;
        let device = Arc::new(Device {
            ordinal,
            info,
            handle,
            context,
            kernels: Mutex::default(),
            tuning: OnceLock::new(),
        });
        open.insert(ordinal, device.clone());
        Ok(device)
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// What it is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The plans that were measured for it, as the file has them when the process first plans; none where that cannot be
    /// read, since nothing needs it.
    pub(crate) fn tuning(&self, variants: &[&Variant]) -> &Tuning {
        self.tuning.get_or_init(|| {
            let read = |path| Tuning::read(path, &self.info, variants).ok();
            tuning::path().as_deref().and_then(read).unwrap_or_default()
        })
    }

    /// Makes this device's context current on this thread until the result is dropped. The functions
    /// of this module do so themselves; around many calls it saves time.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    #[inline]
    pub fn enter(&self) -> Result<Entered<'_>> {
        let mut current = null_mut();
        // SAFETY: the driver is started, and `current` is where it puts the context.
        unsafe { call!(cuCtxGetCurrent(&mut current)) }?;
        let pushed = current != self.context;
        if pushed {
            // SAFETY: the context is retained for the life of the process.
            unsafe { call!(cuCtxPushCurrent_v2(self.context)) }?;
        }
        Ok(Entered { pushed, thread: PhantomData })
    }

    /// A kernel, loaded at its first use and kept for the life of the process. Works while a stream
    /// of this thread is being captured into a graph.
    ///
    /// # Errors
    /// [`Error::MissingKernel`] if the cubin does not hold it; [`Error::OutOfDeviceMemory`],
    /// [`Error::Cuda`].
    pub fn kernel(&self, variant: &Variant) -> Result<Kernel> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (variant.arch, variant.name);
        if let Some(&kernel) = kernels.get(&key) {
            return Ok(kernel);
        }
        let missing = || Error::MissingKernel { name: variant.name.into(), arch: variant.arch.to_string() };
        let image = variant.cubin.bytes();
        let entry = CString::new(variant.entry).ok().filter(|_| !image.is_empty()).ok_or_else(missing)?;
        let _entered = self.enter()?;
        let _relaxed = RelaxedCapture::begin()?;
        let mut module = null_mut();
        // SAFETY: whoever made the `Cubin` said that it is a whole module.
        let result = unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) };
        checked_memory("cuModuleLoadData", result, image.len())?;
        let mut function = null_mut();
        // SAFETY: the module was just loaded, and the name ends in a NUL.
        let result = unsafe { sys::cuModuleGetFunction(&mut function, module, entry.as_ptr()) };
        if result == sys::CUresult::CUDA_ERROR_NOT_FOUND {
            return Err(missing());
        }
        checked("cuModuleGetFunction", result)?;
        let kernel = Kernel { function, threads: variant.threads, shared: 0 };
        kernels.insert(key, kernel);
        Ok(kernel)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device(cuda:{}, {})", self.ordinal, self.info)
    }
}

/// As [`checked`], for calls that take memory.
fn checked_memory(call: &'static str, result: sys::CUresult, bytes: usize) -> Result<()> {
    match result {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(Error::OutOfDeviceMemory { bytes }),
        result => checked(call, result),
    }
}

/// A device's context is current on this thread while this lives.
#[must_use]
pub struct Entered<'a> {
    pushed: bool,
    /// Contexts are current on a thread: this must be dropped on the one that it was made on.
    thread: PhantomData<(&'a Device, *const ())>,
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = null_mut();
            // SAFETY: takes off what `Device::enter` pushed on this thread. An error would change
            // nothing, so there is nothing to do about it.
            unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

/// While this lives, calls of this thread that are forbidden during graph capture are allowed: loading
/// a module does not touch the capturing stream.
struct RelaxedCapture {
    before: sys::CUstreamCaptureMode,
}

impl RelaxedCapture {
    fn begin() -> Result<RelaxedCapture> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver exchanges the mode that `mode` holds for the thread's.
        unsafe { call!(cuThreadExchangeStreamCaptureMode(&mut mode)) }?;
        Ok(RelaxedCapture { before: mode })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: as in `begin`. An error would leave the mode as it is.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.before) };
    }
}

/// A loaded kernel; it belongs to the device that loaded it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    function: sys::CUfunction,
    /// Threads of a block, as the launch counts them.
    threads: u32,
    /// Bytes of shared memory that a launch gives to a block.
    shared: u32,
}

impl Kernel {
    /// The kernel with so many bytes of shared memory a block, besides what it has of itself.
    ///
    /// # Errors
    /// [`Error::Cuda`] if a block cannot have as many.
    pub fn with_shared(self, device: &Device, bytes: u32) -> Result<Kernel> {
        use sys::CUfunction_attribute as A;
        if bytes > 0 {
            let _entered = device.enter()?;
            // What is allowed only grows: other launches of the kernel keep theirs.
            let _alone = device.kernels.lock().unwrap_or_else(PoisonError::into_inner);
            let most = A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let mut allowed = 0;
            // SAFETY: the function stays loaded, and `allowed` is where the driver puts a number.
            unsafe { call!(cuFuncGetAttribute(&mut allowed, most, self.function)) }?;
            let wanted = i32::try_from(bytes).unwrap_or(i32::MAX).max(allowed);
            // The cache is all shared memory, so that as many blocks fit as there is room for.
            let carveout = A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            for (attribute, value) in [(most, wanted), (carveout, 100)] {
                // SAFETY: the function stays loaded.
                unsafe { call!(cuFuncSetAttribute(self.function, attribute, value)) }?;
            }
        }
        Ok(Kernel { shared: bytes, ..self })
    }
}

// SAFETY: a handle that stays valid for the life of the process and is not tied to a thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; nothing of it changes.
unsafe impl Sync for Kernel {}

/// Launches a kernel on a grid of blocks. How many threads a block has, and its shared memory, is part of
/// a tile kernel's code; others have what their variant and [`Kernel::with_shared`] say.
///
/// With `overlap` its blocks may start while those of the kernel before it in the stream still run: it waits for them
/// itself (a programmatic dependent launch).
///
/// # Errors
/// [`Error::Cuda`]. What goes wrong while the kernel runs shows at a later call.
///
/// # Safety
/// The kernel was loaded by the stream's device. `arguments` are of the number and types that it
/// takes. Every address among them is that of memory as large as the kernel takes it to be, valid
/// until the kernel has run, in stream order; what it writes nobody else uses meanwhile. With `overlap` it waits for
/// the kernel before it, before it uses what that writes and before it ends.
#[inline]
pub unsafe fn launch(
    kernel: Kernel,
    grid: [u32; 3],
    arguments: &Arguments,
    stream: &Stream,
    overlap: bool,
) -> Result<()> {
    let _entered = stream.device().enter()?;
    let [x, y, z] = grid;
    arguments.with_addresses(|addresses| {
        if overlap {
            let mut early = sys::CUlaunchAttribute {
                id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                pad: Default::default(),
                value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
            };
            let config = sys::CUlaunchConfig {
                gridDimX: x,
                gridDimY: y,
                gridDimZ: z,
                blockDimX: kernel.threads,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: kernel.shared,
                hStream: stream.handle(),
                attrs: &raw mut early,
                numAttrs: 1,
            };
            // SAFETY: as below; the driver reads the attribute before it returns.
            return unsafe {
                call!(cuLaunchKernelEx(&config, kernel.function, addresses.as_mut_ptr(), null_mut()))
            };
        }
        // SAFETY: the caller answers for the kernel and its arguments; `addresses` holds one address a
        // slot, and the driver copies the slots before it returns.
        unsafe {
            call!(cuLaunchKernel(
                kernel.function,
                x,
                y,
                z,
                kernel.threads,
                1,
                1,
                kernel.shared,
                stream.handle(),
                addresses.as_mut_ptr(),
                null_mut()
            ))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_are_refused_by_what_they_lack() {
        assert!(matches!(check_driver(false, 0), Err(Error::NoDriver)));
        for (version, name) in [(12080, "12.8 (r570)"), (11040, "11.4 (r470)"), (12990, "12.99"), (0, "0.0")]
        {
            let error = check_driver(true, version).unwrap_err();
            assert!(matches!(&error, Error::OldDriver { got, .. } if got == name), "{error}");
        }
        assert_eq!(driver_name(OLDEST_DRIVER), OLDEST_DRIVER_NAME);
        assert!(check_driver(true, 13000).is_ok() && check_driver(true, 14010).is_ok());
    }

    #[test]
    fn devices_that_are_not_there_are_an_error() {
        let error = Device::open(1 << 20).unwrap_err();
        let expected = matches!(
            error,
            Error::NoDriver | Error::OldDriver { .. } | Error::NoDevice { ordinal: 0x100000, .. }
        );
        assert!(expected, "{error}");
    }
}
