//! Streams, and memory that is taken and given back in their order.

use super::{Device, call, checked_memory};
use cudarc::driver::sys;
use std::ptr::null_mut;
use std::sync::Arc;
use volup::{Error, Result};

/// Work on a device that is done in the order in which it was asked for.
pub struct Stream {
    device: Arc<Device>,
    handle: sys::CUstream,
    /// The pool of a stream of our own; none if the stream is borrowed.
    pool: Option<sys::CUmemoryPool>,
}

// SAFETY: the driver's handles are not tied to a thread.
unsafe impl Send for Stream {}
// SAFETY: the driver locks for itself; nothing changes here.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream, which does not wait for others, with a pool of memory that keeps what was given
    /// back for the next that asks.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn new(device: &Arc<Device>) -> Result<Stream> {
        let _entered = device.enter()?;
        let properties = sys::CUmemPoolProps {
            allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: device.handle,
            },
            win32SecurityAttributes: null_mut(),
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let mut pool = null_mut();
        // SAFETY: the properties describe ordinary memory of this device; `pool` receives the handle.
        unsafe { call!(cuMemPoolCreate(&mut pool, &properties)) }?;
        // From here on it is dropped as a whole: the null stream is never destroyed.
        let mut stream = Stream { device: device.clone(), handle: null_mut(), pool: Some(pool) };
        let mut threshold = u64::MAX;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: this attribute is a number of 64 bits, which the driver reads.
        unsafe { call!(cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast())) }?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the device's context is current; `handle` receives the stream.
        unsafe { call!(cuStreamCreate(&mut stream.handle, flags)) }?;
        Ok(stream)
    }

    /// A stream of someone else's, by its handle; 0 is the legacy default stream.
    ///
    /// # Safety
    /// It is a stream of this device, and stays one for as long as this value lives.
    #[inline]
    pub unsafe fn borrowed(device: &Arc<Device>, handle: u64) -> Stream {
        Stream { device: device.clone(), handle: handle as usize as sys::CUstream, pool: None }
    }

    /// The device.
    #[inline]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    #[inline]
    pub(crate) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Whether what is asked for is put into a graph of the caller's, or nothing may be asked for.
    #[inline]
    pub(crate) fn is_captured(&self) -> bool {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a stream of a context that lives; `status` receives the answer.
        let known = unsafe { sys::cuStreamIsCapturing(self.handle, &mut status) };
        known != sys::CUresult::CUDA_SUCCESS
            || status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    }

    /// Waits until all work on it is done.
    ///
    /// # Errors
    /// [`Error::Cuda`], also of work that was asked for earlier.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: a stream of the current context.
        unsafe { call!(cuStreamSynchronize(self.handle)) }
    }

    /// Fills `words` words of 32 bits from a device address on with a value.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// The words are memory of this device that is valid, and used by nobody else, until the work is
    /// done, in stream order.
    #[inline]
    pub unsafe fn fill(&self, address: u64, value: u32, words: usize) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: the caller answers for the memory.
        unsafe { call!(cuMemsetD32Async(address, value, words, self.handle)) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let (Some(pool), Ok(_entered)) = (self.pool, self.device.enter()) else { return };
        // SAFETY: both are ours. The driver lets work that is under way finish, and keeps the pool
        // until its last memory is given back; an error leaves nothing to do.
        unsafe {
            if !self.handle.is_null() {
                sys::cuStreamDestroy_v2(self.handle);
            }
            sys::cuMemPoolDestroy(pool);
        }
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({:?} on {:?})", self.handle, self.device)
    }
}

/// Memory of a device, to be used by work on one stream; given back in that stream's order.
#[derive(Debug)]
pub struct DeviceMemory {
    stream: Arc<Stream>,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// Takes memory, with whatever it holds. No bytes take none, and have the address 0.
    ///
    /// # Errors
    /// [`Error::OutOfDeviceMemory`], [`Error::Cuda`].
    pub fn new(stream: &Arc<Stream>, bytes: usize) -> Result<DeviceMemory> {
        let mut address = 0;
        if bytes > 0 {
            let _entered = stream.device.enter()?;
            // SAFETY: the stream is of the current context, the pool of its device; `address`
            // receives the address.
            let result = unsafe {
                match stream.pool {
                    Some(pool) => sys::cuMemAllocFromPoolAsync(&mut address, bytes, pool, stream.handle),
                    None => sys::cuMemAllocAsync(&mut address, bytes, stream.handle),
                }
            };
            checked_memory("cuMemAllocAsync", result, bytes)?;
        }
        Ok(DeviceMemory { stream: stream.clone(), address, bytes })
    }

    /// Takes memory and fills it with a copy of the host's; done when this returns.
    ///
    /// # Errors
    /// As [`DeviceMemory::new`].
    pub fn of(stream: &Arc<Stream>, values: &[u8]) -> Result<DeviceMemory> {
        let memory = DeviceMemory::new(stream, values.len())?;
        if !values.is_empty() {
            let _entered = stream.device.enter()?;
            let from = values.as_ptr().cast();
            // SAFETY: the memory is as large as the values, which outlive the copy: it is waited for.
            unsafe { call!(cuMemcpyHtoDAsync_v2(memory.address, from, values.len(), stream.handle)) }?;
            stream.synchronize()?;
        }
        Ok(memory)
    }

    /// Copies everything to the host, when the work before it on the stream is done.
    ///
    /// # Errors
    /// [`Error::Length`] if `values` is not of the memory's size; [`Error::Cuda`].
    pub fn copy_to(&self, values: &mut [u8]) -> Result<()> {
        if values.len() != self.bytes {
            return Err(Error::Length { param: "values", got: values.len(), expected: self.bytes });
        }
        if !values.is_empty() {
            let _entered = self.stream.device.enter()?;
            let to = values.as_mut_ptr().cast();
            // SAFETY: the memory is as large as the values, which outlive the copy: it is waited for.
            unsafe { call!(cuMemcpyDtoHAsync_v2(to, self.address, self.bytes, self.stream.handle)) }?;
        }
        self.stream.synchronize()
    }

    /// Where it is on the device.
    #[inline]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.bytes > 0
            && let Ok(_entered) = self.stream.device.enter()
        {
            // SAFETY: taken in `new` and given back once, after all work on the stream so far. An
            // error leaves nothing to do.
            unsafe { sys::cuMemFreeAsync(self.address, self.stream.handle) };
        }
    }
}
