// Elements of tensors and of operands, by `KIND` (0: f16 or bf16, with TYPE_F16 or TYPE_BF16; 1: float32 rounded to
// tf32; 2: float32 as two fp16; 3: float32 as two tf32; 4: float64, which no operand is made of; 5: float32 as one fp16).

#pragma once

#ifndef KIND
#error "KIND, and TYPE_F16 or TYPE_BF16 for 0"
#endif

/// float16 and bfloat16 as what they are in memory.
struct Half {
    unsigned short bits;
};
struct Bfloat {
    unsigned short bits;
};

#if KIND == 0
#ifdef TYPE_F16
using Element = Half;
#define OPERAND "f16"
#else
using Element = Bfloat;
#define OPERAND "bf16"
#endif
#elif KIND == 4
using Element = double;
#else
using Element = float;
#if KIND == 2 || KIND == 5
#define OPERAND "f16"
#else
#define OPERAND "tf32"
#endif
#endif

/// Whether operands are float32 scaled by powers of two to what fp16 has.
#define SCALED (KIND == 2 || KIND == 5)
/// Parts of an operand, and elements of 16 bytes of it.
constexpr int PARTS = KIND == 2 || KIND == 3 ? 2 : 1;
constexpr int E = KIND == 4 ? 2 : KIND == 1 || KIND == 3 ? 4 : 8;

/// What sums are kept in.
#if KIND == 4
using Sum = double;
#else
using Sum = float;
#endif

__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(Half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ float widen(Bfloat x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ void narrow(double x, double *y) { *y = x; }
__device__ __forceinline__ void narrow(float x, float *y) { *y = x; }
__device__ __forceinline__ void narrow(float x, Half *y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y->bits) : "f"(x)); }
__device__ __forceinline__ void narrow(float x, Bfloat *y) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y->bits) : "f"(x)); }

/// Two elements side by side, the first in the lower half.
__device__ __forceinline__ unsigned narrow_both(float x, float y, Half) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(both) : "f"(x), "f"(y));
    return both;
}
__device__ __forceinline__ unsigned narrow_both(float x, float y, Bfloat) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(both) : "f"(x), "f"(y));
    return both;
}
