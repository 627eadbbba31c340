// Box GEMM: all phases of a box of positions at once, from the input itself.
//
// `halo_gemm` writes the input anew for the matrix instructions, and its tiles hold one phase along depth and height.
// Where y is much larger than x, or everything is small, that is what its time goes to. Here a block reads a box of
// the input once, keeps it in shared memory, and computes every residue of every axis from there: y is what it moves.
//
// # What is computed
//
// Per axis let `u = o + p = s*q + r`. Output `o` of residue `r` sums over the taps `t` with `t*d = r (mod s)`, each at
// input `i = q - m`, `m = (t*d - r)/s`. Offsets `m` are multiples of `apart`: `offsets` of them. The product is
// `Y[row, position] = sum over offsets, channels: A[row][offset, channel] * X[position - offset, channel]`.
//
// - **Rows** are channels and residues of a slice (whole groups; its weights between groups are zeros). A row block
//   has `classes` pairs of residues along depth and height, in turn: which ones is its type, `type*classes + ..`, a
//   class being rd*h_stride + rh. Of each, the `residues` residues along width that have taps at all (4 bits each in
//   `residue_list`), of each `channels` channels: row = (class*residues + rw)*channels + channel. At most 16*MT.
// - **Positions** of a box are its columns, numbered along width, height, depth; WARPS/row_warps*8*NT at most.
// - **X** lies in shared memory as panels of 16 bytes a position (E channels), with the halo that offsets need.
//   `chunk_panels` panels at a time.
// - **Steps** take two units, panels at an offset each: two neighbouring panels, or with `pair_w` one panel at two
//   neighbouring offsets along width.
// - **A**, written by `box_pack_weight`: for each step of a row block its MT tiles of 16 rows, each the 512 bytes that
//   a warp's lanes give the instruction, the split's low part after the high, in the order
//   [slice][channel block][type][offset d][h][unit along w][chunk][pair of panels][tile][part][lane].
//
// Tiles of rows that have no tap at an offset are left out there, so that residues share what is read but not zeros:
// masks, of which bit i stands for tile i, say for each type which have one at an offset along depth, the same along
// height, then for all types for each unit along width; a tile takes part where all three say so.
//
// # How
//
// Persistent blocks, whose tables of positions, inputs and steps serve for every box. A warp has 8*NT positions and a
// row block; of `row_warps` neighbouring warps each has another row block of the same positions. Weights are read
// through the first-level cache. Sums go to y through shared memory, 32 positions at a time, a warp's by itself. Of a
// box, a piece of work is every `parts`-th `row_warps` row blocks; where all channels fit at once its input is read
// once for all of them.
//
// # Numbers
//
// `KIND` 0, f16 or bf16; 1, float32 rounded to tf32; 3, float32 as two tf32, of which three products are made; each
// step's are added to float32 registers, since the matrix instructions cut off their sums. Where a piece of work's
// input, or the weight, holds an infinity or NaN, it is computed by the definition, since zeros times those are not
// zeros; so it is where two parts have not bits enough (box_rows.cuh).
//
// # What it takes
//
// It may be launched so that it starts while the weight's pack still runs: it waits for that itself.
//
// Threads: 32*WARPS. Grid: any number of blocks along the first axis, for the n * boxes * slices * parts pieces of work,
// boxes of all axes ceil(count/box); (parts - 1)*row_warps is less than the row blocks of a slice. Bytes of dynamic
// shared memory: `16*(parts*chunk_panels + 1)*halo + 4*WARPS*(staging + 2*line_count) + 16*steps`: halo the product of
// `box + (offsets-1)*apart`; parts 2 for KIND 3, else 1; steps the ones that have a tap at all, of all types, for one
// pair of panels. `types*(d_offsets + h_offsets) + units` is at most 1024, types at most 64, the stride along width 16.
//
// Parameters, i32 but for `residue_list`, `x_n`, `y_n` (i64) and `slope` (f64):
//
// 1. `x`, `a`, `flags` and `mask_list` of the pack, `w`, `bias`, `y`.
// 2. `flag_count` (blocks of the pack), `slices`, `slice_in`, `slice_out`, `in_per_group`, `out_per_group`.
// 3. `chunk_panels`, `chunks`, `pair_w`, `channels`, `channel_blocks`, `classes`, `types`, `parts`, `residues`,
//    `residue_list`.
// 4. Of each axis `input`, `output`, `kernel`, `stride`, `padding`, `dilation`, `first` and `count` of positions,
//    `offsets`, `apart`, `box`.
// 5. `x_last`, `y_last` (whether channels are last), `has_bias`, `activation`, `slope`.
// 6. `pitch` and `staging`: floats from a staged line to the next (for NCDHW and strides of 1 and 2 along width those of
//    box_epilogue.cuh), and of a warp's area, a multiple of 4; `line_count`: entries of a warp's table of lines, even.
// 7. Strides of x and of y. `boxes_d`, `boxes_h`, `boxes_w`. `all_h`, `all_w`, `x_rows`: the halo's height and width, and
//    all of it. `units`, `pairs` of a chunk, `work` (pieces), `row_warps`.

#include "box_epilogue.cuh"
#include "box_rows.cuh"
#include "divisor.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "operand.cuh"

#if !defined(MT) || !defined(NT) || !defined(WARPS) || !defined(CTAS)
#error "MT: tiles of 16 rows; NT: tiles of 8 positions of a warp; WARPS of a block; CTAS: blocks of a multiprocessor"
#endif

constexpr int THREADS = 32 * WARPS, POSITIONS = 8 * NT, ALL = WARPS * POSITIONS;
constexpr int MOST_MASKS = 1024, MOST_TYPES = 64;
/// Vectors of 16 bytes that a thread fetches at once: loads enough to wait for.
constexpr int BATCH = WARPS * CTAS > 16 ? 1 : MT * NT <= 8 ? 4 : KIND == 0 ? 2 : 3;
/// Whether there are registers for more than what a step has, and for the way in which the first input comes early.
#define ROOMY (MT * WARPS * CTAS <= 32)
constexpr bool EARLY = MT * WARPS * CTAS <= (KIND == 0 ? 24 : 32);
/// Steps whose weights are on their way, where registers hold more than one's.
[[maybe_unused]] constexpr int AHEAD = MT == 1 ? 2 : 3;
/// Vectors of 16 bytes of a step's weights.
constexpr int WEIGHTS = MT * PARTS * 32;

/// What numbers are divided by.
struct Divisors {
    Divisor line, height, rows, box_line, box_plane, w_stride, of_class, channels, h_stride, parts, slices, boxes_w,
        boxes_h, boxes_d, types;
};
constexpr int DIVISORS = sizeof(Divisors) / sizeof(Divisor);

/// A number, of which the compiler does not know that it is the same: what follows from it is computed where it is
/// needed, not kept. Registers are scarce.
__device__ __forceinline__ int hidden(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

/// A piece of work, for all threads: where its inputs and outputs lie, the first of each along the axes, its part of
/// the row blocks and its slice.
struct __align__(16) Work {
    long long x, y;
    int i_d, i_h, i_w, part;
    int od, oh, ow, slice;
    /// Its number, or past the last.
    int item;
};

/// Sums of a warp to shared memory: a line of NCDHW is a channel's of a class, its neighbours ACROSS apart; of NDHWC a
/// position's.
template <int ACROSS> __device__ __forceinline__ void stage(const float (&sum)[MT][NT][4], int piece, float *staged, const int *row_at, int any) {
    const int across = ACROSS ? ACROSS : any, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = row_at[16 * i + 8 * half + lane / 4];
            float *const to = staged + at + lane % 4 * 2 * across;
            if (at >= 0)
#pragma unroll
                for (int p = 0; p < NT / 4; p++)
                    if (p == piece)
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            to[8 * j * across] = sum[i][4 * p + j][2 * half];
                            to[(8 * j + 1) * across] = sum[i][4 * p + j][2 * half + 1];
                        }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) box_gemm(
    const Element *x, const uint4 *a, const unsigned *flags, const unsigned *mask_list, const Element *w, const Element *bias, Element *y,
    int flag_count, int slices, int slice_in, int slice_out, int in_per_group, int out_per_group,
    int chunk_panels, int chunks, int pair_w, int channels, int channel_blocks, int classes, int types, int parts,
    int residues, long long residue_list,
    int d_input, int d_output, int d_kernel, int d_stride, int d_padding, int d_dilation, int d_first, int d_count,
    int d_offsets, int d_apart, int d_box,
    int h_input, int h_output, int h_kernel, int h_stride, int h_padding, int h_dilation, int h_first, int h_count,
    int h_offsets, int h_apart, int h_box,
    int w_input, int w_output, int w_kernel, int w_stride, int w_padding, int w_dilation, int w_first, int w_count,
    int w_offsets, int w_apart, int w_box,
    int x_last, int y_last, int has_bias, int activation, double slope, int pitch, int staging, int line_count,
    long long x_n, int x_c, int x_d, int x_h, int x_w, long long y_n, int y_c, int y_d, int y_h, int y_w,
    int boxes_d, int boxes_h, int boxes_w, int all_h, int all_w, int x_rows, int units, int pairs, int work, int row_warps) {
    const Axis depth = {d_input, d_output, d_kernel, d_stride, d_padding, d_dilation, d_first, d_count, d_offsets, d_apart, d_box};
    const Axis height = {h_input, h_output, h_kernel, h_stride, h_padding, h_dilation, h_first, h_count, h_offsets, h_apart, h_box};
    const Axis width = {w_input, w_output, w_kernel, w_stride, w_padding, w_dilation, w_first, w_count, w_offsets, w_apart, w_box};
    extern __shared__ __align__(16) char shared[];
    // Of each position of a box: where its output lies from the first one's, and how far along each axis.
    __shared__ int4 positions[ALL];
    __shared__ Divisors by;
    __shared__ unsigned char masks[MOST_MASKS];
    __shared__ int type_steps[MOST_TYPES + 1];
    __shared__ int row_at[16 * MT];
    __shared__ Work works[2];
    // The row block, counted over slices, that a warp's table of lines is of.
    __shared__ int known[WARPS];
    // Whether the weight is out of the ordinary, and the last piece of work whose input is.
    __shared__ int bad_weight, bad_input;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int plane = 16 * x_rows, part_bytes = chunk_panels * plane;
    // Of each row of X: where its input lies from the first one's, and how far along each axis.
    int4 *const inputs = (int4 *)(shared + PARTS * part_bytes);
    // Of each warp its staging area and table of lines.
    float *const areas = (float *)(inputs + x_rows);
    const int area = staging + 2 * line_count;
    // Of each step: where the two units of X lie, its tiles, its weights.
    int4 *const steps = (int4 *)(areas + WARPS * area);

    if (threadIdx.x < DIVISORS) {
        // Each by a thread of its own: they take long.
        const int numbers[DIVISORS] = {all_w, all_h, x_rows, w_box, w_box * h_box, w_stride, channels * w_stride, channels,
                                       h_stride, parts, slices, boxes_w, boxes_h, boxes_d, types};
        int by_this = 0;
#pragma unroll
        for (int i = 0; i < DIVISORS; i++) by_this = threadIdx.x == i ? numbers[i] : by_this;
        ((Divisor *)&by)[threadIdx.x] = Divisor(by_this);
    }
    if (threadIdx.x < 16 * MT) {
        const int of_class = threadIdx.x / channels, local = of_class / residues, channel = threadIdx.x - of_class * channels;
        const int rw = (int)(residue_list >> 4 * (of_class - local * residues)) & 15;
        const int first = (local * channels + channel) * pitch + rw, last = (local * w_stride + rw) * channels + channel;
        row_at[threadIdx.x] = local >= classes ? -1 : y_last ? last : first;
    }
    // Residues without taps are never staged: zeros.
    for (int i = threadIdx.x; i < WARPS * area; i += THREADS) areas[i] = 0.0f;
    __syncthreads();
    // Where a position of that number is in a box.
    const auto place = [&](int i) {
        const int d = by.box_plane.divide(i), in_plane = i - d * w_box * h_box, h = by.box_line.divide(in_plane);
        return make_int3(d, h, in_plane - h * w_box);
    };
    for (int i = threadIdx.x; i < ALL; i += THREADS) {
        const int3 at = place(i);
        const int od = at.x * d_stride, oh = at.y * h_stride, ow = at.z * w_stride;
        positions[i] = make_int4(od * y_d + oh * y_h + ow * y_w, od, oh, at.x < d_box ? ow : NOWHERE);
    }
    for (int i = threadIdx.x; i < x_rows; i += THREADS) {
        const int line = by.line.divide(i), d = by.height.divide(line), h = line - d * all_h, c = i - line * all_w;
        inputs[i] = make_int4(d * x_d + h * x_h + c * x_w, d, h, c);
    }
    // Of each pair of tiles, the lane's row of X at no offset: the two units of a step lie in turn.
    unsigned from_x[NT / 2];
#pragma unroll
    for (int j = 0; j < NT / 2; j++) {
        const int3 at = place(warp / row_warps * POSITIONS + 16 * j + lane / 16 * 8 + lane % 8);
        from_x[j] = (unsigned)__cvta_generic_to_shared(shared) + (at.x < d_box ? 16 * ((at.x * all_h + at.y) * all_w + at.z) : 0);
    }
    const int second = lane / 8 % 2;

    const auto describe = [&](int item) {
        Work work;
        work.item = item;
        const int rest = by.parts.divide(item);
        work.part = item - rest * parts;
        const int of_w = by.boxes_w.divide(rest), of_h = by.boxes_h.divide(of_w);
        const int of_d = by.boxes_d.divide(of_h), n = by.slices.divide(of_d);
        work.slice = of_d - n * slices;
        const int at_w = w_first + (rest - of_w * boxes_w) * w_box, at_h = h_first + (of_w - of_h * boxes_h) * h_box;
        const int at_d = d_first + (of_h - of_d * boxes_d) * d_box;
        work.i_d = at_d - (d_offsets - 1) * d_apart;
        work.i_h = at_h - (h_offsets - 1) * h_apart;
        work.i_w = at_w - (w_offsets - 1) * w_apart;
        work.x = n * x_n + (long long)work.slice * slice_in * x_c +
                 ((long long)work.i_d * x_d + work.i_h * x_h + work.i_w * x_w);
        work.od = at_d * d_stride - d_padding;
        work.oh = at_h * h_stride - h_padding;
        work.ow = at_w * w_stride - w_padding;
        work.y = n * y_n + (long long)work.slice * slice_out * y_c +
                 ((long long)work.od * y_d + work.oh * y_h + work.ow * y_w);
        return work;
    };
    // A chunk of a piece's input as operands.
    const auto bring = [&](const Work &now, int chunk) {
        unsigned most = 0;
        const int i_d = now.i_d, i_h = now.i_h, i_w = now.i_w;
        const Element *const first = x + now.x;
        const bool vectors = x_last && slice_in % E == 0 && x_w % E == 0;
        const int c_chunk = chunk * chunk_panels * E;
#pragma unroll 1
        for (int at = threadIdx.x; at < x_rows * chunk_panels; at += BATCH * THREADS) {
            alignas(16) Element v[BATCH][E];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int index = at + k * THREADS, panel = by.rows.divide(index);
                // Past the last one, any.
                const int4 p = inputs[index - panel * x_rows];
                const bool here = (unsigned)(i_d + p.y) < (unsigned)d_input && (unsigned)(i_h + p.z) < (unsigned)h_input &&
                                  (unsigned)(i_w + p.w) < (unsigned)w_input;
                const int c0 = c_chunk + panel * E, there = here && panel < chunk_panels ? slice_in - c0 : 0;
                const Element *from = first + (p.x + (long long)c0 * x_c);
                if (vectors) {
                    *(uint4 *)v[k] = there > 0 ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
                } else {
#pragma unroll
                    for (int e = 0; e < E; e++, from += x_c) v[k][e] = e < there ? *from : Element{};
                }
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int index = at + k * THREADS;
                if (index >= x_rows * chunk_panels) break;
                most = largest_so_far(most, v[k]);
                uint4 low;
                *(uint4 *)(shared + 16 * index) = operand(v[k], 1.0f, &low);
                if (PARTS == 2) *(uint4 *)(shared + part_bytes + 16 * index) = low;
            }
        }
        if (undefined(most)) bad_input = now.item;
    };
    if (threadIdx.x == 0) {
        works[0] = describe(blockIdx.x);
        bad_input = -1;
    }
    if (threadIdx.x < WARPS) known[threadIdx.x] = -1;
    __syncthreads();
    // That needs nothing of the pack.
    if (EARLY && works[0].item < work) bring(works[0], 0);

    // What the pack has left; then the steps of each type, a warp's lanes side by side.
    await_previous();
    int bad = 0;
    for (int i = threadIdx.x; i < flag_count; i += THREADS) bad |= flags[i];
    for (int i = threadIdx.x; i < types * (d_offsets + h_offsets) + units; i += THREADS) masks[i] = mask_list[i];
    bad = __syncthreads_or(bad);
    if (threadIdx.x == 0) bad_weight = bad;
    if (warp == 0) {
        int at = 0;
        for (int type = 0; type < types; type++) {
            if (lane == 0) type_steps[type] = at;
            for (int base = 0; base < d_offsets * h_offsets * units; base += 32) {
                const int i = base + lane, md = i / (h_offsets * units), mh = i / units - md * h_offsets, unit = i % units;
                const int mw = pair_w ? 2 * unit : unit;
                unsigned mask = 0;
                if (md < d_offsets)
                    mask = masks[type * d_offsets + md] & masks[types * d_offsets + type * h_offsets + mh] &
                           masks[types * (d_offsets + h_offsets) + unit];
                const int line = (d_offsets - 1 - md) * d_apart * all_h + (h_offsets - 1 - mh) * h_apart;
                const int from = 16 * (line * all_w + (w_offsets - 1 - mw) * w_apart);
                // A second unit past the last offset has no weights: it may read anything finite.
                const int next = !pair_w ? from + plane : mw + 1 < w_offsets ? from - 16 * w_apart : from;
                const unsigned with_taps = __ballot_sync(0xffffffffu, mask != 0);
                if (mask) steps[at + __popc(with_taps & ((1u << lane) - 1))] = make_int4(from, next, mask, i * chunks * pairs * WEIGHTS);
                at += __popc(with_taps);
            }
        }
        if (lane == 0) type_steps[types] = at;
    }

    __syncthreads();

#pragma unroll 1
    for (const Work *at = works; at->item < work; at = at == works ? works + 1 : works) {
        const Work &now = *at;
#pragma unroll 1
        for (int first_block = now.part * row_warps; first_block < types * channel_blocks; first_block += parts * row_warps) {
            // A warp's own, if there is one for it.
            const int own = first_block + hidden(threadIdx.x) / 32 % row_warps;
            const int type = own < types * channel_blocks ? own - by.types.divide(own) * types : types;
            float sum[MT][NT][4];
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sum[i][j][e] = 0.0f;
            const int weights_of_block = d_offsets * h_offsets * units * chunks * pairs * WEIGHTS;
            int of_chunk = (now.slice * channel_blocks * types + own) * weights_of_block + lane;

#pragma unroll 1
            for (int chunk = 0; chunk < chunks; chunk++, of_chunk += pairs * WEIGHTS) {
                if (chunks > 1 || first_block == now.part * row_warps) {
                    // The first of all is there.
                    const bool is_first = EARLY && chunk == 0 && now.item == blockIdx.x && first_block == now.part * row_warps;
                    __syncthreads();
                    if (threadIdx.x == 0 && chunk == 0) works[at == works] = describe(now.item + gridDim.x);
                    if (!is_first) bring(now, chunk);
                    __syncthreads();
                }
                const int last_step = type_steps[min(type + 1, types)];
#if KIND == 3
#pragma unroll 1
                for (int s = type_steps[type]; s < last_step; s++) {
                    const int2 step = *(const int2 *)&steps[s].z;
                    unsigned from = ((const unsigned *)&steps[s])[second];
                    const uint4 *weights = a + (of_chunk + step.y);
#pragma unroll 1
                    for (int pair = 0; pair < pairs; pair++, from += pair_w ? plane : 2 * plane, weights += WEIGHTS) {
                        // Four tiles at a time: more would not fit in registers.
#pragma unroll
                        for (int j0 = 0; j0 < NT; j0 += 4) {
                            unsigned high[2][4], low[2][4];
#pragma unroll
                            for (int j = 0; j < 2; j++) {
                                load_matrices(high[j], from_x[j0 / 2 + j] + from);
                                load_matrices(low[j], from_x[j0 / 2 + j] + from + part_bytes);
                            }
#pragma unroll
                            for (int i = 0; i < MT; i++)
                                if (step.x >> i & 1) {
                                    const uint4 wh = weights[i * 64], wl = weights[i * 64 + 32];
#pragma unroll
                                    for (int j = 0; j < 4; j++) {
                                        float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                                        multiply(product, wl, high[j / 2][j % 2 * 2], high[j / 2][j % 2 * 2 + 1]);
                                        multiply(product, wh, low[j / 2][j % 2 * 2], low[j / 2][j % 2 * 2 + 1]);
                                        multiply(product, wh, high[j / 2][j % 2 * 2], high[j / 2][j % 2 * 2 + 1]);
#pragma unroll
                                        for (int e = 0; e < 4; e++) sum[i][j0 + j][e] += product[e];
                                    }
                                }
                        }
                    }
                }
#elif !ROOMY
                // Registers hold the weights of one step alone.
                int s = type_steps[type], pair = 0;
                if (s < last_step) {
                    int2 step = *(const int2 *)&steps[s].z;
                    unsigned from = ((const unsigned *)&steps[s])[second];
                    const uint4 *of_step = a + (of_chunk + step.y);
                    uint4 weights[MT];
#pragma unroll 1
                    while (true) {
#pragma unroll
                        for (int i = 0; i < MT; i++)
                            if (step.x >> i & 1) weights[i] = of_step[i * 32];
                        unsigned xs[NT / 2][4];
#pragma unroll
                        for (int j = 0; j < NT / 2; j++) load_matrices(xs[j], from_x[j] + from);
                        const int mask = step.x;
                        from += pair_w ? plane : 2 * plane;
                        of_step += WEIGHTS;
                        if (++pair == pairs) {
                            pair = 0;
                            if (++s < last_step) {
                                step = *(const int2 *)&steps[s].z;
                                from = ((const unsigned *)&steps[s])[second];
                                of_step = a + (of_chunk + step.y);
                            }
                        }
#pragma unroll
                        for (int i = 0; i < MT; i++)
                            if (mask >> i & 1)
#pragma unroll
                                for (int j = 0; j < NT; j++)
                                    multiply(sum[i][j], weights[i], xs[j / 2][j % 2 * 2], xs[j / 2][j % 2 * 2 + 1]);
                        if (s == last_step) break;
                    }
                }
#else
                // Of some steps ahead the weights, which come from afar, and where X lies; past the last it again, for nothing.
                uint4 weights[AHEAD][MT];
                unsigned from[AHEAD];
                int masks[AHEAD], s = type_steps[type], pair = 0;
                const auto fetch = [&](int k) {
                    const int4 *const at = &steps[min(s, last_step - 1)];
                    from[k] = ((const unsigned *)at)[second] + pair * (pair_w ? plane : 2 * plane);
                    const int2 step = *(const int2 *)&at->z;
                    const uint4 *const of_step = a + (of_chunk + step.y + pair * WEIGHTS);
                    masks[k] = step.x;
#pragma unroll
                    for (int i = 0; i < MT; i++)
                        if (MT == 1 || step.x >> i & 1) weights[k][i] = of_step[i * 32];
                    const bool done = ++pair == pairs;
                    s += done;
                    pair = done ? 0 : pair;
                };
                int left = (last_step - s) * pairs;
                if (left > 0)
#pragma unroll
                    for (int k = 0; k < AHEAD; k++) fetch(k);
#pragma unroll 1
                for (; left > 0; left -= AHEAD)
#pragma unroll
                    for (int k = 0; k < AHEAD; k++) {
                        if (k && k >= left) break;
                        unsigned xs[NT / 2][4];
#pragma unroll
                        for (int j = 0; j < NT / 2; j++) load_matrices(xs[j], from_x[j] + from[k]);
#pragma unroll
                        for (int i = 0; i < MT; i++)
                            if (MT == 1 || masks[k] >> i & 1)
#pragma unroll
                                for (int j = 0; j < NT; j++)
                                    multiply(sum[i][j], weights[k][i], xs[j / 2][j % 2 * 2], xs[j / 2][j % 2 * 2 + 1]);
                        fetch(k);
                    }
#endif
            }

            // Computed anew: registers are scarce.
            const int of_warp = hidden(threadIdx.x) / 32, block = first_block + of_warp % row_warps;
            if (block >= types * channel_blocks) continue;
            const int channel_block = by.types.divide(block), channel0 = channel_block * channels;
            const int channel = now.slice * slice_out + channel0;
            const Element *const add = has_bias ? bias + channel : nullptr;
            const Outputs outputs = {y + (now.y + (long long)channel0 * y_c), now.od, now.oh, now.ow,
                                     (block - channel_block * types) * classes, classes, channels, min(channels, slice_out - channel0),
                                     d_stride, h_stride, w_stride, d_output, h_output, w_output,
                                     y_c, y_d, y_h, y_w, {activation, (float)slope}};
            if (bad_weight || bad_input == now.item) {
                const long long in_sample = (long long)now.slice * slice_in * x_c + ((long long)now.i_d * x_d + now.i_h * x_h + now.i_w * x_w);
                const Definition by_definition = {depth, height, width, x + (now.x - in_sample), w, add, x_c, x_d, x_h, x_w, channel, in_per_group, out_per_group};
                outputs.define(positions + of_warp / row_warps * POSITIONS, POSITIONS, by_definition);
                continue;
            }
            if (const int wanted = now.slice * types * channel_blocks + block; wanted != known[of_warp]) {
                __syncwarp();
                known[of_warp] = wanted;
                outputs.describe((Line *)(areas + of_warp * area + staging), by.channels, by.w_stride, by.h_stride, add, y_last);
            }
            const bool curved = activation > 2, plain = curved || !has_bias && !activation;
#pragma unroll 1
            for (int piece = 0; piece < NT / 4; piece++) {
                const int4 *const of_piece = positions + of_warp / row_warps * POSITIONS + piece * PIECE;
                float *const staged = areas + of_warp * area;
                const Line *const lines = (const Line *)(staged + staging);
                __syncwarp();
                if (y_last)
                    stage<0>(sum, piece, staged, row_at, pitch);
                else if (w_stride == 1)
                    stage<1>(sum, piece, staged, row_at, 0);
                else if (w_stride == 2)
                    stage<2>(sum, piece, staged, row_at, 0);
                else
                    stage<0>(sum, piece, staged, row_at, w_stride);
                __syncwarp();
                if (curved) {
                    const int count = y_last ? PIECE : classes * channels, length = w_stride * (y_last ? classes * channels : PIECE);
                    outputs.bend(staged, lines, count, length, pitch, y_last);
                }
                if (y_last)
                    outputs.last(staged, of_piece, lines, by.of_class, by.channels, by.h_stride, pitch, plain);
                else if (w_stride == 1)
                    outputs.first<1>(staged, of_piece, lines, by.w_stride, by.h_stride, 0, plain);
                else if (w_stride == 2)
                    outputs.first<2>(staged, of_piece, lines, by.w_stride, by.h_stride, 0, plain);
                else
                    outputs.first<0>(staged, of_piece, lines, by.w_stride, by.h_stride, pitch, plain);
                // For residues without taps, zeros again.
                if (curved && residues < w_stride) {
                    __syncwarp();
                    for (int i = threadIdx.x % 32; i < staging; i += 32) staged[i] = 0.0f;
                }
            }
        }
    }
}
