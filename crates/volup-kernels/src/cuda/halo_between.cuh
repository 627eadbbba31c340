// How `halo_gemm` writes outputs on a lattice with what is between them, which no tap reaches: the channel's bias through the activation.
//
// Of every plane along depth that has outputs a tile owns lines of y: those of its outputs and what is before the next one's. A run, what
// it owns of a plane and channel, is made in shared memory and stored by the copy engine. Runs meet between lines of outputs, where a
// sector starts; only at the ends of planes are sectors written in part, element by element. Planes without outputs are written by the
// producer's warps that have nothing else to do.
//
// As many channels as a sector has elements have places in shared memory. Each serves for all channels that are a multiple of that number
// apart, as they start equally far from a sector. What is between outputs stays there, unless channels differ in it.

#pragma once

#include "divisor.cuh"
#include "halo_epilogue.cuh"
#include "halo_tiles.cuh"
#include "store_async.cuh"

struct Between {
    static constexpr int SIZE = sizeof(Element), SECTOR = 32;
    /// Channels at once, and those that have places; the most planes of a tile.
    static constexpr int AT_ONCE = 8, PLACES = SECTOR / SIZE, PLANES = 8;
    /// What a tile owns of a plane: elements from the tile's first sample on, of the first channel; where it is in a channel's place;
    /// whether its start and end are between lines.
    struct Run {
        int start, end, place, between;
    };
    /// A run of a place's first channel: whole sectors, where they go and are, and how many elements there are before and behind.
    struct Store {
        char *to;
        unsigned from;
        int bytes, before, behind;
    };
    /// Warps that write planes without outputs, and bytes that one of them stores at once.
    static constexpr int FILLERS = 3, PIECE = 2048;
    static constexpr int TABLES = 128 + 32 * PLANES * PLACES;
    static_assert(sizeof(Run) * PLANES <= 128 && sizeof(Store) <= 32);

    /// Elements of a plane, before its first output, and from a line's first output to the line's end. Bytes of a place.
    int plane, head, past, bytes;
    /// The runs and stores, behind which are the places.
    char *memory;

    __device__ static constexpr int room(int bytes) { return TABLES + PLACES * bytes + FILLERS * PIECE; }
    __device__ __forceinline__ Run *runs() const { return (Run *)memory; }
    __device__ __forceinline__ Store *store_of(int run, int place) const { return (Store *)(memory + 128 + 32 * (run * PLACES + place)); }
    __device__ __forceinline__ char *place(int channel) const { return memory + TABLES + channel % PLACES * bytes; }
    __device__ __forceinline__ static void meet() { asm volatile("bar.sync %0, %1;" ::"n"(WGS + 1), "n"(CONSUMERS) : "memory"); }
    /// Until the copy engine has read all but the last stores.
    template <int LAST> __device__ __forceinline__ static void await_read() {
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LAST) : "memory");
    }

    /// A value in each element of a vector.
    __device__ __forceinline__ static uint4 alike(float v) {
        Element e;
        narrow(v, &e);
        unsigned word;
        if constexpr (SIZE == 4)
            word = *(const unsigned *)&e;
        else
            word = *(const unsigned short *)&e * 0x10001u;
        return make_uint4(word, word, word, word);
    }

    /// The run of a tile's plane.
    __device__ __forceinline__ Run run(const Sizes &s, const Divisors &by, const Tile &t, int of_tile) const {
        const int line0 = by.line.divide(t.row0), end = min(line0 + s.advance / s.pw, s.rows / s.pw);
        const int number = by.height.divide(line0) + of_tile, n = by.depth.divide(number), od = (number - n * s.pd) * s.d.stride + s.d.shift + t.phase.rd;
        const int sample0 = by.depth.divide(by.height.divide(line0)), before = max(line0, number * s.ph);
        const int first = max(before - number * s.ph + s.h.shift, 0), last = min(min(end, (number + 1) * s.ph) - number * s.ph + s.h.shift, s.h.out);
        const int output0 = (n - sample0) * s.y_n + od * s.y_d;
        if (first >= last || (unsigned)od >= (unsigned)s.d.out) return {0, 0, 0, 0};
        return {first > 0 ? output0 + (first - 1) * s.y_h + past : output0 - head,
                last < s.h.out ? output0 + (last - 1) * s.y_h + past : output0 - head + plane,
                (((before - line0 + of_tile) * s.y_h * SIZE + SECTOR - 1) & -SECTOR) + 2 * SECTOR * of_tile, (first > 0) | (last < s.h.out) << 1};
    }

    /// How a channel's run is stored; `y` is where the channel starts.
    __device__ __forceinline__ Store stored(const Run &run, Element *y, const char *place) const {
        // Bytes from y on, which is `low` behind a sector's start.
        const int low = (int)((unsigned long long)y % SECTOR), start = run.start * SIZE, end = run.end * SIZE;
        const auto up = [&](int at) { return ((at + low + SECTOR - 1) & -SECTOR) - low; };
        const int first = run.between & 1 ? up(start) : start, last = run.between & 2 ? up(end) : end;
        int whole = up(first), past_whole = up(last - SECTOR + 1);
        if (whole > past_whole) whole = past_whole = last;
        return {(char *)y + whole, shared(place) + run.place + whole - up(start - SECTOR + 1), past_whole - whole, (whole - first) / SIZE, (last - past_whole) / SIZE};
    }

    /// Writes a tile's outputs of whole columns, which are channels, and all between them. `y` is of the tile's first sample and channel;
    /// `beside` tells the values where no tap reaches.
    template <typename Beside>
    __device__ __forceinline__ void write(const float (&sum)[MI][REGISTERS], const Sizes &s, const Divisors &by, const Tile &t, Element *y,
                                          int channels, const Beside &beside) const {
        // What is between outputs, in the places of so many channels.
        const auto fill = [&](int channel, int count) {
#pragma unroll 1
            for (int c = channel; c < channel + count; c++) {
                const uint4 v = beside(c);
#pragma unroll 2
                for (int i = threadIdx.x * 16; i < bytes; i += CONSUMERS * 16) *(uint4 *)(place(c) + i) = v;
            }
        };
        await_read<0>();
        meet();
        if (threadIdx.x < PLANES) runs()[threadIdx.x] = run(s, by, t, threadIdx.x);
        if (!s.has_bias) fill(0, PLACES);
        meet();
        if (threadIdx.x < PLANES * PLACES) {
            const int of = threadIdx.x / PLACES, channel = threadIdx.x % PLACES;
            *store_of(of, channel) = stored(runs()[of], y + (long long)channel * s.y_c, place(channel));
        }
        // Where this lane's rows are in a channel's place, and how far from a sector their run starts if the channel does at one.
        int at[2 * MI];
        {
            const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, plane0 = by.height.divide(by.line.divide(t.row0)), sample0 = by.depth.divide(plane0);
#pragma unroll
            for (int i = 0; i < 2 * MI; i++) {
                const int of_tile = warp * ROWS + 8 * i + lane / 4, row = t.row0 + of_tile;
                const int line = by.line.divide(row), jw = row - line * s.pw, number = by.height.divide(line), jh = line - number * s.ph;
                const int n = by.depth.divide(number), od = (number - n * s.pd) * s.d.stride + s.d.shift + t.phase.rd, oh = jh + s.h.shift, ow = jw + s.w_shift;
                const bool here = of_tile < s.advance && row < s.rows && (unsigned)od < (unsigned)s.d.out && (unsigned)oh < (unsigned)s.h.out &&
                                  (unsigned)ow < (unsigned)s.w_out;
                const Run own = runs()[min(number - plane0, PLANES - 1)];
                const int output = (n - sample0) * s.y_n + od * s.y_d + oh * s.y_h + ow * s.y_w;
                at[i] = here ? (own.place + (output - own.start) * SIZE) * SECTOR | (int)(((unsigned)(unsigned long long)y + own.start * SIZE) % SECTOR) : -1;
            }
        }
#pragma unroll 1
        for (int channel = 0; channel < min(BN, channels); channel += AT_ONCE) {
            const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
            await_read<PLACES / AT_ONCE - 1>();
            meet();
            if (s.has_bias) {
                fill(channel, AT_ONCE);
                meet();
            }
            const unsigned shift = (unsigned)(channel + lane % 4 * 2) * s.y_c * SIZE;
            char *const to_place = place(channel + lane % 4 * 2);
            // Which registers the sums of eight channels are has to be known when this is compiled, which would make one of all cases.
#pragma unroll
            for (int of = 0; of < BN; of += AT_ONCE)
                if (of == channel) {
                    asm volatile("" ::"r"(of));
#pragma unroll
                    for (int i = 0; i < 2 * MI; i++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            Element v;
                            narrow(sum[i % MI][of / 2 + i / MI * 2 + e], &v);
                            if (at[i] >= 0) *(Element *)(to_place + e * bytes + at[i] / SECTOR + (at[i] + shift + e * s.y_c * SIZE) % SECTOR) = v;
                        }
                }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            meet();
            // A warp stores a run of one of the channels, then another.
#pragma unroll 1
            for (int job = warp; job < AT_ONCE * PLANES; job += CONSUMERS / 32) {
                const int c = channel + job % AT_ONCE;
                const Store of = *store_of(job / AT_ONCE, c % PLACES);
                if (c >= channels) continue;
                char *const to = of.to + (long long)(c / PLACES * PLACES) * s.y_c * SIZE;
                if (lane == 0 && of.bytes) store((Element *)to, of.from, of.bytes);
                const int end = lane < of.before ? -lane - 1 : of.bytes / SIZE + lane - of.before;
                if (lane < of.before + of.behind) ((Element *)to)[end] = *(const Element *)(memory + (of.from - shared(memory)) + end * SIZE);
            }
            if (lane == 0) ::stored();
        }
    }

    /// Planes that have no outputs, by the producer's other warps. `y` is all of it, `n` samples of `channels`
    /// channels of `depth` planes, of which every `step`-th from `has` on has outputs.
    template <typename Beside>
    __device__ __forceinline__ void planes(Element *y, int n, int channels, int depth, int has, int step, const Beside &beside) const {
        // Each warp has neighbours, of few channels.
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - CONSUMERS / 32 - 1, empty = depth - (depth - has + step - 1) / step;
        const long long all = (long long)n * channels * empty;
        const int warps = gridDim.x * FILLERS, mine = blockIdx.x * FILLERS + warp, end = (int)(all * (mine + 1) / warps);
        char *const piece = place(0) + PLACES * bytes + warp * PIECE;
        int known = -1;
        for (int at = (int)(all * mine / warps); at < end; at++) {
            const int i = at / empty, of = at - i * empty, past = of - has, d = past < 0 ? of : has + past / (step - 1) * step + past % (step - 1) + 1;
            if (i != known) {
                const uint4 v = beside(i % channels);
                if (lane == 0) await_read<0>();
                __syncwarp();
                for (int k = lane * 16; k < PIECE; k += 32 * 16) *(uint4 *)(piece + k) = v;
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                __syncwarp();
                known = i;
            }
            Element *const start = y + ((long long)i * depth + d) * plane;
            const Store of_plane = stored({0, plane, 0, 0}, start, piece);
            if (lane == 0) {
                for (int k = 0; k < of_plane.bytes; k += PIECE) store((Element *)(of_plane.to + k), shared(piece), min(of_plane.bytes - k, PIECE));
                ::stored();
            }
            if (lane < of_plane.before) start[lane] = *(const Element *)piece;
            if (lane < of_plane.behind) ((Element *)(of_plane.to + of_plane.bytes))[lane] = *(const Element *)piece;
        }
        if (lane == 0) finish();
    }

    /// Before a block ends.
    __device__ __forceinline__ static void finish() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
};
