// Where the outputs of `shuffle_wgmma` lie, and what a lane has of them.

#pragma once

#include "element.cuh"
#include "shuffle_tables.cuh"

/// This thread, of which nothing is kept in registers: these are scarce.
__device__ __forceinline__ unsigned own_thread() {
    unsigned x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
/// Of each eight positions a lane has two, from twice this on.
__device__ __forceinline__ int own_columns() { return own_thread() % 4; }

/// What a pair of rows is.
struct Pair {
    /// Its channel; with Y_LAST there is a second one, the next.
    int channel;
    /// The two rows of W, `co*taps + tap`.
    int row, next_row;
    /// Where its outputs lie from a position's on.
    long long at;

    __device__ __forceinline__ Pair(const Sizes &s, const Divisors &by, int pair) {
        if (Y_LAST) {
            // Rows are in the order of y: lines, residues along width, channels.
            const int line = by.pairs.divide(pair), in_line = pair - line * by.pairs.by, residue = by.channels.divide(in_line);
            const int td = by.h_stride.divide(line);
            channel = 2 * (in_line - residue * by.channels.by);
            row = channel * s.taps + line * s.w_stride + residue;
            next_row = row + s.taps;
            at = (long long)td * s.y_d + (line - td * s.h_stride) * s.y_h + 2 * in_line;
        } else {
            channel = by.pairs.divide(pair);
            const int line = pair - channel * by.pairs.by, td = by.h_stride.divide(line);
            row = 2 * pair;
            next_row = row + 1;
            at = (long long)channel * s.y_c + td * s.y_d + (line - td * s.h_stride) * s.y_h;
        }
    }
};

/// Where the outputs of a tile's positions lie, for all of a warpgroup.
struct Places {
    const Sizes &s;
    Tables &tables;
    const int group;
    /// Which half of the table is this tile's.
    int half = 0;

    /// From a sample's first one on.
    __device__ __forceinline__ int of(int p) const {
        const Divisors &by = tables.by;
        const int d = by.plane.divide(p), in_plane = p - d * by.plane.by, h = by.width.divide(in_plane);
        return d * s.d_stride * s.y_d + h * s.h_stride * s.y_h + (in_plane - h * by.width.by) * (Y_LAST ? s.voxels : 2);
    }

    /// All of the warpgroup meet.
    __device__ __forceinline__ void meet_all() const { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

    /// Notes them. Half of the table is still read by those who are behind.
    __device__ __forceinline__ void note(int first) {
        const int own = threadIdx.x % GROUP, p = first + own;
        half ^= 1;
        tables.places[group][half][own] = p < s.volume ? of(p) : NOWHERE;
        meet_all();
    }
    /// Those from a position of the tile on.
    __device__ __forceinline__ const int *from(int p) const { return tables.places[group][half] + p; }
};

/// A position's two outputs as they are written.
#if KIND == 0
__device__ __forceinline__ unsigned two(float one, float other) { return narrow_both(one, other, Element{}); }
#else
__device__ __forceinline__ float2 two(float one, float other) { return make_float2(one, other); }
#endif

/// Writes outputs of two pairs of neighbouring positions, eight apart, one by one, where there are any.
__device__ __forceinline__ void write_apart(Element *of_pair, bool here, const int *places, const float (&one)[4], const float (&other)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = places[i / 2 * 8 + i % 2];
        const float(&v)[4] = i / 2 ? other : one;
        put(of_pair + at, two(v[i % 2 * 2], v[i % 2 * 2 + 1]), here && at != NOWHERE);
    }
}
