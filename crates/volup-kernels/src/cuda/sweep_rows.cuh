// Rows of `halo_sweep`'s operand A from the input itself, of 16 bits, where a voxel's channels lie together: by the warps that else pack it.
//
// A row of a stage, of 2, 4 or 8 panels, is one piece in the order that the matrix instructions call swizzled: 16 bytes of it are as far from
// their place as bits of their address above the lowest seven say, so that eight rows of a panel are in banks of their own. These bits are
// of the whole address, so any row may be an operand's first. Rows panel by panel, as they are packed, would be asked for sector by sector.

#pragma once

#include "copy_async.cuh"
#include "divisor.cuh"
#include "hopper.cuh"
#include "operand.cuh"

/// Lanes that bring rows; where in shared memory the places of rows are, and of how many rows.
constexpr int BRINGERS = 96, PLACES_AT = 1280, MOST_PLACES = 704;
static_assert(PLACES_AT + 4 * MOST_PLACES == 4096, "before tables of columns");

/// The second half of the descriptor of an operand whose rows are so many bytes, or 16 of each panel; eights of them are so many eights apart.
__device__ __forceinline__ unsigned kind_of_rows(int row_bytes, int apart) {
    return apart * row_bytes / 2 | (row_bytes == 128 ? 1u : row_bytes == 64 ? 2u : row_bytes == 32 ? 3u : 0u) << 30;
}

struct SweepRows {
    const Element *x;
    /// Samples, rows of one (positions of a line, lines); voxels of a line, lines and channels; elements from a plane, sample, line and
    /// voxel to the next.
    int n, pw, ph, width, height, channels, x_plane, x_sample, x_h, x_w;
    /// A's ring.
    unsigned ring, full, empty;
    int stages, stage_bytes, chunk_panels, chunks;
    /// Of each row of a stage where it lies in a plane of x, negative if it is no voxel: the same for all planes of a piece.
    int *places;
    /// The next stage, and the one before, of which nobody has been told yet (negative: there is none).
    int at = 0, phase = 1, untold = -1;

    /// Finds the places of so many rows, from one on, which may be before a plane's first or go on after its last one.
    __device__ __forceinline__ void find(const Divisor &line, const Divisor &lines, int first, int length) const {
        asm volatile("bar.sync 8, 96;" ::: "memory");
#pragma unroll 1
        for (int row = threadIdx.x % 128 - 32; row < length; row += BRINGERS) {
            const int position = max(first + row, 0), line_at = line.divide(position), w = position - line_at * pw;
            const int sample = lines.divide(line_at), h = line_at - sample * ph;
            const bool there = first + row >= 0 && sample < n && h < height && w < width;
            places[row] = there ? sample * x_sample + h * x_h + w * x_w : -1;
        }
        asm volatile("bar.sync 8, 96;" ::: "memory");
    }

    /// Brings those rows of a plane. What is no voxel, or past the last channel, is zeros.
    __device__ __forceinline__ void bring(int plane, int length) {
        // Neighbouring lanes bring neighbouring pieces of a row.
        const int thread = threadIdx.x % 128 - 32, own_row = thread / chunk_panels, panel = thread % chunk_panels, at_once = BRINGERS / chunk_panels;
        const Element *from = x + (long long)plane * x_plane + panel * E;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++, from += chunk_panels * E) {
            // Products may wait for what came last before they give anything back.
            if (!barrier_test(empty + 8 * at, phase)) {
                tell<0>();
                barrier_wait(empty + 8 * at, phase);
            }
            const bool is_channel = (chunk * chunk_panels + panel) * E < channels;
            unsigned to = ring + at * stage_bytes + thread * 16;
#pragma unroll 4
            for (int row = own_row; row < length; row += at_once, to += BRINGERS * 16) {
                const int place = places[row];
                copy_async<16>(to ^ (to >> 7 & chunk_panels - 1) << 4, from + place, is_channel && place >= 0);
            }
            end_copies();
            tell<1>();
            untold = at;
            if (++at == stages) at = 0, phase ^= 1;
        }
    }

    /// Tells of a stage as soon as at most so many of the groups of copies after it are under way.
    template <int LATER> __device__ __forceinline__ void tell() {
        if (untold < 0) return;
        await_copies<LATER>();
        // Matrix instructions read it.
        asm volatile("fence.proxy.async;" ::: "memory");
        barrier_arrive(full + 8 * untold);
        untold = -1;
    }
};
