// How `implicit_gemm` cuts its work, and what a warp does with its sums.

#pragma once

#include "activation.cuh"
#include "divisor.cuh"
#include "half_parts.cuh"
#include "hopper.cuh"
#include "mma.cuh"
#include "operand.cuh"

/// Whether y and statistics are written at once.
#ifdef COUNTS
constexpr bool BOTH = true;
#else
constexpr bool BOTH = false;
#endif
/// Whether the input is NDHWC, whether the output is, and tiles of eight channels of a unit of work: there as many as VOXEL bytes of a voxel
/// of y are.
#ifdef VOXEL
constexpr bool OF_VOXELS = true, VOXELS = VOXEL > 0;
constexpr int OF_UNIT = VOXELS ? VOXEL / (8 * sizeof(Element)) : 1;
#else
constexpr bool OF_VOXELS = false, VOXELS = false;
constexpr int OF_UNIT = 1;
#endif
/// Warps that multiply, and threads that bring what they do; what registers both have.
constexpr int WARPS = 4 * WARPGROUPS, PRODUCERS = 128, THREADS = 32 * WARPS + PRODUCERS;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 2 ? 88 : WARPGROUPS == 3 && KIND == 1 ? 80 : 56;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 2 ? 208 : WARPGROUPS == 4 ? 104 : KIND == 1 ? 144 : 152;
/// Positions of a segment and tiles of 8 of them; of a line; words around them, and from a line to the next.
constexpr int LANES = 32, TILES = LANES / 8, SPAN = LANES * SEGMENTS, MARGIN = 4, PITCH = SPAN + 2 * MARGIN;
constexpr int MOST_CLASSES = 64, MOST_WIDTH = 9, MOST_STAGES = 8;
/// Boxes that are on their way at once, and of a thread fragments of weights.
constexpr int UNDER_WAY = 2, AT_ONCE = KIND == 0 ? 2 : 4;
/// Vectors of four positions of a line; channels of a word; elements of a sector of y, as the copy engine stores them.
constexpr int VECTORS = PITCH / 4, CHANNELS = KIND == 0 ? 2 : 1, STORED = 32 / sizeof(Element);
/// Elements of four words.
constexpr int OF_VECTOR = 4 * CHANNELS;

/// Where the warps that multiply wait for one another; and whether something is so for any of them.
__device__ __forceinline__ void meet_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }
__device__ __forceinline__ bool any_of_consumers(bool is) {
    unsigned any;
    asm volatile("{\n.reg .pred of;\nsetp.ne.u32 of, %1, 0;\nbar.red.or.pred of, 1, %2, of;\nselp.u32 %0, 1, 0, of;\n}"
                 : "=r"(any)
                 : "r"((unsigned)is), "n"(32 * WARPS)
                 : "memory");
    return any;
}

/// Where the warps that bring boxes wait for one another.
__device__ __forceinline__ void meet_producers() { asm volatile("bar.sync 2, %0;" ::"n"(PRODUCERS) : "memory"); }

/// Counts up a number in shared memory, and returns what it was. Of one lane: the compiler's own adds up what lanes ask for first.
__device__ __forceinline__ int take_next(int *number) {
    int taken;
    asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(taken) : "r"(shared(number)) : "memory");
    return taken;
}

/// Which step of K: of two parts the products of the first TOGETHER are summed by the matrix instructions, which cut off, those of each
/// later one are added to these.
enum { FIRST, NEXT, LATER };
constexpr int TOGETHER = 2;
template <int WHICH> struct Step {
    static constexpr int value = WHICH;
};

/// One axis of the convolution.
struct Axis {
    int input, output, kernel, stride, padding, dilation;

    /// The first input that outputs from `o` on may take, ceil((o + padding - (kernel - 1)*dilation)/stride).
    __device__ __forceinline__ int first(int o, const Divisor &by) const {
        const int reach = (kernel - 1) * dilation;
        return by.divide(o + padding - reach + stride * reach + stride - 1) - reach;
    }

    /// The input of a tap, or one that is not there.
    __device__ __forceinline__ int of_tap(int o, int k, const Divisor &by) const {
        const int at = o + padding - k * dilation, i = at < 0 ? -1 : by.divide(at);
        return i >= 0 && i * stride == at ? i : -1;
    }
};

/// What numbers are divided by: `channel`, vectors of one of a box's input; `units` of work of a box.
struct Divisors {
    Divisor boxes_w, boxes_h, boxes_d, channel, lines, d_stride, h_stride, units_h, tiles, stages, units, group_channels;
};
constexpr int DIVISORS = sizeof(Divisors) / sizeof(Divisor);

/// Where a box is, counted in boxes, and its sample.
struct Box {
    int w, h, d, sample;

    __device__ __forceinline__ Box(int item, const Divisors &by, int boxes_w, int boxes_h, int boxes_d) {
        const int of_w = by.boxes_w.divide(item), of_h = by.boxes_h.divide(of_w);
        sample = by.boxes_d.divide(of_h);
        w = item - of_w * boxes_w, h = of_w - of_h * boxes_h, d = of_h - sample * boxes_d;
    }
};

/// A number, of which the compiler does not know that it is the same.
__device__ __forceinline__ int hidden(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

/// What a block has of the work and of shared memory. Warps of each kind compute it anew, so that no registers are kept for it
/// from one part of the kernel to the next.
struct Shares {
    /// Its group, and the first of its boxes; tiles of eight channels; words of a position of the input, and of a stage.
    int group, first_item, tiles, words, stage_words;
    /// Of each entry where its input lies from the lane's, its taps of both columns, and its channel.
    int4 *entry_list;
    unsigned *ring;
    uint4 *weights;
    /// Of each channel its bias, and for a norm its factor and addend.
    float *of_channel;
    /// Of two fp16, for each pair of residues the largest magnitude of each row of its weights.
    unsigned *row_most;
    /// Where warps collect runs.
    Element *areas;

    __device__ __forceinline__ Shares(char *memory, int in_per_group, int out_per_group, int classes, int entries, int stages, int x_c,
                                      int blocks_of_group) {
        group = blockIdx.x / hidden(blocks_of_group), first_item = blockIdx.x - group * blocks_of_group;
        tiles = (hidden(out_per_group) + 7) / 8, words = (hidden(in_per_group) + CHANNELS - 1) / CHANNELS;
        stage_words = words * x_c;
        entry_list = (int4 *)memory;
        ring = (unsigned *)(entry_list + hidden(entries));
        weights = (uint4 *)(ring + hidden(stages) * stage_words);
        of_channel = (float *)(weights + 4 * PARTS * tiles * entries);
        row_most = (unsigned *)(of_channel + 24 * tiles);
        areas = (Element *)(row_most + (SCALED ? 16 * tiles * hidden(classes) : 0));
    }
};

/// Many values through any activation that a few instructions compute, and at once through what follows: `then` is given each with its
/// number. While the special functions are computed, of which there is a result every eight clocks, its instructions cost nothing.
template <int COUNT, typename Then> __device__ __forceinline__ void bend(float (&v)[COUNT], int code, float slope, const Then &then) {
    const auto each = [&](auto of) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) v[k] = then(k, of(v[k]));
    };
    // Else the compiler makes all of this one jump by a table, behind which instructions come late.
    if (hidden(code) == 3)
        each([](float x) { return x * sigmoid(x); });
    else if (code == 5)
        each([](float x) { return x * sigmoid(x * (1.59576912f + 0.0713548163f * x * x)); });
    else if (code == 6)
        each([](float x) { return x * __saturatef(fmaf(x, 0.166666667f, 0.5f)); });
    else if (code > 2)
        each([](float x) { return sigmoid(x); });
    else if (code)
        each([&](float x) { return straighten(x, code, slope); });
    else
        each([](float x) { return x; });
}
template <int COUNT> __device__ __forceinline__ void bend(float (&v)[COUNT], int code, float slope) {
    bend(v, code, slope, [](int, float x) { return x; });
}

/// What a lane has of a channel: two outputs of two positions each of every tile, as the matrix instruction leaves them.
constexpr int SUMS = LINES * SEGMENTS * TILES * 4;
using Sums = float[LINES * SEGMENTS][TILES][4];

/// Four elements of as many channels as share a word, as operands. Of tf32 the instructions cut off what it does not hold: half of its
/// last bit is added before. A float32 as two fp16 is one word, its low part in the upper half.
__device__ __forceinline__ uint4 operands(const Element (&v)[OF_VECTOR], [[maybe_unused]] float scale) {
#if KIND == 0
    const unsigned *const two = (const unsigned *)v;
    return make_uint4(__byte_perm(two[0], two[2], 0x5410), __byte_perm(two[0], two[2], 0x7632), __byte_perm(two[1], two[3], 0x5410),
                      __byte_perm(two[1], two[3], 0x7632));
#elif KIND == 1
    return make_uint4(__float_as_uint(v[0]) + 0x1000u, __float_as_uint(v[1]) + 0x1000u, __float_as_uint(v[2]) + 0x1000u,
                      __float_as_uint(v[3]) + 0x1000u);
#else
    unsigned low[2];
    const unsigned high[2] = {half_parts(v[0] * scale, v[1] * scale, LOW, low[0]), half_parts(v[2] * scale, v[3] * scale, LOW, low[1])};
    return make_uint4(__byte_perm(high[0], low[0], 0x5410), __byte_perm(high[0], low[0], 0x7632), __byte_perm(high[1], low[1], 0x5410),
                      __byte_perm(high[1], low[1], 0x7632));
#endif
}

/// A weight as what multiplies both parts of a word: its own high part, and its low one. Scaled to at most 2^15, it has 18 bits
/// from 2^-7 on.
constexpr float LEAST_WEIGHT = 0.0078125f;
__device__ __forceinline__ unsigned weight_parts(float v, unsigned &low) {
    const unsigned high = half_parts(v, 0.0f, 1.0f, low);
    const auto twice = [](unsigned part) { return part & 0xffffu | by_low(part << 16); };
    low = twice(low);
    return twice(high);
}

/// The largest magnitude so far.
struct Largest {
#if KIND == 0
    unsigned most;

    __device__ __forceinline__ void see(const Element (&v)[OF_VECTOR]) { most = larger(most, v); }
    /// Whether what was seen is left to the definition: infinities, NaN, or what would round to infinity.
    __device__ __forceinline__ bool undefined() const { return ::undefined(most); }
#else
    float most;

    __device__ __forceinline__ void see(const Element (&v)[OF_VECTOR]) {
#pragma unroll
        for (int e = 0; e < OF_VECTOR; e++) asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(v[e])));
    }
    __device__ __forceinline__ bool undefined() const { return __float_as_uint(most) >= (SCALED ? 0x7f800000u : 0x7f7ff000u); }
#endif
};

/// Whether two fp16 have too few bits for four positions, the largest of which has this magnitude, beside what `scale` is for: as
/// `is_too_coarse` has it, but also for what `scale` brings to zero.
__device__ __forceinline__ bool is_coarse_beside(float most, float scale) { return most > 0.0f && most * scale < 0.000003814697265625f; }

/// The exponent that what has such a largest magnitude is scaled by.
__device__ __forceinline__ int exponent_of_any(unsigned most) { return most ? exponent(most) : 0; }
__device__ __forceinline__ unsigned largest_of(uint4 v) { return max(max(v.x, v.y), max(v.z, v.w)); }

/// Of what a unit of work counts the mean of a channel's first lines, and of a lane the differences from it and their squares; where
/// the statistic goes, and how many outputs it is of.
struct Tally {
    float around, off, squares;
    int partial, count;
};

/// The sum of what the four lanes of a channel have.
__device__ __forceinline__ float over_lanes(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

/// Which of a tile's 16 columns of y a lane's sum is of.
__device__ __forceinline__ int column_of(int e) {
    const int t = threadIdx.x % 4;
    return KIND == 0 ? 8 * (e % 2) + 2 * t + e / 2 : 4 * t + 2 * (e % 2) + e / 2;
}

/// The position of a tile that is a column of B, such that lanes collect pairs of 16 bits, or four of 32, beside each other.
__device__ __forceinline__ int position_of(int column) { return KIND == 0 ? column / 2 + column % 2 * 4 : column; }

/// How many elements an address is past a multiple of so many.
template <int COUNT> __device__ __forceinline__ int past_whole(const Element *at) {
    return (unsigned)(unsigned long long)at / (unsigned)sizeof(Element) % COUNT;
}

/// Two neighbours, wherever they lie.
__device__ __forceinline__ void put_both(Element *at, float first, float second) {
#if KIND == 0
    const unsigned both = narrow_both(first, second, Element{});
    at[0] = Element{(unsigned short)both};
    at[1] = Element{(unsigned short)(both >> 16)};
#else
    at[0] = first;
    at[1] = second;
#endif
}

/// A lane's sums of a tile whose first column is at a multiple of 16 bytes, of 16 bits at one of 4.
__device__ __forceinline__ void put_all(Element *at, const float (&v)[4]) {
#if KIND == 0
    *(unsigned *)(at + column_of(0)) = narrow_both(v[0], v[2], Element{});
    *(unsigned *)(at + column_of(1)) = narrow_both(v[1], v[3], Element{});
#else
    *(float4 *)(at + column_of(0)) = make_float4(v[0], v[2], v[1], v[3]);
#endif
}
