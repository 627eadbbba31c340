// The taps along width of a channel as columns of their own, brought together in registers.

#pragma once

#include "halo_epilogue.cuh"

#define NAMES_40 NAMES_32 ",%16,%17,%18,%19"
#define NAMES_72 NAMES_64 ",%32,%33,%34,%35"
#define NAMES_80 NAMES_72 ",%36,%37,%38,%39"
MULTIPLY(40, "%20", "%21", "%22", "%23", N32(0), N8(4))
MULTIPLY(72, "%36", "%37", "%38", "%39", N32(0), N32(4), N8(8))
MULTIPLY(80, "%40", "%41", "%42", "%43", N32(0), N32(4), N16(8))

/// A row's product with tap t belongs to the row `far(t)` before it: sums of a residue go to those of its last tap.
struct Fold {
    /// Of this warp, for tiles in turn: the products of its first rows, as `[column][row]`; those of the next warp follow.
    float *edges;
    /// Rows that the first tap is ahead of the last.
    int reach, dilation;

    static __device__ int bytes(int reach) { return WGS * 4 * 2 * BN * reach * 4; }

    /// The compiler's own would have sums be integers, and moves between them and what the matrix instructions add to.
    __device__ __forceinline__ static float shuffle(float v, int from) {
        float got;
        asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(got) : "f"(v), "r"(from));
        return got;
    }

    __device__ __forceinline__ int far(int tap) const { return max(reach - tap * dilation / W_STRIDE, 0); }

    __device__ __forceinline__ void operator()(float (&sum)[MI][REGISTERS], int turn) const {
        const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
        float *const mine = edges + turn * BN * reach;
        if (row < reach)
#pragma unroll
            for (int j = 0; j < BN; j += 8) {
                float *const to = mine + (j + column) * reach + row;
                to[0] = sum[0][j / 2];
                to[reach] = sum[0][j / 2 + 1];
            }
        asm volatile("bar.sync %0, %1;" ::"n"(WGS + 1), "n"(CONSUMERS) : "memory");
        // The last warp has no next one; its last rows are the next tile's.
        const float *const next = threadIdx.x < CONSUMERS - 32 ? mine + 2 * BN * reach : mine;
#pragma unroll
        for (int last = TAPS - W_STRIDE; last < TAPS; last++)
#pragma unroll
            for (int tap = last; tap >= 0; tap -= W_STRIDE) {
                const int ahead = far(tap);
                if (ahead == 0 && tap == last) continue;
                const int from = (lane + 4 * ahead) % 32;
                const bool own = row >= ahead;
#pragma unroll
                for (int j = 0; j < CHANNELS; j += 8)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int at = (tap * CHANNELS + j) / 2 + e, to = (last * CHANNELS + j) / 2 + e;
                        // Eights of rows, in their order.
#pragma unroll
                        for (int q = 0; q < 2 * MI; q++) {
                            const float here = sum[q % MI][at + q / MI * 2];
                            float after = 0.0f;
                            if (q + 1 < 2 * MI)
                                after = sum[(q + 1) % MI][at + (q + 1) / MI * 2];
                            else if (!own)
                                after = next[(tap * CHANNELS + j + column + e) * reach + row];
                            const float v = shuffle(own ? here : after, from);
                            float &add = sum[q % MI][to + q / MI * 2];
                            add = tap == last ? v : add + v;
                        }
                    }
            }
    }
};
