// What `shuffle_wgmma` knows of its sizes and keeps in shared memory, and how its lanes write.

#pragma once

#include "divisor.cuh"
#include "operand.cuh"

#ifndef MODE
#error "MODE: 0, 1, 2 or 3"
#endif

/// Whether y is written; whether statistics are.
constexpr bool WRITES = MODE != 1, COUNTS = MODE == 1 || MODE == 3;
/// Threads of a block and of a warpgroup; positions of a tile, rows of a warpgroup, channels of a stage.
constexpr int THREADS = 512, GROUP = 128, POS = 128, ROWS = 64, KC = 32;
constexpr int SIZE = sizeof(Element), VECTOR = 16 / SIZE;
/// Vectors of a line of a stage.
constexpr int LINE = POS / VECTOR;
/// Elements from a line of a stage to the next: reads of a warp meet no bank conflict.
constexpr int PITCH = POS + 8, STAGE = KC * PITCH;
/// Channels of a matrix instruction; tiles of 64 positions that are loaded at a time of these; loads of a stage; how many of
/// them have registers of their own, so that one goes on while another is multiplied.
constexpr int STEP = 32 / SIZE, TILES = KIND == 3 ? 1 : 2, LOADS = KC / STEP * 2 / TILES, BUFFERS = KIND == 3 && WRITES ? 1 : 2;
/// Pairs of rows of a lane, one of every eight.
constexpr int PAIRS = ROWS / 8;
constexpr int GROUPS = THREADS / GROUP, NOWHERE = -1;

/// An activation that is a comparison: what is not above zero times `slope`, then at least `least`.
struct Straight {
    float slope, least;
    int leaky;

    Straight() = default;
    __device__ Straight(int code, double slope) : slope(code == 2 ? (float)slope : 1.0f), least(code == 1 ? 0.0f : -INFINITY), leaky(code == 2) {}

    /// LEAKY: whether there may be a slope. Lets NaN through.
    template <bool LEAKY, int N> __device__ __forceinline__ void apply(float (&v)[N]) const {
#pragma unroll
        for (int e = 0; e < N; e++) {
            if (LEAKY) v[e] = v[e] > 0.0f ? v[e] : v[e] * slope;
            asm("max.NaN.f32 %0, %0, %1;" : "+f"(v[e]) : "f"(least));
        }
    }
};

struct Sizes {
    const Element *x, *w;
    Element *y;
    int in_channels, volume, rows, d_stride, h_stride;
    long long x_n, y_n;
    int y_d, y_h, chunks, items, row_groups, stages, ahead, whole;
    float *part_mean, *part_m2, *part_count;
    const float *mean, *rstd;
    const Element *gamma, *beta;
    int norm_groups, group_channels;
};

/// What numbers are divided by.
struct Divisors {
    Divisor plane, width, pos_blocks, half_taps, h_stride;
};

/// Which warpgroup of a block it is.
struct Place {
    /// The team among those of the row block, and their number; the first row of all.
    int team, teams, first_row;
    /// The team's barriers, of each stage what says that it is full, then that it is empty; its stages; the warpgroup's weights.
    unsigned barriers, ring, weights;
};

/// What warpgroups know of their pairs of rows: where the first position's outputs lie in a sample (or the part of the bias
/// that statistics leave out), the bias; mean, factor and addend of the sample at hand.
struct Tables {
    /// Of each thread where its positions' outputs lie, if they are no neighbours; what it has of each pair's statistics.
    int apart[4][WRITES ? THREADS : 1];
    float2 so_far[PAIRS][COUNTS ? THREADS : 1];
    int2 pair[GROUPS][ROWS / 2];
    float4 norm[GROUPS][ROWS / 2];
    Place place[GROUPS];
    Divisors by;
    int bad_weight;
    /// The sample that each warp counts, or has normalized last.
    int sample[THREADS / 32];
    /// Before the normalization, or y, and behind it.
    Straight activation, post;
};

/// The bits of float32 to be rounded to tf32: the matrix instructions cut off the rest. What becomes too large, and NaN, is left to the
/// definition.
__device__ __forceinline__ unsigned round_up(unsigned bits) { return bits + 0x1000u; }

/// Writes neighbours where they are there: no branch for each.
#define IF_THERE(there, what) "{\n.reg .pred p;\nsetp.ne.b32 p, %" #there ", 0;\n@p st.global." what ";\n}"
__device__ __forceinline__ void put(Element *to, float4 v, bool there) {
    asm volatile(IF_THERE(5, "v4.f32 [%0], {%1, %2, %3, %4}") ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"((int)there) : "memory");
}
__device__ __forceinline__ void put(Element *to, uint4 v, bool there) {
    asm volatile(IF_THERE(5, "v4.b32 [%0], {%1, %2, %3, %4}") ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((int)there) : "memory");
}
__device__ __forceinline__ void put(Element *to, float2 v, bool there) {
    asm volatile(IF_THERE(3, "v2.f32 [%0], {%1, %2}") ::"l"(to), "f"(v.x), "f"(v.y), "r"((int)there) : "memory");
}
__device__ __forceinline__ void put(Element *to, unsigned v, bool there) {
    asm volatile(IF_THERE(2, "b32 [%0], %1") ::"l"(to), "r"(v), "r"((int)there) : "memory");
}
