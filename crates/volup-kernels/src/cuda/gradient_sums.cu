// Sums over voxels, of each channel of each sample, that the gradients of what follows a convolution are made of.
//
// With `dv` the gradient of what goes into the last activation, `h` the normalized values and `f` the slope of the first
// activation: `dv`, `dv*h`, `dv*f`, `f`, `h*f`. `dy = (rstd*gamma*dv + q + r*h) * f` with `q` and `r` of the group, so its
// sum follows from these. `KIND` 5 is float32 whose `dy` becomes fp16: then the largest `|dv*f|` and `|h*f|`, too, by which it is
// bounded.
//
// Parameters: `y` (null where nothing follows the convolution), `dz`, `sums` (SUMS of (sample*channels + channel)*chunks +
// chunk), `mean`, `rstd` (null: no normalization), `gamma`, `beta` (null: 1 and 0); i32: `voxels`, `channels`,
// `group_channels`, `chunks`, `channel_blocks`, `activation`, `post`; f64: `slope`, `post_slope`. Threads: 256. Grid: as
// `channel_chunks.cuh` says.

#include "channel_chunks.cuh"
#include "slope.cuh"

#include "gradient_bounds.cuh"

/// Whether the next vectors' loads are under way while one is computed: narrow elements, of which there is more to compute than to
/// wait for. Others leave no registers for three blocks. And of how many vectors of either tensor a thread holds the words.
constexpr bool AHEAD = sizeof(Element) == 2;
constexpr int HELD = AHEAD ? 2 : VECTORS;

extern "C" __global__ void __launch_bounds__(THREADS, KIND == 4 ? 1 : LAST ? 2 : 3) gradient_sums(
    const Element *y, const Element *dz, Sum *sums, const Sum *mean, const Sum *rstd, const Element *gamma, const Element *beta, int voxels,
    int channels, int group_channels, int chunks, int channel_blocks, int activation, int post, double slope, double post_slope) {
    // From the end: what is read last is still in the second-level cache when both are read again.
    const Share share(voxels, channels, chunks, channel_blocks, gridDim.x - 1 - blockIdx.x);
    const int turns = share.turns();
    constexpr int OWN = LAST ? VECTOR : 1;
    // Of magnitudes those of a thread's first channel are of all of its: for more there are no registers.
    Sum total[OWN][SUMS] = {};
    if (share.to > 0 && !y) {
        // Nothing follows the convolution: `dy` is `dz`, and its sum is all that is asked for.
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++) {
            Vector g[VECTORS];
            share.load(dz, turn, g);
#pragma unroll
            for (int k = 0; k < VECTORS; k++)
#pragma unroll
                for (int e = 0; e < VECTOR; e++) {
                    Sum(&to)[SUMS] = total[LAST ? e : 0];
                    to[2] += widen(g[k].of[e]);
                    if (SUMS > ADDED) total[0][ADDED] = larger_finite(total[0][ADDED], widen(g[k].of[e]));
                }
        }
    } else if (share.to > 0) {
        by_known<KIND != 0 || !LAST>(activation, post, [&](auto known) {
            const Activation<known.first> first(activation, slope);
            const Activation<known.second> last(post, post_slope);
            Norm norm[OWN];
#pragma unroll
            for (int e = 0; e < OWN; e++) norm[e] = norm_of(share.sample, share.channel + e, channels, group_channels, mean, rstd, gamma, beta);
            Words of_z[HELD], of_y[HELD];
#pragma unroll
            for (int k = 0; k < (AHEAD ? HELD : 0); k++) of_z[k] = share.load(dz, k), of_y[k] = share.load(y, k);
#pragma unroll 1
            for (int turn = 0; turn < turns; turn++) {
                if (!AHEAD) {
                    Vector g[VECTORS], v[VECTORS];
                    share.load(dz, turn, g);
                    share.load(y, turn, v);
#pragma unroll
                    for (int k = 0; k < VECTORS; k++) of_z[k] = *(const Words *)&g[k], of_y[k] = *(const Words *)&v[k];
                }
#pragma unroll
                for (int k = 0; k < VECTORS; k++) {
                    Sum x[VECTOR], a[VECTOR], f[VECTOR], h[VECTOR], unused[VECTOR], dv[VECTOR];
#pragma unroll
                    for (int e = 0; e < VECTOR; e++) {
                        x[e] = widen(((const Vector *)&of_y[k % HELD])->of[e]);
                        dv[e] = widen(((const Vector *)&of_z[k % HELD])->of[e]);
                    }
                    if (AHEAD) {
                        of_z[k % HELD] = share.load(dz, turn * VECTORS + k + HELD);
                        of_y[k % HELD] = share.load(y, turn * VECTORS + k + HELD);
                    }
                    first.of(x, a, f);
#pragma unroll
                    for (int e = 0; e < VECTOR; e++) {
                        h[e] = norm[LAST ? e : 0].normalized(a[e]);
                        x[e] = norm[LAST ? e : 0].scaled(h[e]);
                    }
                    last.of(x, unused, a);
                    last.back(dv, a);
                    // What is not there has a gradient of 0, and here a slope of 0.
                    if (!share.whole(turn * VECTORS + k)) {
                        int lo, hi;
                        share.range(turn * VECTORS + k, lo, hi);
#pragma unroll
                        for (int e = 0; e < VECTOR; e++) f[e] = e >= lo && e < hi ? f[e] : (Sum)0;
                    }
#pragma unroll
                    for (int e = 0; e < VECTOR; e++) {
                        Sum(&to)[SUMS] = total[LAST ? e : 0];
                        to[0] += dv[e];
                        to[1] += dv[e] * h[e];
                        to[3] += f[e];
                        to[4] += h[e] * f[e];
                        if (SUMS > ADDED) total[0][SUMS - 1] = larger_finite(total[0][SUMS - 1], h[e] * f[e]);
                    }
                    first.back(dv, f);
#pragma unroll
                    for (int e = 0; e < VECTOR; e++) {
                        Sum(&to)[SUMS] = total[LAST ? e : 0];
                        to[2] += dv[e];
                        if (SUMS > ADDED) total[0][ADDED] = larger_finite(total[0][ADDED], dv[e]);
                    }
                }
            }
        });
    }
    const auto put = [&](int channel, int which, Sum v) {
        sums[(((long long)share.sample * channels + channel) * chunks + share.chunk) * SUMS + which] = v;
    };
#if LAST == 0
    __shared__ Sum of_warp[SUMS][THREADS / 32];
#pragma unroll
    for (int which = 0; which < SUMS; which++) {
        Sum v = total[0][which];
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) v = joined(which, v, __shfl_xor_sync(0xffffffffu, v, lanes));
        if (threadIdx.x % 32 == 0) of_warp[which][threadIdx.x / 32] = v;
    }
    __syncthreads();
    if (threadIdx.x < SUMS) {
        Sum v = 0;
        for (int warp = 0; warp < THREADS / 32; warp++) v = joined(threadIdx.x, v, of_warp[threadIdx.x][warp]);
        put(share.channel, threadIdx.x, v);
    }
#else
    // By halves of the threads that have the same channels.
    __shared__ Sum of_thread[THREADS];
    const int across = min(channels / VECTOR, THREADS);
#pragma unroll
    for (int e = 0; e < VECTOR; e++)
#pragma unroll
        for (int which = 0; which < SUMS; which++) {
            Sum v = total[which >= ADDED ? 0 : e][which];
            for (int high = share.high; high > 1;) {
                const int half = (high + 1) / 2;
                __syncthreads();
                if (share.own < high) of_thread[threadIdx.x] = v;
                __syncthreads();
                if (share.own + half < high) v = joined(which, v, of_thread[threadIdx.x + half * across]);
                high = half;
            }
            if (share.own == 0 && share.to > 0) put(share.channel + e, which, v);
        }
#endif
}
