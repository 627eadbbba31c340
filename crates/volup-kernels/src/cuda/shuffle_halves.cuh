// The products of `shuffle_gradient` on Hopper's matrix instructions, for operands of two fp16: `half_parts.cuh` says which.
//
// Panels of 16 bytes a row, as of 16 bits, the low parts' after the high ones'. Each of four warpgroups has 64 rows of dW, where there are
// fewer than 256 a share of the positions too. Two of them have the dX of a tile, each half of its positions, or all of them and half of
// the rows: then no sum of the matrix instructions is of more than 128 products. They take turns with the others, and that runs while the
// next tile is made. A tile's dW is waited for: each channel of x has another scale in each tile, so that its products are added up apart,
// for which there are no registers beside what the next tile takes.

#pragma once

#include "half_parts.cuh"
#include "hopper.cuh"
#include "shuffle_tiles.cuh"

struct Products {
    /// Elements of 16 bytes, positions of a share and of a warpgroup's dX.
    static constexpr int OF_PANEL = 8, COLUMNS = 32;
    /// Bytes from a panel to the next, for the banks as of 16 bits, and of a part.
    static constexpr int G_PANEL = 16 * (ROWS + 1), X_PANEL = 16 * (CI + 1), W_PANEL = 16 * CI;
    static constexpr int G = POS / OF_PANEL * G_PANEL, X = POS / OF_PANEL * X_PANEL, W = ROWS / OF_PANEL * W_PANEL;
    /// Shares of the positions; of the rows for dX, whose sums then meet in shared memory.
    static constexpr int SHARES = 256 / ROWS, HALVES = ROWS / 128, DEEP = ROWS / HALVES / STEP;
    static constexpr int COPIES = CI * POS * SIZE, MET = HALVES == 2 ? CI * COLUMNS * 4 : 0;
    static constexpr int BYTES = 4 * G + COPIES + 3 * X + 2 * W + MET + 2 * CI * 4 + POS * 4;
    static_assert(SHARES * COLUMNS == POS && (POS / COLUMNS) * HALVES == 2, "four warpgroups, two of them for dX");

    char *const memory;
    const Gradient to;
    /// Of dW, and of the dX of a tile that this warpgroup has: of high parts alone, and what the low one of a factor has.
    float sum[CI / 2], high[COLUMNS / 2], low[COLUMNS / 2];
    int sample, first, group;

    __device__ __forceinline__ Products(char *memory, const Gradient &to)
        : memory(memory), to(to), sum{}, sample(-1), group(__shfl_sync(0xffffffffu, threadIdx.x / 128, 0)) {
        if (threadIdx.x < POS) largest()[threadIdx.x] = 0;
    }

    __device__ __forceinline__ char *g(int turn) const { return memory + turn % 2 * 2 * G; }
    __device__ __forceinline__ char *copies() const { return memory + 4 * G; }
    __device__ __forceinline__ char *x() const { return copies() + COPIES; }
    __device__ __forceinline__ char *w() const { return x() + 3 * X; }
    __device__ __forceinline__ float *met() const { return (float *)(w() + 2 * W); }
    /// The inverse of what a channel of x is scaled by, in the weight and in a tile; of each position of this the largest gradient.
    __device__ __forceinline__ float *of_weight() const { return met() + MET / 4; }
    __device__ __forceinline__ float *of_x() const { return of_weight() + CI; }
    __device__ __forceinline__ unsigned *largest() const { return (unsigned *)(of_x() + CI); }

    /// Where the vector of a channel of x from a position on is copied to.
    __device__ __forceinline__ Element *x_at(int, int c, int p) const { return (Element *)copies() + c * POS + p; }

    /// Puts the weight, of channels and rows, each channel scaled by its largest; returns whether there is something that cannot be.
    template <typename F> __device__ __forceinline__ bool put_weight(F weight) const {
        unsigned *const most = (unsigned *)of_weight();
        if (threadIdx.x < CI) most[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < CI * ROWS; i += THREADS) raise(&most[i / ROWS], magnitude(weight(i / ROWS, i % ROWS)));
        __syncthreads();
        bool bad = false;
        for (int i = threadIdx.x; i < CI * ROWS; i += THREADS) {
            const int c = i / ROWS, row = i % ROWS;
            const float v = weight(c, row) * power(exponent(most[c]));
            bad |= out_of_range(most[c], 0x7f800000u);
            Half high, low;
            narrow(v, &high);
            narrow((v - widen(high)) * LOW, &low);
            Half *const at = (Half *)(w() + row / OF_PANEL * W_PANEL + c * 16) + row % OF_PANEL;
            at[0] = high;
            at[W / 2] = low;
        }
        __syncthreads();
        if (threadIdx.x < CI) of_weight()[threadIdx.x] = power(-exponent(most[threadIdx.x]));
        return bad;
    }

    /// Whether a largest magnitude, given as bits, is too small or too large to be scaled.
    __device__ __forceinline__ static bool out_of_range(unsigned most, unsigned end) {
        constexpr unsigned FIRST = 21u << 23;
        return most && most - FIRST >= end - FIRST;
    }

    /// Where positions of a row lie in G; rows are 16 bytes apart.
    __device__ __forceinline__ static int place(int row, int p) { return p / OF_PANEL * G_PANEL + row * 16 + p % OF_PANEL * 2; }

    /// Puts two positions of two rows to G.
    __device__ __forceinline__ void put(int turn, int place, const unsigned (&high)[2], const unsigned (&low)[2]) const {
        char *const at = g(turn) + place;
#pragma unroll
        for (int tw = 0; tw < 2; tw++) {
            *(unsigned *)(at + tw * 16) = high[tw];
            *(unsigned *)(at + G + tw * 16) = low[tw];
        }
    }

    /// Takes the largest gradients of two positions, of the rows that a thread has, for all rows.
    __device__ __forceinline__ void put_largest(int p, float one, float next) const {
        const auto bits = [](float x) { return __float_as_uint(x); };
        if (POS == COLUMNS) {
            // Lanes 16 apart have the same positions: each takes one of them.
            const bool other = threadIdx.x & 16;
            const unsigned got = __shfl_xor_sync(0xffffffffu, bits(other ? one : next), 16);
            atomicMax(&largest()[p + other], max(got, bits(other ? next : one)));
        } else {
            atomicMax(&largest()[p], bits(one));
            atomicMax(&largest()[p + 1], bits(next));
        }
    }

    /// Puts a thread's vector of x, which it and its neighbours have a channel of; returns whether that cannot be scaled, or sums of it
    /// and of scaled gradients may be past float32.
    __device__ __forceinline__ bool put_x(int c, int p) const {
        const float4 v = *(const float4 *)x_at(0, c, p);
        unsigned most = max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
#pragma unroll
        for (int lanes = POS / VECTOR / 2; lanes; lanes /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, lanes));
        const int e = exponent(most);
        const float scale = power(e);
        uint2 high, low;
        high.x = half_parts(v.x * scale, v.y * scale, 1.0f, low.x);
        high.y = half_parts(v.z * scale, v.w * scale, 1.0f, low.y);
        char *const at = x() + p / OF_PANEL * X_PANEL + c * 16 + p % OF_PANEL * 2;
        *(uint2 *)at = high;
        *(uint2 *)(at + X) = low;
        *(uint2 *)(at + 2 * X) = make_uint2(by_low(high.x), by_low(high.y));
        if (p == 0) of_x()[c] = power(-e);
        return out_of_range(most, 207u << 23);
    }

    /// An operand so many bytes further on.
    __device__ __forceinline__ static unsigned long long further(unsigned long long descriptor, unsigned bytes) { return descriptor + (bytes >> 4); }

    /// The dX that was started is done, and what this thread has put is known to the next products.
    __device__ __forceinline__ void publish() const {
        matrix_wait<0>();
        meet();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }

    /// A sum of dX of both accumulators.
    __device__ __forceinline__ float whole(int at) const { return fmaf(low[at], 1.0f / LOW, high[at]); }

    /// Of two warpgroups with the same positions the second one hands over its sums.
    __device__ __forceinline__ void meet() const {
        if (HALVES == 2 && sample >= 0 && group % 2 == 1)
#pragma unroll
            for (int at = 0; at < COLUMNS / 2; at++) met()[at * 128 + threadIdx.x % 128] = whole(at);
    }

    /// Writes what this warpgroup has of dX, if it has any: all of it is done.
    __device__ __forceinline__ void write() {
        if (sample >= 0 && (HALVES == 1 || group % 2 == 0)) {
            const int c0 = threadIdx.x % 128 / 32 * 16, p0 = HALVES == 1 ? group % 2 * COLUMNS : 0;
            const float *const inverse = of_weight() + c0 + threadIdx.x % 32 / 4;
            const float of[2] = {inverse[0], inverse[8]};
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j++) {
                float sums[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float other = HALVES == 1 ? 0.0f : met()[(4 * j + e) * 128 + threadIdx.x % 128];
                    sums[e] = (whole(4 * j + e) + other) * of[e / 2];
                }
                to.store(sample, c0, first + p0 + 8 * j, sums);
            }
        }
        sample = -1;
        // What these registers hold is over: others may have them before the next dX is started.
#pragma unroll
        for (int at = 0; at < COLUMNS / 2; at++) asm volatile("" : "=f"(high[at]), "=f"(low[at]));
    }

    /// Writes what is left of the last tile, starts the dX of one of a sample, and adds its dW. Returns whether a position of it is too
    /// coarse.
    __device__ __forceinline__ bool start(int turn, int n, int first_of_tile, bool weight) {
        bool bad = false;
        if (threadIdx.x < POS) {
            bad = is_too_coarse(largest()[threadIdx.x]);
            largest()[threadIdx.x] = 0;
        }
        write();
        if (weight) {
            float of_tile[CI / 2];
            matrix_fence();
            const int share = group / (ROWS / 64), rows = group % (ROWS / 64) * 64;
            const unsigned long long of_g = descriptor<1>(address(g(turn)) + share * (COLUMNS / OF_PANEL) * G_PANEL + rows * 16, G_PANEL);
            const unsigned long long a = descriptor<1>(address(x()) + share * (COLUMNS / OF_PANEL) * X_PANEL, X_PANEL);
            const auto add = [&](int part_x, int part_g, bool keep) {
#pragma unroll
                for (int k = 0; k < COLUMNS / STEP; k++)
                    multiply(of_tile, further(a, part_x * X + k * 2 * X_PANEL), further(of_g, part_g * G + k * 2 * G_PANEL), keep || k > 0);
            };
            add(1, 0, false);
            add(2, 1, true);
            add(0, 0, true);
            matrix_commit();
            matrix_wait<0>();
            const float *const inverse = of_x() + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
            const float of[2] = {inverse[0], inverse[8]};
#pragma unroll
            for (int at = 0; at < CI / 2; at++) sum[at] = fmaf(of_tile[at], of[at % 4 / 2], sum[at]);
        }
        if (to.dx && group / 2 == turn % 2) {
            const int half = HALVES == 1 ? 0 : group % 2, columns = HALVES == 1 ? group % 2 : 0;
            const unsigned long long a = descriptor<1>(address(w()) + half * DEEP * 2 * W_PANEL, W_PANEL);
            const unsigned long long b = across(address(g(turn)) + columns * (COLUMNS / OF_PANEL) * G_PANEL + half * DEEP * 256, G_PANEL);
            matrix_fence();
#pragma unroll 4
            for (int k = 0; k < DEEP; k++) {
                multiply<1>(low, further(a, k * 2 * W_PANEL), further(b, G + k * 256), k > 0);
                multiply<1>(low, further(a, W + k * 2 * W_PANEL), further(b, k * 256), 1);
                multiply<1>(high, further(a, k * 2 * W_PANEL), further(b, k * 256), k > 0);
            }
            matrix_commit();
            sample = n;
            first = first_of_tile;
        }
        return bad;
    }

    /// The last tile's products are done, and dX is written.
    __device__ __forceinline__ void finish() {
        matrix_wait<0>();
        // The sums of the tile before have been read.
        __syncthreads();
        meet();
        __syncthreads();
        write();
    }

    /// Hands over this thread's sums of dW: of which row, which channel, and of which share.
    template <typename F> __device__ __forceinline__ void sums(F f) const {
        each_sum(sum, [&](int c, int row, float v) { f(group % (ROWS / 64) * 64 + row, c, group / (ROWS / 64), v); });
    }
};
