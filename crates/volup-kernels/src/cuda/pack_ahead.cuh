// The input's pack beside the products of what is packed already.
//
// Of a block's producer warpgroup one warp copies; the other three do what `halo_pack_input` does, by pieces that all
// blocks take in turn, so that every piece is some running block's. A piece is as good as packed when its flag is set. A
// block packs so far ahead of the products that what they read is still in the second-level cache: the first piece that
// nobody has packed is never too far ahead for the warp that has it, as whoever waits has asked for that one or a later one.
//
// A line of rows is cut into units of VOXELS positions, 4 or, of 16 bits, 8; 2^`shift` of them are a piece, 8, 16 or 32, so that each has as many lanes
// of a warp, which share its panels: the first products wait for whole pieces. There are as many lines before the first position as
// `lead` rows take. What is read goes to shared memory, so that more is under way than there are registers for, and neighbouring lanes
// write neighbouring rows of what was read along x.
//
// The input has one slice, whose channels fill its panels, and these its chunks. It and its pack have fewer elements and
// pieces of 16 bytes than 2^31. What has two parts is packed before: a product of those needs the ring's shared memory itself.

#pragma once

#include "copy_async.cuh"
#include "divisor.cuh"
#include "hopper.cuh"
#include "operand.cuh"
#include "warp_meet.cuh"

/// Neighbours of a line that are a unit, and those that are read at once where a line is no whole number of units.
#ifndef PACK_VOXELS
#define PACK_VOXELS 4
#endif
constexpr int VOXELS = PACK_VOXELS, LEAST = 4, UNITS_OF_SLOT = 32 / VOXELS;
static_assert(VOXELS == LEAST || VOXELS == 2 * LEAST && !SCALED);
/// In how many parts, of so many bytes, a warp that packs brings x to shared memory one after the other, at least; more are for units.
#ifdef MORE_PACK_ROUNDS
constexpr bool MAY_HAVE_MORE = true;
#else
constexpr bool MAY_HAVE_MORE = false;
#endif
constexpr int ROUNDS = 2, MORE_ROUNDS = 3, ROUND = 32 * VOXELS * E * sizeof(Element);

/// Whether it looks for the largest magnitude, so that the definition computes where there are infinities or NaN: with a kernel that
/// multiplies rows by weights that are none, or gaps between.
#ifndef PACK_ASKS
#define PACK_ASKS 1
#endif
constexpr bool ASKS = SCALED || PACK_ASKS;

/// Bytes of 32 positions of four panels, and how many of them a ring has room for.
constexpr int POSITION_ROUND = 32 * 4 * E * sizeof(Element), POSITION_SLOTS = ROUNDS * ROUND / POSITION_ROUND;
static_assert(POSITION_SLOTS >= 2);
/// As many of their panels, and of a lane's copies, as there are registers for at once.
constexpr int PANELS_AT_ONCE = !MAY_HAVE_MORE ? 1 : WGS == 4 ? 2 : 4;

/// What lines, planes and samples of rows, and lines of units, are counted by.
struct PackDivisors {
    const Divisor &line, &plane, &sample, &units;
};

/// What a warp that packs does else, between pieces and while it waits: nothing.
struct PacksOnly {
    __device__ __forceinline__ void meanwhile() const {}
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
    /// ROUNDS or MORE_ROUNDS.
    int parts = ROUNDS;

    // Their addresses are made anew: there are no registers to hold them in.
    __device__ __forceinline__ int *next() const { return (int *)words() + 8; }
    __device__ __forceinline__ unsigned *reached() const { return words() + 9; }
    __device__ __forceinline__ unsigned *flags() const { return words() + 10; }
    __device__ __forceinline__ unsigned *words() const {
        unsigned *here = control;
        asm volatile("" : "+l"(here));
        return here;
    }

    /// Waits, as a warp, until rows are packed that copies are to read, and lets packs go on from there.
    __device__ __forceinline__ void await(int first, int last, const PackDivisors &by) const {
        if (ahead == 0) return;
        const int end = piece_of(min(last, a_rows - 1), by);
        if (threadIdx.x % 32 == 0) atomicMax(reached(), end);
#pragma unroll 1
        for (int piece = piece_of(max(first, 0), by) + threadIdx.x % 32; piece <= end; piece += 32)
            while (!is_set(piece)) __nanosleep(32);
        __syncwarp();
        asm volatile("fence.proxy.async;" ::: "memory");
    }

    /// Products ask for nothing more: what is left may be packed.
    __device__ __forceinline__ void finish() const {
        if (ahead > 0 && threadIdx.x % 32 == 0) atomicMax(reached(), pieces);
    }

    /// A warp's share, in the shared memory of all that pack.
    template <typename Else = PacksOnly> __device__ __forceinline__ void pack(const PackDivisors &by, char *rings, const Else &other = {}) const {
        const float scale = SCALED ? power(input_exponent(control)) : 1.0f;
        unsigned most = 0;
        char *const ring = rings + (own_thread() / 32 % 4 - 1) * parts * ROUND;
        const unsigned apart = x_n | x_c | x_d | x_h;
        if (x_w == 1 && (width | apart) % LEAST == 0 && (unsigned long long)x % (LEAST * sizeof(Element)) == 0) {
            if (MAY_HAVE_MORE && parts == MORE_ROUNDS && (panels / block >> 5 - shift) >= MORE_ROUNDS - 1)
                by_units<MORE_ROUNDS - 1>(by, ring, scale, most, other);
            else
                by_units<ROUNDS - 1>(by, ring, scale, most, other);
        } else if (x_c == 1 && ((unsigned long long)x | (x_n | x_d | x_h | x_w) * sizeof(Element)) % 16 == 0) {
            if ((panels / block + 3) / 4 * slots() >= POSITION_SLOTS - 1)
                by_channels<POSITION_SLOTS - 1>(by, ring, scale, most, other);
            else
                by_channels<1>(by, ring, scale, most, other);
        } else {
            int piece = take();
#pragma unroll 1
            while (piece < pieces) {
                await_turn(piece, other);
                // What follows from these would be held in registers from piece to piece.
                PackAhead anew = *this;
                asm volatile("" : "+r"(anew.shift), "+r"(anew.panels), "+r"(anew.x_c), "+r"(anew.x_w));
                anew.by_positions(by, piece, ring, scale, most);
                publish(piece);
                piece = take();
            }
        }
        if (ASKS && !SCALED) raise(&control[0], as_float32(Element{}, largest(Element{}, most)));
    }

private:
    /// The piece that a row is of.
    __device__ __forceinline__ int piece_of(int row, const PackDivisors &by) const {
        const int from = row - lead + before * by.line.by, line = by.line.divide(from);
        return (line * by.units.by + (from - line * by.line.by) * block / VOXELS) >> shift;
    }

    /// A piece that is this warp's: the first lane asks for it, of which all hear when they need it.
    __device__ __forceinline__ int ask() const { return threadIdx.x % 32 == 0 ? atomicAdd(next(), 1) : 0; }
    __device__ __forceinline__ int take() const { return __shfl_sync(0xffffffffu, ask(), 0); }

    /// Waits until a piece is no longer too far ahead.
    template <typename Else> __device__ __forceinline__ void await_turn(int piece, const Else &other) const {
        other.meanwhile();
        while (piece - (int)*(volatile unsigned *)reached() > ahead) {
            __nanosleep(256);
            other.meanwhile();
        }
    }

    /// Says that a piece is packed.
    __device__ __forceinline__ void publish(int piece) const {
        if (threadIdx.x % 32 == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flags() + piece) : "memory");
    }

    /// Whether a piece is packed: then what it is can be read. A fence that is more than this takes microseconds beside so many writes.
    __device__ __forceinline__ bool is_set(int piece) const {
        unsigned flag;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(flag) : "l"(flags() + piece) : "memory");
        return flag != 0;
    }

    /// Where 16 bytes of a position of a line lie, of its first panel; negative if it has no row.
    __device__ __forceinline__ int place(int row0, int at, int pitch) const {
        const int jb = at >> block / 2, row = row0 + jb;
        return jb < pitch && row >= 0 && row < a_rows ? (at & (block - 1)) * (panels / block) * a_rows + row : -1;
    }

    /// This thread, anew for each piece, as above.
    __device__ __forceinline__ static int own_thread() {
        int thread = threadIdx.x;
        asm volatile("" : "+r"(thread));
        return thread;
    }

    /// What a lane knows of its unit of a piece: its first row's line, where it starts in its line, and in x, negative if it is not there.
    struct Unit {
        int row0, at, from;
    };

    __device__ __forceinline__ Unit unit(const PackDivisors &by, int piece, int lane) const {
        const int index = (piece << shift) + (lane & ((1 << shift) - 1)), of_all = by.units.divide(index), line = of_all - before;
        const int at = (index - of_all * by.units.by) * VOXELS, plane = by.plane.divide(max(line, 0)), sample = by.sample.divide(plane);
        const int h = line - plane * by.plane.by, d = plane - sample * by.sample.by;
        const bool here = line >= 0 && sample < n && d < depth && h < height && at < width;
        return {lead + line * by.line.by, at, here ? sample * x_n + d * x_d + h * x_h + at * x_w : -1};
    }

    /// The place, and where it is in x, of a position of this lane, the `slot`th 32 positions on; past the piece's last one they start anew.
    __device__ __forceinline__ int2 position(const Unit &own, int slot, int pitch, int lane) const {
        const int owner = (slot * 32 + lane) / VOXELS & ((1 << shift) - 1);
        const int row0 = __shfl_sync(0xffffffffu, own.row0, owner), at = __shfl_sync(0xffffffffu, own.at, owner) + lane % VOXELS;
        const int start = __shfl_sync(0xffffffffu, own.from, owner);
        return {place(row0, at, pitch), start >= 0 && at < width ? start + lane % VOXELS * x_w : -1};
    }

    /// Runs rounds: what one loads is under way while those before it are written.
    template <typename Load, typename Write> __device__ __forceinline__ static void run(int rounds, const Load &load, const Write &write) {
#pragma unroll
        for (int round = 0; round < ROUNDS - 1; round++) {
            if (round < rounds) load(round);
            end_copies();
        }
#pragma unroll 1
        for (int round = 0; round < rounds; round++) {
            if (round + ROUNDS - 1 < rounds) load(round + ROUNDS - 1);
            end_copies();
            await_copies<ROUNDS - 1>();
            meet();
            write(round);
            meet();
        }
    }

    /// Writes what is of a panel, as many pieces on as `to` says.
    __device__ __forceinline__ void write(const Element (&v)[E], int to, float scale) const {
        const uint4 of_panel = operand(v, scale, nullptr);
        if (to >= 0) a[to] = of_panel;
    }

    /// Counts positions that are left to the definition, of which there are seldom any.
    __device__ __forceinline__ void count(bool coarse) const {
        if (coarse) atomicAdd(&control[2], 1);
    }

    /// Pieces whose units are vectors: a round is E channels of 32 of them. Lanes of the same unit share its panels. So many rounds are
    /// under way, those of the next piece, too: a piece is too short to wait for the memory at its start.
    template <int UNDER_WAY, typename Else>
    __device__ __forceinline__ void by_units(const PackDivisors &by, char *ring, float scale, unsigned &most, const Else &other) const {
        const int lane = own_thread() % 32, rounds = panels / block >> 5 - shift;
        // Where a piece's reads start, negative if nothing is there, and whether all of the unit is.
        struct Start {
            int from;
            bool whole;
        };
        const auto start = [&](int piece) {
            const Unit own = unit(by, piece, lane);
            return Start{own.from >= 0 ? own.from + (lane >> shift) * rounds * E * x_c : -1, own.from >= 0 && own.at + LEAST < width};
        };
        const bool wide = (width | x_n | x_c | x_d | x_h) % VOXELS == 0 && (unsigned long long)x % (VOXELS * sizeof(Element)) == 0;
        const auto load = [&](Start at, int round, int slot) {
            const bool there = at.from >= 0;
            const unsigned to = shared(ring) + slot * ROUND + lane * VOXELS * sizeof(Element);
            int step = there ? x_c : 0;
            asm volatile("" : "+r"(step));
            const Element *channel = x + (there ? at.from + round * E * step : 0);
#pragma unroll
            for (int e = 0; e < E; e++, channel += step) {
                const unsigned of_channel = to + e * 32 * VOXELS * sizeof(Element);
                if (VOXELS == LEAST || wide) {
                    copy_async<VOXELS * sizeof(Element)>(of_channel, channel, there);
                } else {
                    // The second half may be past the line's end.
                    copy_async<LEAST * sizeof(Element)>(of_channel, channel, there);
                    copy_async<LEAST * sizeof(Element)>(of_channel + LEAST * sizeof(Element), at.whole ? channel + LEAST : x, at.whole);
                }
            }
        };
        int piece = take(), asked = ask();
        if (piece >= pieces) return;
        // Where it reads; slots of the ring that are read, and loaded, next.
        Start from = start(piece);
        int now = 0, then = 0;
        const auto on = [](int slot) { return slot + 1 == UNDER_WAY + 1 ? 0 : slot + 1; };
#pragma unroll
        for (int round = 0; round < UNDER_WAY; round++, then = on(then)) {
            load(from, round, then);
            end_copies();
        }
#pragma unroll 1
        while (piece < pieces) {
            // What follows from it would be held in registers from piece to piece.
            int a_rows = this->a_rows;
            asm volatile("" : "+r"(a_rows));
            int to[VOXELS];
            const Unit own = unit(by, piece, lane);
            // Slots of the same positions are of later panels.
#pragma unroll
            for (int slot = 0; slot < VOXELS; slot++) {
                to[slot] = position(own, slot, by.line.by, lane).x;
                if (to[slot] >= 0) to[slot] += (slot * UNITS_OF_SLOT >> shift) * rounds * a_rows;
            }
            const int next = __shfl_sync(0xffffffffu, asked, 0);
            Start next_from = {-1, false};
            if (next < pieces) {
                asked = ask();
                next_from = start(next);
            }
            await_turn(piece, other);
            [[maybe_unused]] unsigned of_position[VOXELS] = {};
#pragma unroll 1
            for (int round = 0; round < rounds; round++) {
                const int later = round + UNDER_WAY;
                if (later < rounds || next < pieces) load(later < rounds ? from : next_from, later < rounds ? later : later - rounds, then);
                end_copies();
                await_copies<UNDER_WAY>();
                meet();
                const Element *const slot0 = (const Element *)(ring + now * ROUND) + lane;
#pragma unroll
                for (int slot = 0; slot < VOXELS; slot++) {
                    alignas(16) Element v[E];
#pragma unroll
                    for (int e = 0; e < E; e++) v[e] = slot0[(e * VOXELS + slot) * 32];
                    unsigned &largest = SCALED ? of_position[slot] : most;
                    if (ASKS) largest = larger(largest, v);
                    write(v, to[slot] >= 0 ? to[slot] + round * a_rows : -1, scale);
                }
                meet();
                now = on(now), then = on(then);
            }
#if SCALED
            if (shift < 5) {
                of_position[0] = max(of_position[0], of_position[2]), of_position[1] = max(of_position[1], of_position[3]);
                of_position[2] = of_position[3] = 0;
            }
            if (shift < 4) of_position[0] = max(of_position[0], of_position[1]), of_position[1] = 0;
#pragma unroll
            for (int slot = 0; slot < VOXELS; slot++) count(is_coarse(of_position[slot], scale));
#endif
            publish(piece);
            piece = next, from = next_from;
        }
    }

    /// Of a piece 32 positions at a time.
    __device__ __forceinline__ int slots() const { return max((1 << shift) / UNITS_OF_SLOT, 1); }

    /// Pieces of positions whose channels lie together, in whole 16 bytes, which neighbouring lanes read: a round is four panels of 32
    /// positions. So many rounds are under way, those of the next piece, too.
    template <int UNDER_WAY, typename Else>
    __device__ __forceinline__ void by_channels(const PackDivisors &by, char *ring, float scale, unsigned &most, const Else &other) const {
        constexpr int OF_PANEL = E * sizeof(Element) / 16, VECTORS = 4 * OF_PANEL;
        const int lane = own_thread() % 32, count_panels = panels / block, rounds = (count_panels + 3) / 4, slots = this->slots();
        int piece = take(), asked = ask();
        if (piece >= pieces) return;
        // What is loaded next: where this lane's position of it starts, the positions and panels, and where it goes.
        int start = -1, load_slot = 0, load_round = 0, now = 0;
        const auto load = [&](int of, int then) {
            if (load_round == 0) start = position(unit(by, of, lane), load_slot, by.line.by, lane).y;
            char *const to = ring + then * POSITION_ROUND;
#pragma unroll PANELS_AT_ONCE
            for (int i = 0; i < VECTORS; i++) {
                const int of_vector = (i * 32 + lane) / VECTORS, vector = lane % VECTORS, from = __shfl_sync(0xffffffffu, start, of_vector);
                const bool there = from >= 0 && load_round * 4 + vector / OF_PANEL < count_panels;
                const uint4 *const at = (const uint4 *)(x + (there ? from + load_round * 4 * E : 0)) + (there ? vector : 0);
                copy_async<16>(shared(to + vector_at<VECTORS>(of_vector, vector)), at, there);
            }
            if (++load_round == rounds) {
                load_round = 0;
                if (++load_slot == slots) load_slot = 0;
            }
        };
#pragma unroll
        for (int round = 0; round < UNDER_WAY; round++) {
            load(piece, round);
            end_copies();
        }
#pragma unroll 1
        while (piece < pieces) {
            // What follows from it would be held in registers from piece to piece.
            int a_rows = this->a_rows;
            asm volatile("" : "+r"(a_rows));
            const int next = __shfl_sync(0xffffffffu, asked, 0);
            if (next < pieces) asked = ask();
            await_turn(piece, other);
#pragma unroll 1
            for (int slot = 0; slot < slots; slot++) {
                const int place = position(unit(by, piece, lane), slot, by.line.by, lane).x;
                [[maybe_unused]] unsigned of_position = 0;
#pragma unroll 1
                for (int round = 0; round < rounds; round++) {
                    const bool is_more = slot * rounds + round + UNDER_WAY < slots * rounds;
                    if (is_more || next < pieces) load(is_more ? piece : next, now ? now - 1 : UNDER_WAY);
                    end_copies();
                    await_copies<UNDER_WAY>();
                    meet();
                    const char *const from = ring + now * POSITION_ROUND;
#pragma unroll PANELS_AT_ONCE
                    for (int i = 0; i < 4; i++) {
                        if (round * 4 + i >= count_panels) break;
                        alignas(16) Element v[E];
#pragma unroll
                        for (int j = 0; j < OF_PANEL; j++)
                            *(uint4 *)&v[j * (16 / sizeof(Element))] = *(const uint4 *)(from + vector_at<VECTORS>(lane, i * OF_PANEL + j));
                        unsigned &largest = SCALED ? of_position : most;
                        if (ASKS) largest = larger(largest, v);
                        write(v, place >= 0 ? place + (round * 4 + i) * a_rows : -1, scale);
                    }
                    meet();
                    now = now == UNDER_WAY ? 0 : now + 1;
                }
                if (SCALED) count(is_coarse(of_position, scale));
            }
            publish(piece);
            piece = next;
        }
    }

    /// A piece of which a lane reads positions: a round is four panels of 32 of them.
    __device__ __forceinline__ void by_positions(const PackDivisors &by, int piece, char *ring, float scale, unsigned &most) const {
        const int lane = own_thread() % 32, count_panels = panels / block;
        const Unit own = unit(by, piece, lane);
#pragma unroll 1
        for (int slot = 0; slot < slots(); slot++) {
            const int2 at = position(own, slot, by.line.by, lane);
            [[maybe_unused]] unsigned of_position = 0;
            run((count_panels + 3) / 4, [&](int round) {
                char *const slot0 = ring + round % ROUNDS * ROUND;
#pragma unroll 1
                for (int i = 0; i < 4; i++) {
                    const bool there = at.y >= 0 && round * 4 + i < count_panels;
                    const int step = there ? x_c : 0;
                    const Element *channel = x + (there ? at.y + (round * 4 + i) * E * step : 0);
                    Element *const to = (Element *)slot0 + i * E * 32 + lane;
#pragma unroll
                    for (int e = 0; e < E; e++, channel += step)
                        if constexpr (sizeof(Element) == 4)
                            copy_async<4>(shared(to + e * 32), channel, there);
                        else
                            to[e * 32] = there ? *channel : Element{};
                }
            }, [&](int round) {
                const char *const slot0 = ring + round % ROUNDS * ROUND;
#pragma unroll 1
                for (int i = 0; i < 4; i++) {
                    alignas(16) Element v[E];
#pragma unroll
                    for (int e = 0; e < E; e++) v[e] = ((const Element *)slot0)[(i * E + e) * 32 + lane];
                    unsigned &largest = SCALED ? of_position : most;
                    if (ASKS) largest = larger(largest, v);
                    write(v, at.x >= 0 && round * 4 + i < count_panels ? at.x + (round * 4 + i) * a_rows : -1, scale);
                }
            });
            if (SCALED) count(is_coarse(of_position, scale));
        }
    }

    /// Where one of so many vectors of a position's channels is: those of as many positions that lanes read at once are in different banks.
    template <int VECTORS> __device__ __forceinline__ static int vector_at(int position, int vector) {
        return (position * VECTORS + (vector ^ position / (8 / VECTORS) % VECTORS)) * 16;
    }
};
