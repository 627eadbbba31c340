// Shuffle GEMM on Hopper's own matrix instructions: a transposed convolution whose kernel is its stride, 2 along width,
// of NCDHW.
//
// # What is computed
//
// As in `shuffle_gemm`: `Y[row, position] = sum over channels: W[channel][row] * X[channel, position]`, a row is a
// channel of y and a tap, `row = co*taps + tap`; positions are those of a sample, in order.
//
// Rows of W are the rows of the instruction, so that a lane has two rows of a warp's sixteen and every fourth pair of
// positions: which two is free, and these are the residues along width of one `pair`, a channel and a tap along depth and height.
// All that a lane does to its outputs is so of one channel: bias, weights of the norm and statistics are in its registers.
// Positions are the columns. Of 16 bits a channel's neighbouring positions are an operand as they lie; of float32 the
// instructions want channels side by side, and whoever brings X turns four by four of them around.
//
// # How
//
// A block has four warpgroups that multiply, four warps that bring X, and stays. `row_groups` of the warpgroups (1, 2 or 4) are a
// team: they compute the same POS positions, 64 rows each. The block has the weights of its 64*row_groups rows in shared memory, all
// channels. Each team takes every so-manieth item, a block of positions, and has a ring of `stages` for X, KC channels each, which as
// many of the other warps fill as it has warpgroups: by copies that nobody waits for, `ahead` stages ahead. Each thread rounds and turns
// what it has asked for where it lies. Barriers in shared memory say what is there and what is read: warpgroups drift apart,
// so that one writes while another multiplies. Teams know nothing of each other. Row blocks of the same positions are
// neighbours in the grid.
//
// # Modes
//
// As in `shuffle_gemm`: `MODE` 0 writes y; 1 writes statistics instead; 2 writes y normalized, items from the last one on:
// what the statistics have read last may still be in the second-level cache. 3 writes y, behind no activation, and statistics
// of what y holds, rounded, through `post_activation`: for training, where both come from the same y. A lane keeps the mean
// of what it has computed of its pair, and the squared deviations from it, tile by tile in order. Partial
// `(sample*groups + group)*pairs + pair` is what the team `group` has of a pair; groups are the teams of one row block, pairs half the
// rows of all. All partials are written.
//
// # Numbers
//
// `KIND` 0, f16 or bf16; 1, float32 rounded to tf32; 3, float32 as two tf32, of which three products are made, at most 192
// channels. Infinities and NaN, and for the split what its low part has not bits enough for (operand.cuh; of X where four
// channels of a position hold nothing larger), are left to the definition: a team's outputs of an item where they are in its X, all
// of a block where they are in the weight.
//
// # What it takes
//
// 640 threads. Grid: any multiple of `row_blocks` along the first axis. Bytes of dynamic shared memory: `32*stages*teams`
// rounded up to 128, `size*KC*chunks*64*row_groups*parts` for the weights and `teams*stages*parts` times a stage: panels of 16 bytes,
// a multiple of 128 of them and one more each: of KIND 0 POS/8 of KC rows, else KC/4 of POS rows. size is that of an element, parts 2 for
// KIND 3, else 1, teams 4/row_groups; where outputs are collected 16 areas of AREA bytes more. `ahead`, 1 or 2, and what is multiplied
// meanwhile, two stages where there are several `chunks`, are at most `stages`. x is dense, y lies as its strides say, 1 along width, x and y
// start at multiples of 16 bytes, which a channel of x is a multiple of. What is counted in a sample, stages of all items and groups
// of all samples are below 2^31.
//
// `how` outputs are written: 0, a position's two residues at once; 1, 16 bytes, where lines of x are a multiple of 4 positions (float32:
// of 2); 2, each warp collects those of PART_POS positions, in areas behind the rings, and the copy engine stores whole lines. Of that
// 2^`line_bits` positions, a multiple of 8, are a line of x, or a part of a longer one. Where h_stride divides 8 and no line is longer,
// `past_line` elements are stored with the first line of y that one of x gives: the other h_stride - 1 lines, which lie right behind. Else 0.
//
// Parameters, i32 but for pointers, `x_n`, `y_n` (i64) and the slopes (f64): `x`, `w`, `bias`, `y`, `in_channels`,
// `out_channels`, `volume`, `plane`, `width` (positions of a sample, a plane, a line), `d_stride`, `h_stride`, `x_n`, `y_n`,
// `y_c`, `y_d`, `y_h` (strides in elements), `chunks` (of KC channels), `pos_blocks` (of a sample), `items` (of all),
// `row_blocks`, `row_groups`, `stages`, `ahead`, `how`, `line_bits`, `past_line`, `has_bias`, `activation`, `slope`, then as in
// `shuffle_gemm` `part_mean`, `part_m2`, `part_count`, `mean`, `rstd`, `gamma`, `beta`, `norm_groups`, `group_channels`, `post_activation`,
// `post_slope`.

#include "launch.cuh"
#include "shuffle_copier.cuh"
#include "store_async.cuh"
#include "stored.cuh"
#include "warp_meet.cuh"

/// One of the threads of a warpgroup that multiplies.
struct Multiplier {
    const Sizes &s;
    Tables &tables;
    const Place place;
    /// Its warpgroup, and the first pair of that among all.
    const int group, first_pair;
    /// The bias of its pair, and the part of it that statistics are less by: all or nothing.
    const float bias, left_out;
    /// From where on the pair's outputs lie.
    Element *const to_pair;
    /// Where this thread collects a part's outputs in shared memory, if the copy engine stores them.
    const unsigned area;
    /// The next stage to be multiplied, and the parity of what fills it; which half of the table of places is this tile's.
    int slot = 0, turn = 0, half = 0;
    float sum[POS / 2];
    /// The sample at hand, and what this thread has counted of it.
    int sample = COUNTS ? 0 : -1;
    Moments own = {0.0f, 0.0f, 0.0f};
    /// What y is less by, times and more by when it is normalized; what sums are more by before that.
    float less = 0.0f, factor = 1.0f, addend = 0.0f, shift = bias;

    /// Pairs of neighbouring positions of a part of a tile that a thread has: two of each four of its sums, with the other residue behind.
    static constexpr int NEIGHBOURS = PART_POS / 8;

    /// This thread, of which nothing is kept in registers: these are scarce.
    __device__ __forceinline__ static unsigned thread() {
        unsigned x;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
        return x;
    }
    __device__ __forceinline__ static int t() { return thread() % 4; }
    /// Its pair among all, and whether there is one.
    __device__ __forceinline__ int pair() const { return first_pair + thread() % GROUP / 4; }
    __device__ __forceinline__ bool here() const { return pair() < s.rows / 2; }

    /// The activations, with a slope that matters where it is one of those that have one.
    __device__ __forceinline__ Straight activation(float slope) const { return {s.activation, slope}; }
    __device__ __forceinline__ Straight post(float slope) const { return {s.post_activation, slope}; }

    /// The products of the team's item whose stages come next: the last chunk's are under way then. Whether there is what is left to the
    /// definition.
    __device__ __forceinline__ int multiply_tile([[maybe_unused]] const unsigned char *memory) {
        const unsigned panel = 16 * ROWS * s.row_groups;
        // Descriptors, but for what all of a kind have in common, in steps of 16 bytes.
        [[maybe_unused]] const unsigned low = (panel * (KC / VECTOR) * s.chunks) >> 4;
        const unsigned first_stage = ::place(place.ring, KIND == 0 ? 128 : PANEL);
        unsigned of_w = ::place(place.weights, panel);
        int undefined = 0;
#pragma unroll 1
        for (int chunk = 0; chunk < s.chunks; chunk++) {
            const unsigned full = place.barriers + BARRIERS * slot, stage = first_stage + slot * (PARTS * STAGE >> 4);
            barrier_wait(full, turn);
            if (KIND != 0) {
                const int4 met = *(const int4 *)(memory + (full + 16 - shared(memory)));
                undefined |= met.x | met.y | met.z | met.w;
            }
            matrix_fence();
#pragma unroll
            for (int k = 0; k < KC / STEP; k++, of_w += 2 * panel >> 4) {
                const int keep = k > 0 || chunk > 0;
                const unsigned long long w = operand_at<1>(of_w);
#if KIND == 0
                multiply<1>(sum, w, (unsigned long long)(PANEL >> 4) << 32 | (stage + 16 * k), keep);
#else
                const unsigned long long x = operand_at<1>(stage + (2 * PANEL >> 4) * k);
                if (PARTS == 2) {
                    multiply(sum, w, operand_at<1>(stage + (STAGE + 2 * PANEL * k >> 4)), keep);
                    multiply(sum, operand_at<1>(of_w + low), x, 1);
                }
                multiply(sum, w, x, PARTS == 2 || keep);
#endif
            }
            matrix_commit();
            // The stage before has been read.
            if (chunk > 0) {
                matrix_wait<1>();
                give_back((slot ? slot : s.stages) - 1);
            }
            if (++slot == s.stages) slot = 0, turn ^= 1;
        }
        return undefined;
    }

    /// All of this warp have what they need of a stage.
    __device__ __forceinline__ void give_back(int of) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(place.barriers + BARRIERS * of + 8);
    }

    /// Where the outputs of a position lie from its sample's on.
    __device__ __forceinline__ int place_of(int p) const {
        const Divisors &by = tables.by;
        const int d = by.plane.divide(p), in_plane = p - d * by.plane.by, h = by.width.divide(in_plane);
        return d * s.d_stride * s.y_d + h * s.h_stride * s.y_h + (in_plane - h * by.width.by) * 2;
    }

    /// Notes where the outputs of a tile's positions lie, for all of the warpgroup. Half of the table is still read by those who are
    /// behind.
    __device__ __forceinline__ void note_places(int first) {
        const int own = threadIdx.x % GROUP, p = first + own;
        half ^= 1;
        tables.places[group][half][own] = p < s.volume ? place_of(p) : NOWHERE;
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
    }

    /// Outputs of two neighbouring positions, two residues each: from their sums, without the activation.
    __device__ __forceinline__ void take(int j, float (&v)[4]) const {
        v[0] = sum[4 * j], v[1] = sum[4 * j + 2], v[2] = sum[4 * j + 1], v[3] = sum[4 * j + 3];
    }

    /// The same by the definition.
    __device__ __forceinline__ void define(int n, int first, int j, float (&v)[4]) const {
        const Element *weight = s.w + 2 * pair();
        v[0] = v[1] = v[2] = v[3] = 0.0f;
#pragma unroll 1
        for (int c = 0; c < s.in_channels && here(); c++, weight += s.rows) {
            const float even = widen(weight[0]), odd = widen(weight[1]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int p = first + 8 * j + 2 * t() + i;
                const float x = p < s.volume ? widen(s.x[n * s.x_n + ((long long)c * s.volume + p)]) : 0.0f;
                v[2 * i] = fmaf(x, even, v[2 * i]);
                v[2 * i + 1] = fmaf(x, odd, v[2 * i + 1]);
            }
        }
    }

    /// Outputs from their sums, normalized in mode 2. In mode 3 no activation comes before y. STRAIGHT: there is no slope, so that
    /// the bias and the mean are one number; POSTED: there is an activation behind the norm.
    template <bool STRAIGHT, bool POSTED> __device__ __forceinline__ void finish(float (&v)[4]) const {
        if constexpr (STRAIGHT) {
            const float least = activation(0.0f).least - bias;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (MODE != 3) asm("max.NaN.f32 %0, %0, %1;" : "+f"(v[e]) : "f"(least));
                v[e] += shift;
                if (MODE == 2) v[e] = fmaf(v[e], factor, addend);
            }
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] += bias;
            if (MODE != 3) activation(tables.slope).apply<true>(v);
            if (MODE == 2)
#pragma unroll
                for (int e = 0; e < 4; e++) v[e] = fmaf(v[e] - less, factor, addend);
        }
        if (MODE == 2 && POSTED) post(STRAIGHT ? 0.0f : tables.post_slope).apply<!STRAIGHT>(v);
    }

    /// Writes outputs of two neighbours, which are `j` and the next, where there are any: position by position, of 16 bytes at once, or to
    /// where the copy engine stores them from. Of each eight positions `own` is this lane's first one.
    template <How HOW> __device__ __forceinline__ void write(Element *of_pair, bool here, int j, int own, const float (&one)[4], const float (&other)[4]) const {
        [[maybe_unused]] const int *const places = tables.places[group][half] + 8 * j + own;
#if KIND == 0
        const auto both = [](const float(&v)[4]) { return make_uint2(narrow_both(v[0], v[1], Element{}), narrow_both(v[2], v[3], Element{})); };
        const uint2 first = both(one), second = both(other);
#endif
        if constexpr (HOW == COLLECTED) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int p = (j + k) % NEIGHBOURS * 8;
                const unsigned to = area + (p < PART_POS / 2 ? 0 : s.past_half) + 2 * p * SIZE;
#if KIND == 0
                const uint2 v = k ? second : first;
                asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(v.x), "r"(v.y) : "memory");
#else
                const float(&v)[4] = k ? other : one;
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
#endif
            }
        }
#if KIND == 0
        if constexpr (HOW == TOGETHER) {
            // Of two lanes the even one writes four positions of the first eight, the odd one of the second.
            const bool odd = own / 2 % 2;
            const uint2 give = odd ? first : second;
            const uint2 given = make_uint2(__shfl_xor_sync(0xffffffffu, give.x, 1), __shfl_xor_sync(0xffffffffu, give.y, 1));
            const int at = places[odd ? 6 : 0];
            put(of_pair + at, odd ? make_uint4(given.x, given.y, second.x, second.y) : make_uint4(first.x, first.y, given.x, given.y),
                here && at != NOWHERE);
        } else if constexpr (HOW == APART) {
            const unsigned all[4] = {first.x, first.y, second.x, second.y};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = places[i / 2 * 8 + i % 2];
                put(of_pair + at, all[i], here && at != NOWHERE);
            }
        }
#else
        if constexpr (HOW != COLLECTED)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const float(&v)[4] = k ? other : one;
                const int at = places[8 * k];
                if constexpr (HOW == TOGETHER) {
                    put(of_pair + at, make_float4(v[0], v[1], v[2], v[3]), here && at != NOWHERE);
                } else {
                    const int next = places[8 * k + 1];
                    put(of_pair + at, make_float2(v[0], v[1]), here && at != NOWHERE);
                    put(of_pair + next, make_float2(v[2], v[3]), here && next != NOWHERE);
                }
            }
#endif
    }

    /// Stores what this warp has collected of a part, from a sample's position `first` on: of pairs that are lines of y which lie side
    /// by side those lines together.
    __device__ __forceinline__ void store_collected(Element *of_pair, int first) const {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet();
        const int width = 1 << s.line_bits, length = 2 * width + s.past_line, line = t(), p = first + line * width;
        const bool is_first = s.past_line == 0 || pair() - tables.by.h_stride.divide(pair()) * s.h_stride == 0;
        if (here() && is_first && line * width < PART_POS && p < s.volume)
            store(of_pair + place_of(p), area + (line * length - 4 * t()) * SIZE, length * SIZE);
        stored();
    }

    /// Statistics of some more outputs of the sample: sums of what they are off from one of them, or from the mean so far, and of the
    /// squares of that.
    struct Counted {
        float seen, from, total[2], squares[2];
    };
    __device__ __forceinline__ Counted counted() const {
        const Moments all = moments();
        return {all.seen, all.mean, {0.0f, 0.0f}, {0.0f, 0.0f}};
    }

    /// What this thread has counted: in a register, or where these do not suffice in shared memory.
    __device__ __forceinline__ Moments moments() const { return MOMENTS_SHARED ? tables.moments[thread()] : own; }
    __device__ __forceinline__ void keep(const Moments &all) { (MOMENTS_SHARED ? tables.moments[thread()] : own) = all; }

    /// Adds outputs of neighbours, of which so many positions are the sample's, or all where WHOLE.
    template <bool WHOLE> __device__ __forceinline__ void count(Counted &counted, int j, int own, const float (&v)[4], int positions) const {
        if (j % (MODE == 3 ? NEIGHBOURS : 2 * NEIGHBOURS) == 0 && counted.seen == 0.0f) counted.from = v[0];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float off = WHOLE || 8 * j + own + e / 2 < positions ? v[e] - counted.from : 0.0f;
            counted.total[e % 2] += off;
            counted.squares[e % 2] = fmaf(off, off, counted.squares[e % 2]);
        }
    }

    /// Adds those to the statistics: of so many positions that the sample has from where they begin, or at most of those. As by Youngs
    /// and Cramer, 1971.
    __device__ __forceinline__ void add(const Counted &counted, int positions, int most) {
        // Two of each eight positions, with two residues each.
        const int own = min(positions, most) - 2 * t(), more = 2 * (own / 8 * 2 + min(own % 8, 2));
        if (own <= 0) return;
        const float seen = counted.seen + more, all = counted.total[0] + counted.total[1], shift = __fdividef(all, seen);
        // Deviations from a mean that moves by that; before, what was seen had no part in `all`.
        float squares = fmaf(-all, shift, counted.squares[0] + counted.squares[1]);
        // Lets NaN through.
        asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(squares));
        keep({seen, counted.from + shift, moments().deviations + squares});
    }

    /// Writes a part of a tile, counts it, or both: from a sample's position `first` on. `outputs` are those of neighbours; LEAKY: what is
    /// counted in mode 3 may have a slope.
    template <int PART, How HOW, bool WHOLE, bool UNROLLED, bool LEAKY, typename Outputs>
    __device__ __forceinline__ void finish_part(int n, int first, Counted &so_far, const Outputs &outputs) {
        Element *const of_pair = to_pair + n * s.y_n;
        if (HOW == COLLECTED) {
            // The copy engine has read what was there.
            stored_read();
            meet();
        }
        const int own_position = 2 * t();
        const bool is_here = here();
#pragma unroll(UNROLLED ? NEIGHBOURS / 2 : 1)
        for (int j = PART * NEIGHBOURS; j < (PART + 1) * NEIGHBOURS; j += 2) {
            float v[2][4];
#pragma unroll
            for (int k = 0; k < 2; k++) outputs(j + k, v[k]);
            if (WRITES) write<HOW>(of_pair, is_here, j, own_position, v[0], v[1]);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                if (MODE == 3) {
                    as_stored(v[k]);
                    post(LEAKY ? tables.post_slope : 0.0f).apply<LEAKY>(v[k]);
                }
                if (COUNTS) count<WHOLE>(so_far, j + k, own_position, v[k], s.volume - first);
            }
        }
        if (HOW == COLLECTED) store_collected(of_pair, first + PART * PART_POS);
    }
    template <How HOW, bool WHOLE, bool UNROLLED, bool LEAKY, typename Outputs>
    __device__ __forceinline__ void finish_parts(int n, int first, const Outputs &outputs) {
        Counted so_far = counted();
        finish_part<0, HOW, WHOLE, UNROLLED, LEAKY>(n, first, so_far, outputs);
        // Where registers are scarce of each part.
        if (MODE == 3) {
            add(so_far, s.volume - first, PART_POS);
            so_far = counted();
        }
        finish_part<1, HOW, WHOLE, UNROLLED, LEAKY>(n, first, so_far, outputs);
        if (COUNTS) add(so_far, s.volume - first - (MODE == 3 ? PART_POS : 0), MODE == 3 ? PART_POS : POS);
    }

    /// The same of sums.
    template <How HOW, bool STRAIGHT, bool POSTED> __device__ __forceinline__ void finish_tile(int n, int first) {
        const auto outputs = [&](int j, float(&v)[4]) {
            take(j, v);
            finish<STRAIGHT, POSTED>(v);
            if (MODE == 1)
#pragma unroll
                for (int e = 0; e < 4; e++) v[e] -= left_out;
        };
        finish_parts<HOW, HOW != APART, true, !STRAIGHT>(n, first, outputs);
    }

    /// Whether outputs that are written are counted one by one. They are written so, too: registers do not suffice for all ways.
    __device__ __forceinline__ bool is_counted_in_part(int first) const { return MODE == 3 && s.volume - first < POS; }

    /// The same, as it has to be.
    __device__ __forceinline__ void finish_tile(int n, int first, int by_definition) {
        const bool leaky = MODE != 3 && s.activation == Straight::LEAKY_RELU || MODE > 1 && s.post_activation == Straight::LEAKY_RELU;
        if (by_definition) {
            const auto outputs = [&](int j, float(&v)[4]) {
                define(n, first, j, v);
                finish<false, true>(v);
#pragma unroll
                for (int e = 0; e < 4; e++) v[e] -= left_out;
            };
            finish_parts<APART, false, false, true>(n, first, outputs);
        } else if (MODE == 1 && !leaky && s.volume - first >= POS) {
            // Without the bias: it needs not be added to each.
            const float least = activation(0.0f).least - left_out;
            const auto outputs = [&](int j, float(&v)[4]) {
                take(j, v);
#pragma unroll
                for (int e = 0; e < 4; e++) asm("max.NaN.f32 %0, %0, %1;" : "+f"(v[e]) : "f"(least));
            };
            finish_parts<APART, true, true, false>(n, first, outputs);
        } else if (MODE == 1 || s.how == APART || is_counted_in_part(first)) {
            finish_tile<APART, false, true>(n, first);
        } else if (s.how == TOGETHER) {
            if (leaky)
                finish_tile<TOGETHER, false, true>(n, first);
            else
                finish_tile<TOGETHER, true, true>(n, first);
        } else {
            if (leaky)
                finish_tile<COLLECTED, false, true>(n, first);
            else if (MODE == 2 && s.post_activation == Straight::RELU)
                finish_tile<COLLECTED, true, true>(n, first);
            else
                finish_tile<COLLECTED, true, false>(n, first);
        }
    }

    /// Writes what the team has of the statistics of all samples before one, and forgets it.
    __device__ __forceinline__ void hand_over_until(int n) {
#pragma unroll 1
        for (; sample < n; sample++) {
            Moments all = moments();
#pragma unroll
            for (int lanes = 1; lanes < 4; lanes *= 2) {
                const float others = __shfl_xor_sync(0xffffffffu, all.seen, lanes), apart = __shfl_xor_sync(0xffffffffu, all.mean, lanes) - all.mean;
                const float share = __fdividef(others, fmaxf(all.seen + others, 1.0f));
                all.deviations += __shfl_xor_sync(0xffffffffu, all.deviations, lanes) + apart * apart * (all.seen * share);
                all.mean += apart * share;
                all.seen += others;
            }
            if (t() == 0 && here()) {
                const long long at = ((long long)sample * place.teams + place.team) * (s.rows / 2) + pair();
                s.part_mean[at] = all.mean + left_out;
                s.part_m2[at] = all.deviations;
                s.part_count[at] = all.seen;
            }
            keep({0.0f, 0.0f, 0.0f});
        }
    }

    /// The normalization of a sample.
    __device__ __forceinline__ void normalize(int n) {
        sample = n;
        if (!here()) return;
        const int channel = tables.by.half_taps.divide(pair()), at = n * s.norm_groups + channel / s.group_channels;
        less = s.mean[at];
        factor = s.rstd[at] * (s.gamma ? widen(s.gamma[channel]) : 1.0f);
        addend = s.beta ? widen(s.beta[channel]) : 0.0f;
        shift = bias - less;
    }

    __device__ __forceinline__ void run(const unsigned char *memory) {
        // The first products are added to nothing.
#pragma unroll
        for (int e = 0; e < POS / 2; e++) sum[e] = 0.0f;
        if (COUNTS) keep({0.0f, 0.0f, 0.0f});
        // The statistics.
        if (MODE == 2) await_previous();
        Item item(s, tables, place.team);
        // Where registers are scarce it is asked for each time.
        const int bad = MODE == 3 ? 0 : tables.bad;
#pragma unroll 1
        for (int i = place.team; i < s.items; i += place.teams, item.next(s, place.teams)) {
            const int n = item.n, first = item.first;
            const int undefined = multiply_tile(memory), by_definition = bad || MODE == 3 && tables.bad || KIND != 0 && undefined;
            if (WRITES && (s.how != COLLECTED || by_definition || is_counted_in_part(first))) note_places(first);
            if (COUNTS) hand_over_until(n);
            if (MODE == 2 && n != sample) normalize(n);
            matrix_wait<0>();
            give_back((slot ? slot : s.stages) - 1);
            finish_tile(n, first, by_definition);
        }
        if (COUNTS) hand_over_until(tables.by.pos_blocks.divide(s.items));
        // Shared memory stays until all has been read.
        if (WRITES) stored_read();
    }
};

/// Which row of all a row of the block's is: those of a warp are its pairs' first ones, then their second ones.
__device__ __forceinline__ int row_of(int i) { return i / 16 * 16 + i % 8 * 2 + i / 8 % 2; }

/// Weights in panels of 16 bytes of each row; the split's low parts behind all others.
__device__ __forceinline__ void keep_weights(const Sizes &s, Tables &tables, unsigned char *to, int first_row) {
    const int rows = ROWS * s.row_groups, vectors = rows * (KC / VECTOR) * s.chunks;
    // Several at once, for the way from memory.
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += MULTIPLIERS) {
        const int panel = i / rows, row = first_row + row_of(i - panel * rows), c = panel * VECTOR;
        alignas(16) Element v[E];
#pragma unroll
        for (int e = 0; e < E; e++) v[e] = row < s.rows && c + e < s.in_channels ? s.w[(long long)(c + e) * s.rows + row] : Element{};
#if KIND != 0
        unsigned most = 0;
#pragma unroll
        for (int e = 0; e < E; e++) most = max(most, within_parts(magnitude(v[e])));
        if (most >= 0x7f800000u) tables.bad = 1;
#endif
        uint4 low;
        *(uint4 *)(to + 16 * i) = operand(v, 1.0f, &low);
        if (PARTS == 2) *(uint4 *)(to + 16 * (vectors + i)) = low;
    }
}

/// Where a lane collects its outputs in the area of its warp: lines of y that are stored together, of so many pairs, lie side by side.
__device__ __forceinline__ int place_in_area(int together, int line_bits) {
    const int pair = threadIdx.x % 32 / 4, some = pair / together, line = pair - some * together;
    return some * (together * 2 * PART_POS * SIZE + AREA_PAD) + ((2 * line << line_bits) + 4 * (threadIdx.x % 4)) * SIZE;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) shuffle_wgmma(
    const Element *x, const Element *w, const Element *bias, Element *y, int in_channels, int out_channels, int volume, int plane,
    int width, int d_stride, int h_stride, long long x_n, long long y_n, int y_c, int y_d, int y_h, int chunks, int pos_blocks, int items,
    int row_blocks, int row_groups, int stages, int ahead, int how, int line_bits, int past_line, int has_bias, int activation, double slope,
    float *part_mean, float *part_m2, float *part_count, const float *mean, const float *rstd, const Element *gamma, const Element *beta,
    int norm_groups, int group_channels, int post_activation, double post_slope) {
    let_next_start();
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Tables tables;
    const int taps = d_stride * h_stride * 2, teams = GROUPS / row_groups;
    const Sizes s = {x, w, y, in_channels, volume, out_channels * taps, d_stride, h_stride, x_n, y_n, y_d, y_h, chunks, pos_blocks, items, row_groups,
                     stages, ahead, how, line_bits, past_line, 1 << line_bits < PART_POS ? past_line * SIZE : 0,
                     part_mean, part_m2, part_count, mean, rstd, gamma, beta, norm_groups, group_channels, activation, post_activation};
    const unsigned barriers = shared(memory), weights_offset = (BARRIERS * stages * teams + 127) / 128 * 128;
    const unsigned weights = barriers + weights_offset, ring = weights + 16 * PARTS * ROWS * row_groups * (KC / VECTOR) * chunks;
    // Of each stage what says that it is full, and that it is empty.
    if (threadIdx.x < stages * teams) {
        barrier_init(barriers + BARRIERS * threadIdx.x, row_groups * 32);
        barrier_init(barriers + BARRIERS * threadIdx.x + 8, row_groups * GROUP / 32);
        *(int4 *)(memory + BARRIERS * threadIdx.x + 16) = make_int4(0, 0, 0, 0);
    }
    if (const int i = threadIdx.x - 32; i >= 0 && i < sizeof(Divisors) / sizeof(Divisor))
        ((Divisor *)&tables.by)[i] = Divisor(i == 0 ? plane : i == 1 ? width : i == 2 ? pos_blocks : i == 3 ? taps / 2 : h_stride);
    if (threadIdx.x == 64) tables.bad = 0;
    if (threadIdx.x == 65) tables.slope = (float)slope, tables.post_slope = (float)post_slope;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    const int of_grid = blockIdx.x / row_blocks, first_row = (blockIdx.x - of_grid * row_blocks) * ROWS * row_groups;
    // Of a warpgroup, and of the warp that copies for it.
    const auto place_of = [&](int i) -> Place {
        const int team = i / row_groups;
        return {of_grid * teams + team, (int)gridDim.x / row_blocks * teams, barriers + BARRIERS * team * stages, ring + team * stages * PARTS * STAGE,
                weights + 16 * ROWS * (i - team * row_groups)};
    };
    __syncthreads();
    if (threadIdx.x >= MULTIPLIERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPIER_REGISTERS));
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 - MULTIPLIERS / 32, 0);
        const Copier copier = {s, tables, place_of(warp), warp % row_groups * 32 + (int)threadIdx.x % 32, row_groups * 32};
        copier.run(memory);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLIER_REGISTERS));
    keep_weights(s, tables, memory + weights_offset, first_row);
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0), first_pair = (first_row + group % row_groups * ROWS) / 2;
    const int pair = first_pair + threadIdx.x % GROUP / 32 * 8 + threadIdx.x % 32 / 4;
    const bool here = pair < s.rows / 2;
    const int channel = tables.by.half_taps.divide(pair), tap = pair - channel * (taps / 2), td = tables.by.h_stride.divide(tap);
    const float add = here && has_bias ? widen(bias[channel]) : 0.0f;
    // What is infinite is not less by it.
    const bool finite = fabsf(add) < INFINITY;
    if (!finite) tables.bad = 1;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, %1;" ::"n"(GROUPS + 1), "n"(MULTIPLIERS) : "memory");
    const unsigned areas = ring + teams * stages * PARTS * STAGE;
    Multiplier multiplier = {s, tables, place_of(group), group, first_pair, add, MODE == 1 && activation != 2 && finite ? add : 0.0f,
                             y + (here ? (long long)channel * y_c + td * y_d + (tap - td * h_stride) * y_h : 0),
                             areas + threadIdx.x / 32 * AREA + place_in_area(past_line ? h_stride : 1, line_bits)};
    multiplier.run(memory);
}
