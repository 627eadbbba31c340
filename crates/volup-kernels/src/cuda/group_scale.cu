// Group normalization in place, where memory is the bound: `y = act((y - mean) * (rstd * gamma) + beta)`, 16 bytes a load,
// several of a thread in flight.
//
// - NCDHW (LAST 0): `count` elements, `voxels` of a channel in a row. A block takes 256*4*V neighbours, V elements of 16
//   bytes. `ceil(count / (256*4*V))` blocks.
// - NDHWC (LAST 1): a sample is `voxels` positions of `channels` channels, a multiple of V, at most 256*V. A block takes
//   32 * (256 / (channels/V)) positions of a sample, `parts = ceil(voxels / that)` blocks a sample.
//
// Parameters: `y` (a multiple of 16 bytes), `mean`, `rstd` (float32, of each sample and group), `gamma`, `beta` (null: 1
// and 0); i64: `count`; i32: `voxels` (below 2^30), `channels`, `group_channels`, `parts`, `from_end` (what lies last is scaled
// first: where nobody has read y since it was written, that may still be in the second-level cache), `activation`; f64: `slope`.
// Threads: 256. Grid along the first axis.

#include "activation.cuh"
#include "divisor.cuh"
#include "stored.cuh"

#ifndef LAST
#error "LAST: channels last"
#endif

constexpr int THREADS = 256, VECTORS = LAST && KIND != 0 ? 8 : 4, V = 16 / sizeof(Element);
/// Times that a block of NDHWC takes so many vectors.
[[maybe_unused]] constexpr int TURNS = 32 / VECTORS;

/// Rows of a block of NCDHW whose normalization is found once for all of its threads: of large volumes it has two at most.
[[maybe_unused]] constexpr int ROWS = 32;

/// A vector of elements.
struct __align__(16) Vector {
    Element of[V];
};

/// How a channel is normalized.
struct Norm {
    float mean, factor, addend;
};

/// What is known of the activation when this is compiled: that it is a comparison or none, that it is SiLU, or nothing. Going
/// through a list of all of them for every vector of 16 bits takes longer than the vector; float32 waits for memory.
enum Known { STRAIGHT, SILU, ANY };
template <Known KNOWN> struct Of {
    static constexpr Known known = KNOWN;
};
template <typename F> __device__ __forceinline__ void by_known(int code, F f) {
    if (KIND == 0 && code <= 2)
        f(Of<STRAIGHT>());
    else if (KIND == 0 && code == 3)
        f(Of<SILU>());
    else
        f(Of<ANY>());
}

/// What comes after: an activation of some values.
template <Known KNOWN, int COUNT> __device__ __forceinline__ void activate(float (&v)[COUNT], int code, float slope) {
    if (KNOWN == SILU) {
        curve(v, 3);
    } else if (KNOWN == ANY && code > 2) {
        curve(v, code);
    } else if (code) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) v[k] = straighten(v[k], code, slope);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, !LAST ? 4 : KIND == 0 ? 2 : 3) group_scale(
    Element *y, const float *mean, const float *rstd, const Element *gamma, const Element *beta, long long count, int voxels, int channels,
    int group_channels, int parts, int from_end, int activation, double slope) {
    const int block = from_end ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const auto norm_of = [&](int sample, int channel) {
        const int group = sample * (channels / group_channels) + channel / group_channels;
        return Norm{mean[group], rstd[group] * (gamma ? widen(gamma[channel]) : 1.0f), beta ? widen(beta[channel]) : 0.0f};
    };
#if LAST == 0
    // The row that the block starts in, a sample's channel, and where in it; how the first rows are normalized.
    __shared__ int first_row, first_at;
    __shared__ Divisor by_voxels;
    __shared__ Norm norms[ROWS];
    const long long start = (long long)block * (THREADS * VECTORS * V);
    if (threadIdx.x < ROWS) {
        const long long row = start / voxels, own = row + threadIdx.x;
        if (threadIdx.x == 0) {
            by_voxels = Divisor(voxels);
            first_row = (int)row;
            first_at = (int)(start - row * voxels);
        }
        if (own * voxels < count) norms[threadIdx.x] = norm_of((int)(own / channels), (int)(own % channels));
    }
    const auto norm_of_row = [&](int row) {
        const int ahead = row - first_row;
        return ahead < ROWS ? norms[ahead] : norm_of(row / channels, row % channels);
    };
    Vector v[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const long long at = start + (k * THREADS + threadIdx.x) * V;
        if (at + V <= count) v[k] = *(const Vector *)(y + at);
    }
    __syncthreads();
    // Vectors of a row each; those that are of two, or not whole, are few.
    unsigned others = 0;
    by_known(activation, [&](auto of) {
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int local = (k * THREADS + threadIdx.x) * V, ahead = by_voxels.divide(first_at + local);
            if (start + local + V > count || voxels - (first_at + local - ahead * voxels) < V) {
                others |= 1u << k;
                continue;
            }
            const Norm norm = norm_of_row(first_row + ahead);
            float x[V];
#pragma unroll
            for (int e = 0; e < V; e++) x[e] = (widen(v[k].of[e]) - norm.mean) * norm.factor + norm.addend;
            activate<of.known>(x, activation, (float)slope);
            *(uint4 *)(y + (start + local)) = vector_of(x);
        }
    });
    if (!others) return;
#pragma unroll 1
    for (int k = 0; k < VECTORS; k++) {
#pragma unroll 1
        for (int e = 0; e < V; e++) {
            const int local = (k * THREADS + threadIdx.x) * V + e;
            if (!(others >> k & 1) || start + local >= count) continue;
            const Norm norm = norm_of_row(first_row + by_voxels.divide(first_at + local));
            float x[1] = {(widen(y[start + local]) - norm.mean) * norm.factor + norm.addend};
            by_known(activation, [&](auto of) { activate<of.known>(x, activation, (float)slope); });
            narrow(x[0], y + (start + local));
        }
    }
#else
    const int sample = block / parts, part = block - sample * parts;
    const int across = channels / V, high = THREADS / across, own = threadIdx.x / across, c = threadIdx.x % across * V;
    if (own >= high) return;
    Norm norm[V];
#pragma unroll
    for (int e = 0; e < V; e++) norm[e] = norm_of(sample, c + e);
    const int first = part * (TURNS * VECTORS * high) + own;
    Element *const from = y + ((long long)sample * voxels * channels + c);
    by_known(activation, [&](auto of) {
#pragma unroll 1
        for (int turn = 0; turn < TURNS; turn++) {
            Vector v[VECTORS];
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                const int p = first + (turn * VECTORS + k) * high;
                if (p < voxels) v[k] = *(const Vector *)(from + (long long)p * channels);
            }
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                const int p = first + (turn * VECTORS + k) * high;
                float x[V];
#pragma unroll
                for (int e = 0; e < V; e++) x[e] = (widen(v[k].of[e]) - norm[e].mean) * norm[e].factor + norm[e].addend;
                activate<of.known>(x, activation, (float)slope);
#pragma unroll
                for (int e = 0; e < V; e++) narrow(x[e], &v[k].of[e]);
                if (p < voxels) *(Vector *)(from + (long long)p * channels) = v[k];
            }
        }
    });
#endif
}
