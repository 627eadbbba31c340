//! AVX2 and FMA: 16 registers of 8 floats; full tiles of 4 channels by 3 vectors.

use super::*;
use std::arch::x86_64::*;

/// Whether this CPU has what the kernels are compiled for.
pub(super) fn detected() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

simd!(
    F32x8,
    f32,
    __m256,
    8,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_stream_ps,
    _mm256_fmadd_ps
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
    _mm256_fmadd_pd
);

kernels!(
    F32: f32, f32_kernels, F32x8, 4, [(4, 3), (2, 5), (1, 6)],
    #[target_feature(enable = "avx2,fma")]
);
kernels!(
    F64: f64, f64_kernels, F64x4, 4, [(4, 3), (2, 5), (1, 6)],
    #[target_feature(enable = "avx2,fma")]
);
