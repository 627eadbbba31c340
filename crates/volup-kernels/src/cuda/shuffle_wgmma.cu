// Shuffle GEMM on Hopper's own matrix instructions: a transposed convolution whose kernel is its stride: of NCDHW with 2 along
// width, or of NDHWC with an even number of channels. X_LAST says that x is NDHWC, Y_LAST that y is.
//
// # What is computed
//
// As in `shuffle_gemm`: `Y[row, position] = sum over channels: W[channel][row] * X[channel, position]`, a row is a
// channel of y and a tap, `row = co*taps + tap`; positions are those of a sample, in order.
//
// Rows of W are the rows of the instruction, so that a lane has two rows of a warp's sixteen and every fourth pair of
// positions: which two is free. Of NCDHW these are the residues along width of one `pair`, a channel and a tap along depth and height,
// of an NDHWC y two neighbouring channels of one tap; there rows are in the order in which a position's outputs lie in y. All that a lane
// does to its outputs is so of one channel or two: bias, weights of the norm and statistics are in its registers.
// Positions are the columns. The instructions want channels side by side, as NDHWC has them, of 16 bits positions as well. Of an x of
// NCDHW in float32 whoever brings X turns four by four of them around.
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
// rows of all. With Y_LAST a partial is of a row of W instead. All partials are written.
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
// a multiple of 128 of them and FREE more each: where ACROSS POS/8 of KC rows, else KC/VECTOR of POS rows. size is that of an
// element, parts 2 for KIND 3, else 1, teams 4/row_groups; where outputs are collected 16 areas of AREA bytes more. `ahead`, 1 or 2, and
// what is multiplied meanwhile, two stages where there are several `chunks`, are at most `stages`. x is dense, y lies as its strides say,
// 1 along width, with Y_LAST dense too, x and y start at multiples of 16 bytes, which a channel of x is a multiple of, with X_LAST a position.
// What is counted in a sample, stages of all items and groups of all samples are below 2^31.
//
// `how` outputs are written: 0, a position's two residues at once; 1, 16 bytes, where lines of x are a multiple of 4 positions (float32:
// of 2); 2, each warp collects those of PART_POS positions, in areas behind the rings, and the copy engine stores whole lines. Of that
// 2^`line_bits` positions, a multiple of 8, are a line of x, or a part of a longer one. Where h_stride divides 8 and no line is longer,
// `past_line` elements are stored with the first line of y that one of x gives: the other h_stride - 1 lines, which lie right behind. Else 0.
// With Y_LAST: 0, two channels of a position at once; 2, a warpgroup collects what it has of PART_POS positions, and its lanes store 16 bytes
// at once, which what a position has of a line of y, `w_stride*out_channels`, is a multiple of.
//
// Parameters, i32 but for pointers, `x_n`, `y_n` (i64) and the slopes (f64): `x`, `w`, `bias`, `y`, `in_channels`,
// `out_channels`, `volume`, `plane`, `width` (positions of a sample, a plane, a line), `d_stride`, `h_stride`, `x_n`, `y_n`,
// `y_c`, `y_d`, `y_h` (strides in elements), `chunks` (of KC channels), `pos_blocks` (of a sample), `items` (of all),
// `row_blocks`, `row_groups`, `stages`, `ahead`, `how`, `line_bits`, `past_line`, `w_stride`, `has_bias`, `activation`, `slope`, then as in
// `shuffle_gemm` `part_mean`, `part_m2`, `part_count`, `mean`, `rstd`, `gamma`, `beta`, `norm_groups`, `group_channels`, `post_activation`,
// `post_slope`.

#include "launch.cuh"
#include "shuffle_copier.cuh"
#if Y_LAST
#include "shuffle_voxels.cuh"
#else
#include "shuffle_lines.cuh"
#endif
#include "stored.cuh"
#include "warp_meet.cuh"

/// One of the threads of a warpgroup that multiplies.
struct Multiplier {
    const Sizes &s;
    Tables &tables;
    const Place place;
    /// The first pair of its warpgroup among all.
    const int first_pair;
    const Writer writer;
    Places places;
    /// The bias of its channels, and the part of it that statistics are less by: all or nothing.
    float bias[CHANNELS], left_out[CHANNELS];
    /// The next stage to be multiplied, and the parity of what fills it.
    int slot = 0, turn = 0;
    float sum[POS / 2];
    /// The sample at hand, and what this thread has counted of it.
    int sample = COUNTS ? 0 : -1;
    Moments own[CHANNELS];
    /// What y is less by, times and more by when it is normalized; what sums are more by before that.
    float less[CHANNELS], factor[CHANNELS], addend[CHANNELS], shift[CHANNELS];

    /// `add` are the biases.
    __device__ __forceinline__ Multiplier(const Sizes &s, Tables &tables, const Place &place, int group, int first_pair, const Writer &writer,
                                          const float (&add)[CHANNELS], bool finite)
        : s(s), tables(tables), place(place), first_pair(first_pair), writer(writer), places{s, tables, group} {
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            bias[c] = shift[c] = add[c];
            left_out[c] = MODE == 1 && s.activation != 2 && finite ? add[c] : 0.0f;
            own[c] = {0.0f, 0.0f, 0.0f};
            less[c] = addend[c] = 0.0f, factor[c] = 1.0f;
        }
    }

    /// Its pair among all, and whether there is one.
    __device__ __forceinline__ int pair() const { return first_pair + own_thread() % GROUP / 4; }
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
        const unsigned first_stage = ::place(place.ring, ACROSS ? 128 : PANEL);
        unsigned of_w = ::place(place.weights, panel);
        int undefined = 0;
#pragma unroll 1
        for (int chunk = 0; chunk < s.chunks; chunk++) {
            const unsigned full = place.barriers + BARRIERS * slot, stage = first_stage + slot * (PARTS * STAGE >> 4);
            barrier_wait(full, turn);
            // By the lane that gives the stage back: no other one reads it.
            if (KIND != 0 && threadIdx.x % 32 == 0) {
                const int4 met = *(const int4 *)(memory + (full + 16 - shared(memory)));
                undefined |= met.x | met.y | met.z | met.w;
            }
            matrix_fence();
#pragma unroll
            for (int k = 0; k < KC / STEP; k++, of_w += 2 * panel >> 4) {
                const int keep = k > 0 || chunk > 0;
                const unsigned long long w = operand_at<1>(of_w);
                if constexpr (ACROSS) {
                    multiply<KIND == 0>(sum, w, (unsigned long long)(PANEL >> 4) << 32 | (stage + 16 * k), keep);
                } else {
                    const unsigned long long x = operand_at<1>(stage + (2 * PANEL >> 4) * k);
                    if (PARTS == 2) {
                        multiply(sum, w, operand_at<1>(stage + (STAGE + 2 * PANEL * k >> 4)), keep);
                        multiply(sum, operand_at<1>(of_w + low), x, 1);
                    }
                    multiply(sum, w, x, PARTS == 2 || keep);
                }
            }
            matrix_commit();
            // The stage before has been read.
            if (chunk > 0) {
                matrix_wait<1>();
                give_back((slot ? slot : s.stages) - 1);
            }
            if (++slot == s.stages) slot = 0, turn ^= 1;
        }
        return KIND == 0 ? 0 : __shfl_sync(0xffffffffu, undefined, 0);
    }

    /// All of this warp have what they need of a stage.
    __device__ __forceinline__ void give_back(int of) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(place.barriers + BARRIERS * of + 8);
    }

    /// Outputs of two neighbouring positions, two rows each: from their sums, without the activation.
    __device__ __forceinline__ void take(int j, float (&v)[4]) const {
        v[0] = sum[4 * j], v[1] = sum[4 * j + 2], v[2] = sum[4 * j + 1], v[3] = sum[4 * j + 3];
    }

    /// The same by the definition.
    __device__ __forceinline__ void define(int n, int first, int j, float (&v)[4]) const {
        const Pair rows(s, tables.by, pair());
        const Element *weight = s.w + rows.row;
        const int next = rows.next_row - rows.row;
        v[0] = v[1] = v[2] = v[3] = 0.0f;
#pragma unroll 1
        for (int c = 0; c < s.in_channels && here(); c++, weight += s.rows) {
            const float even = widen(weight[0]), odd = widen(weight[next]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int p = first + 8 * j + 2 * own_columns() + i;
                const long long at = X_LAST ? (long long)p * s.in_channels + c : (long long)c * s.volume + p;
                const float x = p < s.volume ? widen(s.x[n * s.x_n + at]) : 0.0f;
                v[2 * i] = fmaf(x, even, v[2 * i]);
                v[2 * i + 1] = fmaf(x, odd, v[2 * i + 1]);
            }
        }
    }

    /// Outputs from their sums, normalized in mode 2. In mode 3 no activation comes before y. STRAIGHT: there is no slope, so that
    /// the bias and the mean are one number; POSTED: there is an activation behind the norm.
    template <bool STRAIGHT, bool POSTED> __device__ __forceinline__ void finish(float (&v)[4]) const {
        if constexpr (STRAIGHT) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int c = e % CHANNELS;
                if (MODE != 3) asm("max.NaN.f32 %0, %0, %1;" : "+f"(v[e]) : "f"(activation(0.0f).least - bias[c]));
                v[e] += shift[c];
                if (MODE == 2) v[e] = fmaf(v[e], factor[c], addend[c]);
            }
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] += bias[e % CHANNELS];
            if (MODE != 3) activation(tables.slope).apply<true>(v);
            if (MODE == 2)
#pragma unroll
                for (int e = 0; e < 4; e++) v[e] = fmaf(v[e] - less[e % CHANNELS], factor[e % CHANNELS], addend[e % CHANNELS]);
        }
        if (MODE == 2 && POSTED) post(STRAIGHT ? 0.0f : tables.post_slope).apply<!STRAIGHT>(v);
    }

    /// Statistics of some more outputs of the sample: sums of what they are off from one of them, or from the mean so far, and of the
    /// squares of that.
    struct Counted {
        float seen, from[CHANNELS], total[2], squares[2];
    };
    __device__ __forceinline__ Counted counted() const {
        Counted none = {moments(0).seen, {}, {0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) none.from[c] = moments(c).mean;
        return none;
    }

    /// What this thread has counted: in registers, or where these do not suffice in shared memory.
    __device__ __forceinline__ Moments moments(int c) const { return MOMENTS_SHARED ? tables.moments[c][own_thread()] : own[c]; }
    __device__ __forceinline__ void keep(int c, const Moments &all) { (MOMENTS_SHARED ? tables.moments[c][own_thread()] : own[c]) = all; }

    /// Adds outputs of neighbours, of which so many positions are the sample's, or all where WHOLE.
    template <bool WHOLE> __device__ __forceinline__ void count(Counted &counted, int j, int own, const float (&v)[4], int positions) const {
        if (j % (MODE == 3 ? NEIGHBOURS : 2 * NEIGHBOURS) == 0 && counted.seen == 0.0f)
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) counted.from[c] = v[c];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float off = WHOLE || 8 * j + own + e / 2 < positions ? v[e] - counted.from[e % CHANNELS] : 0.0f;
            counted.total[e % 2] += off;
            counted.squares[e % 2] = fmaf(off, off, counted.squares[e % 2]);
        }
    }

    /// Adds those to the statistics: of so many positions that the sample has from where they begin, or at most of those. As by Youngs
    /// and Cramer, 1971.
    __device__ __forceinline__ void add(const Counted &counted, int positions, int most) {
        // Two of each eight positions, with two residues each, or with two channels.
        const int own = min(positions, most) - 2 * own_columns(), more = 2 / CHANNELS * (own / 8 * 2 + min(own % 8, 2));
        if (own <= 0) return;
        const float seen = counted.seen + more;
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            const float all = Y_LAST ? counted.total[c] : counted.total[0] + counted.total[1], shift = __fdividef(all, seen);
            // Deviations from a mean that moves by that; before, what was seen had no part in `all`.
            float squares = fmaf(-all, shift, Y_LAST ? counted.squares[c] : counted.squares[0] + counted.squares[1]);
            // Lets NaN through.
            asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(squares));
            keep(c, {seen, counted.from[c] + shift, moments(c).deviations + squares});
        }
    }

    /// Writes a part of a tile, counts it, or both: from a sample's position `first` on. `outputs` are those of neighbours; LEAKY: what is
    /// counted in mode 3 may have a slope.
    template <int PART, How HOW, bool WHOLE, bool UNROLLED, bool LEAKY, typename Outputs>
    __device__ __forceinline__ void finish_part(int n, int first, Counted &so_far, const Outputs &outputs) {
        [[maybe_unused]] const unsigned collected = HOW == COLLECTED ? writer.begin<PART>(places) : 0;
        const int own_position = 2 * own_columns();
        const bool is_here = here();
#pragma unroll(UNROLLED ? NEIGHBOURS / 2 : 1)
        for (int j = PART * NEIGHBOURS; j < (PART + 1) * NEIGHBOURS; j += 2) {
            float v[2][4];
#pragma unroll
            for (int k = 0; k < 2; k++) outputs(j + k, v[k]);
            if (WRITES) writer.write<HOW>(places, n, is_here, j, own_position, v[0], v[1], pair(), collected);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                if (MODE == 3) {
                    as_stored(v[k]);
                    post(LEAKY ? tables.post_slope : 0.0f).apply<LEAKY>(v[k]);
                }
                if (COUNTS) count<WHOLE>(so_far, j + k, own_position, v[k], s.volume - first);
            }
        }
        if (HOW == COLLECTED) writer.store_part<PART>(places, n, is_here, pair(), first);
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
                for (int e = 0; e < 4; e++) v[e] -= left_out[e % CHANNELS];
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
                for (int e = 0; e < 4; e++) v[e] -= left_out[e % CHANNELS];
            };
            finish_parts<APART, false, false, true>(n, first, outputs);
        } else if (MODE == 1 && !leaky && s.volume - first >= POS) {
            // Without the bias: it needs not be added to each.
            float least[CHANNELS];
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) least[c] = activation(0.0f).least - left_out[c];
            const auto outputs = [&](int j, float(&v)[4]) {
                take(j, v);
#pragma unroll
                for (int e = 0; e < 4; e++) asm("max.NaN.f32 %0, %0, %1;" : "+f"(v[e]) : "f"(least[e % CHANNELS]));
            };
            finish_parts<APART, true, true, false>(n, first, outputs);
        } else if (MODE == 1 || s.how == APART || is_counted_in_part(first)) {
            finish_tile<APART, false, true>(n, first);
        } else if (!Y_LAST && s.how == TOGETHER) {
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
        for (; sample < n; sample++)
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) {
                Moments all = moments(c);
#pragma unroll
                for (int lanes = 1; lanes < 4; lanes *= 2) {
                    const float others = __shfl_xor_sync(0xffffffffu, all.seen, lanes), apart = __shfl_xor_sync(0xffffffffu, all.mean, lanes) - all.mean;
                    const float share = __fdividef(others, fmaxf(all.seen + others, 1.0f));
                    all.deviations += __shfl_xor_sync(0xffffffffu, all.deviations, lanes) + apart * apart * (all.seen * share);
                    all.mean += apart * share;
                    all.seen += others;
                }
                if (own_columns() == 0 && here()) {
                    const int rows = Y_LAST ? s.rows : s.rows / 2;
                    int row = pair();
                    if (Y_LAST) {
                        const Pair own(s, tables.by, row);
                        row = c ? own.next_row : own.row;
                    }
                    const long long at = ((long long)sample * place.teams + place.team) * rows + row;
                    s.part_mean[at] = all.mean + left_out[c];
                    s.part_m2[at] = all.deviations;
                    s.part_count[at] = all.seen;
                }
                keep(c, {0.0f, 0.0f, 0.0f});
            }
    }

    /// The normalization of a sample.
    __device__ __forceinline__ void normalize(int n) {
        sample = n;
        if (!here()) return;
        const int first = Pair(s, tables.by, pair()).channel;
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            const int channel = first + c, at = n * s.norm_groups + channel / s.group_channels;
            less[c] = s.mean[at];
            factor[c] = s.rstd[at] * (s.gamma ? widen(s.gamma[channel]) : 1.0f);
            addend[c] = s.beta ? widen(s.beta[channel]) : 0.0f;
            shift[c] = bias[c] - less[c];
        }
    }

    __device__ __forceinline__ void run(const unsigned char *memory) {
        // The first products are added to nothing.
#pragma unroll
        for (int e = 0; e < POS / 2; e++) sum[e] = 0.0f;
        if (MOMENTS_SHARED)
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) keep(c, {0.0f, 0.0f, 0.0f});
        // The statistics.
        if (MODE == 2) await_previous();
        Item item(s, tables, place.team);
        // Where registers are scarce it is asked for each time.
        const int bad = MODE == 3 ? 0 : tables.bad;
#pragma unroll 1
        for (int i = place.team; i < s.items; i += place.teams, item.next(s, place.teams)) {
            const int n = item.n, first = item.first;
            const int undefined = multiply_tile(memory), by_definition = bad || MODE == 3 && tables.bad || KIND != 0 && undefined;
            if (WRITES && (Writer::wants_places(s.how) || by_definition || is_counted_in_part(first))) places.note(first);
            if (COUNTS) hand_over_until(n);
            if (MODE == 2 && n != sample) normalize(n);
            matrix_wait<0>();
            give_back((slot ? slot : s.stages) - 1);
            finish_tile(n, first, by_definition);
        }
        if (COUNTS) hand_over_until(tables.by.pos_blocks.divide(s.items));
        if (WRITES) writer.finish();
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
        const int panel = i / rows, in_order = first_row + row_of(i - panel * rows), c = panel * VECTOR;
        int row = in_order;
        if (Y_LAST) {
            const Pair of(s, tables.by, in_order / 2);
            row = in_order >= s.rows ? s.rows : in_order % 2 ? of.next_row : of.row;
        }
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) shuffle_wgmma(
    const Element *x, const Element *w, const Element *bias, Element *y, int in_channels, int out_channels, int volume, int plane,
    int width, int d_stride, int h_stride, long long x_n, long long y_n, int y_c, int y_d, int y_h, int chunks, int pos_blocks, int items,
    int row_blocks, int row_groups, int stages, int ahead, int how, int line_bits, int past_line, int w_stride, int has_bias, int activation, double slope,
    float *part_mean, float *part_m2, float *part_count, const float *mean, const float *rstd, const Element *gamma, const Element *beta,
    int norm_groups, int group_channels, int post_activation, double post_slope) {
    let_next_start();
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Tables tables;
    const int taps = d_stride * h_stride * w_stride, teams = GROUPS / row_groups;
    const Sizes s = {x, w, y, in_channels, volume, out_channels * taps, d_stride, h_stride, x_n, y_n, y_c, y_d, y_h, chunks, pos_blocks, items, row_groups,
                     stages, ahead, how, line_bits, past_line, taps, w_stride, w_stride * out_channels, 1 << line_bits < PART_POS ? past_line * SIZE : 0,
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
        ((Divisor *)&tables.by)[i] = Divisor(i == 0   ? plane
                                             : i == 1 ? width
                                             : i == 2 ? pos_blocks
                                             : i == 3 ? (Y_LAST ? w_stride * out_channels : taps) / 2
                                             : i == 4 ? h_stride
                                                      : max(out_channels / 2, 1));
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
    const int channel = Pair(s, tables.by, pair).channel;
    float add[CHANNELS];
    // What is infinite is not less by it.
    bool finite = true;
#pragma unroll
    for (int c = 0; c < CHANNELS; c++) {
        add[c] = here && has_bias ? widen(bias[channel + c]) : 0.0f;
        finite &= fabsf(add[c]) < INFINITY;
    }
    if (!finite) tables.bad = 1;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, %1;" ::"n"(GROUPS + 1), "n"(MULTIPLIERS) : "memory");
    const Writer writer(s, tables.by, ring + teams * stages * PARTS * STAGE, first_pair, pair, here);
    Multiplier multiplier(s, tables, place_of(group), group, first_pair, writer, add, finite);
    multiplier.run(memory);
}
