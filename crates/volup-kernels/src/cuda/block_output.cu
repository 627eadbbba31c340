// The output of a block from that of its convolution: `z = post(gamma*(act(y) - mean)*rstd + beta)`.
//
// Parameters: `y`, `z`, `mean`, `rstd` (null: no normalization), `gamma`, `beta` (null: 1 and 0); i32: `voxels`, `channels`,
// `group_channels`, `chunks`, `channel_blocks`, `activation`, `post`; f64: `slope`, `post_slope`. Threads: 256. Grid: as
// `channel_chunks.cuh` says.

#include "channel_chunks.cuh"
#include "slope.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2) block_output(
    const Element *y, Element *z, const Sum *mean, const Sum *rstd, const Element *gamma, const Element *beta, int voxels, int channels,
    int group_channels, int chunks, int channel_blocks, int activation, int post, double slope, double post_slope) {
    const Share share(voxels, channels, chunks, channel_blocks);
    if (share.to == 0) return;
    Epilogue of[LAST ? VECTOR : 1];
#pragma unroll
    for (int e = 0; e < (LAST ? VECTOR : 1); e++)
        of[e] = epilogue_of(share.sample, share.channel + e, channels, group_channels, mean, rstd, gamma, beta, activation, slope, post, post_slope);
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn++) {
        Vector v[VECTORS];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) v[k] = share.load(y, turn * VECTORS + k);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
#pragma unroll
            for (int e = 0; e < VECTOR; e++) narrow(of[LAST ? e : 0].output(widen(v[k].of[e])), &v[k].of[e]);
            share.store(z, turn * VECTORS + k, v[k]);
        }
    }
}
