// How X comes to the rings of `shuffle_wgmma`.

#pragma once

#include "copy_async.cuh"
#include "hopper.cuh"
#include "shuffle_tables.cuh"

/// An item of a team: a tile of positions of a sample. They are taken in order, or where a norm needs what was read last from the end.
struct Item {
    int n, first;

    __device__ __forceinline__ Item(const Sizes &s, const Tables &tables, int i) {
        const int item = MODE == 2 ? s.items - 1 - i : i;
        n = tables.by.pos_blocks.divide(item), first = (item - n * s.pos_blocks) * POS;
    }
    /// The one that is so many further on: without a division, of which many would wait.
    __device__ __forceinline__ void next(const Sizes &s, int further) {
        const int of_sample = s.pos_blocks * POS;
        first += (MODE == 2 ? -further : further) * POS;
#pragma unroll 1
        while (MODE == 2 ? first < 0 : first >= of_sample)
            MODE == 2 ? (first += of_sample, n--) : (first -= of_sample, n++);
    }
};

/// One of the threads that bring X to a team's ring.
struct Copier {
    const Sizes &s;
    const Tables &tables;
    const Place place;
    /// Which of them it is, and how many these are.
    const int thread, threads;

    /// What it asks for at once, a block: with X_LAST 16 bytes of a position; else of 16 bits 8 positions of a channel, of float32 4 of each of
    /// 4 channels. Neighbouring lanes fill sectors of memory, and in shared memory meet no bank twice: those of NDHWC have all of a position's
    /// channels; else of 16 bits eight have 64 positions of a channel; of float32 two have 8 of four, the next ones those of the next channels.
    static constexpr int SIDE = KIND == 0 || X_LAST ? 1 : 4, BLOCKS = KC / SIDE * (POS / VECTOR);
    /// With X_LAST: pieces of 16 bytes of a position's channels; those that are rounded at once.
    static constexpr int PIECES = KC / VECTOR, AT_ONCE = COPIER_REGISTERS > 32 ? 4 : 1;

    /// Calls `f` with each block of this thread: its first channel and position. With X_LAST each of so many.
    template <int UNROLL, int EACH = 1, typename F> __device__ __forceinline__ void for_blocks(const F &f) const {
        int c = X_LAST ? thread % PIECES * VECTOR : KIND == 0 ? thread / 8 : thread / 2 % 4 * SIDE;
        int p = X_LAST ? thread / PIECES : (KIND == 0 ? thread % 8 : thread % 2 + thread / 8 * 2) * VECTOR;
#pragma unroll(UNROLL)
        for (int i = thread; i < BLOCKS; i += EACH * threads) {
            f(c, p);
            if (X_LAST) {
                p += EACH * threads / PIECES;
            } else if (KIND == 0) {
                c += threads / 8;
                if (c >= KC) c -= KC, p += 8 * VECTOR;
            } else {
                p += threads / 4 * VECTOR;
                if (p >= POS) p -= POS, c += 4 * SIDE;
            }
        }
    }
    /// Where a block lies in a stage.
    __device__ __forceinline__ static unsigned at(int c, int p) { return ACROSS ? p / VECTOR * PANEL + c * 16 : c / VECTOR * PANEL + p * 16; }

    /// Starts the copies of a chunk of an item. Zeros past the end of channels and positions.
    __device__ __forceinline__ void fetch(const Item &item, int chunk, unsigned to) const {
        const int by_channel = X_LAST ? 1 : s.volume, by_position = X_LAST ? s.in_channels : 1;
        const Element *const from = s.x + (item.n * s.x_n + ((long long)chunk * KC * by_channel + (long long)item.first * by_position));
        const int channels = s.in_channels - chunk * KC, positions = s.volume - item.first;
        if (channels >= KC && positions >= POS)
            for_blocks<X_LAST ? 4 : 2>([&](int c, int p) {
                const Element *const of_block = from + (c * by_channel + p * by_position);
#pragma unroll
                for (int e = 0; e < SIDE; e++) copy_async<16>(to + at(c, p) + 16 * e, of_block + e * by_channel, true);
            });
        else
            for_blocks<2>([&](int c, int p) {
#pragma unroll
                for (int e = 0; e < SIDE; e++) {
                    const bool there = c + e < channels && p < positions;
                    copy_async<16>(to + at(c, p) + 16 * e, there ? from + ((c + e) * by_channel + p * by_position) : s.x, there);
                }
            });
    }

    /// Rounds what this thread has asked for, and turns it around, but for X_LAST. Whether there is what is left to the definition.
    __device__ __forceinline__ bool turn([[maybe_unused]] unsigned char *stage) const {
        bool undefined = false;
#if KIND != 0
        // Vectors at once: of four channels of four neighbouring positions, or with X_LAST those of blocks.
        constexpr int VECTORS = X_LAST ? AT_ONCE : 4;
        const int apart = X_LAST ? threads / PIECES : 1;
        for_blocks<1, X_LAST ? AT_ONCE : 1>([&](int c, int p) {
            float4 *const of = (float4 *)(stage + at(c, p));
            float v[VECTORS][4];
#pragma unroll
            for (int e = 0; e < VECTORS; e++) *(float4 *)v[e] = of[e * apart];
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                unsigned high[4], low[4];
                float largest = 0.0f;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float x = X_LAST ? v[k][e] : v[e % VECTORS][k];
                    // Lets NaN through.
                    asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(x)));
                    high[e] = round_up(__float_as_uint(x));
                    low[e] = round_up(__float_as_uint(x - __uint_as_float(high[e] & 0xffffe000u)));
                }
                undefined |= within_parts(__float_as_uint(largest)) >= 0x7f7ff000u;
                float4 *const to = of + k * apart;
                *(uint4 *)to = make_uint4(high[0], high[1], high[2], high[3]);
                if (PARTS == 2) *(uint4 *)((unsigned char *)to + STAGE) = make_uint4(low[0], low[1], low[2], low[3]);
            }
        });
#endif
        return undefined;
    }

    __device__ __forceinline__ void run(unsigned char *memory) const {
        const int all = place.team < s.items ? ((s.items - 1 - place.team) / place.teams + 1) * s.chunks : 0;
        const unsigned first = shared(memory);
        int chunk = 0, slot = 0, parity = 1, ready = 0;
        Item item(s, tables, place.team);
#pragma unroll 1
        for (int i = 0; i < all + s.ahead; i++) {
            if (i < all) {
                barrier_wait(place.barriers + BARRIERS * slot + 8, parity);
                fetch(item, chunk, place.ring + slot * (PARTS * STAGE));
                if (++chunk == s.chunks) chunk = 0, item.next(s, place.teams);
                if (++slot == s.stages) slot = 0, parity ^= 1;
            }
            end_copies();
            if (i < s.ahead) continue;
            // What has been asked for since may still be under way.
            if (s.ahead == 1)
                await_copies<1>();
            else
                await_copies<2>();
            const bool undefined = turn(memory + (place.ring + ready * (PARTS * STAGE) - first));
            const unsigned full = place.barriers + BARRIERS * ready;
            if (KIND != 0) {
                const bool any = __any_sync(0xffffffffu, undefined);
                if (thread % 32 == 0) *(int *)(memory + (full + 16 + thread / 8 - first)) = any;
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            barrier_arrive(full);
            if (++ready == s.stages) ready = 0;
        }
    }
};
