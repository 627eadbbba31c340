// What `gather_gemm` multiplies: a warpgroup's rows, which each warp has gathered to registers, by a unit of B.

#pragma once

#include "gather_rows.cuh"
#include "halo_epilogue.cuh"
#include "register_operand.cuh"

/// Steps of a chunk, of 32 bytes of K; what a warp holds of its rows: of two parts the high ones of all steps, then the low ones.
constexpr int STEPS = PANELS / 2, FRAGMENTS = PARTS * STEPS;
using Rows = unsigned[FRAGMENTS][MI][4];
/// Bytes of a tap in a unit; registers of a residue along width, for 64 rows.
constexpr int OF_TAP = PARTS * PANELS * CHANNELS * 16, OF_RESIDUE = REGISTERS / RW;

/// A unit's part of B: of a residue along height and width the columns of a step, of one of two parts.
struct UnitColumns {
    unsigned from;

    __device__ __forceinline__ explicit UnitColumns(unsigned unit) : from(place(unit, PARTS * CHANNELS * 16)) {}
    __device__ __forceinline__ unsigned long long operator()(int h, int w, int step, int part) const {
        return operand_at<1>(from + (h * RW + w) * (OF_TAP / 16) + (step * 2 * PARTS + part) * CHANNELS);
    }
};

/// The sums of a residue along width.
__device__ __forceinline__ float (&residue(float (&sum)[REGISTERS], int w))[OF_RESIDUE] {
    return *(float(*)[OF_RESIDUE])(sum + w * OF_RESIDUE);
}

/// Calls `of` for the residues along height and width that have a tap there: bits 1 and 2 of width, 4 and 8 of height. It is compiled for
/// each combination, as what instructions add to has to be known.
template <typename Of> __device__ __forceinline__ void of_those_there([[maybe_unused]] int there, Of of) {
    const auto along_w = [&](int first_h, int last_h) {
        if (RW == 2 && (there & 3) == 1)
            of(first_h, last_h, 0, 0);
        else if (RW == 2 && (there & 3) == 2)
            of(first_h, last_h, RW - 1, RW - 1);
        else
            of(first_h, last_h, 0, RW - 1);
    };
    if (RH == 2 && there < 8)
        along_w(0, 0);
    else if (RH == 2 && there < 12)
        along_w(RH - 1, RH - 1);
    else
        along_w(0, RH - 1);
}

#if PARTED

static_assert(MI == 1);

/// Adds the matrix unit's sums of a residue to registers.
__device__ __forceinline__ void promote(float (&part)[REGISTERS], float (&sum)[REGISTERS], int w, float by) {
#pragma unroll
    for (int j = w * OF_RESIDUE; j < (w + 1) * OF_RESIDUE; j++) sum[j] = fmaf(part[j], by, sum[j]);
}

/// Starts a unit's products, residue by residue: those of high parts and, when these are added to registers, as the matrix unit's sums
/// are cut off, those of a high and a low one, which are 2^11 times too large.
__device__ __forceinline__ void multiply_parts(const Rows &x, int there, unsigned from_b, float (&part)[RH][REGISTERS], float (&sum)[RH][MI][REGISTERS]) {
    const UnitColumns columns(from_b);
    matrix_fence();
    of_those_there(there, [&](int first_h, int last_h, int first, int last) {
#pragma unroll
        for (int h = first_h; h <= last_h; h++)
#pragma unroll
            for (int w = first; w <= last; w++) {
#pragma unroll
                for (int k = 0; k < STEPS; k++) multiply(residue(part[h], w), x[k][0], columns(h, w, k, 0), k > 0);
                matrix_commit();
            }
        const int others = (last_h - first_h + 1) * (last - first + 1) - 1;
#pragma unroll
        for (int h = first_h; h <= last_h; h++)
#pragma unroll
            for (int w = first; w <= last; w++) {
                if (others == 0)
                    matrix_wait<0>();
                else if (others == 1)
                    matrix_wait<1>();
                else
                    matrix_wait<3>();
                promote(part[h], sum[h][0], w, 1.0f);
                matrix_fence();
#pragma unroll
                for (int k = 0; k < STEPS; k++) {
                    multiply(residue(part[h], w), x[STEPS + k][0], columns(h, w, k, 0), k > 0);
                    multiply(residue(part[h], w), x[k][0], columns(h, w, k, 1), 1);
                }
                matrix_commit();
            }
    });
}

/// Adds what the last ones are summed to, when they are done.
__device__ __forceinline__ void promote_cross(int there, float (&part)[RH][REGISTERS], float (&sum)[RH][MI][REGISTERS]) {
#pragma unroll
    for (int h = 0; h < RH; h++)
#pragma unroll
        for (int w = 0; w < RW; w++)
            if ((RW == 1 || there >> w & 1) && (RH == 1 || there >> (2 + h) & 1)) promote(part[h], sum[h][0], w, 0.00048828125f);
}

#else

/// Starts a unit's products.
__device__ __forceinline__ void multiply_unit(const Rows &x, int there, unsigned from_b, float (&sum)[RH][MI][REGISTERS]) {
    const UnitColumns columns(from_b);
    matrix_fence();
    of_those_there(there, [&](int first_h, int last_h, int first, int last) {
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int i = 0; i < MI; i++)
#pragma unroll
                for (int h = first_h; h <= last_h; h++)
#pragma unroll
                    for (int w = first; w <= last; w++) multiply(residue(sum[h][i], w), x[k][i], columns(h, w, k, 0), 1);
        // Each way ends its group by itself: one end after all of them would be an empty group of its own, and every one before that
        // waited for.
        matrix_commit();
    });
}

#endif
