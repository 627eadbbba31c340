// Rows of `gather_gemm`'s operand A from the input itself, of 16 bits, where a voxel's channels lie together: by the warps that else pack it.
//
// A row of a stage is 128 bytes, its panels in an order of their own: `panel ^ row % 8`, so that neither who brings whole rows nor who
// gathers eight rows of a panel meets a bank twice. Rows panel by panel, as they are packed, would be asked for sector by sector.

#pragma once

#include "copy_async.cuh"
#include "gather_tiles.cuh"
#include "hopper.cuh"
#include "operand.cuh"

/// Panels of a chunk.
constexpr int PANELS = 8;
/// Lanes that bring rows, and rows that they bring at once.
constexpr int BRINGERS = 96, ROWS_AT_ONCE = BRINGERS / PANELS;

struct GatherRows {
    const Element *x;
    /// Elements from a voxel to the next; of each the channels of a slice.
    int apart, channels;
    /// A's ring.
    unsigned ring, full, empty;
    int stages, stage_bytes;

    /// Brings the stages of a block's tiles, in their order. What is past the last voxel, or the last channel, is zeros.
    __device__ __forceinline__ void bring(const Sizes &s, const Divisors &by, const Phase *phases, int tiles, int blocks, int chunks) const {
        const int own_row = (threadIdx.x % 128 - 32) / PANELS, own_panel = threadIdx.x % PANELS;
        int at = 0, phase = 1;
#pragma unroll 1
        for (int round = 0; round * teams() < tiles; round++) {
            const int index = tile_of(round, s.by_work);
            if (index >= tiles) continue;
            const Tile<const Phase &> t(s, by, phases, index);
            const int length = t.length(s), slice = t.column_block / blocks;
            const Stages of_tile(t, chunks);
#pragma unroll 1
            for (int ad = of_tile.first_ad; ad < of_tile.past_ad; ad++) {
                const int first = t.from(s, ad);
#pragma unroll 1
                for (int chunk = of_tile.first(ad); chunk < of_tile.past(ad, chunks); chunk++) {
                    const int channel = (chunk * PANELS + own_panel) * E, there = channel < channels ? s.voxels - first : 0;
                    const Element *from = x + (long long)(first + own_row) * apart + slice * channels + channel;
                    const unsigned to = ring + at * stage_bytes;
                    barrier_wait(empty + 8 * at, phase);
#pragma unroll 4
                    for (int row = own_row; row < length; row += ROWS_AT_ONCE, from += ROWS_AT_ONCE * apart)
                        copy_async<16>(to + row * 128 + (own_panel ^ row % 8) * 16, from, row < there);
                    arrive_with_copies(full + 8 * at);
                    if (++at == stages) at = 0, phase ^= 1;
                }
            }
        }
    }
};
