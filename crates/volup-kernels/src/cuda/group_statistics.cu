// Partial statistics of what group normalization goes over, where memory is the bound: 16 bytes a load, 8 of a thread in
// flight.
//
// A block holds a chunk in registers and passes over it twice: a partial is the mean of its elements of a group, the sum of
// their squared deviations from that mean, and their count. No square of a mean is ever subtracted. Chunks are taken from
// the end: what was written last is still in the second-level cache.
//
// - NCDHW (LAST 0): a group of a sample is `length` elements in a row, `rows` of them. Chunks of CHUNK elements start at
//   multiples of 16 bytes, `chunks = ceil((length + V - 1) / CHUNK)` a row, V elements of 16 bytes; the last may be empty.
//   Partial `row*chunks + chunk`.
// - NDHWC (LAST 1): a sample is `length` positions of `channels` channels, a multiple of V, at most 256*V. Chunks of
//   `8 * (256 / (channels/V))` positions, `chunks = ceil(length / that)` a sample; `rows` samples. Partial
//   `(row*chunks + chunk)*groups + group`: group_channels channels each, which is a multiple or a divisor of V.
//
// Parameters: `y` (a multiple of 16 bytes), `mean`, `m2`, `count` (float32); `length` (i64); i32: `rows`, `chunks`,
// `channels`, `groups`, `group_channels`. Threads: 256. Grid: rows*chunks along the first axis.

#include "element.cuh"

#ifndef LAST
#error "LAST: channels last"
#endif

constexpr int THREADS = 256, VECTORS = 8, V = 16 / sizeof(Element);
[[maybe_unused]] constexpr int CHUNK = THREADS * VECTORS * V;

/// A vector of elements.
struct __align__(16) Vector {
    Element of[V];
};

/// Vectors of which the compiler does not know that they are the same: it would rather keep them widened, for which there
/// are no registers.
__device__ __forceinline__ void hide(Vector (&v)[VECTORS]) {
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        uint4 &words = *(uint4 *)&v[k];
        asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
    }
}

/// The sum over a block's threads, in all of them, always in the same order.
__device__ __forceinline__ float over_block(float v) {
    __shared__ float of_warp[THREADS / 32];
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) v += __shfl_xor_sync(0xffffffffu, v, lanes);
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) total += of_warp[warp];
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) group_statistics(
    const Element *y, float *mean, float *m2, float *count, long long length, int rows, int chunks, int channels, int groups, int group_channels) {
    const int task = gridDim.x - 1 - blockIdx.x, row = task / chunks, chunk = task - row * chunks;
    Vector v[VECTORS];
#if LAST == 0
    const long long start = row * length, base = start / V * V + (long long)chunk * CHUNK;
    // What of the chunk is of the row.
    const int from = (int)max(start - base, 0ll), to = (int)min(max(start + length - base, 0ll), (long long)CHUNK), own_at = threadIdx.x * V;
    const auto there = [&](int k, int e) {
        const int at = own_at + k * THREADS * V + e;
        return at >= from && at < to;
    };
    const Element *const own_y = y + base + own_at;
#pragma unroll
    for (int k = 0; k < VECTORS; k++)
        if (there(k, 0) && there(k, V - 1)) v[k] = *(const Vector *)(own_y + k * THREADS * V);
    // Those that lie across an end of the row.
    const bool whole = from == 0 && to == CHUNK;
    if (!whole)
#pragma unroll
        for (int k = 0; k < VECTORS; k++)
            if (!there(k, 0) || !there(k, V - 1))
#pragma unroll
                for (int e = 0; e < V; e++) v[k].of[e] = there(k, e) ? own_y[k * THREADS * V + e] : Element{};
    const float n = (float)max(to - from, 0);
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        float here = 0.0f;
#pragma unroll
        for (int e = 0; e < V; e++) here += widen(v[k].of[e]);
        total += here;
    }
    const float average = over_block(total) / fmaxf(n, 1.0f);
    hide(v);
    total = 0.0f;
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        float here = 0.0f;
#pragma unroll
        for (int e = 0; e < V; e++) {
            const float off = widen(v[k].of[e]) - average;
            here += whole || there(k, e) ? off * off : 0.0f;
        }
        total += here;
    }
    total = over_block(total);
    if (threadIdx.x == 0) {
        mean[task] = average;
        m2[task] = total;
        count[task] = n;
    }
#else
    // Of a thread the channels `c..c + V` of every `high`-th position; threads past the last whole line of them have none.
    __shared__ float sums[THREADS * V], of_group[THREADS * V];
    const int across = channels / V, high = THREADS / across, own_position = threadIdx.x / across, c = threadIdx.x % across * V;
    const long long first = (long long)chunk * (VECTORS * high) + own_position;
    const bool any = own_position < high;
    const auto there = [&](int k) { return any && first + k * high < length; };
#pragma unroll
    for (int k = 0; k < VECTORS; k++)
        if (there(k)) v[k] = *(const Vector *)(y + ((row * length + first + k * high) * channels + c));
    const int positions = (int)min((long long)(VECTORS * high), length - (long long)chunk * (VECTORS * high));
    const float n = (float)positions * group_channels;
    // Sums of `of` by group: by channel over positions, then over the group's.
    const auto by_group = [&](auto of) {
        float total[V] = {};
#pragma unroll
        for (int k = 0; k < VECTORS; k++)
            if (there(k))
#pragma unroll
                for (int e = 0; e < V; e++) total[e] += of(e, widen(v[k].of[e]));
        __syncthreads();
#pragma unroll
        for (int e = 0; e < V; e++) sums[own_position * channels + c + e] = any ? total[e] : 0.0f;
        __syncthreads();
        // A channel by several threads, a group by a warp.
        const int shares = max(THREADS / channels, 1);
        for (int i = threadIdx.x; i < shares * channels; i += THREADS) {
            const int share = i / channels, channel = i - share * channels;
            float all = 0.0f;
            for (int p = share; p < high; p += shares) all += sums[p * channels + channel];
            of_group[i] = all;
        }
        __syncthreads();
        for (int group = threadIdx.x / 32; group < groups; group += THREADS / 32) {
            float all = 0.0f;
            for (int i = threadIdx.x % 32; i < shares * group_channels; i += 32) {
                const int share = i / group_channels;
                all += of_group[share * channels + group * group_channels + i - share * group_channels];
            }
#pragma unroll
            for (int lanes = 16; lanes; lanes /= 2) all += __shfl_xor_sync(0xffffffffu, all, lanes);
            if (threadIdx.x % 32 == 0) sums[group] = all;
        }
        __syncthreads();
    };
    by_group([](int, float x) { return x; });
    hide(v);
    float average[V];
#pragma unroll
    for (int e = 0; e < V; e++) average[e] = sums[(c + e) / group_channels] / n;
    const auto write = [&](float *to, float by) {
        for (int group = threadIdx.x; group < groups; group += THREADS) to[(long long)task * groups + group] = sums[group] * by;
    };
    write(mean, 1.0f / n);
    by_group([&](int e, float x) { return (x - average[e]) * (x - average[e]); });
    write(m2, 1.0f);
    for (int group = threadIdx.x; group < groups; group += THREADS) count[(long long)task * groups + group] = n;
#endif
}
