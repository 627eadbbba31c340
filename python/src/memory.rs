//! PyTorch's memory as Rust slices: the only unsafe code of this crate.

use crate::error::raised;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::mem::MaybeUninit;
use volup::{DType, Element, Error};

/// A dense tensor of PyTorch's: address, shape, name of the type. Plain values, so that building
/// one in Python costs no object of ours.
#[derive(FromPyObject)]
pub(crate) struct RawTensor(usize, Vec<usize>, String);

impl RawTensor {
    pub(crate) fn dtype(&self) -> PyResult<DType> {
        self.2.parse().map_err(raised)
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.1
    }

    /// Checks that the tensor is what its user takes it for.
    pub(crate) fn expect(&self, param: &'static str, shape: &[usize], dtype: DType) -> PyResult<()> {
        let got = self.dtype()?;
        if self.1 != shape {
            return Err(raised(Error::Shape { param, got: self.1.clone(), expected: shape.to_vec() }));
        }
        if got != dtype {
            return Err(raised(Error::DTypeMismatch { param, got, expected: dtype }));
        }
        Ok(())
    }

    /// The address and number of the elements, if there can be a slice of them.
    fn checked<T: Element>(&self) -> PyResult<(*mut T, usize)> {
        let len = self.1.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        let len = len
            .filter(|&len| len <= isize::MAX as usize / size_of::<T>())
            .ok_or_else(|| raised(Error::Overflow { what: "the number of elements" }))?;
        if len == 0 {
            // PyTorch's address of an empty tensor is null, which no slice may have.
            return Ok((std::ptr::dangling_mut(), 0));
        }
        let address = self.0 as *mut T;
        if address.is_null() || !address.is_aligned() {
            return Err(PyRuntimeError::new_err("a tensor has no memory, or memory that is not aligned"));
        }
        Ok((address, len))
    }

    /// The elements.
    ///
    /// # Safety
    /// The address is that of as many elements as the shape says, of type `T`, allocated and
    /// initialised, and during `'a` neither freed nor written to.
    pub(crate) unsafe fn elements<'a, T: Element>(&self) -> PyResult<&'a [T]> {
        let (address, len) = self.checked::<T>()?;
        // SAFETY: `checked` made sure of a non-null, aligned address (or an empty slice) and a
        // length within isize; the caller vouches for the memory.
        Ok(unsafe { std::slice::from_raw_parts(address, len) })
    }

    /// The elements, to be written.
    ///
    /// # Safety
    /// The address is that of as many elements as the shape says, of type `T`, allocated, and
    /// during `'a` neither freed nor read or written through anything else.
    pub(crate) unsafe fn elements_mut<'a, T: Element>(&self) -> PyResult<&'a mut [MaybeUninit<T>]> {
        let (address, len) = self.checked::<T>()?;
        // SAFETY: as in `elements`; MaybeUninit<T> has T's layout and asks for no initialised value.
        Ok(unsafe { std::slice::from_raw_parts_mut(address.cast(), len) })
    }
}
