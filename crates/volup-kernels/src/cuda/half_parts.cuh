// float32 as two fp16, as gradients and what they are multiplied by have it.

#pragma once

#include "row_exponent.cuh"

/// Two numbers as fp16 side by side; in `low` what these leave of them, times a power of two.
__device__ __forceinline__ unsigned half_parts(float x, float y, float times, unsigned &low) {
    const unsigned high = narrow_both(x, y, Half{});
    low = narrow_both((x - widen(Half{(unsigned short)high})) * times, (y - widen(Half{(unsigned short)(high >> 16)})) * times, Half{});
    return high;
}

/// What the low part of a gradient is multiplied by, as that of other operands of two fp16; the low part of what it is multiplied by
/// for the gradient of the weight is not, and its high part by the inverse then, so that all products are of one scale.
constexpr float LOW = 2048.0f;

/// The exponent that a channel of the input is scaled by, of this largest magnitude, given as bits. Where that is no number, the
/// definition computes with the others as they are.
__device__ __forceinline__ int channel_exponent(unsigned largest) { return largest < 0x7f800000u ? exponent(largest) : 0; }

/// Both of a pair of fp16 by 2^-11.
__device__ __forceinline__ unsigned by_low(unsigned pair) {
    unsigned scaled;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(scaled) : "r"(pair), "r"(0x10001000u));
    return scaled;
}

/// What exponents and their negatives are both added to where the largest of each are looked for, as numbers from 0 up.
constexpr int ZERO = 200;

/// Whether bounds of a group's channels, of those that are not zero throughout, are more than 2^24 apart: of weights that are scaled by
/// their inverses some would have too few bits beside the largest. A warp asks.
__device__ __forceinline__ bool are_apart(const float *bounds, int channels) {
    unsigned most = 0, least = 0;
    for (int c = threadIdx.x % 32; c < channels; c += 32) {
        if (bounds[c] == 0.0f) continue;
        most = max(most, (unsigned)(ZERO + row_exponent(bounds[c])));
        least = max(least, (unsigned)(ZERO - row_exponent(bounds[c])));
    }
    return __reduce_max_sync(0xffffffffu, most) + __reduce_max_sync(0xffffffffu, least) > 2 * ZERO + 24;
}

/// Whether fp16 in two parts is too coarse for what has this largest magnitude, given as bits, or ends before it. What is 2^-14 or more
/// has 22 bits; with 18, the fewest that are taken here, a single position of few channels seldom falls below by chance.
__device__ __forceinline__ bool is_too_coarse(unsigned most) { return most - 1 < 0x36800000u - 1 || most >= 0x477fe000u; }
