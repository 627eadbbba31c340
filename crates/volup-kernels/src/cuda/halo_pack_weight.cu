// Packs the weight for `halo_gemm`, whose file says how B lies, and what steps and columns are. With `taps` the taps along
// width are columns: B is of `blocks` tiles of `columns/taps` channels.
//
// Parameters: `w`, `out`, then for the split `scale` of `pack_weight_scale`, else `control`; i32:
// `items` (16-byte pieces of a part: all of B / parts / 16), `chunk_panels`, `chunks`, `columns` (BN),
// `blocks`, `channels`, `slice_in`, `in_per_group`, `out_per_group`, `in_channels`, `out_channels`, `outputs`,
// `channels_first`, `block`, `channel_panels`, `w_first`, `w_stride`, `w_dilation`, `d_kernel`, `h_kernel`,
// `w_kernel`, `w_low`, `w_steps`, `w_step`, `taps` (along width, that are columns of their own; else 1). Threads: 256. Grid: (ceil(items / 256), 1).

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
    const int item = blockIdx.x * 256 + threadIdx.x;
    const bool real = item < items;
    int rest = real ? item : 0;
    const int in_block = rest % columns;
    rest /= columns;
    const int in_chunk = rest % chunk_panels;
    rest /= chunk_panels;
    const int tap_tile = rest, step = rest % w_steps;
    rest /= w_steps;
    const int th = rest % h_kernel;
    rest /= h_kernel;
    const int chunk = rest % chunks;
    rest /= chunks;
    const int td = rest % d_kernel;
    rest /= d_kernel;
    const int column_block = rest, slice = rest / blocks;
    const int of_tap = columns / taps, tap_column = in_block / of_tap;
    const int column = column_block % blocks * columns + in_block;
    const int inner = channels_first ? outputs : channels;
    const int large = column / inner, small = column - large * inner;
    const int co = taps > 1 ? column_block % blocks * of_tap + in_block - tap_column * of_tap : channels_first ? large : small;
    const int rr = channels_first ? small : large;
    const int out_channel = slice * channels + co;
    const int panel = chunk * chunk_panels + in_chunk, parity = panel / channel_panels;
    const int c0 = (panel - parity * channel_panels) * E;
    // The tap along width: e = jj + first - m, t*dilation = stride*m + r.
    const int jj = rr / w_stride, residue = rr - jj * w_stride;
    const int m = jj + w_first - ((w_low + step * w_step) * block + parity);
    const int far = m * w_stride + residue, tw = taps > 1 ? tap_column : far / w_dilation;
    const bool hit = taps > 1 || (rr < outputs && m >= 0 && tw * w_dilation == far);
    const bool tap = real && co < channels && parity < block && out_channel < out_channels && hit && tw < w_kernel;
    alignas(16) Element v[E];
    unsigned most = 0;
#pragma unroll
    for (int e = 0; e < E; e++) {
        const int ci = slice * slice_in + c0 + e;
        const bool here = tap && c0 + e < slice_in && ci < in_channels && ci / in_per_group == out_channel / out_per_group;
        const long long at = (((long long)ci * out_per_group + out_channel % out_per_group) * d_kernel + td) * h_kernel + th;
        v[e] = here ? w[at * w_kernel + tw] : Element{};
        most = max(most, magnitude(v[e]));
    }
    float scale = 1.0f;
#if KIND == 2
    // A power of two: exact.
    if (real) scale = 1.0f / scale_w[taps > 1 ? column_block * of_tap + in_block - tap_column * of_tap : column_block * columns + in_block];
#else
    raise(&control[1], as_float32(Element{}, most));
#endif
    if (real) {
        uint4 low;
        uint4 *to = out + ((long long)tap_tile * PARTS * chunk_panels + in_chunk) * columns + in_block;
        *to = operand(v, scale, &low);
        if (PARTS == 2) to[(long long)chunk_panels * columns] = low;
    }
}
