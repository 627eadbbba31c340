// What `shuffle_ring`, `shuffle_ring_last` and `shuffle_ring_half` have in common: tiles, and float32 as the instructions take it.

#pragma once

#include "activation.cuh"
#include "divisor.cuh"
#include "hopper.cuh"
#include "mma.cuh"
#include "operand.cuh"
#include "warp_meet.cuh"

#if (KIND != 0 && KIND != 1 && KIND != 3) || !defined(WARP_ROWS) || !defined(WARP_POS) || !defined(ROW_WARPS) || !defined(POS_WARPS)
#error "KIND 0, 1 or 3; WARP_ROWS and WARP_POS of a warp; ROW_WARPS and POS_WARPS of a block"
#endif

/// Rows and positions of a block; its warps that multiply, and those that copy: a warp starts its copies one after the other.
constexpr int ROWS = WARP_ROWS * ROW_WARPS, POS = WARP_POS * POS_WARPS, WARPS = ROW_WARPS * POS_WARPS, COPIERS = KIND == 3 ? 4 : 8;
constexpr int THREADS = 32 * (WARPS + COPIERS);
/// Channels of a stage, and of a matrix instruction.
constexpr int KC = KIND == 0 ? 64 : 32, STEP = 2 * E;
/// Elements from a channel's line of weights to the next: what a warp reads at once lies in different banks.
constexpr int W_PITCH = ROWS + E;
/// Tiles of 16 rows of a warp.
constexpr int MT = WARP_ROWS / 16;
/// Where no output is.
constexpr int NOWHERE = -1;

/// Two barriers of each stage: it is there, which so many arrivals say; it has been read, which each warp says.
__device__ __forceinline__ void begin_stages(unsigned barriers, int stages, int bringing) {
    for (int i = threadIdx.x; i < stages; i += THREADS) {
        barrier_init(barriers + 16 * i, bringing);
        barrier_init(barriers + 16 * i + 8, WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

/// Gives back the stage before `slot` when all of it has been multiplied: an arrival may overtake loads.
__device__ __forceinline__ void give_back(unsigned barriers, int slot, int stages) {
    meet();
    if (threadIdx.x % 32 == 0) barrier_arrive(barriers + 16 * (slot ? slot : stages) - 8);
}

#if KIND != 0
/// A float32 for instructions that cut it off to tf32: rounded to nearest, ties away from zero. A NaN, made positive and quiet
/// by an addition, would become negative: the maximum keeps it.
__device__ __forceinline__ unsigned rounded(float x) {
    asm("add.f32 %0, %0, 0f80000000;" : "+f"(x));
    return __viaddmax_s32(__float_as_int(x), 0x1000, __float_as_int(x));
}

/// What the matrix instructions take of a float32.
__device__ __forceinline__ void split(float x, unsigned (&to)[PARTS]) {
#if KIND == 3
    to[0] = __float_as_uint(x);
    part_tf32(to[0], to[1]);
#else
    to[0] = rounded(x);
#endif
}
#endif
