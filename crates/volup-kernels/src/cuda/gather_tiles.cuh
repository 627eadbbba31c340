// The tiles of `gather_gemm`: rows of one phase by a block of columns, whole or in parts, and the voxels that they reach.

#pragma once

#include "cluster_sums.cuh"
#include "divisor.cuh"
#include "halo_epilogue.cuh"
#include "launch.cuh"

/// What the numbers of all tiles are divided by.
struct Divisors {
    Divisor all, phases, of_phase, turn, line, height, depth, x_line, x_plane, x_sample, units;
};
constexpr int DIVISORS = sizeof(Divisors) / sizeof(Divisor);

/// One axis.
struct Axis {
    int kernel, stride, dilation, step, inverse, padding;

    /// The first tap of outputs of a residue, `kernel` if there is none, and how many taps they have.
    __device__ int first_tap(int residue) const {
        const int gcd = stride / step, rest = (residue + padding) % stride;
        return rest % gcd ? kernel : (rest / gcd * inverse) % step;
    }
    __device__ int taps(int first) const { return max(kernel - first + step - 1, 0) / step; }
    /// The voxel that a tap reaches from position 0.
    __device__ int reached(int tap, int residue) const { return (residue + padding - tap * dilation) / stride; }
};

/// What says where tiles and the voxels that they reach lie.
struct Sizes {
    int voxels, pd, ph, pw, in_d, in_h, in_w, back_d, back_h, back_w, by_work;
    Axis d, h, w;

    /// Residues of each axis that phases are of.
    __device__ int along_h() const { return h.stride / RH; }
    __device__ int along_w() const { return w.stride / RW; }
    __device__ int residues() const { return d.stride + along_h() + along_w(); }
};

/// A residue of an axis: its first tap, how many there are, and the voxel that the first one reaches from position 0.
struct Residue {
    int first, taps, reached;

    Residue() = default;
    /// Of all axes', depth first, one after the other.
    __device__ Residue(const Sizes &s, int index) {
        const int of_h = index - s.d.stride, of_w = of_h - s.along_h();
        const bool is_w = of_w >= 0, is_h = !is_w && of_h >= 0;
        const Axis axis = is_w ? s.w : is_h ? s.h : s.d;
        if (RW == 2 && is_w || RH == 2 && is_h) {
            // Two residues that see the same voxels: taps in pairs, of which the first may lack its first, and the last its second.
            first = -(axis.padding % 2), taps = (axis.kernel - first + 1) / 2, reached = (axis.padding + 1) / 2;
            return;
        }
        const int residue = is_w ? of_w : is_h ? of_h : index;
        first = axis.first_tap(residue), taps = axis.taps(first), reached = axis.reached(first, residue);
    }
};

/// Residues along all axes: first taps, how many there are, and the voxel that the first ones reach from position 0.
struct Phase {
    int rd, rh, rw, td, th, tw, nd, nh, nw, cd, ch, cw;

    Phase(const Phase &) = default;
    __device__ Phase(const Sizes &s, const Residue *residues, int phase) {
        const int along_w = s.along_w(), along_h = s.along_h(), line = phase / along_w;
        rw = phase - line * along_w;
        rd = line / along_h;
        rh = line - rd * along_h;
        const Residue d = residues[rd], h = residues[s.d.stride + rh], w = residues[s.d.stride + along_h + rw];
        td = d.first, th = h.first, tw = w.first;
        nd = d.taps, nh = h.taps, nw = w.taps;
        cd = d.reached, ch = h.reached, cw = w.reached;
        if (nd * nh * nw == 0) nd = nh = nw = 0;
    }
    __device__ int taps() const { return nd * nh * nw; }

    /// How many phases come before this one, those with most taps first.
    __device__ int rank(const Sizes &s, const Residue *residues, int phase) const {
        const Residue *const of_h = residues + s.d.stride, *const of_w = of_h + s.along_h();
        int rank = 0, other = 0;
        for (int d = 0; d < s.d.stride; d++)
            for (int h = 0; h < s.along_h(); h++)
                for (int w = 0; w < s.along_w(); w++) {
                    const int more = residues[d].taps * of_h[h].taps * of_w[w].taps - taps();
                    rank += more > 0 || more == 0 && other < phase;
                    other++;
                }
        return rank;
    }
};

/// A row's sample and position.
struct Position {
    int n, d, h, w;

    __device__ __forceinline__ Position(const Sizes &s, const Divisors &by, int row) {
        const int line = by.line.divide(row), plane = by.height.divide(line);
        n = by.depth.divide(plane);
        d = plane - n * s.pd;
        h = line - plane * s.ph;
        w = row - line * s.pw;
    }
};

/// A tile: rows of one phase by a block of columns. Consumers hold the phase in registers: what waits for barriers would read
/// memory anew.
template <typename Of> struct Tile {
    int row0, column_block;
    Of phase;
    Position at;
    /// The taps along depth that reach a voxel from any of its rows, of the phase's: the first, and the one after the last.
    int first_ad, past_ad;

    __device__ __forceinline__ Tile(const Sizes &s, const Divisors &by, const Phase *phases, int tile)
        : column_block(tile - by.all.divide(tile) * by.all.by), phase(phases[chosen(s, by, by.all.divide(tile), &row0)]), at(s, by, row0) {
        const Position last(s, by, row0 + BM - 1);
        const bool one = last.n == at.n;
        const int nearest = (one ? at.d : 0) + phase.cd, farthest = (one ? last.d : s.pd - 1) + phase.cd;
        first_ad = 0, past_ad = phase.nd;
        while (first_ad < past_ad && nearest - first_ad * s.back_d >= s.in_d) first_ad++;
        while (first_ad < past_ad && farthest - (past_ad - 1) * s.back_d < 0) past_ad--;
    }
    __device__ __forceinline__ int units() const { return (past_ad - first_ad) * phase.nh * phase.nw; }

    /// Rows of a stage: voxels from the first one on that taps along height and width reach from any row.
    __device__ __forceinline__ int length(const Sizes &s) const { return BM + (phase.nh - 1) * s.back_h * s.in_w + (phase.nw - 1) * s.back_w; }

    /// The phase, and the first row.
    __device__ __forceinline__ static int chosen(const Sizes &s, const Divisors &by, int rest, int *row0) {
        if (s.by_work) {
            const int phase = by.of_phase.divide(rest);
            *row0 = (rest - phase * by.of_phase.by) * BM;
            return phase;
        }
        // Phases differ in their work, so a block's turns through all of them.
        const int row_tile = by.phases.divide(rest), phase = rest - row_tile * by.phases.by + by.turn.divide(row_tile);
        *row0 = row_tile * BM;
        return phase - by.phases.divide(phase) * by.phases.by;
    }

    /// The first voxel, in the order of NDHW, that rows of the tile reach by a tap along depth and the last ones along height and
    /// width; any reach further on by those before these, at most as far as there are rows and taps more.
    __device__ __forceinline__ int from(const Sizes &s, int ad) const {
        const int cd = phase.cd - ad * s.back_d, ch = phase.ch - (phase.nh - 1) * s.back_h, cw = phase.cw - (phase.nw - 1) * s.back_w;
        // The first ones that any position reaches along each axis: a row past an edge is followed by one of the next line there.
        const int first_d = max(cd, 0), first_h = max(ch, 0), first_w = max(cw, 0);
        int n = at.n, id = at.d + cd, ih = at.h + ch, iw = at.w + cw;
        if (iw >= s.in_w) ih++, iw = first_w;
        if (ih >= s.in_h) id++, ih = first_h, iw = first_w;
        if (id >= s.in_d)
            n++, id = first_d, ih = first_h, iw = first_w;
        else if (id < 0)
            id = 0, ih = first_h, iw = first_w;
        else if (ih < 0)
            ih = 0, iw = first_w;
        iw = max(iw, 0);
        return min(((n * s.in_d + id) * s.in_h + ih) * s.in_w + iw, s.voxels);
    }
};

/// Its stages: a tap along depth and a chunk each, in this order. With SPLIT those of a block of the cluster.
struct Stages {
    int first_ad, past_ad, first_chunk, past_chunk, units;

#ifdef SPLIT
    template <typename Of> __device__ __forceinline__ Stages(const Tile<Of> &t, int chunks) {
        const int all = (t.past_ad - t.first_ad) * chunks, rank = cluster_rank(), first = rank * all / SPLIT, past = (rank + 1) * all / SPLIT;
        const int first_plane = first / chunks, past_plane = (past + chunks - 1) / chunks;
        first_ad = t.first_ad + first_plane, past_ad = first < past ? t.first_ad + past_plane : first_ad;
        first_chunk = first - first_plane * chunks, past_chunk = past - (past_plane - 1) * chunks;
        units = (past - first) * t.phase.nh * t.phase.nw;
    }
    __device__ __forceinline__ int first(int ad) const { return ad == first_ad ? first_chunk : 0; }
    __device__ __forceinline__ int past(int ad, int chunks) const { return ad == past_ad - 1 ? past_chunk : chunks; }
#else
    template <typename Of> __device__ __forceinline__ Stages(const Tile<Of> &t, int chunks)
        : first_ad(t.first_ad), past_ad(t.past_ad), first_chunk(0), past_chunk(chunks), units(t.units() * chunks) {}
    __device__ __forceinline__ int first(int) const { return 0; }
    __device__ __forceinline__ int past(int, int chunks) const { return chunks; }
#endif
};

/// The turn of a team's tile among all: by work, turns go to and fro.
__device__ __forceinline__ int tile_of(int round, int by_work) {
    return round * teams() + (by_work && round & 1 ? teams() - 1 - team() : team());
}
