// How `implicit_gemm` writes NDHWC.

#pragma once

#include "implicit_tiles.cuh"
#include "warp_meet.cuh"

/// Bytes of a voxel; such as are left free behind four voxels, so that lanes meet no bank twice; of a line of voxels.
constexpr int VOXEL_BYTES = OF_UNIT * 8 * sizeof(Element), VOXEL_PAD = 32, VOXEL_LINE = 2 * SPAN * VOXEL_BYTES + 2 * SPAN / 4 * VOXEL_PAD;

/// Where a voxel of a line is collected.
__device__ __forceinline__ int place_of_voxel(int v) { return v * VOXEL_BYTES + v / 4 * VOXEL_PAD; }

/// Writes a warp's sums of eight channels, with more of them in a unit those of all once it has them: to shared memory voxel by voxel, from there
/// to lines of y, `columns` voxels of each. `to` is the first line's, the next one lies `next_line` elements further on, and `lines` are
/// there; the next voxel `channels`.
__device__ __forceinline__ void store_voxels(const Sums &sum, Element *area, Element *to, int columns, int lines, int next_line, int channels, int of_unit) {
    const int lane = threadIdx.x % 32, g = lane / 4;
    char *const collected = (char *)area + (8 * of_unit + g) * sizeof(Element);
    // What was there has been stored.
    if (of_unit == 0) meet();
#pragma unroll
    for (int r = 0; r < LINES * SEGMENTS; r++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int first = r / SEGMENTS * VOXEL_LINE + place_of_voxel(r % SEGMENTS * 64 + 16 * n);
                narrow(sum[r][n][e], (Element *)(collected + (first + place_of_voxel(column_of(e)))));
            }
    if (of_unit + 1 < OF_UNIT) return;
    meet();
    constexpr int PIECES = VOXEL_BYTES / 16;
#pragma unroll 1
    for (int line = 0; line < lines; line++) {
        const char *const from = (const char *)area + (line * VOXEL_LINE + lane % PIECES * 16);
        Element *const of_line = to + line * next_line + lane % PIECES * (16 / (int)sizeof(Element));
#pragma unroll 2
        for (int v = lane / PIECES; v < columns; v += 32 / PIECES) *(uint4 *)(of_line + v * channels) = *(const uint4 *)(from + place_of_voxel(v));
    }
}
