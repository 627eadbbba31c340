// The output of a block from that of its convolution: `z = post(gamma*(act(y) - mean)*rstd + beta)`.
//
// Parameters: `y`, `z`, `mean`, `rstd` (null: no normalization), `gamma`, `beta` (null: 1 and 0); i32: `voxels`, `channels`,
// `group_channels`, `chunks`, `channel_blocks`, `activation`, `post`; f64: `slope`, `post_slope`. Threads: 256. Grid: as
// `channel_chunks.cuh` says.

#include "channel_chunks.cuh"
#include "slope.cuh"

/// Values as a vector of elements, those of 16 bits by twos.
__device__ __forceinline__ void narrow_all(const Sum (&x)[VECTOR], Vector &v) {
#if KIND == 0 && VECTOR > 1
#pragma unroll
    for (int e = 0; e < VECTOR; e += 2) ((unsigned *)&v)[e / 2] = narrow_both(x[e], x[e + 1], Element{});
#else
#pragma unroll
    for (int e = 0; e < VECTOR; e++) narrow(x[e], &v.of[e]);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, KIND == 0 ? 4 : 2) block_output(
    const Element *y, Element *z, const Sum *mean, const Sum *rstd, const Element *gamma, const Element *beta, int voxels, int channels,
    int group_channels, int chunks, int channel_blocks, int activation, int post, double slope, double post_slope) {
    const Share share(voxels, channels, chunks, channel_blocks, blockIdx.x);
    const int turns = share.turns();
    if (share.to == 0) return;
    constexpr int OWN = LAST ? VECTOR : 1;
    Norm norm[OWN];
#pragma unroll
    for (int e = 0; e < OWN; e++) norm[e] = norm_of(share.sample, share.channel + e, channels, group_channels, mean, rstd, gamma, beta);
    by_known(activation, post, [&](auto known) {
        const Activation<known.first> first(activation, slope);
        const Activation<known.second> last(post, post_slope);
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++) {
            Vector v[VECTORS];
            share.load(y, turn, v);
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                Sum x[VECTOR], a[VECTOR], z_of[VECTOR], slopes[VECTOR];
#pragma unroll
                for (int e = 0; e < VECTOR; e++) x[e] = widen(v[k].of[e]);
                first.of(x, a, slopes);
#pragma unroll
                for (int e = 0; e < VECTOR; e++) x[e] = norm[LAST ? e : 0].scaled(norm[LAST ? e : 0].normalized(a[e]));
                last.of(x, z_of, slopes);
                narrow_all(z_of, v[k]);
            }
            share.store(z, turn, v);
        }
    });
}
