//! NEON, which every AArch64 CPU has: 32 registers of 4 floats; full tiles of 8 channels by 3 vectors.

use super::*;
use std::arch::aarch64::*;

simd!(F32x4, f32, float32x4_t, 4, vdupq_n_f32, vld1q_f32, vst1q_f32, vst1q_f32, |a, b, c| vfmaq_f32(c, a, b));
simd!(F64x2, f64, float64x2_t, 2, vdupq_n_f64, vld1q_f64, vst1q_f64, vst1q_f64, |a, b, c| vfmaq_f64(c, a, b));

kernels!(
    F32: f32, f32_kernels, F32x4, [(8, 3), (4, 6), (2, 8), (1, 8)],
    #[target_feature(enable = "neon")]
);
kernels!(
    F64: f64, f64_kernels, F64x2, [(8, 3), (4, 6), (2, 8), (1, 8)],
    #[target_feature(enable = "neon")]
);
