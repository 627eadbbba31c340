//! Widening and rounding of whole lines between what tensors store and what sums are kept in.

use crate::conv::Kernels;
use crate::math::Real;
use half::slice::HalfFloatSliceExt;
use volup::{Element, bf16, f16};

/// The element types of the CPU engine: all four of [`volup::DType`].
pub trait Storage: Element<Acc: Real> {
    /// Widens a line to the accumulator, exactly.
    fn widen(from: &[Self], to: &mut [Self::Acc]);
    /// A line widened: itself if it needs none, else written to the start of `to`.
    fn widened<'a>(from: &'a [Self], to: &'a mut [Self::Acc]) -> &'a [Self::Acc];
    /// Rounds a line to what the type stores.
    fn round(line: &mut [Self::Acc]);
    /// Writes a line, each value rounded to nearest, ties to even.
    ///
    /// # Safety
    /// `to` must be valid for writes of as many elements; it need not be initialized.
    unsafe fn store(from: &[Self::Acc], to: *mut Self);
    /// As [`Storage::store`], past the caches where the type needs no rounding; `fence` must follow
    /// before others read it.
    ///
    /// # Safety
    /// As [`Storage::store`]; the kernels must be those of this CPU.
    unsafe fn stream(kernels: &Kernels<Self::Acc>, from: &[Self::Acc], to: *mut Self);
    /// Hands a line to `f` as accumulators, in pieces, and stores what `f` made of it.
    fn update(line: &mut [Self], f: impl FnMut(&mut [Self::Acc]));
}

macro_rules! same {
    ($type:ty) => {
        impl Storage for $type {
            fn widen(from: &[$type], to: &mut [$type]) {
                to.copy_from_slice(from);
            }
            fn widened<'a>(from: &'a [$type], _: &'a mut [$type]) -> &'a [$type] {
                from
            }
            fn round(_: &mut [$type]) {}
            unsafe fn store(from: &[$type], to: *mut $type) {
                // SAFETY: the caller's contract; a line of sums is scratch memory of its own.
                unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
            }
            unsafe fn stream(kernels: &Kernels<$type>, from: &[$type], to: *mut $type) {
                // SAFETY: the caller's contract.
                unsafe { (kernels.stream)(from, to) };
            }
            fn update(line: &mut [$type], mut f: impl FnMut(&mut [$type])) {
                f(line);
            }
        }
    };
}
same!(f32);
same!(f64);

/// Elements that are converted at a time.
const PIECE: usize = 512;

macro_rules! half {
    ($type:ty) => {
        impl Storage for $type {
            fn widen(from: &[$type], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }
            fn widened<'a>(from: &'a [$type], to: &'a mut [f32]) -> &'a [f32] {
                let to = &mut to[..from.len()];
                Self::widen(from, to);
                to
            }
            fn round(line: &mut [f32]) {
                let mut rounded = [<$type>::ZERO; PIECE];
                for piece in line.chunks_mut(PIECE) {
                    let rounded = &mut rounded[..piece.len()];
                    rounded.convert_from_f32_slice(piece);
                    rounded.convert_to_f32_slice(piece);
                }
            }
            unsafe fn store(from: &[f32], to: *mut $type) {
                let mut rounded = [<$type>::ZERO; PIECE];
                for (piece, from) in from.chunks(PIECE).enumerate() {
                    let rounded = &mut rounded[..from.len()];
                    rounded.convert_from_f32_slice(from);
                    // SAFETY: the caller's contract.
                    unsafe { to.add(piece * PIECE).copy_from_nonoverlapping(rounded.as_ptr(), from.len()) };
                }
            }
            unsafe fn stream(_: &Kernels<f32>, from: &[f32], to: *mut $type) {
                // SAFETY: the caller's contract.
                unsafe { Self::store(from, to) };
            }
            fn update(line: &mut [$type], mut f: impl FnMut(&mut [f32])) {
                let mut widened = [0.0; PIECE];
                for piece in line.chunks_mut(PIECE) {
                    let widened = &mut widened[..piece.len()];
                    piece.convert_to_f32_slice(widened);
                    f(widened);
                    piece.convert_from_f32_slice(widened);
                }
            }
        }
    };
}
half!(f16);
half!(bf16);
