// Partial statistics of what group normalization goes over, where memory is the bound: 16 bytes a load, 8 of a thread in
// flight.
//
// A partial is the mean of some elements of a group, the sum of their squared deviations from that mean, and their count.
// What is held in registers is passed over twice, so no square of a mean is ever subtracted: by a block for all of its chunk
// in NCDHW, by a thread for 8 vectors after the other in NDHWC, merged in order. Chunks are taken from the end: what was
// written last is still in the second-level cache.
//
// - NCDHW (LAST 0): a group of a sample is `length` elements in a row, `rows` of them. Chunks of CHUNK elements start at
//   multiples of 16 bytes, `chunks = ceil((length + V - 1) / CHUNK)` a row, V elements of 16 bytes; the last may be empty.
//   Partial `row*chunks + chunk`.
// - NDHWC (LAST 1): a sample is `length` positions of `channels` channels, a multiple of V, at most 256*V. Chunks of
//   `64 * (256 / (channels/V))` positions, `chunks = ceil(length / that)` a sample; `rows` samples. Partial
//   `(row*chunks + chunk)*groups + group`, of group_channels channels each.
//
// Parameters: `y` (a multiple of 16 bytes), `mean`, `m2`, `count` (float32); `length` (i64); i32: `rows`, `chunks`,
// `channels`, `groups`, `group_channels`. Threads: 256. Grid: rows*chunks along the first axis.

#include "element.cuh"
#include "launch.cuh"

#ifndef LAST
#error "LAST: channels last"
#endif

constexpr int THREADS = 256, VECTORS = 8, V = 16 / sizeof(Element);
[[maybe_unused]] constexpr int CHUNK = THREADS * VECTORS * V, TURNS = 8;

/// Blocks of a multiprocessor: two where more would leave too few registers.
#if LAST && defined(TYPE_F16)
constexpr int CTAS = 2;
#else
constexpr int CTAS = 3;
#endif

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

/// Statistics of some elements.
struct Statistics {
    float mean, m2, count;
};

/// As by Chan, Golub and LeVeque, 1979.
__device__ __forceinline__ Statistics merged(const Statistics &one, const Statistics &other) {
    const float count = one.count + other.count, share = other.count / fmaxf(count, 1.0f), apart = other.mean - one.mean;
    return {one.mean + apart * share, one.m2 + other.m2 + apart * apart * (one.count * share), count};
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

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) group_statistics(
    const Element *y, float *mean, float *m2, float *count, long long length, int rows, int chunks, int channels, int groups, int group_channels) {
    let_next_start();
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
    __shared__ float means[THREADS * V], deviations[THREADS * V];
    __shared__ int seen_by[THREADS];
    const int across = channels / V, high = THREADS / across, own_position = threadIdx.x / across, c = threadIdx.x % across * V;
    const long long first = (long long)chunk * (TURNS * VECTORS * high) + own_position;
    const Element *const own_y = y + ((row * length + first) * channels + c);
    float so_far[V] = {}, deviation[V] = {};
    int seen = 0;
    if (own_position < high)
#pragma unroll 1
        for (int turn = 0; turn < TURNS; turn++) {
            const long long left = length - first - turn * VECTORS * high;
            const int here = left > 0 ? (int)min((left + high - 1) / high, (long long)VECTORS) : 0;
            if (here == 0) break;
#pragma unroll
            for (int k = 0; k < VECTORS; k++)
                if (k < here) v[k] = *(const Vector *)(own_y + (long long)(turn * VECTORS + k) * high * channels);
            const float by = 1.0f / here, share = (float)here / (seen + here);
#pragma unroll
            for (int e = 0; e < V; e++) {
                float total = 0.0f, m2 = 0.0f;
#pragma unroll
                for (int k = 0; k < VECTORS; k++) total += k < here ? widen(v[k].of[e]) : 0.0f;
                const float average = total * by;
#pragma unroll
                for (int k = 0; k < VECTORS; k++) {
                    const float off = widen(v[k].of[e]) - average;
                    m2 += k < here ? off * off : 0.0f;
                }
                const float apart = average - so_far[e];
                so_far[e] += apart * share;
                deviation[e] += m2 + apart * apart * (seen * share);
            }
            seen += here;
        }
#pragma unroll
    for (int e = 0; e < V; e++) {
        means[threadIdx.x * V + e] = so_far[e];
        deviations[threadIdx.x * V + e] = deviation[e];
    }
    seen_by[threadIdx.x] = seen;
    __syncthreads();
    // A group by a warp: what its lanes have in turn, then these.
    for (int group = threadIdx.x / 32; group < groups; group += THREADS / 32) {
        Statistics all = {0.0f, 0.0f, 0.0f};
        for (int i = threadIdx.x % 32; i < high * group_channels; i += 32) {
            const int p = i / group_channels, at = p * channels + group * group_channels + i - p * group_channels;
            all = merged(all, {means[at], deviations[at], (float)seen_by[at / V]});
        }
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2)
            all = merged(all, {__shfl_down_sync(0xffffffffu, all.mean, lanes), __shfl_down_sync(0xffffffffu, all.m2, lanes),
                               __shfl_down_sync(0xffffffffu, all.count, lanes)});
        if (threadIdx.x % 32 == 0) {
            const long long at = (long long)task * groups + group;
            mean[at] = all.mean;
            m2[at] = all.m2;
            count[at] = all.count;
        }
    }
#endif
}
