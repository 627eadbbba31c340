// Operands of `shuffle_gemm`: how they lie in shared memory, how they come there, and how the matrix instructions get them.

#pragma once

#include "copy_async.cuh"
#include "mma.cuh"
#include "operand.cuh"

#if !defined(NORM) || !defined(LAST) || !defined(STAGES) || !defined(WARP_ROWS) || !defined(WARP_POS) || !defined(ROW_WARPS) ||    \
    !defined(POS_WARPS) || !defined(CTAS)
#error "NORM: modes 1 and 2; LAST: channels last; STAGES of X; WARP_ROWS and WARP_POS of a warp; ROW_WARPS and POS_WARPS of a block; CTAS of a multiprocessor"
#endif

/// Rows and positions of a block.
constexpr int ROWS = WARP_ROWS * ROW_WARPS, POS = WARP_POS * POS_WARPS;
constexpr int THREADS = 32 * ROW_WARPS * POS_WARPS;
/// Channels of a stage, and of a matrix instruction.
constexpr int KC = 32, STEP = 2 * E;
/// Tiles of 16 rows and of 8 columns of a warp, and pairs of these.
constexpr int MT = (LAST ? WARP_POS : WARP_ROWS) / 16, NT = (LAST ? WARP_ROWS : WARP_POS) / 8, PAIRS = NT / 2;
constexpr int SIZE = sizeof(Element), VECTOR = 16 / SIZE;
/// Lines of a stage, their length, and elements from one to the next: reads of a warp meet no bank conflict.
constexpr int LINES = LAST ? POS : KC, LENGTH = LAST ? KC : POS, PAD = !LAST && KIND != 0 ? 8 : VECTOR, PITCH = LENGTH + PAD;
/// Elements of a stage, and from a split's high part to its low.
constexpr int STAGE = PARTS * LINES * PITCH, LOW = LINES * PITCH;
/// Loads of weights in flight; steps whose loads may go before the products of those before them: registers are scarce.
constexpr int BATCH = 4, AHEAD = KIND == 3 || CTAS > 2 ? 1 : KC / STEP;
/// Where no output is.
constexpr int NOWHERE = -1;
/// Two and four neighbouring elements.
#if KIND == 0
using Two = unsigned;
using Four = uint2;
#else
using Two = float2;
using Four = float4;
#endif

/// Calls `f` with line and place in it of each vector of 16 bytes of so many lines that is this thread's.
template <int COUNT, int LONG, typename F> __device__ __forceinline__ void for_own(F f) {
    constexpr int PER = LONG / VECTOR, ALL = COUNT * PER;
#pragma unroll
    for (int k = 0; k < (ALL + THREADS - 1) / THREADS; k++) {
        const int i = threadIdx.x + k * THREADS;
        if (ALL % THREADS == 0 || i < ALL) f(i / PER, i % PER * VECTOR);
    }
}

/// So many lines of elements to shared memory; zeros past the ends of what there is.
template <int COUNT, int LONG>
__device__ __forceinline__ void fetch(int unit, unsigned to, int to_pitch, const Element *from, int pitch, int lines, int length) {
    for_own<COUNT, LONG>([&](int line, int at) {
        const Element *const source = from + ((long long)line * pitch + at);
        const unsigned target = to + SIZE * (line * to_pitch + at);
        const int left = line < lines ? length - at : 0;
        if (unit == 16) {
            copy_async<16>(target, left > 0 ? source : from, left > 0);
        } else if (unit == 8) {
#pragma unroll
            for (int k = 0; k < 2; k++) copy_async<8>(target + 8 * k, k * VECTOR / 2 < left ? source + k * VECTOR / 2 : from, k * VECTOR / 2 < left);
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++) copy_async<4>(target + 4 * k, k * VECTOR / 4 < left ? source + k * VECTOR / 4 : from, k * VECTOR / 4 < left);
        }
    });
}

/// Splits a weight, of which there is no room for both parts. The matrix instructions cut off the low part: half of its
/// last bit is added before.
__device__ __forceinline__ void halve(unsigned &high, unsigned &low) {
    const float x = __uint_as_float(high);
    high &= 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high)) + 0x1000u;
}
