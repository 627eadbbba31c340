//! Plain arrays that the compiler vectorizes with the target's baseline. Multiply and add are not
//! fused: without hardware support a fused one is a library call.

use super::*;

macro_rules! array {
    ($name:ident, $t:ty, $lanes:literal) => {
        struct $name;
        impl Simd for $name {
            type T = $t;
            type V = [$t; $lanes];
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn splat(value: $t) -> Self::V {
                [value; $lanes]
            }
            #[inline(always)]
            unsafe fn load(from: *const $t) -> Self::V {
                // SAFETY: Simd's contract.
                unsafe { from.cast::<Self::V>().read_unaligned() }
            }
            #[inline(always)]
            unsafe fn store(to: *mut $t, vector: Self::V) {
                // SAFETY: Simd's contract.
                unsafe { to.cast::<Self::V>().write_unaligned(vector) }
            }
            #[inline(always)]
            unsafe fn stream(to: *mut $t, vector: Self::V) {
                // SAFETY: Simd's contract.
                unsafe { Self::store(to, vector) }
            }
            #[inline(always)]
            unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
                std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
            }
        }
    };
}
array!(F32x4, f32, 4);
array!(F64x2, f64, 2);

kernels!(F32: f32, f32_kernels, F32x4, [(4, 3), (2, 5), (1, 6)],);
kernels!(F64: f64, f64_kernels, F64x2, [(4, 3), (2, 5), (1, 6)],);
