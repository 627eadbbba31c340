// What `shuffle_gradient` has in shared memory.

#pragma once

#include "operand.cuh"

#ifndef ROWS
#error "ROWS: channels of y and taps of a tile"
#endif

/// Channels of x of a tile, its positions; bytes of a tile of one tensor.
constexpr int CI = 64, TILE = 32768, SIZE = sizeof(Element), VECTOR = 16 / SIZE, POS = TILE / (SIZE * ROWS);
constexpr int THREADS = 512;
/// Channels or positions of a step of the matrix instructions.
constexpr int STEP = KIND == 0 || KIND == 2 ? 16 : 8;

__device__ __forceinline__ unsigned address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

/// Hands over what a warpgroup's matrix instructions add up in a thread: of which of 64 rows, and which column.
template <int COUNT, typename F> __device__ __forceinline__ void each_sum(const float (&sum)[COUNT], F f) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < COUNT / 4; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) f(threadIdx.x % 128 / 32 * 16 + lane / 4 + e / 2 * 8, 8 * j + lane % 4 * 2 + e % 2, sum[4 * j + e]);
}

/// The gradient of the input.
struct Gradient {
    Element *dx;
    /// Of a sample: channels, and positions of each; whether these are whole vectors.
    int channels, volume, whole;

    /// Writes a warp's sums of 16 channels by 8 positions, from a channel and a position on: of 16 bits by twice as many,
    /// since two neighbouring lanes exchange theirs, so that each has four neighbours and whole sectors are written.
#if KIND == 0
    __device__ __forceinline__ void store(int n, int c0, int p0, const float *one, const float *next) const {
        const int lane = threadIdx.x % 32, t = lane % 4, high = t % 2, p = p0 + 8 * high + t / 2 * 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int c = c0 + lane / 4 + 8 * half, last = c < channels ? volume : 0;
            Element *const to = dx + ((long long)n * channels + c) * volume;
            const auto pack = [&](const float *v) { return narrow_both(v[2 * half], v[2 * half + 1], Element{}); };
            const unsigned a = pack(one), b = pack(next), got = __shfl_xor_sync(0xffffffffu, high ? a : b, 1);
            const uint2 four = high ? make_uint2(got, b) : make_uint2(a, got);
            if (whole) {
                if (p < last) *(uint2 *)(to + p) = four;
            } else {
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (p + e < last) to[p + e] = Element{(unsigned short)((e < 2 ? four.x : four.y) >> e % 2 * 16)};
            }
        }
    }
#else
    __device__ __forceinline__ void store(int n, int c0, int p0, const float *sums) const {
        const int lane = threadIdx.x % 32, p = p0 + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int c = c0 + lane / 4 + 8 * half, last = c < channels ? volume : 0;
            Element *const to = dx + ((long long)n * channels + c) * volume;
            if (whole) {
                if (p < last) *(float2 *)(to + p) = make_float2(sums[2 * half], sums[2 * half + 1]);
            } else {
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (p + e < last) to[p + e] = sums[2 * half + e];
            }
        }
    }
#endif
};
