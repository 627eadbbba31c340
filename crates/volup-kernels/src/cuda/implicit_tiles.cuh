// How `implicit_gemm` cuts its work, and what a warp does with its sums.

#pragma once

#include "activation.cuh"
#include "divisor.cuh"
#include "mma.cuh"
#include "operand.cuh"

/// Whether y and statistics are written at once.
#ifdef COUNTS
constexpr bool BOTH = true;
#else
constexpr bool BOTH = false;
#endif
constexpr int WARPS = 8, THREADS = 32 * WARPS;
/// Positions of a line and tiles of 8 of them; words around them, and from a line to the next.
constexpr int LANES = 32, TILES = LANES / 8, MARGIN = 4, PITCH = LANES + 2 * MARGIN;
/// Words from a channel's staged line to the next.
constexpr int STAGED = 2 * LANES + 8;
constexpr int MOST_CLASSES = 64, MOST_WIDTH = 9;
/// Vectors of four positions of a line; those that a thread has under way; channels of a word; channels written at once.
constexpr int VECTORS = PITCH / 4, BATCH = PARTS == 2 ? 4 : 8, CHANNELS = KIND == 0 ? 2 : 1, AT_ONCE = 4;

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

/// What numbers are divided by.
struct Divisors {
    Divisor boxes_w, boxes_h, boxes_d, samples, planes, lines, d_stride, h_stride, w_stride, row_blocks, co_blocks;
};
constexpr int DIVISORS = sizeof(Divisors) / sizeof(Divisor);

/// A box, for all threads: registers are scarce.
struct Box {
    const Element *x, *w;
    Element *y;
    /// Its first output, pair of columns and input, its group, the one before it, and its sample.
    int od, oh, j, id, ih, group, known, sample;
    /// Its number, and whether it is left to the definition.
    int item, bad;
    /// Where partial statistics of its first channel and warp lie.
    int partial;
};

/// A unit of work: its first output from that of its box, its pair of residues, and the line of the box's input that it
/// starts at.
struct __align__(16) Unit {
    int d, h, residues, line;
};

/// The type of four elements.
template <typename T> struct FourOf {
    using type = uint2;
};
template <> struct FourOf<float> {
    using type = float4;
};

/// Writes a number where there is one: no branch.
__device__ __forceinline__ void put(Element *at, float v, bool there) {
    Element e;
    narrow(v, &e);
#if KIND == 0
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.b16 [%0], %1;\n}" ::"l"(at), "h"(e.bits), "r"((int)there) : "memory");
#else
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(at), "f"(e), "r"((int)there) : "memory");
#endif
}

/// Values through any activation.
template <int COUNT> __device__ __forceinline__ void bend(float (&v)[COUNT], int code, float slope) {
    if (code > 2)
        curve(v, code);
    else if (code)
#pragma unroll
        for (int k = 0; k < COUNT; k++) v[k] = straighten(v[k], code, slope);
}

/// A number, of which the compiler does not know that it is the same; the number of the thread, read anew.
__device__ __forceinline__ int hidden(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ __forceinline__ int thread() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

/// Many values through one of the curved activations that a few instructions compute.
template <int COUNT> __device__ __forceinline__ void curve_plainly(float (&v)[COUNT], int code) {
    const auto each = [&](auto of) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) v[k] = of(v[k]);
    };
    if (code == 3)
        each([](float x) { return x * sigmoid(x); });
    else if (code == 5)
        each([](float x) { return x * sigmoid(x * (1.59576912f + 0.0713548163f * x * x)); });
    else if (code == 6)
        each([](float x) { return x * (fminf(fmaxf(x + 3.0f, 0.0f), 6.0f) * 0.166666667f); });
    else
        each([](float x) { return sigmoid(x); });
}

/// The same of any activation that a few instructions compute.
template <int COUNT> __device__ __forceinline__ void bend_plainly(float (&v)[COUNT], int code, float slope) {
    if (code > 2)
        curve_plainly(v, code);
    else if (code)
#pragma unroll
        for (int k = 0; k < COUNT; k++) v[k] = straighten(v[k], code, slope);
}

/// What a lane has: of 8*MT channels two outputs of two positions each, as the matrix instruction leaves them.
using Sums = float[MT][ROWS][TILES][4];

/// Four elements of as many channels as share a word, as operands; of two parts the low one in `low`.
__device__ __forceinline__ uint4 words(const Element (&v)[E], uint4 &low) {
#if KIND == 0
    const unsigned *const two = (const unsigned *)v;
    return make_uint4(__byte_perm(two[0], two[2], 0x5410), __byte_perm(two[0], two[2], 0x7632), __byte_perm(two[1], two[3], 0x5410),
                      __byte_perm(two[1], two[3], 0x7632));
#else
    return operand(v, 1.0f, &low);
#endif
}

/// Which of a tile's 16 columns of y a lane's sum is of.
__device__ __forceinline__ int column_of(int e) { return 8 * (e % 2) + 2 * (threadIdx.x % 4) + e / 2; }

/// Where a channel's staged line starts: lanes that have eight channels and four positions meet no bank twice.
__device__ __forceinline__ int line_of(int channel) { return channel * STAGED + channel / 4 % 2; }

/// A line of sums to shared memory, or back.
template <bool BACK> __device__ __forceinline__ void stage(Sums &sum, int line, float *staged) {
    // Where registers do not suffice, nothing of this is kept.
    const int g = (BOTH ? thread() : threadIdx.x) % 32 / 4;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (r == line)
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float &at = staged[line_of(8 * i + g) + 16 * n + column_of(e)], &s = sum[i][r][n][e];
                        (BACK ? s : at) = BACK ? at : s;
                    }
}
