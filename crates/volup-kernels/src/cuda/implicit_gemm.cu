// Implicit GEMM: a transposed convolution of few channels, of stride 2 along width, whose sums are of exactly the products
// that an output has.
//
// Where an output has few products, padding them to what a matrix product is usually cut into costs more than they do, and
// so does every instruction that moves an output. Here what is summed over, channels and taps of a residue, is one list
// without gaps: of three channels and two taps six numbers, in steps of eight. Operands are gathered from a box of the input
// in shared memory, one word each.
//
// # What is computed
//
// Along an axis output `o` takes tap `k` from input `i` where `o + padding - k*dilation = stride*i`. Along width outputs
// come in pairs, `o = 2j` and `2j + 1`; each tap belongs to one of them, at an input that lies a constant `offset` from j.
// For each pair of residues along depth and height the product is
// `Y[channel and column of a pair, position j] = sum over units: A[.., unit] * X[unit, position]`,
// a unit being a tap along depth, one along height, an offset along width and a channel of the input; of 16 bits two
// neighbouring channels. Rows of a tile of 16 are eight channels' first columns, then their second ones.
//
// # How
//
// Persistent blocks. A block has a box of outputs, `box_d` planes by `row_blocks` times ROWS lines of each of the stride's
// residues by 64 columns, of all channels of a group. It brings the group's weights, in the order that the instruction takes
// them in, and the box's input, with zeros around, as operands, to shared memory. A unit of work of a warp is one plane and
// ROWS lines of one residue, 32 positions each, of 8*MT channels; `1 << column_bits` neighbouring ones of the WARPS warps
// have different channels, others different lines, neighbours the residues of the same: y is written line next to line.
//
// Sums pass through shared memory, a line of each channel at a time, so that a warp writes 32 neighbours at once.
//
// # Modes
//
// As in `shuffle_gemm`: `mode` 0 writes y; 1 writes statistics instead; 2 writes y normalized. 3, which kernels with `COUNTS`
// have alone, writes y and statistics of what y holds, rounded, through `post_activation`: to be scaled where it lies, or for
// training, where both come from the same y. A partial statistic is the mean of a channel's outputs, the sum of their squared
// deviations from it and their count, for a box and one of `rows = WARPS >> column_bits` warps: partial
// `((sample*boxes + box)*rows + (warp >> column_bits))*channels + channel`, channels all. Units of work are merged in order.
// Activations before statistics are none of erf's and tanh.
//
// # Numbers
//
// `KIND` 0, f16 or bf16; 1, float32 rounded to tf32; 3, float32 as two tf32, of which three products are made; each step's
// are added to float32 registers, since the matrix instructions cut off their sums. Infinities and NaN, and for the split
// what its low part has not bits enough for (operand.cuh), are left to the definition: all of a box where they are in its
// input or weights.
//
// # What it takes
//
// Threads: 32*WARPS. Grid: any number of blocks along the first axis. Boxes of an axis are ceil(output/box), of height
// `box_h = row_blocks*ROWS*h_stride`; `box_d` is a multiple of the stride. Bytes of dynamic shared memory:
// `16*(units + taps + box_d*h_stride*row_blocks) + 4*(parts*words*x_c + 4*channels) + 64*parts*(tiles*units + channels - 8*tiles)
// + 4*WARPS*8*MT*STAGED`: parts 2 for KIND 3, else 1; taps all of a channel pair; words channels of the input (KIND 0: pairs);
// x_c a multiple of 16, but not of 32, of at least planes*lines*PITCH; channels those of a group, up to a multiple of 8*MT;
// tiles of 8 of them; `units` those of all pairs of residues, each a multiple of 8; `planes` and `lines` of input that a box
// has at most. Offsets along width are from -MARGIN to MARGIN. d_stride*h_stride is at most MOST_CLASSES, taps along width at
// most MOST_WIDTH. x and y are dense NCDHW, starting at multiples of 16 bytes; all that is counted in a sample, boxes and
// partials are below 2^31.
//
// Parameters, i32 but for pointers, `x_n`, `y_n` (i64) and `slope` (f64): `x`, `w`, `bias`, `y`; `in_per_group`,
// `out_per_group`, `groups`; of each axis `input`, `output`, `kernel`, `stride`, `padding`, `dilation`; `box_d`,
// `row_blocks`, `boxes_d`, `boxes_h`, `boxes_w`, `samples`, `planes`, `lines`, `x_c`, `units`, `column_bits`; `x_n`, `y_n`
// (from a sample to the next); `has_bias`, `activation`, `slope`, and from `mode` on those of `shuffle_gemm`.

#if !defined(MT) || !defined(ROWS) || !defined(CTAS)
#error "MT: tiles of 8 channels of a warp; ROWS: its lines; CTAS: blocks of a multiprocessor"
#endif

#include "implicit_tiles.cuh"
#include "stored.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) implicit_gemm(
    const Element *x, const Element *w, const Element *bias, Element *y, int in_per_group, int out_per_group, int groups,
    int d_input, int d_output, int d_kernel, int d_stride, int d_padding, int d_dilation,
    int h_input, int h_output, int h_kernel, int h_stride, int h_padding, int h_dilation,
    int w_input, int w_output, int w_kernel, int w_stride, int w_padding, int w_dilation,
    int box_d, int row_blocks, int boxes_d, int boxes_h, int boxes_w, int samples, int planes, int lines, int x_c, int units,
    int column_bits, long long x_n, long long y_n, int has_bias, int activation, double slope, int mode, float *part_mean,
    float *part_m2, float *part_count, const float *mean, const float *rstd, const Element *gamma, const Element *beta,
    int norm_groups, int group_channels, int post_activation, double post_slope) {
    const Axis depth = {d_input, d_output, d_kernel, d_stride, d_padding, d_dilation};
    const Axis height = {h_input, h_output, h_kernel, h_stride, h_padding, h_dilation};
    const Axis width = {w_input, w_output, w_kernel, w_stride, w_padding, w_dilation};
    extern __shared__ __align__(16) char shared[];
    __shared__ Divisors by;
    // Of each pair of residues its first tap of depth, height and offset, and its first unit; offsets along width with the
    // taps of the first column and the second, or -1.
    __shared__ int first_tap[MOST_CLASSES + 1], first_unit[MOST_CLASSES + 1];
    __shared__ int3 offsets[MOST_WIDTH];
    __shared__ int offset_count, bad_weight;
    __shared__ Box at_box;
    // From a box's first output on, how far back its input starts.
    __shared__ int first_d, first_h;
    // Where weights lie; of each channel its bias, mean, factor and addend; and the areas of the warps.
    __shared__ int weights_at, of_channel_at, areas_at;
    // Of a warp's channels mean, squared deviations from it and count.
    __shared__ float3 so_far[WARPS][8 * MT];

    // Whether there are statistics.
    const bool counts = BOTH || mode == 1;
    const int taps = d_kernel * h_kernel * w_kernel, channels = groups * out_per_group, warp_rows = WARPS >> column_bits;
    const int tiles = (out_per_group + 7) / 8, padded = (tiles + MT - 1) / MT * MT * 8, chunks = (in_per_group + CHANNELS - 1) / CHANNELS;
    // Of each unit where its input lies from the lane's, its taps of both columns, and its channel. Of each tap along depth and
    // height and offset along width the same, and its pair of residues.
    int4 *const unit_list = (int4 *)shared, *const tap_list = unit_list + units;
    Unit *const work_list = (Unit *)(tap_list + taps);
    const int box_units = box_d * h_stride * row_blocks;
    unsigned *const inputs = (unsigned *)(work_list + box_units);
    if (threadIdx.x == 64) {
        weights_at = 16 * (units + taps + box_units) + 4 * PARTS * chunks * x_c;
        // The last step's are read for all of a warp's tiles.
        of_channel_at = weights_at + 64 * PARTS * (tiles * units + padded - 8 * tiles);
        areas_at = of_channel_at + 16 * padded;
    }

    if (threadIdx.x < DIVISORS) {
        const int numbers[DIVISORS] = {boxes_w, boxes_h, boxes_d, samples, planes, lines, d_stride, h_stride, w_stride, row_blocks, tiles};
        int by_this = 0;
#pragma unroll
        for (int i = 0; i < DIVISORS; i++) by_this = threadIdx.x == i ? numbers[i] : by_this;
        ((Divisor *)&by)[threadIdx.x] = Divisor(by_this);
    }
    if (threadIdx.x == 32) {
        int count = 0;
        for (int k = 0; k < w_kernel; k++) {
            const int at = w_padding - k * w_dilation, column = at & 1, offset = (at + column) / 2;
            int i = 0;
            while (i < count && offsets[i].x != offset) i++;
            if (i == count) offsets[count++] = make_int3(offset, -1, -1);
            (column ? offsets[i].z : offsets[i].y) = k;
        }
        offset_count = count;
    }
    for (int i = threadIdx.x; i < units; i += THREADS) unit_list[i] = make_int4(0, -1, -1, 0);
    __syncthreads();

    if (threadIdx.x == 0) {
        first_d = depth.first(0, by.d_stride);
        first_h = height.first(0, by.h_stride);
    }
    __syncthreads();
    const int classes = d_stride * h_stride;
    const auto each_tap = [&](auto what) {
        const int rd = by.h_stride.divide(threadIdx.x), rh = threadIdx.x - rd * h_stride;
        for (int kd = 0; kd < d_kernel; kd++) {
            const int d = rd + d_padding - kd * d_dilation - d_stride * first_d, at_d = by.d_stride.divide(d);
            if (at_d * d_stride != d) continue;
            for (int kh = 0; kh < h_kernel; kh++) {
                const int h = rh + h_padding - kh * h_dilation - h_stride * first_h, at_h = by.h_stride.divide(h);
                if (at_h * h_stride != h) continue;
                const int tap = (kd * h_kernel + kh) * w_kernel, line = (at_d * lines + at_h) * PITCH;
                for (int i = 0; i < offset_count; i++) {
                    const int3 of = offsets[i];
                    what(make_int4(line + of.x, of.y < 0 ? -1 : tap + of.y, of.z < 0 ? -1 : tap + of.z, threadIdx.x));
                }
            }
        }
    };
    if (threadIdx.x < classes) {
        int count = 0;
        each_tap([&](int4) { count++; });
        first_tap[threadIdx.x + 1] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        first_tap[0] = first_unit[0] = 0;
        for (int i = 0; i < classes; i++) {
            first_unit[i + 1] = first_unit[i] + (first_tap[i + 1] * chunks + 7) / 8 * 8;
            first_tap[i + 1] += first_tap[i];
        }
    }
    __syncthreads();
    if (threadIdx.x < classes) {
        int at = first_tap[threadIdx.x];
        each_tap([&](int4 tap) { tap_list[at++] = tap; });
    }
    __syncthreads();
    // Offsets side by side, then channels: lanes read neighbours, and other channels in other banks.
    for (int i = threadIdx.x; i < first_tap[classes] * chunks; i += THREADS) {
        const int c = i / first_tap[classes], at = i - c * first_tap[classes];
        int4 tap = tap_list[at];
        const int pair = (at - first_tap[tap.w]) / offset_count, along = at - first_tap[tap.w] - pair * offset_count;
        const int unit = first_unit[tap.w] + (pair * chunks + c) * offset_count + along;
        unit_list[unit] = make_int4(tap.x + c * x_c, tap.y, tap.z, c * CHANNELS);
    }

    // The units of work, which are those of every box.
    for (int unit = threadIdx.x; unit < box_units; unit += THREADS) {
        const int of_lines = by.h_stride.divide(unit), d = by.row_blocks.divide(of_lines), at_d = by.d_stride.divide(d);
        const int row0 = (of_lines - d * row_blocks) * ROWS, round = unit / warp_rows;
        // Where those of all residues are computed at once they take turns, since they have not the same number of taps.
        const bool turns = by.h_stride.divide(warp_rows) * h_stride == warp_rows;
        int rh = unit - of_lines * h_stride + (turns ? round - by.h_stride.divide(round) * h_stride : 0);
        if (rh >= h_stride) rh -= h_stride;
        work_list[unit] = {d, rh + row0 * h_stride, (d - at_d * d_stride) * h_stride + rh, at_d * lines + row0};
    }
    if (threadIdx.x == 0) at_box.item = -1;
#pragma unroll 1
    while (true) {
        // All are done with the box before.
        __syncthreads();
        if (thread() == 0) {
            const int before = at_box.item, item = before < 0 ? blockIdx.x : before + gridDim.x, of_w = by.boxes_w.divide(item), of_h = by.boxes_h.divide(of_w), of_d = by.boxes_d.divide(of_h);
            const int group = by.samples.divide(of_d), n = of_d - group * samples;
            const int box_w = item - of_w * boxes_w, box_h = of_w - of_h * boxes_h, box = of_h - of_d * boxes_d;
            at_box.item = item;
            at_box.known = before < 0 ? -1 : at_box.group;
            at_box.group = group;
            at_box.sample = n;
            at_box.od = box * box_d;
            at_box.oh = box_h * row_blocks * ROWS * h_stride;
            at_box.j = box_w * LANES;
            at_box.id = by.d_stride.divide(at_box.od) + first_d;
            at_box.ih = box_h * row_blocks * ROWS + first_h;
            const int in = hidden(in_per_group), out = hidden(out_per_group);
            at_box.x = x + n * x_n + (long long)group * in * d_input * h_input * w_input;
            at_box.w = w + (long long)group * in * out * taps;
            at_box.y = y + n * y_n + (long long)group * out * d_output * h_output * w_output;
            at_box.partial = (((n * boxes_d + box) * boxes_h + box_h) * boxes_w + box_w) * warp_rows * channels + group * out_per_group;
        }
        __syncthreads();
        if (at_box.item >= hidden(boxes_w) * boxes_h * boxes_d * samples * groups) break;

        // The box's input.
        unsigned most = 0;
        {
            // Computed anew for each box: registers are scarce.
            const int high = hidden(planes), wide = hidden(lines), line_input = hidden(w_input), plane = h_input * line_input, id0 = at_box.id, ih0 = at_box.ih, iw0 = at_box.j - MARGIN;
            const Element *const from = at_box.x;
            const bool vectors = line_input % 4 == 0;
            const int all = chunks * high * wide * VECTORS;
#pragma unroll 1
            for (int first = thread(); first < all; first += BATCH * THREADS) {
                alignas(16) Element v[BATCH][E];
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    const int i = first + k * THREADS, line = i / VECTORS, of_plane = by.lines.divide(line), c = by.planes.divide(of_plane);
                    const int d = id0 + of_plane - c * high, h = ih0 + line - of_plane * wide, column = iw0 + (i - line * VECTORS) * 4;
                    const bool there = i < all && (unsigned)d < (unsigned)d_input && (unsigned)h < (unsigned)h_input;
#pragma unroll
                    for (int e = 0; e < CHANNELS; e++) {
                        const int channel = c * CHANNELS + e;
                        const bool has = there && channel < in_per_group;
                        const Element *const at = from + ((channel * d_input + d) * plane + h * line_input + column);
                        using Four = typename FourOf<Element>::type;
                        if (vectors) {
                            ((Four *)v[k])[e] = has && (unsigned)column < (unsigned)line_input ? *(const Four *)at : Four{};
                        } else {
#pragma unroll
                            for (int f = 0; f < 4; f++) v[k][4 * e + f] = has && (unsigned)(column + f) < (unsigned)line_input ? at[f] : Element{};
                        }
                    }
                }
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    const int i = first + k * THREADS, line = i / VECTORS, c = by.planes.divide(by.lines.divide(line));
                    if (i >= all) break;
                    most = largest_so_far(most, v[k]);
                    uint4 low{};
                    uint4 *const to = (uint4 *)(inputs + c * x_c + (line - c * high * wide) * PITCH + (i - line * VECTORS) * 4);
                    *to = words(v[k], low);
                    if (PARTS == 2) *(uint4 *)((unsigned *)to + chunks * x_c) = low;
                }
            }
        }
        // The group's weights, as a warp's lanes give them to the instruction: [step][tile][part][lane].
        if (at_box.group != at_box.known) {
            const Element *const from = at_box.w;
            unsigned most = 0;
#pragma unroll 2
            for (int i = thread(); i < 4 * units * tiles; i += THREADS) {
                const int of_lane = i / 32, step = by.co_blocks.divide(of_lane), tile = of_lane - step * tiles, o = tile * 8 + i % 32 / 4;
                unsigned high[4], low[4];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const int4 unit = unit_list[step * 8 + i % 4 + 4 * k];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int tap = e ? unit.z : unit.y;
                        alignas(4) Element v[CHANNELS];
#pragma unroll
                        for (int c = 0; c < CHANNELS; c++) {
                            const bool there = tap >= 0 && o < out_per_group && unit.w + c < in_per_group;
                            v[c] = there ? from[((unit.w + c) * out_per_group + o) * taps + tap] : Element{};
                            most = max(most, KIND == 0 ? magnitude(widen(v[c])) : within_parts(magnitude(widen(v[c]))));
                        }
#if KIND == 0
                        high[2 * k + e] = *(const unsigned *)v;
#else
                        high[2 * k + e] = round_tf32(v[0]);
                        low[2 * k + e] = round_tf32(v[0] - __uint_as_float(high[2 * k + e]));
#endif
                    }
                }
                uint4 *const to = (uint4 *)(shared + weights_at) + of_lane * PARTS * 32 + i % 32;
                *to = make_uint4(high[0], high[1], high[2], high[3]);
                if (PARTS == 2) to[32] = make_uint4(low[0], low[1], low[2], low[3]);
            }
            const int bad = __syncthreads_or(most >= 0x7f800000u);
            if (thread() == 0) bad_weight = bad;
        }
        float *const of_channel = (float *)(shared + of_channel_at);
        for (int o = thread(); o < padded; o += THREADS) {
            const int channel = at_box.group * out_per_group + min(o, out_per_group - 1);
            of_channel[o] = has_bias ? widen(bias[channel]) : 0.0f;
            if (!BOTH && mode == 2) {
                const int at = at_box.sample * norm_groups + channel / group_channels;
                of_channel[padded + o] = mean[at];
                of_channel[2 * padded + o] = gamma ? rstd[at] * widen(gamma[channel]) : rstd[at];
                of_channel[3 * padded + o] = beta ? widen(beta[channel]) : 0.0f;
            }
        }
        const int bad_input = __syncthreads_or(undefined(most));
        if (thread() == 0) at_box.bad = bad_input | bad_weight;
        __syncthreads();

#pragma unroll 1
        for (int block = thread() / 32 & ((1 << column_bits) - 1); block * MT < tiles; block += 1 << column_bits) {
            if (const int lane = thread() % 32; counts && lane < 8 * MT) so_far[thread() / 32][lane] = make_float3(0.0f, 0.0f, 0.0f);
            __syncwarp();
#pragma unroll 1
            for (int unit = (thread() / 32 >> column_bits); unit < hidden(box_d) * h_stride * row_blocks; unit += warp_rows) {
                // Computed anew: registers are scarce.
                const float *const of_channel = (const float *)(shared + of_channel_at);
                const int warp = thread() / 32, lane = thread() % 32, g = lane / 4, t = lane % 4;
                float *const staged = (float *)(shared + areas_at) + warp * 8 * MT * STAGED;
                const Unit here = work_list[unit];
                if (at_box.od + here.d >= d_output || at_box.oh + here.h >= h_output) continue;

                Sums sum;
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    const float add = of_channel[8 * (MT * block + i) + g];
#pragma unroll
                    for (int r = 0; r < ROWS; r++)
#pragma unroll
                        for (int n = 0; n < TILES; n++)
#pragma unroll
                            for (int e = 0; e < 4; e++) sum[i][r][n][e] = add;
                }
                if (!at_box.bad) {
                    const unsigned *const from = inputs + (here.line * PITCH + MARGIN + g / 2 + g % 2 * 4);
                    const int end = first_unit[here.residues + 1];
#pragma unroll 1
                    for (int at = first_unit[here.residues]; at < end; at += 8) {
                        const unsigned *const one = from + unit_list[at + t].x, *const other = from + unit_list[at + 4 + t].x;
                        const uint4 *const of_step = (const uint4 *)(shared + weights_at) + (at / 8 * tiles + block * MT) * PARTS * 32 + lane;
                        uint4 a[MT][PARTS];
#pragma unroll
                        for (int i = 0; i < MT; i++)
#pragma unroll
                            for (int part = 0; part < PARTS; part++)
                                // Past the last tile any: what comes of it is not written.
                                a[i][part] = of_step[(i * PARTS + part) * 32];
#pragma unroll
                        for (int r = 0; r < ROWS; r++)
#pragma unroll
                            for (int n = 0; n < TILES; n++) {
                                const int far = r * PITCH + 8 * n;
                                const unsigned b0 = one[far], b1 = other[far];
#if KIND == 3
                                // No more loads ahead than there are registers for.
                                if (n % 2 == 0) asm volatile("" ::: "memory");
                                const unsigned l0 = one[far + chunks * x_c], l1 = other[far + chunks * x_c];
#pragma unroll
                                for (int i = 0; i < MT; i++) {
                                    float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                                    multiply(product, a[i][1], b0, b1);
                                    multiply(product, a[i][0], l0, l1);
                                    multiply(product, a[i][0], b0, b1);
#pragma unroll
                                    for (int e = 0; e < 4; e++) sum[i][r][n][e] += product[e];
                                }
#else
#pragma unroll
                                for (int i = 0; i < MT; i++) multiply(sum[i][r][n], a[i][0], b0, b1);
#endif
                            }
                    }
                } else {
                    // By the definition, a line after the other, through shared memory.
#pragma unroll 1
                    for (int r = 0; r < ROWS && at_box.oh + here.h + r * h_stride < h_output; r++) {
                        __syncwarp();
#pragma unroll 1
                        for (int i = lane; i < 8 * MT * 2 * LANES; i += 32) {
                            const int o = 8 * MT * block + i / (2 * LANES), ow = 2 * at_box.j + i % (2 * LANES);
                            float v = of_channel[o];
                            if (o < out_per_group && ow < w_output)
                                for (int kd = 0; kd < d_kernel; kd++) {
                                    const int id = depth.of_tap(at_box.od + here.d, kd, by.d_stride);
                                    if ((unsigned)id >= (unsigned)d_input) continue;
                                    for (int kh = 0; kh < h_kernel; kh++) {
                                        const int ih = height.of_tap(at_box.oh + here.h + r * h_stride, kh, by.h_stride);
                                        if ((unsigned)ih >= (unsigned)h_input) continue;
                                        for (int kw = 0; kw < w_kernel; kw++) {
                                            const int iw = width.of_tap(ow, kw, by.w_stride);
                                            if ((unsigned)iw >= (unsigned)w_input) continue;
                                            const Element *at = at_box.x + ((id * h_input + ih) * w_input + iw);
                                            const Element *weight = at_box.w + (o * taps + (kd * h_kernel + kh) * w_kernel + kw);
#pragma unroll 1
                                            for (int c = 0; c < in_per_group; c++, at += d_input * h_input * w_input, weight += out_per_group * taps)
                                                v = fmaf(widen(*at), widen(*weight), v);
                                        }
                                    }
                                }
                            staged[line_of(i / (2 * LANES)) + i % (2 * LANES)] = v;
                        }
                        __syncwarp();
                        stage<true>(sum, r, staged);
                    }
                }

                const int od = at_box.od + work_list[unit].d, oh = at_box.oh + work_list[unit].h;
                int left = 0;
#pragma unroll
                for (int r = 0; r < ROWS; r++) left += oh + r * h_stride < h_output;
                const int columns = min(2 * LANES, w_output - 2 * at_box.j), first_channel = 8 * MT * hidden(block);
                // Adds the sums, through an activation, to the statistics.
                const auto count_sums = [&](int code, double slope) {
                    const int count = left * columns;
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        float(&v)[ROWS * TILES * 4] = *(float(*)[ROWS * TILES * 4])sum[i];
                        if (BOTH) as_stored(v);
                        bend_plainly(v, code, (float)slope);
                        // What is not in y becomes what does not count.
                        const auto fill = [&](float by) {
#pragma unroll
                            for (int n = 0; n < TILES; n++)
                                if (16 * (n + 1) > columns)
#pragma unroll
                                    for (int e = 0; e < 4; e++)
                                        if (16 * n + column_of(e) >= columns)
#pragma unroll
                                            for (int r = 0; r < ROWS; r++) sum[i][r][n][e] = by;
#pragma unroll
                            for (int r = 1; r < ROWS; r++)
                                if (r >= left)
#pragma unroll
                                    for (int k = 0; k < TILES * 4; k++) v[r * TILES * 4 + k] = by;
                        };
                        // The sum of something of the channel's outputs, in every lane that has any of them.
                        const auto over = [&](auto of) {
                            float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                            for (int k = 0; k < ROWS * TILES * 4; k++) total[k % 4] += of(v[k]);
                            float all = total[0] + total[1] + (total[2] + total[3]);
                            all += __shfl_xor_sync(0xffffffffu, all, 1);
                            return all + __shfl_xor_sync(0xffffffffu, all, 2);
                        };
                        fill(0.0f);
                        const float mean_here = over([](float v) { return v; }) / count;
                        fill(mean_here);
                        const float m2 = over([&](float v) { return (v - mean_here) * (v - mean_here); });
                        // Merged as by Chan, Golub and LeVeque, 1979.
                        if (t == 0) {
                            float3 &of = so_far[warp][8 * i + g];
                            const float seen = of.z + count, apart = mean_here - of.x, part = count / seen;
                            of = make_float3(of.x + apart * part, of.y + (m2 + apart * apart * (of.z * part)), seen);
                        }
                    }
                };
                if (BOTH) {
#pragma unroll
                    for (int i = 0; i < MT; i++) bend_plainly(*(float(*)[ROWS * TILES * 4])sum[i], activation, (float)slope);
                } else if (mode == 1) {
                    count_sums(activation, slope);
                    continue;
                }

                const int plane = d_output * h_output * w_output, channels_left = min(out_per_group - first_channel, 8 * MT);
                Element *to = at_box.y + ((long long)first_channel * plane + (od * h_output + oh) * w_output + (2 * at_box.j + lane));
                const auto lines_to = [&](auto bend_all) {
#pragma unroll 1
                    for (int r = 0; r < left; r++, to += h_stride * w_output) {
                        __syncwarp();
                        stage<false>(sum, r, staged);
                        __syncwarp();
                        Element *at = to;
#pragma unroll 1
                        for (int c0 = 0; c0 < channels_left; c0 += AT_ONCE) {
                            float v[2 * AT_ONCE];
                            const float *const lines = staged + (line_of(c0) + lane);
#pragma unroll
                            for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
                                for (int e = 0; e < 2; e++) v[2 * k + e] = lines[k * STAGED + 32 * e];
                            bend_all(v, first_channel + c0);
                            const bool first = lane < columns, second = lane + 32 < columns;
                            const int here = channels_left - c0;
#pragma unroll
                            for (int k = 0; k < AT_ONCE; k++, at += plane)
#pragma unroll
                                for (int e = 0; e < 2; e++) put(at + 32 * e, v[2 * k + e], (e ? second : first) && k < here);
                        }
                    }
                };
                if (BOTH || mode == 0 && !activation)
                    lines_to([](float(&)[2 * AT_ONCE], int) {});
                else
                    lines_to([&](float(&v)[2 * AT_ONCE], int channel) {
                        bend(v, activation, (float)slope);
                        if (mode != 2) return;
#pragma unroll
                        for (int k = 0; k < AT_ONCE; k++) {
                            const float *const norm = of_channel + padded + channel + k;
#pragma unroll
                            for (int e = 0; e < 2; e++) v[2 * k + e] = (v[2 * k + e] - norm[0]) * norm[padded] + norm[2 * padded];
                        }
                        bend(v, post_activation, (float)post_slope);
                    });
                if (BOTH) count_sums(post_activation, post_slope);
            }
            __syncwarp();
            if (const int warp = thread() / 32, lane = thread() % 32, own = 8 * MT * block + lane; counts && lane < 8 * MT && own < out_per_group) {
                const float3 of = so_far[warp][lane];
                const int partial = at_box.partial + (warp >> column_bits) * channels + own;
                part_mean[partial] = of.x;
                part_m2[partial] = of.y;
                part_count[partial] = of.z;
            }
        }
    }
}
