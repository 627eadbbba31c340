// Shuffle GEMM of many channels in float32, channels last: a transposed convolution whose kernel is its stride, of NDHWC.
//
// # What is computed
//
// As in `shuffle_ring`: `Y[row, position] = sum over channels: W[channel][row] * X[channel, position]`, a row is a channel of y and
// a tap, `row = co*TAPS + tap`; positions are those of a sample, in order.
//
// # How
//
// A block has ROWS rows and takes every so-manieth block of POS positions. Both operands pass through a ring of `stages`, 32
// channels each, which warps of their own fill as soon as a stage has been read: a line of the weight at a time, and of X 16
// bytes of a position by each thread. With `kept` the weights come once and stay. What is read is rounded in registers.
//
// The rows of a matrix instruction that neighbouring lanes have are taps, those of its tiles are neighbouring channels: so a lane
// has CHANNELS of them, of each of its positions, and writes them.
//
// # Numbers
//
// As in `shuffle_ring`.
//
// # What it takes
//
// TAPS divides 8. Threads: 32*(ROW_WARPS*POS_WARPS + 8), of two parts 32*(ROW_WARPS*POS_WARPS + 4). Grid: any multiple of
// `row_blocks` along the first axis. Bytes of dynamic shared memory: `16*stages` rounded up to 128, `4*32*(stages*POS*5/4 +
// w_stages*(ROWS + 4)) + 8*ROWS`; `w_stages`: `chunks` where weights are `kept`, else `stages`. Channels of x are a multiple of
// 32, channels of y of CHANNELS, and these times TAPS of WARP_ROWS. x is dense, y lies as its strides say, channels side by side;
// x, w and y start at multiples of 16 bytes. What is counted in a sample, stages of all items are below 2^31.
//
// Parameters, i32 but for pointers, `x_n`, `y_n` (i64) and `slope` (f64): `x`, `w`, `bias`, `y`, `out_channels`, `volume`,
// `plane`, `width` (positions of a sample, a plane, a line), `d_stride`, `h_stride`, `w_stride`, `x_n`, `y_n`, `y_c`, `y_d`,
// `y_h`, `y_w` (strides in elements), `chunks` (of 32 channels), `pos_blocks` (of a sample), `items` (of all), `row_blocks`,
// `stages`, `kept`, `has_bias`, `activation` (0, none; 1, ReLU; 2, leaky), `slope`.

#include "copy_async.cuh"
#include "shuffle_ring.cuh"

#if !defined(TAPS) || 8 % TAPS
#error "TAPS, a divisor of 8"
#endif

/// Channels of a lane, and tiles of 8 positions of a warp.
constexpr int CHANNELS = 2 * MT, TILES = WARP_POS / 8;
/// Elements from a position's line to the next, as what a warp reads at once lies in different banks; of a stage.
constexpr int X_PITCH = KC + 8, X_STAGE = POS * X_PITCH;
/// Whether a stage is given back with the next one. Of two parts each value that is loaded is looked at before, and no register is left.
constexpr bool LATE = KIND != 3;
/// Steps whose loads may be under way together, as far as there are registers.
constexpr int STEPS_AT_ONCE = KIND == 3 ? 1 : KC / STEP;
/// Threads that copy, and positions that they have 16 bytes each of at once.
constexpr int COPYING = 32 * COPIERS, AT_ONCE = COPYING / (KC / 4);

/// What numbers are divided by.
struct Divisors {
    Divisor plane, width, pos_blocks;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) shuffle_ring_last(
    const float *x, const float *w, const float *bias, float *y, int out_channels, int volume, int plane, int width, int d_stride,
    int h_stride, int w_stride, long long x_n, long long y_n, int y_c, int y_d, int y_h, int y_w, int chunks, int pos_blocks, int items,
    int row_blocks, int stages, int kept, int has_bias, int activation, double slope) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Divisors by;
    const int rows = out_channels * TAPS, in_channels = chunks * KC;
    const int group = blockIdx.x / row_blocks, row_block = blockIdx.x - group * row_blocks, groups = gridDim.x / row_blocks;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Of each stage two barriers: it is there, each copy of X and each warp's of weights; it has been read.
    const unsigned barriers = shared(memory);
    float *const ring = (float *)(memory + (16 * stages + 127) / 128 * 128), *const weights = ring + stages * X_STAGE;
    // Of each row of the row block where its first output lies in a sample, and its bias.
    int *const row_at = (int *)(weights + (kept ? chunks : stages) * KC * W_PITCH);
    float *const row_bias = (float *)(row_at + ROWS);
    begin_stages(barriers, stages, COPYING + COPIERS);

    if (warp >= WARPS) {
        // A lane has 16 bytes of positions, and a line of the weight.
        constexpr int EACH = KC / COPIERS;
        const int thread = threadIdx.x - 32 * WARPS, position = thread / (KC / 4), channel = thread % (KC / 4) * 4;
        const int line = (warp - WARPS) * EACH + lane % EACH, row_bytes = 4 * min(ROWS, rows - row_block * ROWS);
        int slot = 0, parity = 1;
        bool all = true;
#if KIND == 3
        if (lane < EACH) {
            // Zeros where there are no rows: what lies there would be taken for small numbers. Copies may come there yet.
#pragma unroll 1
            for (int i = 0; i < (kept ? chunks : stages); i++)
                for (int row = row_bytes / 4; row < ROWS; row += 4) *(float4 *)&weights[(i * KC + line) * W_PITCH + row] = float4{};
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
#endif
#pragma unroll 1
        for (int item = group; item < items; item += groups) {
            const int n = item / pos_blocks, first = (item - n * pos_blocks) * POS + position;
            const float *of_x = x + (n * x_n + (first * in_channels + channel)), *of_w = w + ((long long)line * rows + row_block * ROWS);
#pragma unroll 1
            for (int chunk = 0; chunk < chunks; chunk++, of_x += KC, of_w += (long long)KC * rows) {
                const unsigned full = barriers + 16 * slot, to = shared(ring + slot * X_STAGE + position * X_PITCH + channel);
                // Each lane for what it copies over.
                barrier_wait(full + 8, parity);
                if (lane == 0) barrier_expect(full, all ? EACH * row_bytes : 0);
                if (all && lane < EACH) copy(shared(weights + ((kept ? chunk : slot) * KC + line) * W_PITCH), of_w, row_bytes, full);
#pragma unroll
                for (int p = 0; p < POS; p += AT_ONCE) {
                    const bool there = first + p < volume;
                    copy_async<16>(to + p * X_PITCH * 4, there ? of_x + p * in_channels : x, there);
                }
                arrive_with_copies(full);
                if (++slot == stages) slot = 0, parity ^= 1;
            }
            all = !kept;
        }
        return;
    }

    if (const int i = threadIdx.x; i < sizeof(Divisors) / sizeof(Divisor))
        ((Divisor *)&by)[i] = Divisor(i == 0 ? plane : i == 1 ? width : pos_blocks);
    for (int i = threadIdx.x; i < ROWS; i += 32 * WARPS) {
        const int row = row_block * ROWS + i, channel = row / TAPS, tap = row % TAPS, tw = tap % w_stride, line = tap / w_stride;
        row_at[i] = row < rows ? channel * y_c + line / h_stride * y_d + line % h_stride * y_h + tw * y_w : NOWHERE;
        row_bias[i] = row < rows && has_bias ? bias[channel] : 0.0f;
    }
    asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");

    const int g = lane / 4, t = lane % 4, pos0 = warp / ROW_WARPS * WARP_POS;
    // A lane's first row; the others are of the next channels.
    const int row0 = warp % ROW_WARPS * WARP_ROWS + g / TAPS * CHANNELS * TAPS + g % TAPS, fixed = row_at[row0];
    int slot = 0, parity = 0;
#pragma unroll 1
    for (int item = group; item < items; item += groups) {
        float sum[MT][TILES][4];
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < TILES; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[i][j][e] = row_bias[row0 + (2 * i + e / 2) * TAPS];
        // Of two parts the smallest magnitude but zero, less one, that is the larger of two neighbours.
        unsigned smallest = ~0u;
        const auto take = [&](float2 v, unsigned (&one)[PARTS], unsigned (&other)[PARTS]) {
            if (KIND == 3) smallest = __viaddmin_u32(__float_as_uint(fmaxf(fabsf(v.x), fabsf(v.y))), ~0u, smallest);
            split(v.x, one);
            split(v.y, other);
        };
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            const unsigned full = barriers + 16 * slot;
            // Of each step two neighbouring channels.
            const float *const xs = ring + slot * X_STAGE + (pos0 + g) * X_PITCH + 2 * t;
            const float *const ws = weights + ((kept ? chunk : slot) * KC + 2 * t) * W_PITCH + row0;
            barrier_wait(full, parity);
            if (LATE && chunk > 0) give_back(barriers, slot, stages);
#pragma unroll STEPS_AT_ONCE
            for (int k = 0; k < KC; k += STEP) {
                unsigned a[MT][4][PARTS];
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const float *const of = ws + k * W_PITCH + (2 * i + half) * TAPS;
                        take(make_float2(of[0], of[W_PITCH]), a[i][half], a[i][2 + half]);
                    }
#pragma unroll
                for (int j = 0; j < TILES; j++) {
                    unsigned b[2][PARTS];
                    take(*(const float2 *)(xs + 8 * j * X_PITCH + k), b[0], b[1]);
                    if (!LATE && k + STEP == KC && j + 1 == TILES) {
                        meet();
                        if (lane == 0) barrier_arrive(full + 8);
                    }
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        const auto add = [&](float(&to)[4], int of_a, int of_b) {
                            multiply(to, make_uint4(a[i][0][of_a], a[i][1][of_a], a[i][2][of_a], a[i][3][of_a]), b[0][of_b], b[1][of_b]);
                        };
                        add_products(sum[i][j], add);
                    }
                }
            }
            if (++slot == stages) slot = 0, parity ^= 1;
        }
        if (LATE) give_back(barriers, slot, stages);

        const int n = by.pos_blocks.divide(item), first = (item - n * pos_blocks) * POS + pos0 + 2 * t;
        float *const of_sample = y + n * y_n + fixed;
        // Calls `f` with each of a lane's positions, and its sums.
        const auto for_positions = [&](auto f) {
            if (fixed == NOWHERE) return;
#pragma unroll
            for (int j = 0; j < TILES; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    if (first + 8 * j + e >= volume) continue;
                    f(first + 8 * j + e, [&](int channel) -> float & { return sum[channel / 2][j][channel % 2 * 2 + e]; });
                }
        };
        float largest = 0.0f;
        for_positions([&](int, auto of) {
            // Lets NaN through.
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(of(c))));
        });
        if (__any_sync(0xffffffffu, !(largest < __uint_as_float(0x7f800000u)) || smallest < 0x07000000u - 1)) {
            for_positions([&](int p, auto of) {
                const float *of_x = x + n * x_n + (long long)p * in_channels, *of_w = w + (row_block * ROWS + row0);
#pragma unroll
                for (int c = 0; c < CHANNELS; c++) of(c) = 0.0f;
#pragma unroll 1
                for (int k = 0; k < in_channels; k++, of_w += rows)
#pragma unroll
                    for (int c = 0; c < CHANNELS; c++) of(c) = fmaf(of_x[k], of_w[c * TAPS], of(c));
#pragma unroll
                for (int c = 0; c < CHANNELS; c++) of(c) += row_bias[row0 + c * TAPS];
            });
        }
        if (activation)
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < TILES; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sum[i][j][e] = straighten(sum[i][j][e], activation, (float)slope);
        // Neighbouring lanes have neighbouring positions: of two runs of channels the even one writes the first half, the odd one the
        // second, so that both together write whole sectors.
        // The compiler takes vectors apart unless told which instruction it is.
        const bool odd = lane % 2;
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int p = first + 8 * j + e, d = by.plane.divide(p), in_plane = p - d * plane, h = by.width.divide(in_plane);
                const int place = d * d_stride * y_d + h * h_stride * y_h + (in_plane - h * width) * w_stride * y_w;
                const int own = fixed != NOWHERE && p < volume ? place : NOWHERE;
                float one[4], next[4];
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    one[c] = sum[c / 2][j][c % 2 * 2 + e];
                    if (CHANNELS == 4) continue;
                    const float high = sum[2 + c / 2][j][c % 2 * 2 + e], taken = __shfl_xor_sync(0xffffffffu, odd ? one[c] : high, 1);
                    next[c] = odd ? high : taken;
                    one[c] = odd ? taken : one[c];
                }
                if (CHANNELS == 4) {
                    if (own != NOWHERE) __stwb((float4 *)(of_sample + own), make_float4(one[0], one[1], one[2], one[3]));
                    continue;
                }
                const int other = __shfl_xor_sync(0xffffffffu, own, 1), at = odd ? other : own, next_at = odd ? own : other;
                if (at != NOWHERE) __stwb((float4 *)(of_sample + at + 4 * odd), make_float4(one[0], one[1], one[2], one[3]));
                if (next_at != NOWHERE) __stwb((float4 *)(of_sample + next_at + 4 * odd), make_float4(next[0], next[1], next[2], next[3]));
            }
    }
}
