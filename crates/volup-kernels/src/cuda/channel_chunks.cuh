// Tensors of the output's size, dealt out to blocks in chunks: vectors of VECTOR elements, four of a thread in flight.
//
// - NCDHW (LAST 0): a row is a channel of a sample, `voxels` elements. Chunks start at multiples of VECTOR elements of the
//   tensor, `chunks = ceil((voxels + VECTOR - 1) / (TURNS*VECTORS*256*VECTOR))` a row, the last may be empty. Blocks:
//   rows * chunks.
// - NDHWC (LAST 1): VECTOR divides the channels. A block has up to 256 vectors of channels, `channel_blocks` of them a
//   position, `high = 256 / min(channels/VECTOR, 256)` positions side by side, chunks of TURNS*VECTORS*high positions.
//   Blocks: samples * chunks * channel_blocks, the last fastest.

#pragma once

#include "element.cuh"

#include <type_traits>

#if !defined(LAST) || !defined(VECTOR)
#error "LAST: channels last; VECTOR: elements of a load"
#endif

constexpr int THREADS = 256, VECTORS = 4, TURNS = 8;

/// A vector of elements.
struct __align__(VECTOR * sizeof(Element)) Vector {
    Element of[VECTOR];
};

/// One as it is loaded: of vectors of narrow elements the compiler would move every one.
using Words = std::conditional_t<sizeof(Vector) == 16, uint4, std::conditional_t<sizeof(Vector) == 8, uint2, Element>>;

/// Stores a vector at once: the compiler would store its elements one by one.
__device__ __forceinline__ void put(Element *to, const Vector &v) {
    if constexpr (sizeof(Vector) == 16) {
        const uint4 words = *(const uint4 *)&v;
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");
    } else if constexpr (sizeof(Vector) == 8) {
        const uint2 words = *(const uint2 *)&v;
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words.x), "r"(words.y) : "memory");
    } else {
        *(Vector *)to = v;
    }
}

/// What of a tensor is this thread's.
struct Share {
    int sample, chunk;
    /// The thread's first channel: of NDHWC the vector's others follow it.
    int channel;
    /// Threads that have the same channels, and which of them this is.
    int high, own;
    /// Where the vectors lie, and which elements from `base` on are of the chunk.
    long long base;
    int from, to, pitch;

    /// That of a block by its number.
    __device__ __forceinline__ Share(int voxels, int channels, int chunks, int channel_blocks, int block) {
        int at = block;
#if LAST == 0
        chunk = at % chunks;
        const int row = at / chunks;
        sample = row / channels;
        channel = row - sample * channels;
        high = THREADS;
        own = threadIdx.x;
        const long long start = (long long)row * voxels;
        base = start / VECTOR * VECTOR + (long long)chunk * (TURNS * VECTORS * THREADS * VECTOR);
        from = (int)max(start - base, 0ll);
        to = (int)min(max(start + voxels - base, 0ll), (long long)(TURNS * VECTORS * THREADS * VECTOR));
        pitch = VECTOR;
#else
        const int across_all = channels / VECTOR, channel_block = at % channel_blocks;
        at /= channel_blocks;
        chunk = at % chunks;
        sample = at / chunks;
        const int across = min(across_all - channel_block * THREADS, THREADS), widest = min(across_all, THREADS);
        high = THREADS / widest;
        own = threadIdx.x / widest;
        channel = (channel_block * THREADS + threadIdx.x % widest) * VECTOR;
        const int first = chunk * (TURNS * VECTORS * high);
        base = ((long long)sample * voxels + first) * channels + channel;
        from = 0;
        to = own < high && threadIdx.x % widest < across ? min(voxels - first, TURNS * VECTORS * high) : 0;
        pitch = channels;
#endif
    }

    /// Elements of vector `k`, from its start on, that are there: `lo..hi`.
    __device__ __forceinline__ void range(int k, int &lo, int &hi) const {
        const int at = k * high + own;
#if LAST == 0
        lo = min(max(from - at * VECTOR, 0), VECTOR);
        hi = max(min(to - at * VECTOR, VECTOR), lo);
#else
        lo = 0;
        hi = at < to ? VECTOR : 0;
#endif
    }
    __device__ __forceinline__ long long offset(int k) const { return base + (long long)(k * high + own) * pitch; }

    /// Turns that have any of them.
    __device__ __forceinline__ int turns() const {
        const int of_turn = VECTORS * high * (LAST ? 1 : VECTOR);
        return (to + of_turn - 1) / of_turn;
    }

    /// Where vector `k` begins, and whether all of it is there; those that are there in part are few.
    __device__ __forceinline__ bool whole(int k) const {
        int lo, hi;
        range(k, lo, hi);
        return hi - lo == VECTOR;
    }
    __device__ __forceinline__ bool partly(int k) const {
        int lo, hi;
        range(k, lo, hi);
        return hi > lo && hi - lo < VECTOR;
    }

    /// A turn's vectors of a tensor, zeros where nothing is.
    __device__ __forceinline__ void load(const Element *x, int turn, Vector (&v)[VECTORS]) const {
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            v[k] = Vector{};
            if (whole(turn * VECTORS + k)) v[k] = *(const Vector *)(x + offset(turn * VECTORS + k));
        }
#pragma unroll
        for (int k = 0; k < (LAST ? 0 : VECTORS); k++)
            if (partly(turn * VECTORS + k)) {
                int lo, hi;
                range(turn * VECTORS + k, lo, hi);
#pragma unroll
                for (int e = 0; e < VECTOR; e++)
                    if (e >= lo && e < hi) v[k].of[e] = x[offset(turn * VECTORS + k) + e];
            }
    }

    /// Vector `k` alone.
    __device__ __forceinline__ Words load(const Element *x, int k) const {
        Words words = {};
        const int at = (k * high + own) * (LAST ? 1 : VECTOR), elements = LAST ? 1 : VECTOR;
        if (at >= from && at + elements <= to) {
            words = *(const Words *)(x + offset(k));
        } else if (LAST == 0 && partly(k)) {
            int lo, hi;
            range(k, lo, hi);
            Vector v = {};
#pragma unroll
            for (int e = 0; e < VECTOR; e++)
                if (e >= lo && e < hi) v.of[e] = x[offset(k) + e];
            words = *(const Words *)&v;
        }
        return words;
    }

    __device__ __forceinline__ void store(Element *y, int turn, const Vector (&v)[VECTORS]) const {
#pragma unroll
        for (int k = 0; k < VECTORS; k++)
            if (whole(turn * VECTORS + k)) put(y + offset(turn * VECTORS + k), v[k]);
#pragma unroll
        for (int k = 0; k < (LAST ? 0 : VECTORS); k++)
            if (partly(turn * VECTORS + k)) {
                int lo, hi;
                range(turn * VECTORS + k, lo, hi);
#pragma unroll
                for (int e = 0; e < VECTOR; e++)
                    if (e >= lo && e < hi) y[offset(turn * VECTORS + k) + e] = v[k].of[e];
            }
    }
};
