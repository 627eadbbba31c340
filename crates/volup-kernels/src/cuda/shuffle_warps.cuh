// The products of `shuffle_gradient` on the matrix instructions of a warp, for operands of two parts, which are taken apart
// in registers: there is no room in shared memory for both.
//
// Each warp has rows by channels of dW, and channels by positions of dX. A tile that holds an infinity or NaN is multiplied
// in float32: their parts are not numbers whose products add up to what the definition says.

#pragma once

#include "mma.cuh"
#include "shuffle_tiles.cuh"

struct Products {
    /// Elements from a row to the next: reads of a warp meet no bank conflict.
    static constexpr int PITCH = POS + 8, PITCH_W = ROWS + 4, X = CI * PITCH;
    static constexpr int BYTES = SIZE * (ROWS * PITCH + 2 * X + CI * PITCH_W), SHARES = 1;
    /// A warp's part of dW, rows by channels, and of dX, channels by positions.
    static constexpr int WEIGHT_N = ROWS > 64 ? 32 : 16, WEIGHT_M = ROWS * CI / 16 / WEIGHT_N, WEIGHT_ROWS = ROWS / WEIGHT_M;
    static constexpr int INPUT_N = 8, INPUT_M = CI * POS / 16 / INPUT_N > CI ? CI : CI * POS / 16 / INPUT_N, INPUT_ROWS = CI / INPUT_M;
    static constexpr int INPUT_TILES = CI * POS / 16 / INPUT_M / INPUT_N;
    static_assert(WEIGHT_M % 16 == 0 && INPUT_M % 16 == 0 && CI % INPUT_M == 0, "whole instructions");
    static constexpr int MT = WEIGHT_M / 16, NT = WEIGHT_N / 8, INPUT_MT = INPUT_M / 16;

    Element *const memory;
    const Gradient to;
    const int rows;
    float sum[MT][NT][4];

    __device__ __forceinline__ Products(char *memory, const Gradient &to, int rows) : memory((Element *)memory), to(to), rows(rows), sum{} {}

    __device__ __forceinline__ Element *g() const { return memory; }
    __device__ __forceinline__ Element *x(int turn) const { return memory + ROWS * PITCH + turn % 2 * X; }
    __device__ __forceinline__ Element *w() const { return memory + ROWS * PITCH + 2 * X; }

    /// Where the vector of a channel of x from a position on lies, and a weight.
    __device__ __forceinline__ Element *x_at(int turn, int c, int p) const { return x(turn) + c * PITCH + p; }
    __device__ __forceinline__ Element *w_at(int c, int row) const { return w() + c * PITCH_W + row; }

    /// Puts half a vector of positions of two rows to G.
    __device__ __forceinline__ void put(int, int row, int p, const uint2 (&v)[2]) const {
#pragma unroll
        for (int tw = 0; tw < 2; tw++) *(uint2 *)(g() + (row + tw) * PITCH + p) = v[tw];
    }

    template <int COUNT> __device__ __forceinline__ static void part(unsigned (&v)[2][COUNT]) {
#pragma unroll
        for (int e = 0; e < COUNT; e++) part_tf32(v[0][e], v[1][e]);
    }
    __device__ __forceinline__ static void multiply_parts(float (&sum)[4], const unsigned (&a)[2][4], const unsigned (&b)[2][2]) {
        float product[4] = {};
        const auto add = [&](int of_a, int of_b) {
            multiply(product, make_uint4(a[of_a][0], a[of_a][1], a[of_a][2], a[of_a][3]), b[of_b][0], b[of_b][1]);
        };
        add(1, 0);
        add(0, 1);
        add(0, 0);
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e] += product[e];
    }

    /// Adds what the definition says to a thread's sums: of its row and its column of each step.
    template <int MT, int NT, typename A, typename B>
    __device__ __forceinline__ static void add_by_definition(float (&sum)[MT][NT][4], int steps, A of_row, B of_column) {
        const int t = threadIdx.x % 4;
#pragma unroll 1
        for (int k = 0; k < steps; k++)
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum[i][j][e] = fmaf(of_row(16 * i + e / 2 * 8, k), of_column(8 * j + 2 * t + e % 2, k), sum[i][j][e]);
    }

    /// The products of a tile, of which every thread has seen whether they go by the definition.
    __device__ __forceinline__ void start(int turn, int n, int first, bool weight, bool by_definition) {
        if (weight) add_weight(x(turn), by_definition);
        if (to.dx) put_input(by_definition, n, first);
        __syncthreads();
    }

    __device__ __forceinline__ void add_weight(const Element *x, bool by_definition) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g_lane = lane / 4, t = lane % 4;
        const Element *const of_g = g() + (warp % WEIGHT_ROWS * WEIGHT_M + g_lane) * PITCH;
        const Element *const of_x = x + warp / WEIGHT_ROWS * WEIGHT_N * PITCH;
        if (by_definition) {
            add_by_definition(sum, POS, [&](int m, int p) { return of_g[m * PITCH + p]; }, [&](int n, int p) { return of_x[n * PITCH + p]; });
            return;
        }
        // The positions that an instruction adds up may come in any order: neighbours are read at once.
#pragma unroll 1
        for (int k = 2 * t; k < POS; k += STEP) {
            unsigned b[NT][2][2];
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const uint2 v = *(const uint2 *)(of_x + (8 * j + g_lane) * PITCH + k);
                b[j][0][0] = v.x, b[j][0][1] = v.y;
                part(b[j]);
            }
#pragma unroll
            for (int i = 0; i < MT; i++) {
                unsigned a[2][4];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint2 v = *(const uint2 *)(of_g + (16 * i + 8 * half) * PITCH + k);
                    a[0][half] = v.x, a[0][2 + half] = v.y;
                }
                part(a);
#pragma unroll
                for (int j = 0; j < NT; j++) multiply_parts(sum[i][j], a, b[j]);
            }
        }
    }

    __device__ __forceinline__ void put_input(bool by_definition, int n, int first) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g_lane = lane / 4, t = lane % 4;
        const int c0 = warp % INPUT_ROWS * INPUT_M, p0 = warp / INPUT_ROWS * INPUT_TILES * INPUT_N;
        const Element *const of_w = w() + (c0 + g_lane) * PITCH_W;
        float product[INPUT_MT][INPUT_TILES][4] = {};
        if (by_definition) {
            add_by_definition(product, rows, [&](int m, int row) { return of_w[m * PITCH_W + row]; },
                              [&](int n, int row) { return g()[row * PITCH + p0 + n]; });
        } else {
#pragma unroll 1
            for (int k = t; k < ROWS; k += STEP) {
                unsigned b[INPUT_TILES][2][2];
#pragma unroll
                for (int j = 0; j < INPUT_TILES; j++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) b[j][0][e] = __float_as_uint(g()[(k + 4 * e) * PITCH + p0 + 8 * j + g_lane]);
                    part(b[j]);
                }
#pragma unroll
                for (int i = 0; i < INPUT_MT; i++) {
                    unsigned a[2][4];
#pragma unroll
                    for (int e = 0; e < 4; e++) a[0][e] = __float_as_uint(of_w[(16 * i + e % 2 * 8) * PITCH_W + k + e / 2 * 4]);
                    part(a);
#pragma unroll
                    for (int j = 0; j < INPUT_TILES; j++) multiply_parts(product[i][j], a, b[j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < INPUT_MT; i++)
#pragma unroll
            for (int j = 0; j < INPUT_TILES; j++) to.store(n, c0 + 16 * i, first + p0 + 8 * j, product[i][j]);
    }

    /// Hands over this thread's sums of dW: of which row, which channel, and of which share.
    template <typename F> __device__ __forceinline__ void sums(F f) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    f(warp % WEIGHT_ROWS * WEIGHT_M + 16 * i + lane / 4 + e / 2 * 8, warp / WEIGHT_ROWS * WEIGHT_N + 8 * j + lane % 4 * 2 + e % 2, 0,
                      sum[i][j][e]);
    }
};
