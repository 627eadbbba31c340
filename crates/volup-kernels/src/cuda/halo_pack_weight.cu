// Packs the weight for `halo_gemm`, whose file says how B lies, and what steps and columns are. With `taps` the taps along
// width are columns: B is of `blocks` tiles of `columns/taps` channels.
//
// A block brings E input channels, a panel, of `run` output channels and `lines` lines of taps to shared memory as pieces of
// 16 bytes, and writes what B has of them from there: w is read, and its elements become operands, once a panel, and
// neighbouring threads read neighbouring taps, but write neighbouring columns.
//
// Parameters: `w`, `out`, then for fp16 of float32 `scale_w` of `pack_weight_scale` or `half_scale`, else `control`; i32:
// `run`, `lines`, `line_runs` (as many as hold all of `d_kernel*h_kernel`), `pitch` (pieces from a channel to the next in
// shared memory, at least `lines*w_kernel`), `each` (columns of a channel, those past a slice's last counted in: `outputs` if `channels_first`, else as many as fill the
// blocks; or `taps`), `chunk_panels`, `chunks`, `columns` (BN), `blocks`, `channels`, `slice_in`, `in_per_group`,
// `out_per_group`, `outputs`, `channels_first`, `block`, `channel_panels`, `w_first`, `w_stride`, `w_dilation`, `d_kernel`,
// `h_kernel`, `w_kernel`, `w_low`, `w_steps`, `w_step`, `taps` (along width, that are columns of their own; else 1),
// `sweeps` (1: taps along depth are columns, as `halo_sweep` has them).
// Threads: 256. Grid: (runs*line_runs, chunks*chunk_panels, slices), with runs as many as hold all channels of a slice, and
// the columns past them. Bytes of dynamic shared memory: run*pitch*16, twice for two parts.

#include "divisor.cuh"
#include "launch.cuh"
#include "operand.cuh"

/// Pieces that a thread reads at a time.
constexpr int AHEAD = 2;

extern "C" __global__ void __launch_bounds__(256, 4) halo_pack_weight(
    const Element *w, uint4 *out,
#if SCALED
    const float *scale_w,
#else
    unsigned *control,
#endif
    int run, int lines, int line_runs, int pitch, int each, int chunk_panels, int chunks, int columns, int blocks, int channels, int slice_in,
    int in_per_group, int out_per_group, int outputs, int channels_first, int block, int channel_panels, int w_first, int w_stride,
    int w_dilation, int d_kernel, int h_kernel, int w_kernel, int w_low, int w_steps, int w_step, int taps, int sweeps) {
#if SCALED
    // The scales, of the kernel before this one; what comes next needs those as well, from the start.
    await_previous();
#endif
    let_next_start();
    extern __shared__ uint4 pieces[];
    const int of_tap = columns / taps, span = lines * w_kernel, kernel = d_kernel * h_kernel * w_kernel;
    // Whether a channel's columns are neighbours, else those of a residue or a tap.
    const bool together = channels_first && taps == 1;
    // What numbers are divided by, each by a thread of its own: they take long.
    enum { LINE_RUNS, CHUNK, PANELS, SPAN, GROUP, INNER, OF_TAP, STRIDE, DILATION, HEIGHT, DIVISORS };
    __shared__ Divisor by[DIVISORS];
    if (threadIdx.x < DIVISORS) {
        const int numbers[DIVISORS] = {line_runs, chunk_panels, channel_panels, span, out_per_group, together ? each : run,
                                       of_tap, w_stride, w_dilation, h_kernel};
        int by_this = 0;
#pragma unroll
        for (int i = 0; i < DIVISORS; i++) by_this = threadIdx.x == i ? numbers[i] : by_this;
        by[threadIdx.x] = Divisor(by_this);
    }
    __syncthreads();
    const int run_at = by[LINE_RUNS].divide(blockIdx.x), channel0 = run_at * run, line0 = (blockIdx.x - run_at * line_runs) * lines;
    const int panel = blockIdx.y, parity = by[PANELS].divide(panel), c0 = (panel - parity * channel_panels) * E;
    const int slice = blockIdx.z, first_in = slice * slice_in, first_out = slice * channels;

    // Pieces of the weight: of each channel its taps, one after the other as in w.
    [[maybe_unused]] unsigned most = 0;
    const int count = run * span, there = parity < block ? min(run, channels - channel0) : 0;
    const long long apart = (long long)out_per_group * kernel;
    const Element *const of_panel = w + (first_in + c0) * apart;
#pragma unroll 1
    for (int first = threadIdx.x; first < count; first += AHEAD * 256) {
        alignas(16) Element v[AHEAD][E];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int at = first + i * 256, in_run = by[SPAN].divide(at), tap = line0 * w_kernel + at - in_run * span;
            const int out_channel = first_out + channel0 + in_run, group = by[GROUP].divide(out_channel);
            // Of the panel's channels those of the output channel's group.
            const int from = max(group * in_per_group - first_in, 0) - c0;
            const int to = in_run < there && tap < kernel ? min((group + 1) * in_per_group - first_in, slice_in) - c0 : 0;
            const Element *x = of_panel + (long long)(out_channel - group * out_per_group) * kernel + tap;
#pragma unroll
            for (int e = 0; e < E; e++, x += apart) v[i][e] = e >= from && e < to ? *x : Element{};
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int at = first + i * 256, in_run = by[SPAN].divide(at);
            if (at >= count) break;
            float scale = 1.0f;
#if SCALED
            // A power of two: exact.
            if (in_run < there) scale = 1.0f / scale_w[slice * blocks * of_tap + (channel0 + in_run) * (together ? outputs : 1)];
#endif
            most = larger(most, v[i]);
            uint4 low;
            uint4 *const to = pieces + in_run * pitch + at - in_run * span;
            *to = operand(v[i], scale, &low);
            if (PARTS == 2) to[run * pitch] = low;
        }
    }
#if !SCALED
    __shared__ unsigned largest_of[8];
    most = __reduce_max_sync(0xffffffffu, largest(Element{}, most));
    if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = most;
#endif
    __syncthreads();
#if !SCALED
    // Once a block, and nobody waits for it.
    if (threadIdx.x < 8) {
        most = __reduce_max_sync(0xffu, largest_of[threadIdx.x]);
        if (threadIdx.x == 0) atomicMax(&control[1], as_float32(Element{}, most));
    }
#endif

    // A thread keeps to a column, and to lines that others of that column do not write.
    const int width = min(run * each, 256), others = 256 / width, first_line = threadIdx.x / width;
    if (first_line >= others) return;
    const int chunk = by[CHUNK].divide(panel), in_chunk = panel - chunk * chunk_panels;
    const int lines_here = min(lines, d_kernel * h_kernel - line0), w_outputs = taps > 1 ? taps : outputs;
#pragma unroll 1
    for (int item = threadIdx.x - first_line * width; item < run * each; item += width) {
        const int outer = by[INNER].divide(item), inner = item - outer * by[INNER].by;
        const int in_run = together ? outer : inner, which = together ? inner : outer, channel = channel0 + in_run;
        const int column = taps > 1 ? channel : together ? channel * outputs + which : which * channels + channel;
        const int of_slice = by[OF_TAP].divide(column), in_block = column - of_slice * of_tap + (taps > 1 ? which * of_tap : 0);
        if (of_slice >= blocks || (taps == 1 && !together && channel >= channels)) continue;
        // The tap along width: e = jj + first - m, t*dilation = stride*m + r, if that is one.
        const int jj = by[STRIDE].divide(which), residue = which - jj * w_stride;
        const int far0 = taps > 1 ? which * w_dilation : (jj + w_first - w_low * block - parity) * w_stride + residue;
        const int plane0 = (slice * blocks + of_slice) * (sweeps ? 1 : d_kernel), panel_columns = sweeps ? d_kernel * columns : columns;
#pragma unroll 1
        for (int step = 0; step < w_steps; step++) {
            const int far = far0 - step * w_step * block * w_stride, tw = by[DILATION].divide(max(far, 0));
            const bool hit = which < w_outputs && far >= 0 && tw * w_dilation == far && tw < w_kernel;
            const uint4 *const from = pieces + in_run * pitch + tw;
#pragma unroll 1
            for (int line = first_line; line < lines_here; line += others) {
                const int td = by[HEIGHT].divide(line0 + line), th = line0 + line - td * h_kernel;
                const int tile = (((plane0 + (sweeps ? 0 : td)) * chunks + chunk) * h_kernel + th) * w_steps + step;
                uint4 *const to = out + ((long long)tile * chunk_panels + in_chunk) * PARTS * panel_columns + (sweeps ? td * columns : 0) + in_block;
                const uint4 none = make_uint4(0, 0, 0, 0);
                *to = hit ? from[line * w_kernel] : none;
                if (PARTS == 2) to[panel_columns] = hit ? from[run * pitch + line * w_kernel] : none;
            }
        }
    }
}
