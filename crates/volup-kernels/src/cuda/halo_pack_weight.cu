// Packs the weight for `halo_gemm`, whose file says how B lies, and what steps and columns are. With `taps` the taps along
// width are columns: B is of `blocks` tiles of `columns/taps` channels.
//
// Parameters: `w`, `out`, then for the split `scale` of `pack_weight_scale`, else `control`; i32:
// `items` (16-byte pieces of a part: all of B / parts / 16), `chunk_panels`, `chunks`, `columns` (BN),
// `blocks`, `channels`, `slice_in`, `in_per_group`, `out_per_group`, `in_channels`, `out_channels`, `outputs`,
// `channels_first`, `block`, `channel_panels`, `w_first`, `w_stride`, `w_dilation`, `d_kernel`, `h_kernel`,
// `w_kernel`, `w_low`, `w_steps`, `w_step`, `taps` (along width, that are columns of their own; else 1).
// Threads: 256. Grid: any number of blocks along the first axis.

#include "divisor.cuh"
#include "launch.cuh"
#include "operand.cuh"

extern "C" __global__ void __launch_bounds__(256) halo_pack_weight(
    const Element *w, uint4 *out,
#if KIND == 2
    const float *scale_w,
#else
    unsigned *control,
#endif
    int items, int chunk_panels, int chunks, int columns, int blocks, int channels, int slice_in, int in_per_group, int out_per_group,
    int in_channels, int out_channels, int outputs, int channels_first, int block, int channel_panels, int w_first, int w_stride,
    int w_dilation, int d_kernel, int h_kernel, int w_kernel, int w_low, int w_steps, int w_step, int taps) {
    let_next_start();
    const int of_tap = columns / taps, inner = channels_first ? outputs : channels;
    // What numbers are divided by, each by a thread of its own: they take long.
    enum { STEPS, HEIGHT, DEPTH, COLUMNS, IN_CHUNK, CHUNKS, BLOCKS, OF_TAP, INNER, PANELS, STRIDE, DILATION, GROUP, DIVISORS };
    __shared__ Divisor by[DIVISORS];
    if (threadIdx.x < DIVISORS) {
        const int numbers[DIVISORS] = {w_steps, h_kernel, d_kernel, columns, chunk_panels, chunks, blocks, of_tap,
                                       inner, channel_panels, w_stride, w_dilation, out_per_group};
        int by_this = 0;
#pragma unroll
        for (int i = 0; i < DIVISORS; i++) by_this = threadIdx.x == i ? numbers[i] : by_this;
        by[threadIdx.x] = Divisor(by_this);
    }
    __syncthreads();
    const int kernel = d_kernel * h_kernel * w_kernel;
    unsigned most = 0;
#pragma unroll 1
    for (int item = blockIdx.x * 256 + threadIdx.x; item < items; item += gridDim.x * 256) {
        int rest = item;
        const auto digit = [&](int at) {
            const int before = rest;
            rest = by[at].divide(before);
            return before - rest * by[at].by;
        };
        // Neighbouring threads read neighbouring taps, of neighbouring columns: whole sectors of w.
        const int step = digit(STEPS), th = digit(HEIGHT), td = digit(DEPTH);
        const int in_block = digit(COLUMNS), in_chunk = digit(IN_CHUNK), chunk = digit(CHUNKS);
        const int column_block = rest, slice = by[BLOCKS].divide(column_block), of_slice = column_block - slice * blocks;
        const int tap_tile = (((column_block * d_kernel + td) * chunks + chunk) * h_kernel + th) * w_steps + step;
        const int column = of_slice * columns + in_block, tap_column = by[OF_TAP].divide(in_block);
        const int large = by[INNER].divide(column), small = column - large * inner;
        const int channel = taps > 1 ? of_slice * of_tap + in_block - tap_column * of_tap : channels_first ? large : small;
        const int rr = channels_first ? small : large;
        const int out_channel = slice * channels + channel;
        const int panel = chunk * chunk_panels + in_chunk, parity = by[PANELS].divide(panel);
        const int c0 = (panel - parity * channel_panels) * E;
        // The tap along width: e = jj + first - m, t*dilation = stride*m + r.
        const int jj = by[STRIDE].divide(rr), residue = rr - jj * w_stride;
        const int m = jj + w_first - ((w_low + step * w_step) * block + parity);
        const int far = max(m, 0) * w_stride + residue, tw = taps > 1 ? tap_column : by[DILATION].divide(far);
        const bool hit = taps > 1 || (rr < outputs && m >= 0 && tw * w_dilation == far);
        const bool tap = channel < channels && parity < block && out_channel < out_channels && hit && tw < w_kernel;
        // Of the slice's channels those of the column's group.
        const int group = by[GROUP].divide(out_channel), first_channel = slice * slice_in;
        const int from = max(group * in_per_group - first_channel, 0), to = min((group + 1) * in_per_group - first_channel, slice_in);
        const Element *at = w + ((long long)(first_channel + c0) * out_per_group + out_channel - group * out_per_group) * kernel +
                            (td * h_kernel + th) * w_kernel + tw;
        alignas(16) Element v[E];
#pragma unroll
        for (int e = 0; e < E; e++, at += (long long)out_per_group * kernel) {
            v[e] = tap && c0 + e >= from && c0 + e < to ? *at : Element{};
            most = max(most, magnitude(v[e]));
        }
        float scale = 1.0f;
#if KIND == 2
        // A power of two: exact.
        scale = 1.0f / scale_w[taps > 1 ? column_block * of_tap + in_block - tap_column * of_tap : column_block * columns + in_block];
#endif
        uint4 low;
        uint4 *panel_at = out + ((long long)tap_tile * PARTS * chunk_panels + in_chunk) * columns + in_block;
        *panel_at = operand(v, scale, &low);
        if (PARTS == 2) panel_at[(long long)chunk_panels * columns] = low;
    }
#if KIND != 2
    raise(&control[1], as_float32(Element{}, most));
#endif
}
