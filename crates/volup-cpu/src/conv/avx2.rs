//! AVX2 and FMA: 16 registers of 8 floats; full tiles of 4 channels by 3 vectors.

use super::*;
use std::arch::x86_64::*;

/// Whether this CPU has what the kernels are compiled for.
pub(super) fn detected() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// [`Simd::step`] of a full tile, which takes all 16 registers: left to itself LLVM brings weights
/// forward, then keeps one sum in memory from step to step, which more than doubles the time.
macro_rules! full_tile {
    ($step:ident, $t:ty, $v:ty, $suffix:literal, $size:literal) => {
        /// # Safety
        /// As [`Simd::step`].
        #[inline]
        #[target_feature(enable = "avx2,fma")]
        unsafe fn $step(sums: &mut [[$v; 3]; 4], x: *const $t, w: *const $t) {
            let [[s00, s01, s02], [s10, s11, s12], [s20, s21, s22], [s30, s31, s32]] = sums;
            // SAFETY: reads three vectors at x and four weights at w, by the caller's contract.
            unsafe {
                std::arch::asm!(
                    concat!("vmovup", $suffix, " {x0}, [{x}]"),
                    concat!("vmovup", $suffix, " {x1}, [{x} + 32]"),
                    concat!("vmovup", $suffix, " {x2}, [{x} + 64]"),
                    concat!("vbroadcasts", $suffix, " {weight}, [{w}]"),
                    concat!("vfmadd231p", $suffix, " {s00}, {x0}, {weight}"),
                    concat!("vfmadd231p", $suffix, " {s01}, {x1}, {weight}"),
                    concat!("vfmadd231p", $suffix, " {s02}, {x2}, {weight}"),
                    concat!("vbroadcasts", $suffix, " {weight}, [{w} + ", $size, "]"),
                    concat!("vfmadd231p", $suffix, " {s10}, {x0}, {weight}"),
                    concat!("vfmadd231p", $suffix, " {s11}, {x1}, {weight}"),
                    concat!("vfmadd231p", $suffix, " {s12}, {x2}, {weight}"),
                    concat!("vbroadcasts", $suffix, " {weight}, [{w} + 2 * ", $size, "]"),
                    concat!("vfmadd231p", $suffix, " {s20}, {x0}, {weight}"),
                    concat!("vfmadd231p", $suffix, " {s21}, {x1}, {weight}"),
                    concat!("vfmadd231p", $suffix, " {s22}, {x2}, {weight}"),
                    concat!("vbroadcasts", $suffix, " {weight}, [{w} + 3 * ", $size, "]"),
                    concat!("vfmadd231p", $suffix, " {s30}, {x0}, {weight}"),
                    concat!("vfmadd231p", $suffix, " {s31}, {x1}, {weight}"),
                    concat!("vfmadd231p", $suffix, " {s32}, {x2}, {weight}"),
                    x = in(reg) x, w = in(reg) w,
                    x0 = out(ymm_reg) _, x1 = out(ymm_reg) _, x2 = out(ymm_reg) _, weight = out(ymm_reg) _,
                    s00 = inout(ymm_reg) *s00, s01 = inout(ymm_reg) *s01, s02 = inout(ymm_reg) *s02,
                    s10 = inout(ymm_reg) *s10, s11 = inout(ymm_reg) *s11, s12 = inout(ymm_reg) *s12,
                    s20 = inout(ymm_reg) *s20, s21 = inout(ymm_reg) *s21, s22 = inout(ymm_reg) *s22,
                    s30 = inout(ymm_reg) *s30, s31 = inout(ymm_reg) *s31, s32 = inout(ymm_reg) *s32,
                    options(readonly, nostack, preserves_flags, pure),
                );
            }
        }
    };
}
full_tile!(full_tile_f32, f32, __m256, "s", "4");
full_tile!(full_tile_f64, f64, __m256d, "d", "8");

simd!(
    F32x8,
    f32,
    __m256,
    8,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_stream_ps,
    _mm256_fmadd_ps,
    (4, 3): full_tile_f32
);
simd!(
    F64x4,
    f64,
    __m256d,
    4,
    _mm256_set1_pd,
    _mm256_loadu_pd,
    _mm256_storeu_pd,
    _mm256_stream_pd,
    _mm256_fmadd_pd,
    (4, 3): full_tile_f64
);

kernels!(
    F32: f32, f32_kernels, F32x8, [(4, 3), (2, 4), (1, 6)],
    #[target_feature(enable = "avx2,fma")]
);
kernels!(
    F64: f64, f64_kernels, F64x4, [(4, 3), (2, 4), (1, 6)],
    #[target_feature(enable = "avx2,fma")]
);
