// The products of `shuffle_gradient` on Hopper's matrix instructions, for operands of one part.
//
// Panels of 16 bytes a row, as in `halo_gemm`: of G and X a panel is a few neighbouring positions of every row or channel, of
// W a few rows of every channel. Of 16 bits the same G is an operand of both products. tf32 has to have what is added up
// side by side: there G is stored twice.
//
// Each of four warpgroups has 64 rows of dW, where there are fewer than 256 a share of the positions too. They take turns
// with dX. Instructions of a tile run while the next one is made, if G has room for both.

#pragma once

#include "hopper.cuh"
#include "shuffle_tiles.cuh"

struct Products {
    /// Bytes from a panel to the next; between those of G and X a row is left free, so that what is written to several at
    /// once meets no bank twice.
    static constexpr int G_PANEL = 16 * (ROWS + 1), X_PANEL = 16 * (CI + 1), W_PANEL = 16 * CI, TURNED_PANEL = 16 * POS;
    static constexpr int BUFFERS = KIND == 0 ? 2 : 1, PANELS = POS / VECTOR;
    static constexpr int G = PANELS * G_PANEL, TURNED = KIND == 0 ? 0 : TILE, X = PANELS * X_PANEL, W = ROWS / VECTOR * W_PANEL;
    static constexpr int BYTES = BUFFERS * G + TURNED + 2 * X + W;
    /// Shares of the positions; columns of dX of a warpgroup, and how many warpgroups have some.
    static constexpr int SHARES = 256 / ROWS, COLUMNS = POS < 64 ? POS : 64, BESIDE = POS / COLUMNS;
    static_assert(SHARES * ROWS == 256 && POS / STEP % SHARES == 0 && 4 % BESIDE == 0, "four warpgroups");

    char *const memory;
    const Gradient to;
    /// Of dW, and of the dX of a tile that this warpgroup has.
    float sum[CI / 2], product[COLUMNS / 2];
    int sample, first, group;

    __device__ __forceinline__ Products(char *memory, const Gradient &to) : memory(memory), to(to), sum{}, sample(-1), group(__shfl_sync(0xffffffffu, threadIdx.x / 128, 0)) {}

    __device__ __forceinline__ char *g(int turn) const { return memory + (turn % BUFFERS * G); }
    __device__ __forceinline__ char *turned() const { return memory + BUFFERS * G; }
    __device__ __forceinline__ char *x(int turn) const { return memory + BUFFERS * G + TURNED + turn % 2 * X; }
    __device__ __forceinline__ char *w() const { return memory + BUFFERS * G + TURNED + 2 * X; }

    /// Where the vector of a channel of x from a position on lies, and a weight.
    __device__ __forceinline__ Element *x_at(int turn, int c, int p) const { return (Element *)(x(turn) + p / VECTOR * X_PANEL + c * 16); }
    __device__ __forceinline__ Element *w_at(int c, int row) const {
        return (Element *)(w() + row / VECTOR * W_PANEL + c * 16) + row % VECTOR;
    }

    /// Puts half a vector of positions of two rows to G.
    __device__ __forceinline__ void put(int turn, int row, int p, const uint2 (&v)[2]) const {
        char *const at = g(turn) + p / VECTOR * G_PANEL + row * 16 + p % VECTOR * SIZE;
#pragma unroll
        for (int tw = 0; tw < 2; tw++) *(uint2 *)(at + tw * 16) = v[tw];
#if KIND != 0
        // Of every other four lanes the second position first: each then has banks of its own.
        const bool other = p & 8;
        char *const turned_at = turned() + row / 4 * TURNED_PANEL + p * 16 + row % 4 * 4;
        *(uint2 *)(turned_at + other * 16) = other ? make_uint2(v[0].y, v[1].y) : make_uint2(v[0].x, v[1].x);
        *(uint2 *)(turned_at + !other * 16) = other ? make_uint2(v[0].x, v[1].x) : make_uint2(v[0].y, v[1].y);
#endif
    }

    /// The products that were started are done, and what this thread has put is known to the next ones.
    __device__ __forceinline__ static void publish() {
        matrix_wait<0>();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }

    /// Writes what this warpgroup has of dX, if it has any: all of it is done.
    __device__ __forceinline__ void write() {
        if (sample < 0) return;
        const int c0 = threadIdx.x % 128 / 32 * 16, p0 = group % BESIDE * COLUMNS;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j += KIND == 0 ? 2 : 1) {
#if KIND == 0
            to.store(sample, c0, first + p0 + 8 * j, &product[4 * j], &product[4 * j + 4]);
#else
            to.store(sample, c0, first + p0 + 8 * j, &product[4 * j]);
#endif
        }
        sample = -1;
    }

    /// Writes what is left of the last tile, then starts the products of one of a sample.
    __device__ __forceinline__ void start(int turn, int n, int first_of_tile, bool weight) {
        const bool mine = to.dx && turn % (4 / BESIDE) == group / BESIDE;
        if (BUFFERS == 2) write();
        matrix_fence();
        if (weight) {
            constexpr int STEPS = POS / STEP / SHARES;
            const int share = group / (ROWS / 64), rows = group % (ROWS / 64) * 64;
            const unsigned a = address(g(turn)) + share * STEPS * 2 * G_PANEL + rows * 16, b = address(x(turn)) + share * STEPS * 2 * X_PANEL;
#pragma unroll
            for (int k = 0; k < STEPS; k++)
                multiply(sum, descriptor<1>(a + k * 2 * G_PANEL, G_PANEL), descriptor<1>(b + k * 2 * X_PANEL, X_PANEL), 1);
        }
        if (mine) {
            const int p0 = group % BESIDE * COLUMNS;
            const unsigned a = address(w());
#pragma unroll 4
            for (int k = 0; k < ROWS / STEP; k++) {
                const unsigned long long of_w = descriptor<1>(a + k * 2 * W_PANEL, W_PANEL);
#if KIND == 0
                multiply<1>(product, of_w, across(address(g(turn)) + p0 / VECTOR * G_PANEL + k * 256, G_PANEL), k > 0);
#else
                multiply(product, of_w, descriptor<1>(address(turned()) + p0 * 16 + k * 2 * TURNED_PANEL, TURNED_PANEL), k > 0);
#endif
            }
        }
        matrix_commit();
        if (mine) {
            sample = n;
            first = first_of_tile;
        }
        if (BUFFERS == 1) {
            matrix_wait<0>();
            __syncthreads();
            write();
        }
    }

    /// The last tile's products are done, and dX is written.
    __device__ __forceinline__ void finish() {
        matrix_wait<0>();
        write();
    }

    /// Hands over this thread's sums of dW: of which row, which channel, and of which share.
    template <typename F> __device__ __forceinline__ void sums(F f) const {
        each_sum(sum, [&](int row, int c, float v) { f(group % (ROWS / 64) * 64 + row, c, group / (ROWS / 64), v); });
    }
};
