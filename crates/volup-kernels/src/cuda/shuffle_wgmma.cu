// Shuffle GEMM on Hopper's own matrix instructions: a transposed convolution whose kernel is its stride, 2 along width,
// of NCDHW.
//
// # What is computed
//
// As in `shuffle_gemm`: `Y[position, row] = sum over channels: X[channel, position] * W[channel][row]`, a row is a
// channel of y and a tap, `row = co*taps + tap`; positions are those of a sample, in order.
//
// Here positions are the rows of the instruction and come from registers, where a channel's positions, neighbours in
// memory, need no transposition. Rows of W are its columns. A lane has two neighbouring columns of each eight, which are the
// residues along width of a position. Which position is which row of the instruction is free: a lane has four neighbours in
// line of float32, positions `2g` and `2g + 1` of sixteen; of 16 bits eight, positions `4g` to `4g + 3` of 32.
//
// # How
//
// A block has four warpgroups and stays. `row_groups` of them (1, 2 or 4) are a team: they compute the same 128 positions,
// 64 rows each. The block has the weights of its 64*row_groups rows in shared memory, all channels. Each team takes every
// so-manieth item, a block of positions, and has a ring of `stages` for X, 32 channels each, which all its threads fill by
// asynchronous copies `ahead` items ahead. Barriers in shared memory say what is there and what is read: warpgroups may
// drift apart, so that one stores while another multiplies. Teams know nothing of each other. Row blocks of the same
// positions are neighbours in the grid.
//
// # Modes
//
// As in `shuffle_gemm`: `MODE` 0 writes y; 1 writes statistics instead; 2 writes y normalized, items from the last one on:
// what the statistics have read last may still be in the second-level cache. 3 writes y, behind no activation, and statistics
// of what y holds, rounded, through `post_activation`: for training, where both come from the same y. A thread keeps the mean
// of what it has computed of each pair of rows that are the residues along width, and the squared deviations from it, tile by
// tile in order. Partial `((sample*groups + group)*4 + warp)*pairs + pair` is what the warps of that number of the team
// `group` have of a pair; groups are the teams of one row block, pairs half the rows of all. All partials are written.
//
// # Numbers
//
// `KIND` 0, f16 or bf16; 1, float32 rounded to tf32; 3, float32 as two tf32, of which three products are made, at most 192
// channels. Infinities and NaN, and for the split what its low part has not bits enough for (operand.cuh; of X where two
// positions of two channels hold nothing larger), are left to the definition: a warp's outputs where they are in its X, all
// of a block where they are in the weight.
//
// # What it takes
//
// 512 threads. Grid: any multiple of `row_blocks` along the first axis. Bytes of dynamic shared memory: `16*stages*teams`
// rounded up to 128, and `size*(32*chunks*64*row_groups*parts + teams*stages*32*136)`: size that of an element, parts 2 for
// KIND 3, else 1, teams 4/row_groups. x is dense, y lies as its strides say, 1 along width, x and y start at multiples of 16
// bytes, which a channel of x is a multiple of. `whole`: whether lines of x are a multiple of 4 positions (float32: of 2).
// `ahead*chunks` below `stages`. What is counted in a sample, stages of all items and groups of all samples are below 2^31.
//
// Parameters, i32 but for pointers, `x_n`, `y_n` (i64) and the slopes (f64): `x`, `w`, `bias`, `y`, `in_channels`,
// `out_channels`, `volume`, `plane`, `width` (positions of a sample, a plane, a line), `d_stride`, `h_stride`, `x_n`, `y_n`,
// `y_c`, `y_d`, `y_h` (strides in elements), `chunks` (of 32 channels), `pos_blocks` (of a sample), `items` (of all),
// `row_blocks`, `row_groups`, `stages`, `ahead`, `whole`, `has_bias`, `activation`, `slope`, then as in `shuffle_gemm`
// `part_mean`, `part_m2`, `part_count`, `mean`, `rstd`, `gamma`, `beta`, `norm_groups`, `group_channels`, `post_activation`,
// `post_slope`.

#include "copy_async.cuh"
#include "register_operand.cuh"
#include "shuffle_tables.cuh"
#include "stored.cuh"

/// The i-th item to be computed.
__device__ __forceinline__ int item_of(const Sizes &s, int i) { return MODE == 2 ? s.items - 1 - i : i; }

/// One of the block's warpgroups.
struct Warpgroup {
    const Sizes &s;
    Tables &tables;
    /// The next stage to be multiplied, and the parity of what fills it.
    int slot = 0, turn = 0;
    /// Where this thread's vector of the next channels to be fetched lies, and how many channels there are from there on.
    const Element *fetched;
    int lines;
    float sum[2][ROWS / 2];
    /// Whether this thread has met something in a tile's X that is left to the definition.
    bool undefined;
    /// How many outputs of each pair this thread has seen of the sample at hand.
    float seen = 0.0f;

    __device__ __forceinline__ Warpgroup(const Sizes &s, Tables &tables) : s(s), tables(tables) {}

    // Of this thread. Registers are scarce: nothing of this is kept.
    __device__ __forceinline__ static unsigned thread() {
        unsigned x;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
        return x;
    }
    __device__ __forceinline__ static int warp() { return thread() % GROUP / 32; }
    __device__ __forceinline__ static int g() { return thread() % 32 / 4; }
    __device__ __forceinline__ static int t() { return thread() % 4; }
    __device__ __forceinline__ static int number() { return thread() / GROUP; }
    __device__ __forceinline__ const Place &place() const { return tables.place[number()]; }
    __device__ __forceinline__ int teams() const { return uniform(place().teams); }
    /// The same number in all lanes: the compiler sees that a warp goes one way.
    __device__ __forceinline__ static int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

    /// Starts the copies of a chunk of the team's i-th item to a stage that is free when a barrier has that parity.
    __device__ __forceinline__ void fetch(int i, int chunk, int to_slot, int parity) {
        const unsigned of_team = thread() & (GROUP * s.row_groups - 1), line = of_team / LINE, at = of_team % LINE * VECTOR;
        const int step = GROUP / LINE * s.row_groups;
        if (chunk == 0) {
            const int item = item_of(s, i), n = tables.by.pos_blocks.divide(item), first = (item - n * tables.by.pos_blocks.by) * POS + at;
            fetched = s.x + (n * s.x_n + ((int)line * s.volume + first));
            // Zeros past the end of channels, positions and items.
            lines = i < s.items && first < s.volume ? s.in_channels : 0;
        }
        const Element *from = fetched;
        const unsigned full = place().barriers + 16 * to_slot;
        unsigned to = place().ring + SIZE * (to_slot * STAGE + line * PITCH + at);
        barrier_wait(full + 8, parity);
#pragma unroll 2
        for (int l = line; l < KC; l += step, to += SIZE * step * PITCH, from += step * s.volume) copy_async<16>(to, l < lines ? from : s.x, l < lines);
        arrive_with_copies(full);
        fetched += (long long)KC * s.volume;
        lines -= KC;
    }

    /// Those of the first items: all stages are free.
    __device__ __forceinline__ void start() {
#pragma unroll 1
        for (int k = 0; k < s.ahead; k++)
#pragma unroll 1
            for (int chunk = 0; chunk < s.chunks; chunk++) fetch(place().team + k * place().teams, chunk, k * s.chunks + chunk, 1);
    }

    /// A step's operand of some tiles; of the split its low parts too.
    __device__ __forceinline__ void load(const Element *from, unsigned (&a)[PARTS][TILES][4]) {
#if KIND == 0
        // Four positions of two neighbouring channels, and of two eight channels on.
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint2 even = *(const uint2 *)(from + 8 * half * PITCH), odd = *(const uint2 *)(from + (8 * half + 1) * PITCH);
            a[0][0][2 * half] = __byte_perm(even.x, odd.x, 0x5410);
            a[0][0][2 * half + 1] = __byte_perm(even.x, odd.x, 0x7632);
            a[0][1][2 * half] = __byte_perm(even.y, odd.y, 0x5410);
            a[0][1][2 * half + 1] = __byte_perm(even.y, odd.y, 0x7632);
        }
#else
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const float2 one = *(const float2 *)(from + 16 * i), four = *(const float2 *)(from + 4 * PITCH + 16 * i);
            const float v[4] = {one.x, one.y, four.x, four.y};
            float largest = 0.0f;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                // Lets NaN through.
                asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(v[e])));
                a[0][i][e] = round_up(__float_as_uint(v[e]));
                if (PARTS == 2) a[PARTS - 1][i][e] = round_up(__float_as_uint(v[e] - __uint_as_float(a[0][i][e] & 0xffffe000u)));
            }
            undefined |= within_parts(__float_as_uint(largest)) >= 0x7f7ff000u;
        }
#endif
    }

    /// The products of the item that the team has of those from `base` on, while others are fetched.
    __device__ __forceinline__ void multiply_tile(int base) {
        const unsigned panel = 16 * ROWS * s.row_groups, part = panel * (KC / VECTOR) * s.chunks;
        unsigned of_w = place().weights;
        // Of a lane in a stage: its first channel, its first position.
        const int at = KIND == 0 ? 2 * t() * PITCH + 32 * warp() + 4 * g() : t() * PITCH + 32 * warp() + 2 * g();
        undefined = false;
        unsigned a[BUFFERS][PARTS][TILES][4];
#pragma unroll 1
        for (int chunk = 0; chunk < s.chunks; chunk++) {
            if (const int later = base + s.ahead * place().teams; later < s.items) {
                const int to = slot + s.ahead * s.chunks;
                fetch(later + place().team, chunk, to < s.stages ? to : to - s.stages, to < s.stages ? turn ^ 1 : turn);
            }
            const unsigned full = place().barriers + 16 * slot;
            barrier_wait(full, turn);
            const Element *const stage = (const Element *)__cvta_shared_to_generic(place().ring + SIZE * (slot * STAGE + at));
#pragma unroll
            for (int k = 0; k < LOADS; k++) {
                unsigned(&of)[PARTS][TILES][4] = a[k % BUFFERS];
                const int step = k * TILES / 2;
                matrix_wait<BUFFERS - 1>();
                load(stage + (step * STEP * PITCH + (TILES == 1 ? k % 2 * 16 : 0)), of);
                matrix_fence();
                const unsigned long long high = descriptor<1>(of_w, panel);
                const int keep = step > 0 || chunk > 0;
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    float(&to)[ROWS / 2] = sum[TILES == 1 ? k % 2 : i];
                    if (PARTS == 2) {
                        multiply(to, of[PARTS - 1][i], high, keep);
                        multiply(to, of[0][i], descriptor<1>(of_w + part, panel), 1);
                    }
                    multiply(to, of[0][i], high, PARTS == 2 || keep);
                }
                matrix_commit();
                if (TILES == 2 || k % 2) of_w += 2 * panel;
            }
            if (++slot == s.stages) slot = 0, turn ^= 1;
            // The stage is given back now that products have begun of all that was loaded of it: an arrival may overtake loads.
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(place().barriers + 16 * ((slot ? slot : s.stages) - 1) + 8);
            __syncwarp();
        }
        matrix_wait<0>();
    }

    /// A position of a tile, of so many that this lane has.
    __device__ __forceinline__ int position(int i, int half) const {
        return 32 * warp() + (KIND == 0 ? 4 * g() + 2 * i : 16 * i + 2 * g()) + half;
    }
    /// Which of the warpgroup's pairs the lane's j-th is.
    __device__ __forceinline__ int pair(int j) const { return 4 * j + t(); }

    __device__ __forceinline__ float bias(int j) const { return __int_as_float(tables.pair[number()][pair(j)].y); }

    /// The part of it that statistics are less by: all or nothing.
    __device__ __forceinline__ float left_out(int j) const { return MODE == 1 ? __int_as_float(tables.pair[number()][pair(j)].x) : 0.0f; }

    /// A pair's outputs, two residues of four positions, from their sums. In mode 3 no activation comes before y.
    template <bool LEAKY> __device__ __forceinline__ void finish(int j, float (&v)[8]) const {
        const float of_pair = bias(j);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] += of_pair;
        if (MODE != 3) tables.activation.apply<LEAKY>(v);
    }

    /// Calls `f` with each of the lane's pairs and its outputs.
    template <bool LEAKY, typename F> __device__ __forceinline__ void for_outputs(F f) const {
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            float v[8];
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] = sum[e / 4][4 * j + e % 4];
            finish<LEAKY>(j, v);
            f(j, v);
        }
    }

    /// The same by the definition.
    template <typename F> __device__ __forceinline__ void for_defined(int n, int first, F f) {
#pragma unroll 1
        for (int j = 0; j < PAIRS; j++) {
            float v[8];
            define(n, first, j, v);
            finish<true>(j, v);
            f(j, v);
        }
        clear();
    }

    /// A pair's sums by the definition.
    __device__ __forceinline__ void define(int n, int first, int j, float (&v)[8]) const {
        const int row = place().first_row + 2 * pair(j);
        const Element *weight = s.w + row;
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = 0.0f;
#pragma unroll 1
        for (int c = 0; c < s.in_channels && row < s.rows; c++, weight += s.rows) {
            const float even = widen(weight[0]), odd = widen(weight[1]);
#pragma unroll
            for (int of = 0; of < 4; of++) {
                const int p = first + position(of / 2, of % 2);
                const float x = p < s.volume ? widen(s.x[n * s.x_n + ((long long)c * s.volume + p)]) : 0.0f;
                v[2 * of] = fmaf(x, even, v[2 * of]);
                v[2 * of + 1] = fmaf(x, odd, v[2 * of + 1]);
            }
        }
    }

    /// Where a position's outputs lie.
    __device__ __forceinline__ int place_of(int p) const {
        const Divisors &by = tables.by;
        const int d = by.plane.divide(p), in_plane = p - d * by.plane.by, h = by.width.divide(in_plane);
        return d * s.d_stride * s.y_d + h * s.h_stride * s.y_h + (in_plane - h * by.width.by) * 2;
    }

    /// Writes a pair's outputs. WHOLE: those of a lane that are neighbours in line at once, else position by position; where
    /// they lie, from those of the pair on.
    template <bool LEAKY, bool WHOLE> __device__ __forceinline__ void write(int j, float (&v)[8], Element *of_sample, const int (&at)[2]) const {
        if (MODE == 2) {
            const float4 norm = tables.norm[number()][pair(j)];
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] = (v[e] - norm.x) * norm.y + norm.z;
            tables.post.apply<LEAKY>(v);
        }
        const int of_pair = tables.pair[number()][pair(j)].x;
        Element *const to = of_sample + of_pair;
        const bool here = of_pair != NOWHERE;
#if KIND == 0
        const uint4 all = make_uint4(narrow_both(v[0], v[1], Element{}), narrow_both(v[2], v[3], Element{}),
                                     narrow_both(v[4], v[5], Element{}), narrow_both(v[6], v[7], Element{}));
        if (WHOLE) {
            put(to + at[0], all, here && at[0] != NOWHERE);
            return;
        }
        const unsigned both[4] = {all.x, all.y, all.z, all.w};
#else
        if (WHOLE) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                put(to + at[i], make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]), here && at[i] != NOWHERE);
            return;
        }
        const float2 both[4] = {{v[0], v[1]}, {v[2], v[3]}, {v[4], v[5]}, {v[6], v[7]}};
#endif
#pragma unroll
        for (int of = 0; of < 4; of++) {
            const int one = tables.apart[of][thread()];
            put(to + one, both[of], here && one != NOWHERE);
        }
    }

    /// Where a sample's outputs begin.
    __device__ __forceinline__ Element *output_of(int n) const {
        Element *of_sample = s.y + n * s.y_n;
        // The compiler would rather multiply anew for each output.
        asm volatile("" : "+l"(of_sample));
        return of_sample;
    }

    /// Where one of the lane's positions of a tile is written, from its sample's start.
    __device__ __forceinline__ int place_in(int first, int of) const {
        const int p = first + position(of / 2, of % 2);
        return p < s.volume ? place_of(p) : NOWHERE;
    }

    /// Writes a tile's outputs.
    __device__ __forceinline__ void write(int n, int first, bool by_definition) {
        Element *const of_sample = output_of(n);
        const auto place_at = [&](int of) { return place_in(first, of); };
        int at[2] = {NOWHERE, NOWHERE};
        const bool leaky = tables.activation.leaky || MODE == 2 && tables.post.leaky;
        if (s.whole && !by_definition) {
            at[0] = place_at(0);
            if (KIND != 0) at[1] = place_at(2);
            if (leaky)
                for_outputs<true>([&](int j, float(&v)[8]) { write<true, true>(j, v, of_sample, at); });
            else
                for_outputs<false>([&](int j, float(&v)[8]) { write<false, true>(j, v, of_sample, at); });
            return;
        }
#pragma unroll 1
        for (int of = 0; of < 4; of++) tables.apart[of][thread()] = place_at(of);
        if (by_definition)
            for_defined(n, first, [&](int j, float(&v)[8]) { write<true, false>(j, v, of_sample, at); });
        else
            for_outputs<true>([&](int j, float(&v)[8]) { write<true, false>(j, v, of_sample, at); });
    }

    /// Where this thread keeps statistics of the sample at hand: of each pair the mean of what it has computed, and squared
    /// deviations from it. Registers are scarce.
    __device__ __forceinline__ float2 &so_far(int j) const { return tables.so_far[j][thread()]; }

    /// Merges statistics with those of so many more: which share of both these are. As by Chan, Golub and LeVeque, 1979.
    __device__ __forceinline__ static float2 merged(float2 one, float seen, float2 other, float share) {
        const float apart = other.x - one.x;
        return make_float2(one.x + apart * share, one.y + (other.y + apart * apart * (seen * share)));
    }

    /// Adds a pair's outputs of a whole tile to the statistics, as by Youngs and Cramer, 1971: deviations are from the mean so
    /// far, of the first outputs from one of them. `share`: of each output among all.
    __device__ __forceinline__ void count(int j, const float (&v)[8], float share) {
        const float2 before = so_far(j);
        const float from = seen > 0.0f ? before.x : v[0];
        float total[2] = {0.0f, 0.0f}, squares[2] = {0.0f, 0.0f};
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float apart = v[e] - from;
            total[e % 2] = e < 2 ? apart : total[e % 2] + apart;
            squares[e % 2] = fmaf(apart, apart, squares[e % 2]);
        }
        const float all = total[0] + total[1], shift = all * share;
        float more = fmaf(-all, shift, squares[0] + squares[1]);
        // Lets NaN through.
        asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(more));
        so_far(j) = make_float2(from + shift, before.y + more);
    }

    /// What of a tile the sample has: so many positions from its first one on, and so many outputs of each pair of this lane's,
    /// which are that share of all that it has seen.
    struct Part {
        int positions, here;
        float share;
    };
    __device__ __forceinline__ Part part_of(int first) const {
        const int positions = s.volume - first;
        int here = 0;
#pragma unroll
        for (int of = 0; of < 4; of++) here += position(of / 2, of % 2) < positions ? 2 : 0;
        return {positions, here, __fdividef(here, fmaxf(seen + here, 1.0f))};
    }

    /// Adds those of a pair's outputs that the sample has to the statistics.
    __device__ __forceinline__ void count(int j, float (&v)[8], const Part &part) {
        if (part.here == 0) return;
        const float less = left_out(j);
        float total = 0.0f, m2 = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] -= less;
#pragma unroll
        for (int e = 0; e < 8; e += 2) total += position(e / 4, e / 2 % 2) < part.positions ? v[e] + v[e + 1] : 0.0f;
        const float mean = __fdividef(total, part.here);
#pragma unroll
        for (int e = 0; e < 8; e++) m2 += position(e / 4, e / 2 % 2) < part.positions ? (v[e] - mean) * (v[e] - mean) : 0.0f;
        so_far(j) = merged(so_far(j), seen, make_float2(mean, m2), part.share);
    }

    /// In mode 3 adds a pair's outputs, as y holds them, to the statistics: `of` a whole tile, of which each has that share,
    /// or a part of it.
    template <bool LEAKY, typename Of> __device__ __forceinline__ void count_written(int j, float (&v)[8], const Of &of) {
        as_stored(v);
        tables.post.apply<LEAKY>(v);
        count(j, v, of);
    }

    /// In mode 3 writes a tile's outputs, and counts each pair's at once.
    __device__ __forceinline__ void write_and_count(int n, int first, bool by_definition) {
        Element *const of_sample = output_of(n);
        const auto place_at = [&](int of) { return place_in(first, of); };
        int at[2] = {NOWHERE, NOWHERE};
        // What is counted in part is written position by position: registers do not suffice for both ways.
        if (s.whole && !by_definition && s.volume - first >= POS) {
            at[0] = place_at(0);
            if (KIND != 0) at[1] = place_at(2);
            const float share = __fdividef(1.0f, seen + 8.0f);
            if (tables.post.leaky)
                for_outputs<true>([&](int j, float(&v)[8]) { write<true, true>(j, v, of_sample, at), count_written<true>(j, v, share); });
            else
                for_outputs<false>([&](int j, float(&v)[8]) { write<false, true>(j, v, of_sample, at), count_written<false>(j, v, share); });
            seen += 8.0f;
            return;
        }
#pragma unroll 1
        for (int of = 0; of < 4; of++) tables.apart[of][thread()] = place_at(of);
        const Part part = part_of(first);
        const auto write_apart = [&](int j, float(&v)[8]) { write<true, false>(j, v, of_sample, at), count_written<true>(j, v, part); };
        if (by_definition)
            for_defined(n, first, write_apart);
        else
            for_outputs<true>(write_apart);
        seen += part.here;
    }

    /// Adds a tile's outputs, without a slope less the bias: it needs not be added to each.
    __device__ __forceinline__ void count(int n, int first, bool by_definition) {
        if (s.volume - first >= POS && !by_definition) {
            const float share = __fdividef(1.0f, seen + 8.0f);
            if (tables.activation.leaky) {
                for_outputs<true>([&](int j, float(&v)[8]) { count(j, v, share); });
            } else {
#pragma unroll
                for (int j = 0; j < PAIRS; j++) {
                    const float least = tables.activation.least - bias(j);
                    float v[8];
#pragma unroll
                    for (int e = 0; e < 8; e++) asm("max.NaN.f32 %0, %1, %2;" : "=f"(v[e]) : "f"(sum[e / 4][4 * j + e % 4]), "f"(least));
                    count(j, v, share);
                }
            }
            seen += 8.0f;
            return;
        }
        const Part part = part_of(first);
        const auto count_here = [&](int j, float(&v)[8]) { count(j, v, part); };
        // The compiler would rather begin both ways at once, for which registers do not suffice.
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int e = 0; e < ROWS / 2; e++) asm volatile("" : "+f"(sum[i][e]));
        if (by_definition)
            for_defined(n, first, count_here);
        else
            for_outputs<true>(count_here);
        seen += part.here;
    }

    /// Writes a sample's statistics and forgets them. Of the lanes that have a pair's each writes those of another.
    __device__ __forceinline__ void hand_over(int sample) {
        const int pairs = s.rows / 2, own = place().first_row / 2 + pair(g());
#pragma unroll 1
        for (int j = 0; j < PAIRS; j++) {
            float2 all = so_far(j);
            float count = seen;
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) {
                const float others = __shfl_xor_sync(0xffffffffu, count, lanes), share = __fdividef(others, fmaxf(count + others, 1.0f));
                const float2 of_others = make_float2(__shfl_xor_sync(0xffffffffu, all.x, lanes), __shfl_xor_sync(0xffffffffu, all.y, lanes));
                all = merged(all, count, of_others, share);
                count += others;
            }
            if (j == g() && own < pairs) {
                const long long at = ((long long)(sample * place().teams + place().team) * 4 + warp()) * pairs + own;
                s.part_mean[at] = all.x + left_out(j);
                s.part_m2[at] = all.y;
                s.part_count[at] = count;
            }
            so_far(j) = make_float2(0.0f, 0.0f);
        }
        seen = 0.0f;
    }

    /// Those of all samples before one that are not written yet.
    __device__ __forceinline__ void hand_over_until(int n) {
        int &of_warp = tables.sample[thread() / 32];
        const int before = uniform(of_warp);
        __syncwarp();
#pragma unroll 1
        for (int sample = before; sample < n; sample++) {
            hand_over(sample);
            if (thread() % 32 == 0) of_warp = sample + 1;
        }
        __syncwarp();
    }

    /// The normalization of a sample, once all of the warpgroup have done with that of the one before.
    __device__ __forceinline__ void normalize(int n) {
        asm volatile("bar.sync %0, 128;" ::"r"(number() + 1) : "memory");
        const int own = thread() % GROUP;
        if (own % 32 == 0) tables.sample[thread() / 32] = n;
        if (const int of = place().first_row / 2 + own; own < ROWS / 2 && of < s.rows / 2) {
            const int channel = tables.by.half_taps.divide(of), at = n * s.norm_groups + channel / s.group_channels;
            const float factor = s.rstd[at] * (s.gamma ? widen(s.gamma[channel]) : 1.0f);
            tables.norm[number()][own] = make_float4(s.mean[at], factor, s.beta ? widen(s.beta[channel]) : 0.0f, 0.0f);
        }
        asm volatile("bar.sync %0, 128;" ::"r"(number() + 1) : "memory");
    }

    /// The first products are added to nothing, which the compiler does not know: until here it keeps nothing of the sums.
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int e = 0; e < ROWS / 2; e++) sum[i][e] = 0.0f;
    }

    /// All that this warpgroup does.
    __device__ __forceinline__ void run() {
        clear();
        if (COUNTS)
            for (int j = 0; j < PAIRS; j++) so_far(j) = make_float2(0.0f, 0.0f);
#pragma unroll 1
        for (int base = 0; base < s.items; base += teams()) {
            multiply_tile(base);
            const int i = uniform(base + place().team);
            if (i >= s.items) continue;
            const int item = item_of(s, i), n = tables.by.pos_blocks.divide(item), first = (item - n * tables.by.pos_blocks.by) * POS;
            const bool bad = (KIND != 0 || MODE == 1) && (tables.bad_weight || KIND != 0 && __any_sync(0xffffffffu, undefined));
            if (COUNTS) hand_over_until(n);
            if (MODE == 2 && n != uniform(tables.sample[thread() / 32])) normalize(n);
            if (MODE == 3)
                write_and_count(n, first, bad);
            else if (COUNTS)
                count(n, first, bad);
            else
                write(n, first, bad);
        }
        if (COUNTS) hand_over_until(tables.by.pos_blocks.divide(s.items));
    }
};

/// Weights in panels of 16 bytes of each row; the split's low parts behind all others.
__device__ __forceinline__ void keep_weights(const Sizes &s, Tables &tables, unsigned char *to, int first_row) {
    const int rows = ROWS * s.row_groups, vectors = rows * (KC / VECTOR) * s.chunks;
#pragma unroll 2
    for (int i = threadIdx.x; i < vectors; i += THREADS) {
        const int panel = i / rows, row = first_row + i % rows, c = panel * VECTOR;
        alignas(16) Element v[E];
#pragma unroll
        for (int e = 0; e < E; e++) v[e] = row < s.rows && c + e < s.in_channels ? s.w[(long long)(c + e) * s.rows + row] : Element{};
#if KIND != 0
        unsigned most = 0;
#pragma unroll
        for (int e = 0; e < E; e++) most = max(most, within_parts(magnitude(v[e])));
        if (most >= 0x7f800000u) tables.bad_weight = 1;
#endif
        uint4 low;
        *(uint4 *)(to + 16 * i) = operand(v, 1.0f, &low);
        if (PARTS == 2) *(uint4 *)(to + 16 * (vectors + i)) = low;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) shuffle_wgmma(
    const Element *x, const Element *w, const Element *bias, Element *y, int in_channels, int out_channels, int volume, int plane,
    int width, int d_stride, int h_stride, long long x_n, long long y_n, int y_c, int y_d, int y_h, int chunks, int pos_blocks, int items,
    int row_blocks, int row_groups, int stages, int ahead, int whole, int has_bias, int activation, double slope,
    float *part_mean, float *part_m2, float *part_count, const float *mean, const float *rstd, const Element *gamma, const Element *beta,
    int norm_groups, int group_channels, int post_activation, double post_slope) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Tables tables;
    const int taps = d_stride * h_stride * 2;
    const Sizes s = {x, w, y, in_channels, volume, out_channels * taps, d_stride, h_stride, x_n, y_n, y_d, y_h, chunks, items, row_groups,
                     stages, ahead, whole, part_mean, part_m2, part_count, mean, rstd, gamma, beta,
                     norm_groups, group_channels};
    const int teams = GROUPS / row_groups;
    const unsigned barriers = shared(memory), weights_offset = (16 * stages * teams + 127) / 128 * 128;
    const unsigned weights = barriers + weights_offset, ring = weights + 16 * PARTS * ROWS * row_groups * (KC / VECTOR) * chunks;
    // Of each stage what says that it is full, and that it is empty.
    if (threadIdx.x < stages * teams) {
        barrier_init(barriers + 16 * threadIdx.x, row_groups * GROUP);
        barrier_init(barriers + 16 * threadIdx.x + 8, row_groups * GROUP / 32);
    }
    if (const int i = threadIdx.x - 32; i >= 0 && i < sizeof(Divisors) / sizeof(Divisor))
        ((Divisor *)&tables.by)[i] = Divisor(i == 0 ? plane : i == 1 ? width : i == 2 ? pos_blocks : i == 3 ? taps / 2 : h_stride);
    if (threadIdx.x == 64) tables.bad_weight = 0;
    if (threadIdx.x < THREADS / 32) tables.sample[threadIdx.x] = COUNTS ? 0 : -1;
    if (threadIdx.x == 65) tables.activation = Straight(activation, slope);
    if (threadIdx.x == 66) tables.post = Straight(post_activation, post_slope);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    const int group = blockIdx.x / row_blocks, all_teams = (int)gridDim.x / row_blocks * teams, first_row = (blockIdx.x - group * row_blocks) * ROWS * row_groups;
    if (const int i = threadIdx.x; i < GROUPS) {
        const int team = i / row_groups, of_team = i % row_groups;
        tables.place[i] = {group * teams + team, all_teams, first_row + of_team * ROWS, barriers + 16 * team * stages, ring + SIZE * team * stages * STAGE,
                           weights + 16 * ROWS * of_team};
    }
    for (int i = threadIdx.x; i < GROUPS * ROWS / 2; i += THREADS) {
        const int of = i / (ROWS / 2), row = first_row + of % row_groups * ROWS + i % (ROWS / 2) * 2, pair = row / 2;
        const int channel = tables.by.half_taps.divide(pair), tap = pair - channel * (taps / 2), td = tables.by.h_stride.divide(tap);
        const bool here = row < s.rows;
        const float add = here && has_bias ? widen(bias[channel]) : 0.0f;
        int at = here ? channel * y_c + td * y_d + (tap - td * h_stride) * y_h : NOWHERE;
        if (MODE == 1) {
            // What is infinite is left to the definition.
            const bool finite = fabsf(add) < INFINITY;
            if (!finite) tables.bad_weight = 1;
            at = __float_as_int(activation != 2 && finite ? add : 0.0f);
        }
        tables.pair[of][i % (ROWS / 2)] = make_int2(at, __float_as_int(add));
    }
    __syncthreads();
    Warpgroup warpgroup(s, tables);
    // Copies are on their way before the weights are there.
    warpgroup.start();
    keep_weights(s, tables, memory + weights_offset, first_row);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    warpgroup.run();
}
