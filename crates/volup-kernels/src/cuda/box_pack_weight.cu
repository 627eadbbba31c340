// Packs the weight for `box_gemm`, whose file says how A lies and what rows and steps are.
//
// Parameters: `w`, `out`, `flags` (a word for each block: whether it met what is left to the definition), `mask_list`
// (a word for each mask); i32: `items` (lanes of all fragments:
// slices*channel_blocks*types*d_offsets*h_offsets*units*chunks*pairs*MT*32), `slice_in`, `slice_out`, `in_per_group`,
// `out_per_group`, `chunk_panels`, `chunks`, `pair_w`, `channels`, `channel_blocks`, `classes`, `types`, `tiles` (MT),
// `residues`; `residue_list` (i64); i32: of depth `d_kernel`, `d_stride`, `d_dilation`, `d_offsets`, `d_apart`, the same
// of height and width. Threads: 256. Grid: any number of blocks along the first axis.

#include "box_rows.cuh"
#include "digits.cuh"
#include "launch.cuh"
#include "operand.cuh"

extern "C" __global__ void __launch_bounds__(256) box_pack_weight(
    const Element *w, uint4 *out, unsigned *flags, unsigned *mask_list,
    int items, int slice_in, int slice_out, int in_per_group, int out_per_group, int chunk_panels, int chunks, int pair_w,
    int channels, int channel_blocks, int classes, int types, int tiles, int residues, long long residue_list,
    int d_kernel, int d_stride, int d_dilation, int d_offsets, int d_apart,
    int h_kernel, int h_stride, int h_dilation, int h_offsets, int h_apart,
    int w_kernel, int w_stride, int w_dilation, int w_offsets, int w_apart) {
    let_next_start();
    const Axis depth = {0, 0, d_kernel, d_stride, 0, d_dilation, 0, 0, d_offsets, d_apart, 0};
    const Axis height = {0, 0, h_kernel, h_stride, 0, h_dilation, 0, 0, h_offsets, h_apart, 0};
    const Axis width = {0, 0, w_kernel, w_stride, 0, w_dilation, 0, 0, w_offsets, w_apart, 0};
    const int pairs = pair_w ? chunk_panels : chunk_panels / 2, units = pair_w ? (w_offsets + 1) / 2 : w_offsets;
    // Masks, a warp each.
    for (int i = (blockIdx.x * 256 + threadIdx.x) / 32; i < types * (d_offsets + h_offsets) + units; i += gridDim.x * 8) {
        const bool of_d = i < types * d_offsets, of_w = i >= types * (d_offsets + h_offsets);
        const int in = of_d ? i : of_w ? i - types * (d_offsets + h_offsets) : i - types * d_offsets;
        const int per = of_d ? d_offsets : of_w ? units : h_offsets;
        const int type = in / per, m = in - type * per;
        unsigned mask = 0;
        for (int row = threadIdx.x % 32; row < 16 * tiles; row += 32) {
            const Row r(row, type, channels, classes, d_stride, h_stride, residues, residue_list);
            bool hit = of_d ? depth.tap(r.d, m) < d_kernel : height.tap(r.h, m) < h_kernel;
            if (of_w) {
                const int first = pair_w ? 2 * m : m;
                hit = width.tap(r.w, first) < w_kernel || pair_w && first + 1 < w_offsets && width.tap(r.w, first + 1) < w_kernel;
            }
            // Along width a row counts if it is of any type.
            if (hit && (r.here || of_w && row < classes * residues * channels)) mask |= 1u << row / 16;
        }
        mask = __reduce_or_sync(0xffffffffu, mask);
        if (threadIdx.x % 32 == 0) mask_list[i] = mask;
    }
    unsigned most = 0;
    for (int item = blockIdx.x * 256 + threadIdx.x; item < items; item += gridDim.x * 256) {
        Digits<int> digits = {item};
        const int lane = digits.next(32), tile = digits.next(tiles), pair = digits.next(pairs), chunk = digits.next(chunks);
        const int unit = digits.next(units);
        const int mh = digits.next(h_offsets), md = digits.next(d_offsets), type = digits.next(types);
        const int channel0 = digits.next(channel_blocks) * channels, slice = digits.rest;
        // Of each of the two rows, and of each of the two units of a step: the tap, and the row's channel.
        int tap[2][2], co[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Row row(16 * tile + 8 * half + lane / 4, type, channels, classes, d_stride, h_stride, residues, residue_list);
            const int td = depth.tap(row.d, md), th = height.tap(row.h, mh);
            co[half] = slice * slice_out + channel0 + row.channel;
            const bool here = row.here && channel0 + row.channel < slice_out && td < d_kernel && th < h_kernel;
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const int mw = pair_w ? 2 * unit + u : unit, tw = mw < w_offsets ? width.tap(row.w, mw) : w_kernel;
                tap[half][u] = here && tw < w_kernel ? (td * h_kernel + th) * w_kernel + tw : -1;
            }
        }
        const int taps = d_kernel * h_kernel * w_kernel;
        alignas(16) Element v[E];
#pragma unroll
        for (int at = 0; at < 4; at++) {
            const int half = at % 2, u = at / 2;
            const int panel = chunk * chunk_panels + (pair_w ? pair : 2 * pair + u);
#pragma unroll
            for (int e = 0; e < E / 4; e++) {
                const int c = panel * E + lane % 4 * (E / 4) + e, ci = slice * slice_in + c;
                const bool here = tap[half][u] >= 0 && c < slice_in && ci / in_per_group == co[half] / out_per_group;
                const long long from = ((long long)ci * out_per_group + co[half] % out_per_group) * taps + tap[half][u];
                v[at * (E / 4) + e] = here ? w[from] : Element{};
            }
        }
        most = largest_so_far(most, v);
        uint4 low;
        uint4 *to = out + (long long)(item / 32) * PARTS * 32 + lane;
        *to = operand(v, 1.0f, &low);
        if (PARTS == 2) to[32] = low;
    }
    const int bad = __syncthreads_or(undefined(most));
    if (threadIdx.x == 0) flags[blockIdx.x] = bad;
}
