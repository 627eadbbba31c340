// What `shuffle_wgmma` knows of its sizes and keeps in shared memory, and how its lanes write.

#pragma once

#include "divisor.cuh"
#include "operand.cuh"

#if !defined(MODE) || !defined(X_LAST) || !defined(Y_LAST)
#error "MODE: 0, 1, 2 or 3; X_LAST and Y_LAST: channels last in x, in y"
#endif

/// Whether y is written; whether statistics are.
constexpr bool WRITES = MODE != 1, COUNTS = MODE == 1 || MODE == 3;
/// Warpgroups of a block that multiply, and threads of one; of all of them, and with those that copy.
constexpr int GROUPS = 4, GROUP = 128, MULTIPLIERS = GROUPS * GROUP, THREADS = MULTIPLIERS + 32 * GROUPS;
/// Registers of a thread of each: who rounds what it has copied needs more, but where y is NDHWC, written and counted those who
/// multiply have none to spare.
constexpr int COPIER_REGISTERS = KIND == 0 || Y_LAST && MODE == 3 ? 32 : 56, MULTIPLIER_REGISTERS = COPIER_REGISTERS == 32 ? 112 : 104;
/// Rows of a warpgroup, positions of a tile, channels of a stage and of a matrix instruction.
constexpr int ROWS = 64, POS = 128, KC = KIND == 3 ? 16 : 32, STEP = 32 / sizeof(Element);
/// Positions of a part of a tile, which is finished at a time.
constexpr int PART_POS = POS / 2;
/// Channels that a lane's two rows are of, neighbours.
constexpr int CHANNELS = Y_LAST ? 2 : 1;
/// Elements of 16 bytes; whether panels are of positions side by side, else of channels.
constexpr int VECTOR = 16 / sizeof(Element);
constexpr bool ACROSS = KIND == 0 && !X_LAST;
/// Bytes from a panel of a stage to the next, and of a stage: rows are left free, so that what is written to several panels at once
/// meets no bank twice.
constexpr int FREE = X_LAST ? 8 * VECTOR / KC : 1, PANEL = 16 * ((ACROSS ? KC : POS) + FREE), STAGE = PANEL * (ACROSS ? POS : KC) / VECTOR;
/// Bytes of a stage's two barriers and of what its copiers' warps have met.
constexpr int BARRIERS = 32;
/// Bytes of an element; of what a warp collects of a part's outputs, and what is left free of it behind lines that are stored together.
/// With Y_LAST from what a warpgroup collects of a position to the next one.
constexpr int SIZE = sizeof(Element), AREA_PAD = 32, AREA = 8 * (2 * PART_POS * SIZE + AREA_PAD), AREA_PITCH = ROWS * SIZE + 16;
/// Pairs of neighbouring positions of a part of a tile that a thread has: two of each four of its sums, with the other row behind.
constexpr int NEIGHBOURS = PART_POS / 8;
constexpr int NOWHERE = -1;
/// Whether statistics so far are in shared memory: registers do not suffice.
constexpr bool MOMENTS_SHARED = COUNTS && WRITES;
/// How outputs are written: a position's residues, 16 bytes at once, or by the copy engine.
enum How { APART, TOGETHER, COLLECTED };

/// An activation that is a comparison, by its number: what is not above zero times `slope`, then at least `least`.
struct Straight {
    float slope, least;

    __device__ __forceinline__ Straight(int code, float slope) : slope(code == LEAKY_RELU ? slope : 1.0f), least(code == RELU ? 0.0f : -INFINITY) {}

    enum { RELU = 1, LEAKY_RELU };

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
    int y_c, y_d, y_h, chunks, pos_blocks, items, row_groups, stages, ahead, how, line_bits, past_line;
    /// With Y_LAST: taps, residues along width, and elements of y from a position of a line to the next one's.
    int taps, w_stride, voxels;
    /// Bytes that lie in a warp's area between what is collected of the first half of a part and of the second.
    int past_half;
    float *part_mean, *part_m2, *part_count;
    const float *mean, *rstd;
    const Element *gamma, *beta;
    int norm_groups, group_channels;
    /// Before the normalization, or y, and behind it.
    int activation, post_activation;
};

/// What numbers are divided by: `pairs` of a channel, with Y_LAST those of a line of y that a position has, and of its `channels`.
struct Divisors {
    Divisor plane, width, pos_blocks, pairs, h_stride, channels;
};

/// Which warpgroup of a block it is, or which of the warps that copy.
struct Place {
    /// The team among those of the row block, and their number.
    int team, teams;
    /// The team's barriers, of each stage what says that it is full, then that it is empty; its stages; the warpgroup's weights.
    unsigned barriers, ring, weights;
};

/// Statistics of some outputs: how many, their mean, and squared deviations from it.
struct Moments {
    float seen, mean, deviations;
};

/// What all threads know.
struct Tables {
    /// Where the outputs of a tile's positions lie, of this tile and the last one.
    int places[GROUPS][2][WRITES ? POS : 1];
    Moments moments[CHANNELS][MOMENTS_SHARED ? MULTIPLIERS : 1];
    Divisors by;
    int bad;
    /// Of the activations.
    float slope, post_slope;
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
