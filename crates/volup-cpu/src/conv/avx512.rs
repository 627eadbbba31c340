//! AVX-512: 32 registers of 16 floats; full tiles of 8 channels by 3 vectors.

use super::*;
use std::arch::x86_64::*;

/// Whether this CPU has what the kernels are compiled for. With `avx512f` alone LLVM keeps to half
/// of the registers and spills, hence the rest.
pub(super) fn detected() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("fma")
}

simd!(
    F32x16,
    f32,
    __m512,
    16,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_stream_ps,
    _mm512_fmadd_ps
);
simd!(
    F64x8,
    f64,
    __m512d,
    8,
    _mm512_set1_pd,
    _mm512_loadu_pd,
    _mm512_storeu_pd,
    _mm512_stream_pd,
    _mm512_fmadd_pd
);

kernels!(
    F32: f32, f32_kernels, F32x16, [(8, 3), (4, 6), (2, 8), (1, 8)],
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,fma")]
);
kernels!(
    F64: f64, f64_kernels, F64x8, [(8, 3), (4, 6), (2, 8), (1, 8)],
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,fma")]
);
