// How `shuffle_wgmma` writes outputs of NCDHW: two residues along width of each position.

#pragma once

#include "shuffle_places.cuh"
#include "store_async.cuh"
#include "warp_meet.cuh"

/// What a thread writes with.
struct Writer {
    const Sizes &s;
    /// From where on its pair's outputs lie.
    Element *const to_pair;
    /// Where it collects a part's outputs in shared memory, if the copy engine stores them.
    const unsigned area;

    __device__ __forceinline__ Writer(const Sizes &s, const Divisors &by, unsigned areas, int, int pair, bool here)
        : s(s), to_pair(s.y + (here ? Pair(s, by, pair).at : 0)), area(areas + threadIdx.x / 32 * AREA + place_in_area(s.past_line ? s.h_stride : 1)) {}

    /// From the area of its warp on: lines of y that are stored together, of so many pairs, lie side by side.
    __device__ __forceinline__ int place_in_area(int together) const {
        const int pair = threadIdx.x % 32 / 4, some = pair / together, line = pair - some * together;
        return some * (together * 2 * PART_POS * SIZE + AREA_PAD) + ((2 * line << s.line_bits) + 4 * (threadIdx.x % 4)) * SIZE;
    }

    /// Whether the places of a tile's positions are asked for.
    __device__ __forceinline__ static bool wants_places(int how) { return how != COLLECTED; }

    /// Before a part of a tile is collected: the copy engine has read what was there. Returns where this thread collects it.
    template <int PART> __device__ __forceinline__ unsigned begin(const Places &) const {
        stored_read();
        meet();
        return area;
    }

    /// Writes outputs of two neighbours, which are `j` and the next, where there are any: position by position, of 16 bytes at once, or to
    /// where the copy engine stores them from. Of each eight positions `own` is this lane's first one.
    template <How HOW>
    __device__ __forceinline__ void write(const Places &places, int n, bool here, int j, int own, const float (&one)[4], const float (&other)[4], int,
                                          [[maybe_unused]] unsigned collected) const {
        [[maybe_unused]] Element *const of_pair = to_pair + n * s.y_n;
        [[maybe_unused]] const int *const at_own = places.from(8 * j + own);
        if constexpr (HOW == APART) {
            write_apart(of_pair, here, at_own, one, other);
            return;
        }
#if KIND == 0
        const auto both = [](const float(&v)[4]) { return make_uint2(two(v[0], v[1]), two(v[2], v[3])); };
        const uint2 first = both(one), second = both(other);
#endif
        if constexpr (HOW == COLLECTED) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int p = (j + k) % NEIGHBOURS * 8;
                const unsigned to = collected + (p < PART_POS / 2 ? 0 : s.past_half) + 2 * p * SIZE;
#if KIND == 0
                const uint2 v = k ? second : first;
                asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(v.x), "r"(v.y) : "memory");
#else
                const float(&v)[4] = k ? other : one;
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
#endif
            }
        }
        if constexpr (HOW == TOGETHER) {
#if KIND == 0
            // Of two lanes the even one writes four positions of the first eight, the odd one of the second.
            const bool odd = own / 2 % 2;
            const uint2 give = odd ? first : second;
            const uint2 given = make_uint2(__shfl_xor_sync(0xffffffffu, give.x, 1), __shfl_xor_sync(0xffffffffu, give.y, 1));
            const int at = at_own[odd ? 6 : 0];
            put(of_pair + at, odd ? make_uint4(given.x, given.y, second.x, second.y) : make_uint4(first.x, first.y, given.x, given.y),
                here && at != NOWHERE);
#else
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const float(&v)[4] = k ? other : one;
                const int at = at_own[8 * k];
                put(of_pair + at, make_float4(v[0], v[1], v[2], v[3]), here && at != NOWHERE);
            }
#endif
        }
    }

    /// Stores what this warp has collected of a part, from a sample's position `first` on: of pairs that are lines of y which lie side
    /// by side those lines together.
    template <int PART> __device__ __forceinline__ void store_part(const Places &places, int n, bool here, int pair, int first) const {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet();
        const Divisor &h_stride = places.tables.by.h_stride;
        const int width = 1 << s.line_bits, length = 2 * width + s.past_line, line = own_columns(), p = first + PART * PART_POS + line * width;
        const bool is_first = s.past_line == 0 || pair - h_stride.divide(pair) * s.h_stride == 0;
        if (here && is_first && line * width < PART_POS && p < s.volume)
            store(to_pair + n * s.y_n + places.of(p), area + (line * length - 4 * own_columns()) * SIZE, length * SIZE);
        stored();
    }

    /// Shared memory stays until all has been read.
    __device__ __forceinline__ void finish() const { stored_read(); }
};
