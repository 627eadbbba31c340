// Shuffle GEMM of many channels in float32: a transposed convolution whose kernel is its stride, 2 along width, of NCDHW.
//
// # What is computed
//
// As in `shuffle_gemm`: `Y[row, position] = sum over channels: W[channel][row] * X[channel, position]`, a row is a channel
// of y and a tap, `row = co*taps + tap`; positions are those of a sample, in order.
//
// # How
//
// A block has ROWS rows and takes every so-manieth block of POS positions. Both operands pass through a ring of `stages`, 32
// channels each, which warps of their own fill, a line of a channel at a time, as soon as a stage has been read; nobody else
// waits for anybody. With `kept` the weights come once and stay. What is read is rounded in registers. Sums go to y from there:
// a lane has two positions of two rows that differ in their residue along width, hence four neighbours of y.
//
// # Numbers
//
// `KIND` 1: float32 rounded to tf32. An output that is not finite shows that an operand was not, or did not stay so: then the
// warp's are left to the definition. 3: as two tf32, of each step three products, which are added to the sums in registers.
// Neighbours of which none reaches 2^-113, where the low part has not bits enough, are left to the definition as well.
//
// # What it takes
//
// Threads: 32*(ROW_WARPS*POS_WARPS + 8), of two parts 32*(ROW_WARPS*POS_WARPS + 4). Grid: any multiple of `row_blocks` along
// the first axis. Bytes of dynamic shared memory: `16*stages` rounded up to 128, `4*32*(stages*(POS + 4) + w_stages*(ROWS +
// 4)) + 8*ROWS`; `w_stages`: `chunks` where weights are `kept`, else `stages`. Channels of x are a multiple of 32; positions
// of a sample, channels of y times taps are multiples of 4. x is dense, y lies as its strides say, 1 along width; x, w and y
// start at multiples of 16 bytes. `whole`: whether lines of x are a multiple of 2 positions. What is counted in a sample,
// stages of all items are below 2^31.
//
// Parameters, i32 but for pointers, `x_n`, `y_n` (i64) and `slope` (f64): `x`, `w`, `bias`, `y`, `out_channels`, `volume`,
// `plane`, `width` (positions of a sample, a plane, a line), `d_stride`, `h_stride`, `x_n`, `y_n`, `y_c`, `y_d`, `y_h` (strides
// in elements), `chunks` (of 32 channels), `pos_blocks` (of a sample), `items` (of all), `row_blocks`, `stages`, `kept`,
// `whole`, `has_bias`, `activation` (0, none; 1, ReLU; 2, leaky), `slope`.

#include "shuffle_ring.cuh"

/// Elements from a channel's line of positions to the next: what a warp reads at once lies in different banks.
constexpr int X_PITCH = POS + 4;
/// Pairs of tiles of 8 positions of a warp.
constexpr int PAIRS = WARP_POS / 16;

/// What numbers are divided by.
struct Divisors {
    Divisor taps, plane, width, pos_blocks, h_stride;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) shuffle_ring(
    const float *x, const float *w, const float *bias, float *y, int out_channels, int volume, int plane, int width, int d_stride,
    int h_stride, long long x_n, long long y_n, int y_c, int y_d, int y_h, int chunks, int pos_blocks, int items, int row_blocks,
    int stages, int kept, int whole, int has_bias, int activation, double slope) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Divisors by;
    const int taps = d_stride * h_stride * 2, rows = out_channels * taps;
    const int group = blockIdx.x / row_blocks, row_block = blockIdx.x - group * row_blocks, groups = gridDim.x / row_blocks;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Of each stage two barriers: it is there; it has been read.
    const unsigned barriers = shared(memory);
    float *const ring = (float *)(memory + (16 * stages + 127) / 128 * 128), *const weights = ring + stages * KC * X_PITCH;
    // Of each row of the row block where its first output lies in a sample, and its bias.
    int *const row_at = (int *)(weights + (kept ? chunks : stages) * KC * W_PITCH);
    float *const row_bias = (float *)(row_at + ROWS);
    begin_stages(barriers, stages, COPIERS);

    if (warp >= WARPS) {
        // A lane has a line of X or of the weight.
        constexpr int EACH = KC / COPIERS;
        const bool of_w = lane >= EACH;
        const int line = (warp - WARPS) * EACH + lane % EACH, row_bytes = 4 * min(ROWS, rows - row_block * ROWS);
        int slot = 0, parity = 1;
        bool all = true;
#if KIND == 3
        if (lane < 2 * EACH) {
            // Zeros where there are no rows or positions: what lies there would be taken for small numbers. Copies may come there yet.
            const int columns = of_w ? ROWS : POS, column = of_w ? row_bytes / 4 : volume % POS, lines = of_w && kept ? chunks : stages;
            float *const own = of_w ? weights + line * W_PITCH : ring + line * X_PITCH;
#pragma unroll 1
            for (int i = 0; i < (column ? lines : 0); i++)
                for (int c = column; c < columns; c += 4) *(float4 *)&own[i * KC * (of_w ? W_PITCH : X_PITCH) + c] = float4{};
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
#endif
#pragma unroll 1
        for (int item = group; item < items; item += groups) {
            const int n = item / pos_blocks, first = (item - n * pos_blocks) * POS, pos_bytes = 4 * min(POS, volume - first);
            const float *from = of_w ? w + ((long long)line * rows + row_block * ROWS) : x + (n * x_n + (line * volume + first));
            const long long step = (long long)KC * (of_w ? rows : volume);
#pragma unroll 1
            for (int chunk = 0; chunk < chunks; chunk++, from += step) {
                const unsigned full = barriers + 16 * slot;
                const float *const to = of_w ? weights + ((kept ? chunk : slot) * KC + line) * W_PITCH : ring + (slot * KC + line) * X_PITCH;
                barrier_wait(full + 8, parity);
                if (lane == 0) barrier_expect(full, EACH * (pos_bytes + (all ? row_bytes : 0)));
                __syncwarp();
                if (lane < (all ? 2 : 1) * EACH) copy(shared(to), from, of_w ? row_bytes : pos_bytes, full);
                if (++slot == stages) slot = 0, parity ^= 1;
            }
            all = !kept;
        }
        return;
    }

    if (const int i = threadIdx.x; i < sizeof(Divisors) / sizeof(Divisor))
        ((Divisor *)&by)[i] = Divisor(i == 0 ? taps : i == 1 ? plane : i == 2 ? width : i == 3 ? pos_blocks : h_stride);
    asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
    for (int i = threadIdx.x; i < ROWS; i += 32 * WARPS) {
        const int row = row_block * ROWS + i, channel = by.taps.divide(row), tap = row - channel * taps;
        const int td = by.h_stride.divide(tap / 2), th = tap / 2 - td * h_stride;
        row_at[i] = row < rows ? channel * y_c + td * y_d + th * y_h + tap % 2 : NOWHERE;
        row_bias[i] = row < rows && has_bias ? bias[channel] : 0.0f;
    }
    asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");

    const int g = lane / 4, t = lane % 4, row0 = warp % ROW_WARPS * WARP_ROWS, pos0 = warp / ROW_WARPS * WARP_POS;
    // A lane reads two neighbours of each of two lines: rows that it has both of, or positions of two tiles.
    const int line = t / 2 * 4 + t % 2, apart = g % 2 ? g + 7 : g;
    int slot = 0, parity = 0;
#pragma unroll 1
    for (int item = group; item < items; item += groups) {
        float sum[MT][2 * PAIRS][4];
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[i][j][e] = row_bias[row0 + 16 * i + apart + e / 2];
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
            const float *const xs = ring + (slot * KC + line) * X_PITCH + pos0 + apart;
            const float *const ws = weights + ((kept ? chunk : slot) * KC + line) * W_PITCH + row0 + apart;
            barrier_wait(full, parity);
            if (chunk > 0) give_back(barriers, slot, stages);
#pragma unroll
            for (int k = 0; k < KC; k += STEP) {
                unsigned a[MT][4][PARTS], b[2 * PAIRS][2][PARTS];
#pragma unroll
                for (int pair = 0; pair < PAIRS; pair++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        take(*(const float2 *)(xs + (k + 2 * half) * X_PITCH + 16 * pair), b[2 * pair][half], b[2 * pair + 1][half]);
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        take(*(const float2 *)(ws + (k + 2 * half) * W_PITCH + 16 * i), a[i][2 * half], a[i][2 * half + 1]);
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int j = 0; j < 2 * PAIRS; j++) {
                        const auto add = [&](float(&to)[4], int of_a, int of_b) {
                            multiply(to, make_uint4(a[i][0][of_a], a[i][1][of_a], a[i][2][of_a], a[i][3][of_a]), b[j][0][of_b], b[j][1][of_b]);
                        };
                        add_products(sum[i][j], add);
                    }
            }
            if (++slot == stages) slot = 0, parity ^= 1;
        }
        give_back(barriers, slot, stages);

        const int n = by.pos_blocks.divide(item), first = (item - n * pos_blocks) * POS + pos0 + 2 * t;
        const auto place = [&](int p) {
            const int d = by.plane.divide(p), in_plane = p - d * plane, h = by.width.divide(in_plane);
            return d * d_stride * y_d + h * h_stride * y_h + (in_plane - h * width) * 2;
        };
        float *of_sample = y + n * y_n;
        // The compiler would rather multiply anew for each output.
        asm volatile("" : "+l"(of_sample));
        // Where rows lie, and each other position of the lane's, if they are there.
        int fixed[MT], at[2 * PAIRS];
#pragma unroll
        for (int i = 0; i < MT; i++) fixed[i] = row_at[row0 + 16 * i + apart];
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; j++) at[j] = first + 8 * j < volume ? place(first + 8 * j) : NOWHERE;
        // Calls `f` with a lane's outputs: of each pair of rows and of positions four neighbours.
        const auto for_outputs = [&](auto f) {
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < 2 * PAIRS; j++) {
                    float(&even)[4] = sum[i][j / 2 * 2], (&odd)[4] = sum[i][j / 2 * 2 + 1];
                    f(i, j, even[j % 2], even[2 + j % 2], odd[j % 2], odd[2 + j % 2], fixed[i] != NOWHERE && at[j] != NOWHERE);
                }
        };
        float largest = 0.0f;
        for_outputs([&](int, int, float a, float b, float c, float d, bool there) {
            // Lets NaN through.
            const float of[4] = {a, b, c, d};
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (there) asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(of[e])));
        });
        if (__any_sync(0xffffffffu, !(largest < __uint_as_float(0x7f800000u)) || smallest < 0x07000000u - 1)) {
            for_outputs([&](int i, int j, float &a, float &b, float &c, float &d, bool there) {
                if (!there) return;
                const int row = row0 + 16 * i + apart;
                const float *of_x = x + n * x_n + (first + 8 * j), *of_w = w + (row_block * ROWS + row);
                a = b = c = d = 0.0f;
#pragma unroll 1
                for (int k = 0; k < chunks * KC; k++, of_x += volume, of_w += rows) {
                    a = fmaf(of_x[0], of_w[0], a), b = fmaf(of_x[0], of_w[1], b);
                    c = fmaf(of_x[1], of_w[0], c), d = fmaf(of_x[1], of_w[1], d);
                }
                a += row_bias[row], b += row_bias[row + 1], c += row_bias[row], d += row_bias[row + 1];
            });
        }
        for_outputs([&](int i, int j, float a, float b, float c, float d, bool there) {
            float v[4] = {a, b, c, d};
            if (activation)
#pragma unroll
                for (int e = 0; e < 4; e++) v[e] = straighten(v[e], activation, (float)slope);
            if (!there) return;
            float *const to = of_sample + (fixed[i] + at[j]);
            if (whole) {
                *(float4 *)to = make_float4(v[0], v[1], v[2], v[3]);
            } else {
                *(float2 *)to = make_float2(v[0], v[1]);
                *(float2 *)(of_sample + (fixed[i] + place(first + 8 * j + 1))) = make_float2(v[2], v[3]);
            }
        });
    }
}
