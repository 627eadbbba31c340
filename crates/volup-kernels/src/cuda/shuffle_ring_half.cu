// Shuffle GEMM of many channels in 16 bits: a transposed convolution whose kernel is its stride, of NCDHW (LAST 0), 2 along width,
// or of NDHWC (LAST 1), with 8 taps.
//
// # What is computed
//
// As in `shuffle_ring`: `Y[row, position] = sum over channels: W[channel][row] * X[channel, position]`, a row is a channel of y and
// a tap, `row = co*taps + tap`; positions are those of a sample, in order.
//
// # How
//
// A block has ROWS rows and takes every so-manieth block of POS positions. Both operands pass through a ring of `stages`, 64
// channels each, which warps of their own fill as soon as a stage has been read, 16 bytes a thread at a time: lines are short, and
// bulk copies of them take longer to start. With `kept` the weights come once and stay. Both are operands of the matrix instructions
// as they lie.
//
// NCDHW: lanes whose rows are the residues along width of one line exchange, so that each has four neighbours of y. NDHWC: eight
// rows of a tile are the taps of a channel, so a lane has the channels of a tap side by side, of each of its positions.
//
// # What it takes
//
// Threads: 32*(ROW_WARPS*POS_WARPS + 8). Grid: any multiple of `row_blocks` along the first axis. Bytes of dynamic shared memory:
// `16*stages` rounded up to 128, `2*stages*X + 128*w_stages*(ROWS + 8) + 8*ROWS`; `X`: `64*(POS + 8)`, of NDHWC `POS*72`; `w_stages`:
// `chunks` where weights are `kept`, else `stages`. Channels of y times taps are a multiple of 8. NCDHW: positions of a sample are a
// multiple of 8; y lies as its strides say, 1 along width. NDHWC: channels of x and of y are multiples of 8, the latter times 8 of
// WARP_ROWS; y lies as its strides say, channels side by side. x is dense; x, w and y start at multiples of 16 bytes. `whole`:
// whether lines of x are a multiple of 2 positions. What is counted in a sample and in the weight, stages of all items are below 2^31.
//
// Parameters, i32 but for pointers, `x_n`, `y_n` (i64) and `slope` (f64): `x`, `w`, `bias`, `y`, `in_channels`,
// `out_channels`, `volume`, `plane`, `width` (positions of a sample, a plane, a line), `d_stride`, `h_stride`, `w_stride`, `x_n`,
// `y_n`, `y_c`, `y_d`, `y_h`, `y_w` (strides in elements), `chunks` (of 64 channels), `pos_blocks` (of a sample), `items` (of all),
// `row_blocks`, `stages`, `kept`, `whole`, `has_bias`, `activation` (0, none; 1, ReLU; 2, leaky), `slope`.

#include "copy_async.cuh"
#include "shuffle_ring.cuh"

#if KIND != 0 || !defined(LAST) || WARP_POS % 16 || (LAST && WARP_ROWS != 64 && WARP_ROWS != 128)
#error "KIND 0; LAST 0 or 1; WARP_POS a multiple of 16; of NDHWC 64 or 128 WARP_ROWS"
#endif

/// Lines of a stage of X, and elements from one to the next, as what a warp reads at once lies in different banks.
constexpr int X_LINES = LAST ? POS : KC, X_PITCH = (LAST ? KC : POS) + E, X_STAGE = X_LINES * X_PITCH;
/// Pairs of tiles of 8 positions of a warp.
constexpr int PAIRS = WARP_POS / 16;
/// Of NDHWC vectors of 8 channels of a lane.
constexpr int VECTORS = MT == 8 ? 2 : 1;
/// Threads that copy, pieces of 16 bytes of a line of X, and lines that they have at once.
constexpr int COPYING = 32 * COPIERS, X_VECTORS = (LAST ? KC : POS) / E, X_AT_ONCE = COPYING / X_VECTORS, W_AT_ONCE = COPYING / (ROWS / E);
static_assert(X_LINES % X_AT_ONCE == 0 && KC % W_AT_ONCE == 0, "whole rounds of copies");

/// What numbers are divided by.
struct Divisors {
    Divisor taps, h_stride, w_stride, plane, width, pos_blocks;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) shuffle_ring_half(
    const Element *x, const Element *w, const Element *bias, Element *y, int in_channels, int out_channels, int volume, int plane,
    int width, int d_stride, int h_stride, int w_stride, long long x_n, long long y_n, int y_c, int y_d, int y_h, int y_w, int chunks,
    int pos_blocks, int items, int row_blocks, int stages, int kept, int whole, int has_bias, int activation, double slope) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Divisors by;
    const int taps = d_stride * h_stride * w_stride, rows = out_channels * taps;
    const int group = blockIdx.x / row_blocks, row_block = blockIdx.x - group * row_blocks, groups = gridDim.x / row_blocks;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Of each stage two barriers: it is there; it has been read.
    const unsigned barriers = shared(memory);
    Element *const ring = (Element *)(memory + (16 * stages + 127) / 128 * 128), *const weights = ring + stages * X_STAGE;
    // Of each row of the row block where its first output lies in a sample, and its bias.
    int *const row_at = (int *)(weights + (kept ? chunks : stages) * KC * W_PITCH);
    float *const row_bias = (float *)(row_at + ROWS);
    begin_stages(barriers, stages, COPYING);

    if (warp >= WARPS) {
        // A thread has 16 bytes of some lines of both: of the weight and of X in NCDHW channels, of X in NDHWC positions.
        const int thread = threadIdx.x - 32 * WARPS;
        const int w_line = thread / (ROWS / E), row = thread % (ROWS / E) * E, x_line = thread / X_VECTORS, column = thread % X_VECTORS * E;
        const bool is_row = row_block * ROWS + row < rows;
        int slot = 0, parity = 1;
        bool all = true;
#pragma unroll 1
        for (int item = group; item < items; item += groups) {
            const int n = item / pos_blocks, first = (item - n * pos_blocks) * POS;
            const Element *of_w = w + ((long long)w_line * rows + (row_block * ROWS + row));
            // Lines that are not there may be farther than 32 bits count.
            const long long run = LAST ? in_channels : volume, before = LAST ? (first + x_line) * run : x_line * run + first;
            const Element *of_x = x + (n * x_n + before + column);
#pragma unroll 1
            for (int chunk = 0; chunk < chunks; chunk++, of_w += (long long)KC * rows, of_x += LAST ? KC : KC * run) {
                // Channels that there are from here on. Of others there are zeros, as of other positions and rows.
                const int left = in_channels - chunk * KC;
                const unsigned full = barriers + 16 * slot;
                barrier_wait(full + 8, parity);
                if (all) {
                    const unsigned to = shared(weights + ((kept ? chunk : slot) * KC + w_line) * W_PITCH + row);
#pragma unroll
                    for (int i = 0; i < KC; i += W_AT_ONCE) {
                        const bool there = is_row && w_line + i < left;
                        copy_async<16>(to + i * W_PITCH * 2, there ? of_w + (long long)i * rows : w, there);
                    }
                }
                const unsigned to = shared(ring + slot * X_STAGE + x_line * X_PITCH + column);
#pragma unroll
                for (int i = 0; i < X_LINES; i += X_AT_ONCE) {
                    const bool there = first + (LAST ? x_line + i : column) < volume && (LAST ? column : x_line + i) < left;
                    copy_async<16>(to + i * X_PITCH * 2, there ? of_x + i * run : x, there);
                }
                arrive_with_copies(full);
                if (++slot == stages) slot = 0, parity ^= 1;
            }
            all = !kept;
        }
        return;
    }

    if (const int i = threadIdx.x; i < sizeof(Divisors) / sizeof(Divisor)) {
        const int of_y = i == 0 ? taps : i == 1 ? h_stride : w_stride, of_x = i == 3 ? plane : i == 4 ? width : pos_blocks;
        ((Divisor *)&by)[i] = Divisor(i < 3 ? of_y : of_x);
    }
    asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
    for (int i = threadIdx.x; i < ROWS; i += 32 * WARPS) {
        const int row = row_block * ROWS + i, channel = by.taps.divide(row), tap = row - channel * taps;
        const int lines = by.w_stride.divide(tap), tw = tap - lines * w_stride, td = by.h_stride.divide(lines), th = lines - td * h_stride;
        row_at[i] = row < rows ? channel * y_c + td * y_d + th * y_h + tw * y_w : NOWHERE;
        row_bias[i] = row < rows && has_bias ? widen(bias[channel]) : 0.0f;
    }
    asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");

    const int g = lane / 4, t = lane % 4, row0 = warp % ROW_WARPS * WARP_ROWS, pos0 = warp / ROW_WARPS * WARP_POS;
    // Where the rows lie that the lane names of four matrices: of the weight channels by rows, both halves of rows first; of X both
    // halves of channels first.
    const int low = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
    const unsigned of_w = shared(weights + ((low + third) * W_PITCH + row0 + second));
    const unsigned of_x = shared(ring + (LAST ? (pos0 + low + third) * X_PITCH + second : (low + second) * X_PITCH + pos0 + third));
    int slot = 0, parity = 0;
#pragma unroll 1
    for (int item = group; item < items; item += groups) {
        float sum[MT][2 * PAIRS][4];
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[i][j][e] = row_bias[row0 + 16 * i + g + e / 2 * 8];
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            const unsigned xs = of_x + slot * X_STAGE * 2, ws = of_w + (kept ? chunk : slot) * (KC * W_PITCH * 2);
            barrier_wait(barriers + 16 * slot, parity);
            if (chunk > 0) give_back(barriers, slot, stages);
#pragma unroll
            for (int k = 0; k < KC; k += STEP) {
                unsigned a[MT][4];
#pragma unroll
                for (int i = 0; i < MT; i++) load_transposed(a[i], ws + 2 * (k * W_PITCH + 16 * i));
#pragma unroll
                for (int pair = 0; pair < PAIRS; pair++) {
                    unsigned b[4];
                    if (LAST)
                        load_matrices(b, xs + 2 * (16 * pair * X_PITCH + k));
                    else
                        load_transposed(b, xs + 2 * (k * X_PITCH + 16 * pair));
#pragma unroll
                    for (int i = 0; i < MT; i++)
#pragma unroll
                        for (int j = 0; j < 2; j++)
                            multiply(sum[i][2 * pair + j], make_uint4(a[i][0], a[i][1], a[i][2], a[i][3]), b[2 * j], b[2 * j + 1]);
                }
            }
            if (++slot == stages) slot = 0, parity ^= 1;
        }
        give_back(barriers, slot, stages);

        const int n = by.pos_blocks.divide(item), first = (item - n * pos_blocks) * POS + pos0 + 2 * t;
        const auto place = [&](int p) {
            const int d = by.plane.divide(p), in_plane = p - d * plane, h = by.width.divide(in_plane);
            return d * d_stride * y_d + h * h_stride * y_h + (in_plane - h * width) * w_stride * y_w;
        };
        Element *const of_sample = y + n * y_n;
        // Two sums as they are written.
        const auto both = [&](float one, float next) {
            if (activation) one = straighten(one, activation, (float)slope), next = straighten(next, activation, (float)slope);
            return narrow_both(one, next, Element{});
        };
        if (LAST) {
            const int fixed = row_at[row0 + g];
            // Of two vectors neighbouring lanes, whose positions are neighbours, write one of both each: whole sectors together.
            const bool odd = VECTORS == 2 && lane % 2;
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int p = first + 8 * j + e, own = fixed != NOWHERE && p < volume ? fixed + place(p) : NOWHERE;
                    unsigned v[VECTORS][4];
#pragma unroll
                    for (int i = 0; i < 4 * VECTORS; i++) v[i / 4][i % 4] = both(sum[i][j][e], sum[i][j][2 + e]);
                    const int other = VECTORS == 2 ? __shfl_xor_sync(0xffffffffu, own, 1) : NOWHERE;
#pragma unroll
                    for (int c = 0; VECTORS == 2 && c < 4; c++) {
                        const unsigned taken = __shfl_xor_sync(0xffffffffu, odd ? v[0][c] : v[VECTORS - 1][c], 1);
                        (odd ? v[0][c] : v[VECTORS - 1][c]) = taken;
                    }
                    const int at[2] = {odd ? other : own, odd ? own : other};
#pragma unroll
                    for (int i = 0; i < VECTORS; i++)
                        if (at[i] != NOWHERE) *(uint4 *)(of_sample + (at[i] + E * odd)) = make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
                }
            continue;
        }
        const int apart = g % 2 ? g + 7 : g;
        int at[2 * PAIRS], next[2 * PAIRS];
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; j++) {
            at[j] = first + 8 * j < volume ? place(first + 8 * j) : NOWHERE;
            next[j] = whole ? at[j] + 2 : place(first + 8 * j + 1);
        }
#pragma unroll
        for (int i = 0; i < MT; i++) {
            // Of the even one of both lanes' rows, whose neighbour in y the next row is.
            const int fixed = row_at[row0 + 16 * i + apart];
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; j++) {
                const unsigned upper = both(sum[i][j][0], sum[i][j][1]), lower = both(sum[i][j][2], sum[i][j][3]);
                const unsigned taken = __shfl_xor_sync(0xffffffffu, g % 2 ? upper : lower, 4);
                const unsigned even = g % 2 ? taken : upper, odd = g % 2 ? lower : taken;
                const uint2 v = make_uint2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
                if (fixed == NOWHERE || at[j] == NOWHERE) continue;
                if (whole) {
                    *(uint2 *)(of_sample + (fixed + at[j])) = v;
                } else {
                    *(unsigned *)(of_sample + (fixed + at[j])) = v.x;
                    *(unsigned *)(of_sample + (fixed + next[j])) = v.y;
                }
            }
        }
    }
}
