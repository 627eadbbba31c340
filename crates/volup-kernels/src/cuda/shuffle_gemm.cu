// Shuffle GEMM: a transposed convolution whose kernel is its stride, in one launch.
//
// Each output has one tap: the convolution is one matrix product, channels by positions, whose results are dealt out
// among the residues of the stride (in two dimensions the "pixel shuffle"). Here input and weight are read as they lie,
// and sums go to y from registers.
//
// # What is computed
//
// `Y[row, position] = sum over channels: W[channel][row] * X[channel, position]`: a row is a channel of y and a tap, in
// the weight's order, `row = co*taps + tap`; positions are those of a sample, in order.
//
// - **NCDHW** (LAST 0): rows are the rows of the matrix instruction, positions its columns; both operands lie in shared
//   memory as in memory, a channel a line. A row block is ROWS rows. With a stride of 2 along width a lane has two
//   positions of two rows that differ in that residue, hence four neighbours of y; with 1 four positions of a row.
// - **NDHWC** (LAST 1): positions are rows, and channels of y columns, four neighbours a lane. A row block is `channels`
//   channels (a multiple of 16) with all taps; in shared memory its columns lie tap by tap.
//
// # How
//
// A block keeps the weights of one row block in shared memory, and takes every so-manieth block of POS positions. X comes
// by asynchronous copies, KC channels a stage, STAGES - 1 ahead of the products, past the end of one block of positions
// into the next; of NCDHW the first one's chunks bring those of the weight along, so that a block that has only one does
// not wait for all of it. Float32 is rounded, or split, where it lies, by the thread that copied it: it needs to wait for
// nobody. Row blocks of the same positions are neighbours in the grid: X is read from memory once.
//
// # Modes
//
// Group normalization needs all of a sample's outputs before it can write one. Computing them twice moves less than
// writing, reading and writing them: `mode` 0 writes y; 1 writes statistics instead; 2 writes y normalized.
//
// A partial statistic is the mean of one row's outputs, the sum of their squared deviations from it and their count, for
// the positions of a sample that the warps at one place of the blocks of one group compute: partial
// `((sample*groups + group)*POS_WARPS + place)*rows + row`, groups = grid / row_blocks, row = co*taps + tap, rows all.
// Within a block of positions deviations are from its own mean; blocks are merged in order. All partials are written.
// Kernels with `NORM` 0 have mode 0 alone, and registers to spare.
//
// # Numbers
//
// `KIND` 0, f16 or bf16; 1, float32 rounded to tf32; 3, float32 as two tf32, of which three products are made; each
// step's are added to float32 registers, since the matrix instructions cut off their sums. Infinities and NaN, and for
// the split what its low part has not bits enough for (operand.cuh), are left to the definition: the outputs of a block
// of positions where they are in X, all of a block where they are in the weight.
//
// # What it takes
//
// Threads: 32*ROW_WARPS*POS_WARPS. Grid: any multiple of `row_blocks` along the first axis. Bytes of dynamic shared
// memory: `size*(STAGES*parts*stage + chunks*KC*w_pitch) + 20*ROWS + 8*ROWS*POS_WARPS`: size that of an element; parts 2
// for KIND 3, else 1; a stage KC lines of POS elements (NDHWC: POS of KC) and 16 bytes, more by 16 for float32 of NCDHW.
// `w_pitch` of NDHWC: elements from a channel's weights to the next's, those of taps*(channels + 16 bytes) rounded up to 8
// words (float32) or 4 past a multiple of 32; of NCDHW ROWS and as many as a stage's lines have more. x is dense, y lies as
// its strides say, in NCDHW 1 along width. x, w and y start at multiples of 16 bytes. `x_unit`, and in NCDHW `w_unit`: 16,
// 8 or 4 bytes that start and length of all runs are multiples of; in NDHWC weights are read by 16 bytes where `w_unit` is
// 16, else one by one. The stride along width is 1 or 2 in NCDHW; in NDHWC taps*channels is at most ROWS. What is counted
// in a sample, stages of all items and groups of all samples are below 2^31.
//
// Parameters, i32 but for pointers, `x_n`, `y_n` (i64) and `slope` (f64): `x`, `w`, `bias`, `y`, `in_channels`,
// `out_channels`, `volume`, `plane`, `width` (positions of a sample, a plane, a line), `d_stride`, `h_stride`,
// `w_stride`, `x_n`, `y_n`, `y_c`, `y_d`, `y_h`, `y_w` (strides in elements), `chunks` (of KC channels), `pos_blocks` (of
// a sample), `items` (of all), `row_blocks`, `w_pitch`, `channels`, `x_unit`, `w_unit`, `whole` (whether the four
// neighbours that a lane has lie in y side by side, all or none there, at a multiple of four), `has_bias`, `activation`
// (0, none; 1, ReLU; 2, leaky), `slope`, `mode`, `part_mean`, `part_m2`, `part_count` (of mode 1), `mean`, `rstd` (of mode
// 2: of each sample and group of channels), `gamma`, `beta` (null: 1 and 0), `norm_groups`, `group_channels` (their product
// the channels of y), `post_activation`, `post_slope` (f64; as the activation).

#include "activation.cuh"
#include "copy_async.cuh"
#include "divisor.cuh"
#include "launch.cuh"
#include "operand.cuh"
#include "shuffle_operands.cuh"

/// Writes four neighbours where they are there: no branch for each.
__device__ __forceinline__ void put(Element *to, const Four &v, bool there) {
#if KIND == 0
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.b32 [%0], {%1, %2};\n}" ::"l"(to), "r"(v.x), "r"(v.y), "r"((int)there) : "memory");
#else
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.f32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"((int)there) : "memory");
#endif
}

/// What numbers are divided by.
struct Divisors {
    Divisor taps, plane, width, pos_blocks, h_stride, w_stride, row_blocks, units;
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) shuffle_gemm(
    const Element *x, const Element *w, const Element *bias, Element *y, int in_channels, int out_channels, int volume, int plane,
    int width, int d_stride, int h_stride, int w_stride, long long x_n, long long y_n, int y_c, int y_d, int y_h, int y_w, int chunks,
    int pos_blocks, int items, int row_blocks, int w_pitch, int channels, int x_unit, int w_unit, int whole, int has_bias,
    int activation, double slope, int mode, float *part_mean, float *part_m2, float *part_count, const float *mean, const float *rstd,
    const Element *gamma, const Element *beta, int norm_groups, int group_channels, int post_activation, double post_slope) {
    let_next_start();
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ Divisors by;
    // The blocks of positions, in turn, that have what is left to the definition.
    __shared__ int bad_item[2];
    __shared__ int bad_weight;
    const int taps = d_stride * h_stride * w_stride, rows = out_channels * taps;
    if (!NORM) mode = 0;
    if (!LAST) w_pitch = ROWS + PAD;
    Element *const stages = (Element *)shared, *const weights = stages + STAGES * STAGE;
    // Of each row, or column, of the row block where its first output lies in a sample, and its bias.
    int *const row_at = (int *)(weights + chunks * KC * w_pitch);
    float *const row_bias = (float *)(row_at + ROWS);
    // Of each row its mean, factor and addend in the sample at hand; of each warp's rows statistics of a block of positions.
    float(*const row_norm)[ROWS] = (float(*)[ROWS])(row_bias + ROWS);
    float2 *const row_statistics = (float2 *)(row_norm + 3) + threadIdx.x / 32 * WARP_ROWS;
    const unsigned stages_at = (unsigned)__cvta_generic_to_shared(stages), weights_at = (unsigned)__cvta_generic_to_shared(weights);

    if (const int i = threadIdx.x; i < sizeof(Divisors) / sizeof(Divisor))
        ((Divisor *)&by)[i] = Divisor(i == 0   ? taps
                                      : i == 1 ? plane
                                      : i == 2 ? width
                                      : i == 3 ? pos_blocks
                                      : i == 4 ? h_stride
                                      : i == 5 ? w_stride
                                      : i == 6 ? row_blocks
                                               : (LAST ? channels / 16 : 1));
    if (threadIdx.x < 2) bad_item[threadIdx.x] = -1;
    if (threadIdx.x == 2) bad_weight = 0;
    __syncthreads();
    const int group = by.row_blocks.divide(blockIdx.x), row_block = blockIdx.x - group * row_blocks;
    const int groups = by.row_blocks.divide(gridDim.x);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row0 = warp % ROW_WARPS * WARP_ROWS, pos0 = warp / ROW_WARPS * WARP_POS;
    // In NDHWC columns of a tap lie so far from the next one's.
    const int tap_pitch = channels + VECTOR;

    // A row's channel of y, and its tap; whether there is one.
    const auto row_of = [&](int row, int &channel, int &tap) {
        if (LAST) {
            tap = by.units.divide(row / 16);
            channel = row_block * channels + row - tap * channels;
            return tap < taps && channel < out_channels;
        }
        channel = by.taps.divide(row_block * ROWS + row);
        tap = row_block * ROWS + row - channel * taps;
        return row_block * ROWS + row < rows;
    };

    // A stage's copies, the `fetched`-th of the block's.
    const int work = group < items ? (items - group + groups - 1) / groups * chunks : 0;
    int fetched = 0, fetched_item = group, fetched_chunk = 0;
    const auto fetch_next = [&]() {
        if (fetched < work) {
            const int n = by.pos_blocks.divide(fetched_item), p = (fetched_item - n * pos_blocks) * POS, c = fetched_chunk * KC;
            const unsigned to = stages_at + fetched % STAGES * STAGE * SIZE;
            const Element *const from = x + n * x_n + (LAST ? p * in_channels + c : c * volume + p);
            const int positions = volume - p, rest = in_channels - c;
            fetch<LINES, LENGTH>(x_unit, to, PITCH, from, LAST ? in_channels : volume, LAST ? positions : rest, LAST ? rest : positions);
            if (!LAST && fetched < chunks)
                fetch<KC, ROWS>(w_unit, weights_at + SIZE * c * w_pitch, w_pitch, w + ((long long)c * rows + row_block * ROWS), rows, rest, rows - row_block * ROWS);
            if (++fetched_chunk == chunks) {
                fetched_chunk = 0;
                fetched_item += groups;
            }
        }
        fetched++;
        end_copies();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) fetch_next();

    for (int i = threadIdx.x; i < ROWS; i += THREADS) {
        int channel, tap;
        const bool here = row_of(i, channel, tap);
        const int rest = by.w_stride.divide(tap), tw = tap - rest * w_stride, td = by.h_stride.divide(rest), th = rest - td * h_stride;
        row_at[i] = here ? channel * y_c + td * y_d + th * y_h + tw * y_w : NOWHERE;
        row_bias[i] = here && has_bias ? widen(bias[channel]) : 0.0f;
    }
    // Four weights of float32 as they are kept.
    const auto keep_weights = [&](float4 &v) {
        const float of[4] = {v.x, v.y, v.z, v.w};
        unsigned most = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) most = max(most, within_parts(magnitude(of[e])));
        if (most >= 0x7f800000u) bad_weight = 1;
        if (KIND == 1) *(uint4 *)&v = make_uint4(round_tf32(v.x), round_tf32(v.y), round_tf32(v.z), round_tf32(v.w));
    };
    if (LAST) {
        // Weights from where they lie to the order of taps, several loads at a time.
        const int first = row_block * channels * taps, count = min(channels * taps, rows - first);
        const int per = w_unit == 16 ? VECTOR : 1, line = channels * taps / per, all = line * chunks * KC;
        const Divisor by_line(line);
#pragma unroll 1
        for (int base = threadIdx.x; base < all; base += BATCH * THREADS) {
            alignas(16) Element v[BATCH][VECTOR];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int i = base + k * THREADS, c = by_line.divide(i), at = (i - c * line) * per;
                const Element *const from = w + ((long long)c * rows + first + at);
                const bool there = i < all && c < in_channels && at < count;
                *(uint4 *)v[k] = make_uint4(0, 0, 0, 0);
                if (there && w_unit == 16)
                    *(uint4 *)v[k] = *(const uint4 *)from;
                else if (there)
                    v[k][0] = *from;
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int i = base + k * THREADS, c = by_line.divide(i), at = (i - c * line) * per;
                if (i >= all) break;
                if (KIND != 0) keep_weights(*(float4 *)v[k]);
                int channel = by.taps.divide(at), tap = at - channel * taps;
#pragma unroll
                for (int e = 0; e < VECTOR; e++) {
                    if (e >= per) break;
                    weights[c * w_pitch + tap * tap_pitch + channel] = v[k][e];
                    if (++tap == taps) {
                        tap = 0;
                        channel++;
                    }
                }
            }
        }
    }

    // Where the lane's operands start in the weights, of NDHWC for each pair of tiles, and in a stage. For `ldmatrix` a
    // lane's row of 16 bytes: eight lanes after eight along the lines that they cross, then beside it, or the other way.
    const int second = lane / 8 % 2, third = lane / 16;
    int w_from[LAST ? PAIRS : 1], x_from;
    if (LAST) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const int unit = row0 / 16 + pair, tap = by.units.divide(unit);
            // Of columns that are not there any that are.
            const int column = tap < taps ? tap * tap_pitch + (unit * 16 - tap * channels) : 0;
            w_from[pair] = column + (KIND == 0 ? (lane % 8 + second * 8) * w_pitch + third * 8 : t * w_pitch + 2 * g);
        }
        x_from = (pos0 + lane % 8 + second * 8) * PITCH + third * VECTOR;
    } else {
        w_from[0] = row0 + (KIND == 0 ? (lane % 8 + third * 8) * w_pitch + second * 8 : t * w_pitch + 2 * g);
        x_from = pos0 + (KIND == 0 ? (lane % 8 + second * 8) * PITCH + third * 8 : t * PITCH + (w_stride == 1 ? 2 * g : g));
    }
    // From a tile of columns to its neighbour in a pair: positions of both alternate where a lane is to have four in line.
    [[maybe_unused]] const int odd = w_stride == 1 ? 1 : 8;

    // Which row and column of the warp's a sum is of. Where a lane is to have four columns in line, float32 has those of a
    // pair of tiles in turn.
    const auto row_in = [&](int i, int e) { return 16 * i + (LAST || KIND == 0 ? g + e / 2 * 8 : 2 * g + e / 2); };
    const auto column_in = [&](int j, int e) {
        return j / 2 * 16 + (KIND != 0 && (LAST || w_stride == 1) ? 4 * t + e % 2 * 2 + j % 2 : j % 2 * 8 + 2 * t + e % 2);
    };

    int chunk = 0, item = group, turn = 0;
    float sum[MT][NT][4];
    // The sample that statistics are of, or whose normalization is at hand, and what this lane's row has so far in it.
    constexpr int OWN = WARP_ROWS / 32;
    int sample = mode == 1 ? 0 : -1, seen = 0;
    float so_far[OWN] = {}, deviation[OWN] = {};
    const auto write_statistics = [&]() {
#pragma unroll
        for (int own = 0; own < OWN; own++) {
            int channel, tap;
            if (row_of(row0 + lane + 32 * own, channel, tap)) {
                const long long at = ((long long)(sample * groups + group) * POS_WARPS + warp / ROW_WARPS) * rows + (channel * taps + tap);
                part_mean[at] = so_far[own];
                part_m2[at] = deviation[own];
                part_count[at] = (float)seen;
            }
            so_far[own] = deviation[own] = 0.0f;
        }
        seen = 0;
        sample++;
    };
#pragma unroll 1
    for (int number = 0; number < work; number++) {
        const int stage = number % STAGES * STAGE;
        await_copies<STAGES - 2>();
        if (KIND != 0) {
            unsigned most = 0;
            for_own<LINES, LENGTH>([&](int line, int at) {
                alignas(16) Element v[E];
                uint4 *const here = (uint4 *)(stages + stage + line * PITCH + at), low;
                *(uint4 *)v = *here;
                most = largest_so_far(most, v);
                *here = operand(v, 1.0f, &low);
                if (PARTS == 2) *(uint4 *)((Element *)here + LOW) = low;
            });
            if (undefined(most)) bad_item[turn] = item;
            if (!LAST && number < chunks)
                for_own<KC, ROWS>([&](int line, int at) { keep_weights(*(float4 *)(weights + (number * KC + line) * w_pitch + at)); });
        }
        __syncthreads();
        fetch_next();
        if (chunk == 0) {
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sum[i][j][e] = row_bias[row0 + (LAST ? column_in(j, e) : row_in(i, e))];
            if (mode == 2)
                if (const int n = by.pos_blocks.divide(item); n != sample) {
                    sample = n;
                    await_previous();
                    for (int i = threadIdx.x; i < ROWS; i += THREADS) {
                        int channel, tap;
                        const bool here = row_of(i, channel, tap);
                        const int at = n * norm_groups + (here ? channel / group_channels : 0);
                        row_norm[0][i] = mean[at];
                        row_norm[1][i] = rstd[at] * (gamma && here ? widen(gamma[channel]) : 1.0f);
                        row_norm[2][i] = beta && here ? widen(beta[channel]) : 0.0f;
                    }
                    __syncthreads();
                }
        }

#pragma unroll AHEAD
        for (int k = 0; k < KC; k += STEP) {
            // Operands: rows (of NDHWC positions) by tile, columns by pair of tiles, each pair's first halves of K first.
            unsigned a[PARTS][MT][4], b[PARTS][PAIRS][4];
#if KIND == 0
            const unsigned ws = weights_at + SIZE * (chunk * KC + k) * w_pitch, xs = stages_at + SIZE * (stage + (LAST ? k : k * PITCH) + x_from);
#pragma unroll
            for (int i = 0; i < MT; i++) {
                if (LAST)
                    load_matrices(a[0][i], xs + SIZE * 16 * i * PITCH);
                else
                    load_transposed(a[0][i], ws + SIZE * (w_from[0] + 16 * i));
            }
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) load_transposed(b[0][pair], LAST ? ws + SIZE * w_from[LAST ? pair : 0] : xs + SIZE * 16 * pair);
#else
            const unsigned *const ws = (const unsigned *)weights + (chunk * KC + k) * w_pitch;
            if (LAST) {
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int i = 0; i < MT; i++) load_matrices(a[part][i], stages_at + 4 * (stage + part * LOW + x_from + k + 16 * i * PITCH));
#pragma unroll
                for (int pair = 0; pair < PAIRS; pair++) {
                    const unsigned *const from = ws + w_from[LAST ? pair : 0];
                    const uint2 one = *(const uint2 *)from, four = *(const uint2 *)(from + 4 * w_pitch);
                    unsigned(&to)[4] = b[0][pair];
                    to[0] = one.x, to[1] = four.x, to[2] = one.y, to[3] = four.y;
                    if (PARTS == 2)
#pragma unroll
                        for (int e = 0; e < 4; e++) halve(to[e], b[PARTS - 1][pair][e]);
                }
            } else {
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int pair = 0; pair < PAIRS; pair++) {
                        const unsigned *const from = (const unsigned *)stages + (stage + part * LOW + x_from + k * PITCH + 16 * pair);
                        unsigned(&to)[4] = b[part][pair];
                        to[0] = from[0], to[1] = from[4 * PITCH], to[2] = from[odd], to[3] = from[4 * PITCH + odd];
                    }
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    const unsigned *const from = ws + w_from[0] + 16 * i;
                    const uint2 one = *(const uint2 *)from, four = *(const uint2 *)(from + 4 * w_pitch);
                    unsigned(&to)[4] = a[0][i];
                    to[0] = one.x, to[1] = one.y, to[2] = four.x, to[3] = four.y;
                    if (PARTS == 2)
#pragma unroll
                        for (int e = 0; e < 4; e++) halve(to[e], a[PARTS - 1][i][e]);
                }
            }
#endif
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    const auto add = [&](float(&to)[4], int of_a, int of_b) {
                        const unsigned(&rows)[4] = a[of_a][i];
                        multiply(to, make_uint4(rows[0], rows[1], rows[2], rows[3]), b[of_b][j / 2][j % 2 * 2],
                                 b[of_b][j / 2][j % 2 * 2 + 1]);
                    };
                    if (KIND == 3) {
                        float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                        add(product, PARTS - 1, 0);
                        add(product, 0, PARTS - 1);
                        add(product, 0, 0);
#pragma unroll
                        for (int e = 0; e < 4; e++) sum[i][j][e] += product[e];
                    } else {
                        add(sum[i][j], 0, 0);
                    }
                }
        }
        if (++chunk < chunks) continue;
        chunk = 0;

        const int n = by.pos_blocks.divide(item), first = (item - n * pos_blocks) * POS + pos0;
        Element *of_sample = y + n * y_n;
        // The compiler would rather multiply anew for each output.
        asm volatile("" : "+l"(of_sample));
        const auto place = [&](int p) {
            const int d = by.plane.divide(p), in_plane = p - d * plane, h = by.width.divide(in_plane);
            return d * d_stride * y_d + h * h_stride * y_h + (in_plane - h * width) * w_stride * y_w;
        };
        const bool by_definition = KIND != 0 && (bad_weight || bad_item[turn] == item);
        item += groups;
        turn ^= 1;
        if (by_definition) {
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int p = first + (LAST ? row_in(i, e) : column_in(j, e)), row = row0 + (LAST ? column_in(j, e) : row_in(i, e));
                        int channel, tap;
                        if (!row_of(row, channel, tap) || p >= volume) continue;
                        const Element *from = x + n * x_n + (LAST ? p * in_channels : p), *weight = w + (channel * taps + tap);
                        float v = 0.0f;
#pragma unroll 1
                        for (int c = 0; c < in_channels; c++, from += LAST ? 1 : volume, weight += rows) v = fmaf(widen(*from), widen(*weight), v);
                        sum[i][j][e] = v + row_bias[row];
                    }
        }
        if (activation)
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sum[i][j][e] = straighten(sum[i][j][e], activation, (float)slope);

        if (mode == 1) {
            while (sample < n) write_statistics();
            const int count = min(volume - first, WARP_POS);
            if (count <= 0) continue;
            // Of a row the sum of something of its positions, in every lane that has any of them.
            const auto over_positions = [&](auto of, int i, int j, int half) {
                float total = 0.0f;
#pragma unroll
                for (int k = 0; k < (LAST ? 2 * MT : 2 * NT); k++) {
                    const int a = LAST ? k / 2 : i, b = LAST ? j : k / 2, e = LAST ? 2 * (k % 2) + half : 2 * half + k % 2;
                    if ((LAST ? row_in(a, e) : column_in(b, e)) < count) total += of(sum[a][b][e]);
                }
#pragma unroll
                for (int lanes = LAST ? 4 : 1; lanes < (LAST ? 32 : 4); lanes *= 2) total += __shfl_xor_sync(0xffffffffu, total, lanes);
                return total;
            };
            __syncwarp();
#pragma unroll
            for (int k = 0; k < (LAST ? NT : MT); k++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int i = LAST ? 0 : k, j = LAST ? k : 0;
                    const float mean = over_positions([](float v) { return v; }, i, j, half) / count;
                    const float m2 = over_positions([mean](float v) { return (v - mean) * (v - mean); }, i, j, half);
                    const int row = LAST ? column_in(j, half) : row_in(i, 2 * half);
                    if (LAST ? g == 0 : t == 0) row_statistics[row] = make_float2(mean, m2);
                }
            __syncwarp();
            // Merged as by Chan, Golub and LeVeque, 1979.
            const float share = (float)count / (float)(seen + count);
#pragma unroll
            for (int own = 0; own < OWN; own++) {
                const float2 now = row_statistics[lane + 32 * own];
                const float apart = now.x - so_far[own];
                so_far[own] += apart * share;
                deviation[own] += now.y + apart * apart * ((float)seen * share);
            }
            seen += count;
            continue;
        }
        if (mode == 2)
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float *const norm = row_norm[0] + row0 + (LAST ? column_in(j, e) : row_in(i, e));
                        sum[i][j][e] = straighten((sum[i][j][e] - norm[0]) * norm[ROWS] + norm[2 * ROWS], post_activation, (float)post_slope);
                    }

        // A lane's outputs, four neighbours each: one of them lies in y where a row's or position's place says, `fixed`, and
        // one along the other dimension. Without `whole` each neighbour has a place of its own.
        if (!LAST && w_stride == 2) {
            // Two positions of two rows.
            int fixed[MT];
#pragma unroll
            for (int i = 0; i < MT; i++) fixed[i] = row_at[row0 + 16 * i + (KIND != 0 ? 2 * g : g % 2 ? 7 + g : g)];
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const int p = first + 8 * j + 2 * t, at = place(p);
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    const float(&s)[4] = sum[i][j];
#if KIND == 0
                    // Rows lie in neighbouring lanes: each has them of one of the tile's halves.
                    const bool high = g % 2;
                    const unsigned one = narrow_both(s[0], s[1], Element{}), other = narrow_both(s[2], s[3], Element{});
                    const unsigned got = __shfl_xor_sync(0xffffffffu, high ? one : other, 4);
                    const unsigned even = high ? got : one, odd = high ? other : got;
                    const Four v = make_uint2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
#else
                    const Four v = make_float4(s[0], s[2], s[1], s[3]);
#endif
                    if (whole) {
                        put(of_sample + (fixed[i] + at), v, fixed[i] != NOWHERE && p < volume);
                    } else if (fixed[i] != NOWHERE) {
                        if (p < volume) *(Two *)(of_sample + (fixed[i] + at)) = ((const Two *)&v)[0];
                        if (p + 1 < volume) *(Two *)(of_sample + (fixed[i] + place(p + 1))) = ((const Two *)&v)[1];
                    }
                }
            }
        } else {
            // Four columns of a row: positions, or channels.
            int fixed[MT][2];
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int row = 16 * i + (LAST || KIND == 0 ? 8 * half + g : 2 * g + half);
                    fixed[i][half] = LAST ? (first + row < volume ? place(first + row) : NOWHERE) : row_at[row0 + row];
                }
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
#if KIND == 0
                // They lie in neighbouring lanes: each has them of one tile of the pair.
                const bool high = t % 2;
                const int column = 16 * pair + (high ? 6 + 2 * t : 2 * t);
#else
                const int column = 16 * pair + 4 * t;
#endif
                const auto column_at = [&](int column) {
                    return LAST ? row_at[row0 + column] : first + column < volume ? place(first + column) : NOWHERE;
                };
                const int at = column_at(column);
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const float(&s)[4] = sum[i][2 * pair], (&of_next)[4] = sum[i][2 * pair + 1];
#if KIND == 0
                        const unsigned one = narrow_both(s[2 * half], s[2 * half + 1], Element{}), other = narrow_both(of_next[2 * half], of_next[2 * half + 1], Element{});
                        const unsigned got = __shfl_xor_sync(0xffffffffu, high ? one : other, 1);
                        const Four v = high ? make_uint2(got, other) : make_uint2(one, got);
#else
                        const Four v = make_float4(s[2 * half], of_next[2 * half], s[2 * half + 1], of_next[2 * half + 1]);
#endif
                        const int to = fixed[i][half];
                        if (whole) {
                            put(of_sample + (to + at), v, to != NOWHERE && at != NOWHERE);
                        } else if (to != NOWHERE) {
#pragma unroll
                            for (int e = 0; e < 4; e++)
                                if (const int one = column_at(column + e); one != NOWHERE) of_sample[to + one] = ((const Element *)&v)[e];
                        }
                    }
            }
        }
    }
    if (mode == 1)
        while (sample < by.pos_blocks.divide(items)) write_statistics();
}
