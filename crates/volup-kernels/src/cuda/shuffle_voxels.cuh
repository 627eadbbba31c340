// How `shuffle_wgmma` writes outputs of NDHWC: two channels of each position.

#pragma once

#include "shuffle_places.cuh"

/// What a thread writes with.
struct Writer {
    const Sizes &s;
    /// What warpgroups collect of a part's outputs in shared memory.
    const unsigned areas;
    /// Where what it stores at once lies in y from a position's outputs on, if it is there; else nowhere.
    int at;

    /// Pieces of 16 bytes of what a warpgroup has of a position; positions that it stores at once.
    static constexpr int PIECES = ROWS / VECTOR, AT_ONCE = GROUP / PIECES;
    /// Loads from shared memory on their way: as many as registers are left for.
    static constexpr int LOADS = COUNTS ? 1 : PART_POS / AT_ONCE;

    __device__ __forceinline__ Writer(const Sizes &s, const Divisors &by, unsigned areas, int first_pair, int, bool)
        : s(s), areas(areas) {
        const int pair = first_pair + threadIdx.x % PIECES * (VECTOR / 2);
        at = pair < s.rows / 2 ? (int)Pair(s, by, pair).at : NOWHERE;
    }

    /// A position of its warpgroup's, and so many bytes into it.
    __device__ __forceinline__ unsigned area(int position, int bytes) const {
        return areas + (own_thread() / GROUP * PART_POS + position) * AREA_PITCH + bytes;
    }

    /// Whether the places of a tile's positions are asked for.
    __device__ __forceinline__ static bool wants_places(int) { return true; }

    /// Before a part of a tile is collected: all have read what was there, of the first part when places were noted. Returns where this thread
    /// collects it, from its pair of its first position on.
    template <int PART> __device__ __forceinline__ unsigned begin(const Places &places) const {
        if (PART > 0) places.meet_all();
        return area(2 * own_columns(), own_thread() % GROUP / 4 * 2 * SIZE);
    }

    /// Writes outputs of two pairs of neighbours, which are `j` and the next, where there are any: position by position, or to where the warpgroup
    /// stores them from. Of each eight positions `own` is this lane's first one.
    template <How HOW>
    __device__ __forceinline__ void write(const Places &places, int n, bool here, int j, int own, const float (&one)[4], const float (&other)[4], int pair,
                                          [[maybe_unused]] unsigned collected) const {
        if constexpr (HOW == APART) {
            write_apart(s.y + (n * s.y_n + Pair(s, places.tables.by, pair).at), here, places.from(8 * j + own), one, other);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&v)[4] = i / 2 ? other : one;
                const unsigned to = collected + ((j + i / 2) % NEIGHBOURS * 8 + i % 2) * AREA_PITCH;
                const auto both = two(v[i % 2 * 2], v[i % 2 * 2 + 1]);
#if KIND == 0
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(both) : "memory");
#else
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(both.x), "f"(both.y) : "memory");
#endif
            }
        }
    }

    /// Stores what the warpgroup has collected of a part.
    template <int PART> __device__ __forceinline__ void store_part(const Places &places, int n, bool, int, int) const {
        places.meet_all();
        const int own = own_thread() % GROUP / PIECES;
        const unsigned from = area(own, own_thread() % PIECES * 16);
        const int *const to = places.from(PART * PART_POS + own);
        Element *const of_vector = s.y + n * s.y_n + at;
#pragma unroll(LOADS)
        for (int p = 0; p < PART_POS; p += AT_ONCE) {
            uint4 v;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from + p * AREA_PITCH) : "memory");
            put(of_vector + to[p], v, at != NOWHERE && to[p] != NOWHERE);
        }
    }

    __device__ __forceinline__ void finish() const {}
};
