// The tiles of `halo_gemm`: rows of one phase by a block of columns.

#pragma once

#include "divisor.cuh"
#include "halo_epilogue.cuh"

/// What the numbers of all tiles are divided by.
struct Divisors {
    Divisor all, phases, turn, line, height, depth, units;
};
constexpr int DIVISORS = sizeof(Divisors) / sizeof(Divisor);

/// One axis whose residues are phases.
struct Axis {
    int kernel, stride, dilation, step, inverse, first, shift, out;

    /// The first tap of a residue, `kernel` if there is none, and how many taps it has.
    __device__ int first_tap(int residue) const {
        int gcd = stride / step;
        return residue % gcd ? kernel : (residue / gcd * inverse) % step;
    }
    __device__ int taps(int first) const { return max(kernel - first + step - 1, 0) / step; }
};

struct Sizes {
    int rows, a_rows, lead, pd, ph, pw;
    Axis d, h;
    int d_input;
    int outputs, w_shift, w_out, w_low, w_steps, w_step;
    int chunk_panels, chunks, slices, blocks, channels;
    int y_n, y_c, y_d, y_h, y_w;
    int channels_first, has_bias, activation;
    int a_stages, stage_rows, whole_h, b_stages, unit_steps, resident, by_work, promote, advance;
};

/// One pair of residues along depth and height.
struct Phase {
    int rd, rh, td, th, nd, nh;
    /// Rows from a tile's first to the one that its first taps read; planes likewise. Planes from a tap along depth to the next.
    int rows, planes, back_d;

    __device__ Phase(const Sizes &s, int phase) {
        rd = phase / s.h.stride;
        rh = phase % s.h.stride;
        td = s.d.first_tap(rd);
        th = s.h.first_tap(rh);
        nd = s.d.taps(td);
        nh = s.h.taps(th);
        if (nd == 0 || nh == 0) nd = nh = 0;
        const int md = (td * s.d.dilation - rd) / s.d.stride, mh = (th * s.h.dilation - rh) / s.h.stride;
        planes = s.d.first - md;
        back_d = s.d.dilation / (s.d.stride / s.d.step);
        rows = s.lead + (planes * s.ph + s.h.first - mh) * s.pw + s.w_low;
    }
};

/// A tile: rows of one phase by a block of columns.
struct Tile {
    int row0, column_block, plane0, plane1, pd, d_input;
    const Phase &phase;
    const Divisor &depth;

    __device__ __forceinline__ Tile(const Sizes &s, const Divisors &by, const Phase *phases, int tile)
        : pd(s.pd), d_input(s.d_input), phase(phases[turned(s, by, tile)]), depth(by.depth) {
        const int rest = by.all.divide(tile);
        column_block = tile - rest * by.all.by;
        row0 = by.phases.divide(rest) * s.advance;
        plane0 = by.height.divide(by.line.divide(row0)) + phase.planes;
        plane1 = by.height.divide(by.line.divide(min(row0 + BM, s.rows) - 1)) + phase.planes;
    }

    /// A tile's phase. Phases differ in their work, so a block's turns through all of them, or of those in order of their work
    /// from one to that as far from the other end.
    __device__ __forceinline__ static int turned(const Sizes &s, const Divisors &by, int tile) {
        const int rest = by.all.divide(tile), row_tile = by.phases.divide(rest), turn = by.turn.divide(row_tile);
        const int at = rest - row_tile * by.phases.by, phase = at + turn;
        if (s.by_work) return turn & 1 ? by.phases.by - 1 - at : at;
        return phase - by.phases.divide(phase) * by.phases.by;
    }

    /// Whether a plane is a gap.
    __device__ __forceinline__ bool gap(int plane) const { return plane < 0 || plane - depth.divide(plane) * pd >= d_input; }

    /// Whether a tap along depth reads nothing but gaps.
    __device__ __forceinline__ bool skipped(int ad) const {
        const int first = plane0 - ad * phase.back_d, last = plane1 - ad * phase.back_d;
        return last - first <= 1 && gap(first) && gap(last);
    }
};
