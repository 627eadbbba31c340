// Partial statistics of the activation of a convolution's output, of each channel of each sample: mean, sum of squared
// deviations from it, count.
//
// Four vectors are held in registers and passed over twice; what a thread and what a block has is merged in a fixed order,
// as by Chan, Golub and LeVeque, 1979. No square of a mean is ever subtracted.
//
// Parameters: `y`, `mean`, `m2`, `count` (of (sample*channels + channel)*chunks + chunk); i32: `voxels`, `channels`, `chunks`,
// `channel_blocks`, `activation`; f64: `slope`. Threads: 256. Grid: as `channel_chunks.cuh` says.

#include "channel_chunks.cuh"
#include "launch.cuh"
#include "slope.cuh"

/// Statistics of some elements.
struct Statistics {
    Sum mean, m2, count;

    __device__ __forceinline__ void merge(const Statistics &other) {
        const Sum all = count + other.count, share = all > 0 ? other.count / all : 0, apart = other.mean - mean;
        mean += apart * share;
        m2 += other.m2 + apart * apart * (count * share);
        count = all;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, KIND == 4 ? 2 : 3) channel_statistics(const Element *y, Sum *mean, Sum *m2, Sum *count, int voxels, int channels,
                                                                         int chunks, int channel_blocks, int activation, double slope) {
    let_next_start();
    // From the end: what was written last is still in the second-level cache, and what is read last when `y` is read again.
    const Share share(voxels, channels, chunks, channel_blocks, gridDim.x - 1 - blockIdx.x);
    const int turns = share.turns();
    constexpr int OWN = LAST ? VECTOR : 1;
    Statistics so_far[OWN] = {};
    [[maybe_unused]] Sum seen = 0;
    by_known(activation, 0, [&](auto known) {
        const Activation<known.first> first(activation, slope);
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++) {
            Vector v[VECTORS];
            share.load(y, turn, v);
            Sum a[VECTORS][VECTOR];
            int lo[VECTORS], hi[VECTORS];
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                share.range(turn * VECTORS + k, lo[k], hi[k]);
                Sum x[VECTOR], slopes[VECTOR];
#pragma unroll
                for (int e = 0; e < VECTOR; e++) x[e] = widen(v[k].of[e]);
                first.of(x, a[k], slopes);
            }
#if LAST == 0
            // The sum of something over what of a vector is there.
            const auto over = [&](int k, auto of) {
                Sum total = 0;
                if (hi[k] - lo[k] == VECTOR) {
#pragma unroll
                    for (int e = 0; e < VECTOR; e++) total += of(a[k][e]);
                } else {
#pragma unroll
                    for (int e = 0; e < VECTOR; e++) total += e >= lo[k] && e < hi[k] ? of(a[k][e]) : (Sum)0;
                }
                return total;
            };
            int here = 0;
            Sum total = 0;
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                here += hi[k] - lo[k];
                total += over(k, [](Sum a) { return a; });
            }
            Statistics of = {here > 0 ? total / here : 0, 0, (Sum)here};
#pragma unroll
            for (int k = 0; k < VECTORS; k++) of.m2 += over(k, [&](Sum a) { return (a - of.mean) * (a - of.mean); });
            so_far[0].merge(of);
#else
            int here = 0;
#pragma unroll
            for (int k = 0; k < VECTORS; k++) here += hi[k] > 0;
            const Sum by = here > 0 ? (Sum)1 / here : 0, share_of = here > 0 ? here / (seen + here) : 0;
#pragma unroll
            for (int e = 0; e < VECTOR; e++) {
                Sum total = 0, m2 = 0;
#pragma unroll
                for (int k = 0; k < VECTORS; k++) total += hi[k] > 0 ? a[k][e] : (Sum)0;
                const Sum average = total * by;
#pragma unroll
                for (int k = 0; k < VECTORS; k++) m2 += hi[k] > 0 ? (a[k][e] - average) * (a[k][e] - average) : (Sum)0;
                const Sum apart = average - so_far[e].mean;
                so_far[e].mean += apart * share_of;
                so_far[e].m2 += m2 + apart * apart * (seen * share_of);
                so_far[e].count = seen + here;
            }
            seen += here;
#endif
        }
    });
    const auto put = [&](int channel, const Statistics &of) {
        const long long at = ((long long)share.sample * channels + channel) * chunks + share.chunk;
        mean[at] = of.mean;
        m2[at] = of.m2;
        count[at] = of.count;
    };
#if LAST == 0
    __shared__ Statistics of_warp[THREADS / 32];
    Statistics all = so_far[0];
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2)
        all.merge({__shfl_down_sync(0xffffffffu, all.mean, lanes), __shfl_down_sync(0xffffffffu, all.m2, lanes),
                   __shfl_down_sync(0xffffffffu, all.count, lanes)});
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = all;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < THREADS / 32; warp++) all.merge(of_warp[warp]);
        put(share.channel, all);
    }
#else
    // By halves of the threads that have the same channels.
    __shared__ Statistics of_thread[THREADS];
#pragma unroll 1
    for (int e = 0; e < VECTOR; e++) {
        Statistics all = so_far[0];
#pragma unroll
        for (int own = 1; own < VECTOR; own++)
            if (own == e) all = so_far[own];
        const int across = min(channels / VECTOR, THREADS);
        for (int high = share.high; high > 1;) {
            const int half = (high + 1) / 2;
            __syncthreads();
            if (share.own < high) of_thread[threadIdx.x] = all;
            __syncthreads();
            if (share.own + half < high) all.merge(of_thread[threadIdx.x + half * across]);
            high = half;
        }
        if (share.own == 0 && share.to > 0) put(share.channel + e, all);
    }
#endif
}
