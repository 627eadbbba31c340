// The input's pack beside the products of what is packed already.
//
// Of a block's producer warpgroup one warp copies; the other three do what `halo_pack_input` does, by pieces that all
// blocks take in turn, so that every piece is some running block's. A piece is as good as packed when its flag is set. A
// block packs so far ahead of the products that what they read is still in the second-level cache: the first piece that
// nobody has packed is never too far ahead for the warp that has it, as whoever waits has asked for that one or a later one.
//
// A line of rows is cut into units of VOXELS positions; 2^`shift` of them are a piece, at most 32, so that each has as many lanes
// of a warp, which share its panels: the first products wait for whole pieces. There are as many lines before the first position as
// `lead` rows take.
//
// The input has one slice, whose channels fill its panels, and these its chunks. It and its pack have fewer elements and
// pieces of 16 bytes than 2^31.

#pragma once

#include "divisor.cuh"
#include "hopper.cuh"
#include "operand.cuh"

/// Neighbours of a line that are read at once.
constexpr int VOXELS = KIND == 2 ? 2 : 4;
struct alignas(VOXELS * sizeof(Element)) Voxels {
    unsigned words[VOXELS * sizeof(Element) / 4];
};

/// What lines, planes and samples of rows, and lines of units, are counted by.
struct PackDivisors {
    const Divisor &line, &plane, &sample, &units;
};

struct PackAhead {
    const Element *x;
    uint4 *a;
    /// Control words: of those of `halo_pack_input` the first and the third; from the ninth on the piece that is taken next, the last
    /// one that products have asked for, and flags.
    unsigned *control;
    int a_rows, lead, n, depth, height, width, block, panels, x_n, x_c, x_d, x_h, x_w;
    /// Lines before the first, pieces, and how many of them the pack may be ahead of the products; 0 if there is nothing to pack.
    int before, shift, pieces, ahead;

    __device__ __forceinline__ int *next() const { return (int *)control + 8; }
    __device__ __forceinline__ static unsigned *reached(unsigned *control) { return control + 9; }
    __device__ __forceinline__ volatile unsigned *flags() const { return control + 10; }

    /// Waits, as a warp, until rows are packed that copies are to read, and lets packs go on from there.
    __device__ __forceinline__ void await(int first, int last, const PackDivisors &by) const {
        if (ahead == 0) return;
        const int end = piece_of(min(last, a_rows - 1), by);
        // Its address is made anew: producers have no registers to hold it in.
        unsigned *words = control;
        asm volatile("" : "+l"(words));
        if (threadIdx.x % 32 == 0) atomicMax(reached(words), end);
#pragma unroll 1
        for (int piece = piece_of(max(first, 0), by) + threadIdx.x % 32; piece <= end; piece += 32)
            while (flags()[piece] == 0) __nanosleep(32);
        __threadfence();
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncwarp();
    }

    /// Products ask for nothing more: what is left may be packed.
    __device__ __forceinline__ void finish() const {
        if (ahead > 0 && threadIdx.x % 32 == 0) atomicMax(reached(control), pieces);
    }

    /// A warp's share.
    __device__ __forceinline__ void pack(const PackDivisors &by) const {
        const int lane = threadIdx.x % 32;
        const float scale = KIND == 2 ? power(exponent(control[0])) : 1.0f;
        const unsigned apart = x_n | x_c | x_d | x_h;
        const bool vectors = x_w == 1 && (width | apart) % VOXELS == 0 && (unsigned long long)x % sizeof(Voxels) == 0;
        const bool last = x_c == 1 && ((unsigned long long)x | (x_n | x_d | x_h | x_w) * sizeof(Element)) % 16 == 0;
        unsigned most = 0, coarse = 0;
        int piece = take(lane);
#pragma unroll 1
        while (piece < pieces) {
            while (piece - (int)*(volatile unsigned *)reached(control) > ahead) __nanosleep(256);
#pragma unroll 1
            for (int i = lane; i < (vectors ? 32 : VOXELS << shift); i += 32) {
                const int unit = (piece << shift) + (vectors ? i & ((1 << shift) - 1) : i / VOXELS), of_all = by.units.divide(unit), line = of_all - before;
                const int at = (unit - of_all * by.units.by) * VOXELS + (vectors ? 0 : i % VOXELS);
                const int plane = by.plane.divide(max(line, 0)), sample = by.sample.divide(plane);
                const int h = line - plane * by.plane.by, d = plane - sample * by.sample.by;
                const bool here = line >= 0 && sample < n && d < depth && h < height && at < width;
                const int from = here ? sample * x_n + d * x_d + h * x_h + at * x_w : 0, row0 = lead + line * by.line.by;
                if (!vectors)
                    position(from, place(row0, at, by.line.by), here, last, scale, most, coarse);
                else if (block >= VOXELS)
                    unit_of<0>(from, row0, at, by.line.by, here, scale, most, coarse);
                else if (block == 1)
                    unit_of<1>(from, row0, at, by.line.by, here, scale, most, coarse);
                else
                    unit_of<VOXELS / 2>(from, row0, at, by.line.by, here, scale, most, coarse);
            }
            __syncwarp();
            if (lane == 0) {
                __threadfence();
                flags()[piece] = 1;
            }
            piece = take(lane);
        }
        if (KIND == 2) {
            if (coarse > 0) atomicAdd(&control[2], coarse);
        } else {
            raise(&control[0], as_float32(Element{}, largest(Element{}, most)));
        }
    }

private:
    /// The piece that a row is of.
    __device__ __forceinline__ int piece_of(int row, const PackDivisors &by) const {
        const int from = row - lead + before * by.line.by, line = by.line.divide(from);
        return (line * by.units.by + (from - line * by.line.by) * block / VOXELS) >> shift;
    }

    /// A piece, as the first lane sees it.
    __device__ __forceinline__ int take(int lane) const {
        int piece = 0;
        if (lane == 0) piece = atomicAdd(next(), 1);
        return __shfl_sync(0xffffffffu, piece, 0);
    }

    /// A position is coarse if all its channels lie below 2^-26 of the largest, but not all at zero.
    __device__ __forceinline__ static unsigned is_coarse(unsigned most, float scale) {
        return most > 0 && __uint_as_float(most) * scale < 0.000244140625f;
    }

    /// Where 16 bytes of a position of a line lie, of its first panel; negative if it has no row.
    __device__ __forceinline__ int place(int row0, int at, int pitch) const {
        const int jb = at >> block / 2, row = row0 + jb;
        return jb < pitch && row >= 0 && row < a_rows ? (at & (block - 1)) * (panels / block) * a_rows + row : -1;
    }

    /// A position's 16 bytes of a panel, in its parts.
    struct Pieces {
        uint4 part[PARTS];
    };

    /// Neighbouring positions of a line, `at` the first of them, channel by channel, of the lane's share of panels. With APART, two that are as far apart are in
    /// neighbouring rows: an even lane takes both lanes' first one, so that neighbouring lanes write neighbouring rows.
    template <int APART>
    __device__ __forceinline__ void unit_of(int from, int row0, int at, int pitch, bool here, float scale, unsigned &most, unsigned &coarse) const {
        constexpr int NEXT = APART > 0 ? APART : VOXELS;
        const int count = panels / block;
        const bool odd = threadIdx.x % 2;
        int to[VOXELS];
#pragma unroll
        for (int k = 0; k < VOXELS; k++) {
            to[k] = place(row0, at + k, pitch);
            if (k / NEXT % 2 == 1) exchange(to[k - NEXT], to[k], odd);
        }
        [[maybe_unused]] unsigned of_position[VOXELS] = {};
        const int share = threadIdx.x % 32 >> shift, shares = 32 >> shift, end = (share + 1) * count / shares;
        int p = share * count / shares;
        from += p * E * x_c;
#pragma unroll 1
        for (; p < end; p++) {
            // Multiples of what does not change would be held in registers.
            int step = x_c;
            asm volatile("" : "+r"(step));
            Voxels some[E];
#pragma unroll
            for (int e = 0; e < E; e++) {
                some[e] = Voxels{};
                if (here) some[e] = *(const Voxels *)(x + from);
                from += step;
            }
            const auto pieces_of = [&](int k) {
                alignas(16) Element v[E];
#if KIND == 0
#pragma unroll
                for (int e = 0; e < E; e += 2)
                    *(unsigned *)&v[e] = __byte_perm(some[e].words[k / 2], some[e + 1].words[k / 2], k % 2 ? 0x7632 : 0x5410);
#else
#pragma unroll
                for (int e = 0; e < E; e++) v[e] = __uint_as_float(some[e].words[k]);
#endif
                unsigned &largest = KIND == 2 ? of_position[k] : most;
                largest = larger(largest, v);
                return in_parts(v, scale);
            };
#pragma unroll
            for (int k = 0; k < VOXELS; k++) {
                if (APART == 0) write(pieces_of(k), to[k], p);
                if (APART == 0 || k / NEXT % 2 == 1) continue;
                Pieces one = pieces_of(k), other = pieces_of(k + NEXT);
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    exchange(one.part[part].x, other.part[part].x, odd), exchange(one.part[part].y, other.part[part].y, odd);
                    exchange(one.part[part].z, other.part[part].z, odd), exchange(one.part[part].w, other.part[part].w, odd);
                }
                write(one, to[k], p);
                write(other, to[k + NEXT], p);
            }
        }
#if KIND == 2
#pragma unroll
        for (int k = 0; k < VOXELS; k++) {
#pragma unroll 1
            for (int other = 1 << shift; other < 32; other *= 2)
                of_position[k] = max(of_position[k], __shfl_xor_sync(0xffffffffu, of_position[k], other));
            if (share == 0) coarse += is_coarse(of_position[k], scale);
        }
#endif
    }

    /// The odd lane's first for the even lane's second.
    template <typename T> __device__ __forceinline__ static void exchange(T &first, T &second, bool odd) {
        const T given = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
        first = odd ? given : first;
        second = odd ? second : given;
    }

    __device__ __forceinline__ static Pieces in_parts(const Element (&v)[E], float scale) {
        Pieces pieces;
        pieces.part[0] = operand(v, scale, &pieces.part[PARTS - 1]);
        return pieces;
    }

    /// Writes what is of a panel, `to` being its place in the first one.
    __device__ __forceinline__ void write(const Pieces &pieces, int to, int panel) const {
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            if (to >= 0) a[to + (part * panels + panel) * a_rows] = pieces.part[part];
    }

    /// One position; `last` reads whole 16 bytes of channels that lie together.
    __device__ __forceinline__ void position(int from, int to, bool here, bool last, float scale, unsigned &most, unsigned &coarse) const {
        constexpr int PIECES = E * sizeof(Element) / 16, AT_ONCE = KIND == 2 ? 1 : 4;
        const int count = panels / block;
        unsigned of_position = KIND == 2 ? 0 : most;
#pragma unroll 1
        for (int p = 0; p < count; p += AT_ONCE) {
            int step = x_c;
            asm volatile("" : "+r"(step));
            alignas(16) Element v[AT_ONCE][E];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
                for (int e = 0; e < E; e++) v[i][e] = Element{};
                if (!here || p + i >= count) continue;
                if (last) {
#pragma unroll
                    for (int j = 0; j < PIECES; j++)
                        *(uint4 *)&v[i][j * 16 / sizeof(Element)] = *((const uint4 *)(x + from) + (p + i) * PIECES + j);
                } else {
#pragma unroll
                    for (int e = 0; e < E; e++) v[i][e] = x[from + ((p + i) * E + e) * step];
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (p + i >= count) break;
                of_position = larger(of_position, v[i]);
                write(in_parts(v[i], scale), to, p + i);
            }
        }
        if (KIND == 2)
            coarse += is_coarse(of_position, scale);
        else
            most = of_position;
    }
};
