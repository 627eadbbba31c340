// Implicit GEMM: a transposed convolution of few channels, of stride 2 along width, whose sums are of exactly the products
// that an output has.
//
// Where an output has few products, padding them to what a matrix product is usually cut into costs more than they do, and
// so does every instruction that moves an output. Here what is summed over, channels and taps of a residue, is one list
// without gaps: of three channels and two taps six numbers, in steps of eight. Operands are gathered from a box of the input
// in shared memory, one word each.
//
// # What is computed
//
// Along an axis output `o` takes tap `k` from input `i` where `o + padding - k*dilation = stride*i`. Along width outputs
// come in pairs, `o = 2j` and `2j + 1`; each tap belongs to one of them, at an input that lies a constant `offset` from j.
// For each pair of residues along depth and height the product is
// `Y[channel and column of a pair, position j] = sum over entries: A[.., entry] * X[entry, position]`,
// an entry being a tap along depth, one along height, an offset along width and a channel of the input; of 16 bits two
// neighbouring channels. Rows of a tile of 16 are eight channels' first columns, then their second ones.
//
// # How
//
// Persistent blocks of one group, which keep its weights in shared memory in the order that the instruction takes them in. A
// box of outputs is `box_d` planes by some row blocks, LINES lines of each of the stride's residues, by SEGMENTS times 64
// columns, of all channels of the group. Four warps bring boxes' inputs to a ring of `stages`, with zeros around: by copies that
// nobody waits for, the next box's while those of one are under way, and each thread rounds what it has asked for where it lies.
// The other warps take units of work one after the other, whichever comes: `blocks_h` row blocks of one plane, of eight channels;
// LINES lines of each residue along height are a row block. So no warp waits for another, but for a stage.
//
// Sums are collected in shared memory as they lie in y. Where a box is as wide as y, `joined`, all lines of a row block are one
// run of each channel; else each line is one. The copy engine stores whole sectors of 32 bytes: where a part of one is written,
// the cache reads it first, among all that the memory writes. `linked`, what a run leaves of its last sector starts the next one;
// at the ends of a unit, or of each run, lanes store single elements. Warps take units along height, then along channels, then
// along depth: what they store at the same time lies close by.
//
// With VOXEL the input is NDHWC, and words of it are asked for one by one. If it is not 0, so is the output. Then a unit of work has all
// tiles of channels that make up VOXEL bytes of a voxel of y: these are collected voxel by voxel, and stored by lanes, whole sectors
// (`implicit_voxels.cuh`).
//
// # Modes
//
// As in `shuffle_gemm`: `mode` 0 writes y; 1 writes statistics instead; 2 writes y normalized. 3, which kernels with `COUNTS`
// have alone, writes y and statistics of what y holds, rounded, through `post_activation`: to be scaled where it lies, or for
// training, where both come from the same y. A partial statistic is the mean of a channel's outputs, the sum of their squared
// deviations from it and their count, for a unit of work: partial
// `(((sample*boxes + box)*box_d + plane)*units_h + unit)*channels + channel`, units_h units a plane and channels all.
// A lane sums up how far its values are from the mean of its channel's first lines, and the squares of that. What they are the
// share `f` of, the mean of all is no further from theirs than the deviation by sqrt(1/f): the squares
// lose log2(1 + 1/f) bits to it at most.
// Activations are none of erf's and tanh.
//
// # Numbers
//
// `KIND` 0, f16 or bf16; 1, float32 rounded to tf32; 2, float32 as two fp16, which share a word: of each entry an instruction takes
// both, and multiplies them by what a lane has of the weight. So two products are made, of the weight's high part and of its low one;
// those of TOGETHER steps are summed by the matrix instructions, which cut off their sums, each later step's are added in float32. Scales
// are powers of two: of a box one, by its largest magnitude, which the warps that bring it look for before they round; of each row of
// weights one for each pair of residues. Sums are scaled back at the end. Infinities and NaN, four neighbours of which the largest is
// below 2^-33 of its box's, weights far below their row's largest, and products of both largest that are no normal number are left to
// the definition: all of a box where they are in its input or weights.
//
// # What it takes
//
// Threads: THREADS, 128 more than the warps that multiply have. Grid: groups times `blocks_of_group`. Boxes of an axis are
// ceil(output/box), of height `box_h = units_h*blocks_h*LINES*h_stride`; `box_d` is a multiple of the stride. LINES above 1
// want `joined`; `linked` wants boxes as wide as y, and runs, but for y's last ones, of a sector at least. Units of a box times
// `stages - 1` are at least WARPS - 1, or a warp takes one stage for another.
// Bytes of dynamic shared memory: `16*entries + stages*4*words*x_c + 64*parts*tiles*entries + 96*tiles + rows +
// WARPS*8*run_pitch*element`: parts 2 and rows 64*tiles*d_stride*h_stride for KIND 2, else 1 and none; words channels of the input (KIND 0:
// pairs); x_c a multiple of 16, but not of 32, of at least planes*lines*PITCH; tiles of 8 channels of a group; `entries` those
// of all pairs of residues, each a multiple of 8; `planes` and `lines` of input that a box has at most; run_pitch elements, a
// multiple of 32 bytes, of at least a run and 32 bytes but one element: from a place that is no multiple of them the copy engine
// takes half as long again; of an NDHWC output as many as make LINES lines of 2*SPAN voxels, with 32 bytes more for each four. VOXEL is a
// multiple of 8 elements and of 32 bytes, and what a group has of a voxel one of VOXEL; there is no `joined` then, which LINES above 1
// does not want, and no `linked`. Offsets along width are from -MARGIN to MARGIN.
// d_stride*h_stride is at most MOST_CLASSES, taps along width at most MOST_WIDTH. x and y are dense, starting at
// multiples of 16 bytes; all that is counted in a sample, units of work and partials are below 2^31.
//
// Parameters, i32 but for pointers, `x_n`, `y_n` (i64) and `slope` (f64): `x`, `w`, `bias`, `y`; `in_per_group`,
// `out_per_group`, `groups`; of each axis `input`, `output`, `kernel`, `stride`, `padding`, `dilation`; `box_d`,
// `units_h`, `blocks_h`, `boxes_d`, `boxes_h`, `boxes_w`, `samples`, `planes`, `lines`, `x_c`, `entries`, `stages`, `joined`,
// `linked`, `run_pitch`, `blocks_of_group`; `x_n`, `y_n` (from a sample to the next); `has_bias`, `activation`, `slope`, and from `mode`
// on those of `shuffle_gemm`.

#if !defined(SEGMENTS) || !defined(LINES) || !defined(WARPGROUPS)
#error "SEGMENTS of 64 columns and LINES of a unit of work; WARPGROUPS that multiply"
#endif

#include "copy_async.cuh"
#include "implicit_tiles.cuh"
#include "implicit_voxels.cuh"
#include "launch.cuh"
#include "store_async.cuh"
#include "stored.cuh"
#include "warp_meet.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) implicit_gemm(
    const Element *x, const Element *w, const Element *bias, Element *y, int in_per_group, int out_per_group, int groups,
    int d_input, int d_output, int d_kernel, int d_stride, int d_padding, int d_dilation,
    int h_input, int h_output, int h_kernel, int h_stride, int h_padding, int h_dilation,
    int w_input, int w_output, int w_kernel, int w_stride, int w_padding, int w_dilation,
    int box_d, int units_h, int blocks_h, int boxes_d, int boxes_h, int boxes_w, int samples, int planes, int lines, int x_c, int entries,
    int stages, int joined, int linked, int run_pitch, int blocks_of_group, long long x_n, long long y_n, int has_bias, int activation,
    double slope, int mode, float *part_mean, float *part_m2, float *part_count, const float *mean, const float *rstd,
    const Element *gamma, const Element *beta, int norm_groups, int group_channels, int post_activation, double post_slope) {
    let_next_start();
    const Axis depth = {d_input, d_output, d_kernel, d_stride, d_padding, d_dilation};
    const Axis height = {h_input, h_output, h_kernel, h_stride, h_padding, h_dilation};
    extern __shared__ __align__(32) char memory[];
    __shared__ Divisors by;
    // Of each pair of residues its first entry; offsets along width with the taps of the first column and the second, or -1.
    __shared__ int first_entry[MOST_CLASSES + 1];
    __shared__ int3 offsets[MOST_WIDTH];
    __shared__ int offset_count;
    // From a box's first output on, how far back its input starts.
    __shared__ int first_d, first_h;
    // Of each stage two barriers, that it is there and that it has been read, and whether the warps that brought it met what is
    // left to the definition. The next unit of work.
    __shared__ alignas(8) unsigned long long barriers[2 * MOST_STAGES];
    __shared__ int4 bad_input[MOST_STAGES];
    // Of two fp16 the largest magnitude that each of those warps brought; of the exponents that weights are scaled by the most, and of
    // their negatives, both from ZERO up.
    [[maybe_unused]] __shared__ uint4 most_input[SCALED ? MOST_STAGES : 1];
    [[maybe_unused]] __shared__ unsigned most_exponent, most_negative;
    __shared__ int next_unit;
    // For each warp that multiplies whether a weight is.
    __shared__ int bad_weight[WARPS];
    // What a lane has of the statistics where sums of 16 bits and what is made of them leave no registers for it.
    constexpr bool TALLIED = BOTH && KIND == 0 || OF_UNIT > 1;
    __shared__ Tally tallies[OF_UNIT][TALLIED ? 32 * WARPS : 1];

    const int taps = d_kernel * h_kernel * w_kernel, channels = groups * out_per_group;
    // What roles compute anew, so that no registers are kept for it from one to the next.
    const auto shares = [&] { return Shares(memory, in_per_group, out_per_group, d_stride * h_stride, entries, stages, x_c, blocks_of_group); };
    {
        const Shares own = shares();
        if (threadIdx.x < DIVISORS) {
            const int numbers[DIVISORS] = {boxes_w,  boxes_h, boxes_d,   OF_VOXELS ? own.words : planes * lines * VECTORS, lines, d_stride,
                                           h_stride, units_h, own.tiles,   stages, box_d * units_h * own.tiles / OF_UNIT, max(group_channels, 1)};
            int by_this = 0;
#pragma unroll
            for (int i = 0; i < DIVISORS; i++) by_this = threadIdx.x == i ? numbers[i] : by_this;
            ((Divisor *)&by)[threadIdx.x] = Divisor(by_this);
        }
        if (threadIdx.x == 32) {
            int count = 0;
            for (int k = 0; k < w_kernel; k++) {
                const int at = w_padding - k * w_dilation, column = at & 1, offset = (at + column) / 2;
                int i = 0;
                while (i < count && offsets[i].x != offset) i++;
                if (i == count) offsets[count++] = make_int3(offset, -1, -1);
                (column ? offsets[i].z : offsets[i].y) = k;
            }
            offset_count = count;
        }
        if (threadIdx.x == 64) {
            next_unit = 0;
            most_exponent = 0, most_negative = 0;
            for (int i = 0; i < stages; i++) {
                barrier_init(shared(barriers + 2 * i), PRODUCERS);
                barrier_init(shared(barriers + 2 * i + 1), 32 * box_d * units_h * own.tiles / OF_UNIT);
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        if (threadIdx.x == 96) {
            first_d = depth.first(0, Divisor(d_stride));
            first_h = height.first(0, Divisor(h_stride));
        }
        for (int i = threadIdx.x; i < entries; i += THREADS) own.entry_list[i] = make_int4(0, -1, -1, 0);
        if (SCALED)
            for (int i = threadIdx.x; i < 16 * own.tiles * d_stride * h_stride; i += THREADS) own.row_most[i] = 0;
        __syncthreads();
    }

    const int items = boxes_w * boxes_h * boxes_d * samples, lane = threadIdx.x % 32;
    if (threadIdx.x >= 32 * WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        const Shares own = shares();
        const int thread = threadIdx.x - 32 * WARPS, plane = h_input * w_input;
        const int of_one = planes * lines * VECTORS, all = own.words * of_one;
        const bool vectors = !OF_VOXELS && w_input % 4 == 0;
        const int in_channels = groups * in_per_group;
        // Vectors of a channel lie side by side. Of NDHWC neighbouring threads ask for neighbouring channels, and a vector's number is another.
        const auto channel_of = [&](int i) {
            const int by_this = by.channel.divide(i);
            return OF_VOXELS ? i - by_this * own.words : by_this;
        };
        const auto in_channel = [&](int i, int c) { return OF_VOXELS ? by.channel.divide(i) : i - c * of_one; };
        const auto vector_at = [&](unsigned *inputs, int i, int c) {
            return OF_VOXELS ? inputs + (c * x_c + 4 * in_channel(i, c)) : inputs + c * (x_c - 4 * of_one) + 4 * i;
        };
        // Boxes asked for, and those that are there.
        int asked = 0, done = 0;
#pragma unroll 1
        while (true) {
            const int item = own.first_item + asked * blocks_of_group, turn = by.stages.divide(asked), slot = asked - turn * stages;
            const unsigned is_free = shared(barriers + 2 * slot + 1);
            // The next is asked for once its stage is free, but what has come does not wait for that.
            if (item < items && asked - done < UNDER_WAY && (asked == done || __all_sync(0xffffffffu, barrier_test(is_free, ~turn & 1)))) {
                barrier_wait(is_free, ~turn & 1);
                const Box box(item, by, boxes_w, boxes_h, boxes_d);
                const int id0 = by.d_stride.divide(box.d * box_d) + first_d, ih0 = box.h * units_h * blocks_h * LINES + first_h;
                const int iw0 = box.w * SPAN - MARGIN;
                const Element *const from = x + box.sample * x_n + (long long)own.group * in_per_group * (OF_VOXELS ? 1 : d_input * plane);
                unsigned *const inputs = own.ring + slot * own.stage_words;
#pragma unroll 2
                for (int i = thread; i < all; i += PRODUCERS) {
                    const int c = channel_of(i), of_channel = in_channel(i, c), line = of_channel / VECTORS;
                    const int p = by.lines.divide(line), d = id0 + p, h = ih0 + line - p * lines, column = iw0 + (of_channel - line * VECTORS) * 4;
                    const bool there = (unsigned)d < (unsigned)d_input && (unsigned)h < (unsigned)h_input;
                    Element *const to = (Element *)vector_at(inputs, i, c);
#pragma unroll
                    for (int e = 0; e < CHANNELS; e++) {
                        const int channel = c * CHANNELS + e;
                        const bool has = there && channel < in_per_group;
                        const int voxel = d * plane + h * w_input + column, next = OF_VOXELS ? in_channels : 1;
                        const Element *const at = from + (OF_VOXELS ? voxel * in_channels + channel : channel * d_input * plane + voxel);
                        if (vectors) {
                            const bool inside = has && (unsigned)column < (unsigned)w_input;
                            copy_async<4 * sizeof(Element)>(shared(to + 4 * e), inside ? at : x, inside);
                        } else {
#pragma unroll
                            for (int f = 0; f < 4; f++) {
                                const bool inside = has && (unsigned)(column + f) < (unsigned)w_input;
#if KIND == 0
                                to[4 * e + f] = inside ? at[f * next] : Element{};
#else
                                copy_async<4>(shared(to + f), inside ? at + f * next : x, inside);
#endif
                            }
                        }
                    }
                }
                end_copies();
                asked++;
                continue;
            }
            if (done == asked) break;
            if (asked - done == UNDER_WAY)
                await_copies<UNDER_WAY - 1>();
            else
                await_copies<0>();
            const int ready = done - by.stages.divide(done) * stages;
            unsigned *const inputs = own.ring + ready * own.stage_words;
            Largest most{};
            float scale = 1.0f;
#if SCALED
            // The largest of all first.
#pragma unroll 4
            for (int i = thread; i < all; i += PRODUCERS) {
                alignas(16) Element v[OF_VECTOR];
                *(uint4 *)v = *(const uint4 *)vector_at(inputs, i, channel_of(i));
                most.see(v);
            }
            const unsigned most_of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(most.most));
            if (lane == 0) (&most_input[ready].x)[thread / 32] = most_of_warp;
            meet_producers();
            scale = power(exponent_of_any(largest_of(most_input[ready])));
#endif
            bool bad = most.undefined();
            // Each thread what it has asked for.
#pragma unroll 4
            for (int i = thread; i < all; i += PRODUCERS) {
                uint4 *const at = (uint4 *)vector_at(inputs, i, channel_of(i));
                alignas(16) Element v[OF_VECTOR];
                *(uint4 *)v = *at;
#if SCALED
                bad |= is_coarse_beside(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))), scale);
#else
                most.see(v);
#endif
                *at = operands(v, scale);
            }
            if (!SCALED) bad = most.undefined();
            bad = __any_sync(0xffffffffu, bad);
            if (lane == 0) (&bad_input[ready].x)[thread / 32] = bad;
            barrier_arrive(shared(barriers + 2 * ready));
            done++;
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const Shares own = shares();
    {
        const int classes = d_stride * h_stride, of_plane = d_kernel * h_kernel;
        // A warp goes through the taps along depth and height of a pair of residues: of each its number among them, and where
        // it lies.
        const auto each_pair = [&](int residues, auto what) {
            const int rd = by.h_stride.divide(residues), rh = residues - rd * h_stride;
            int before = 0;
            for (int first = 0; first < of_plane; first += 32) {
                const int kd = (first + lane) / h_kernel, kh = first + lane - kd * h_kernel;
                const int d = rd + d_padding - kd * d_dilation - d_stride * first_d, at_d = by.d_stride.divide(max(d, 0));
                const int h = rh + h_padding - kh * h_dilation - h_stride * first_h, at_h = by.h_stride.divide(max(h, 0));
                const bool here = kd < d_kernel && at_d * d_stride == d && at_h * h_stride == h;
                const unsigned all = __ballot_sync(0xffffffffu, here);
                if (here) what(before + __popc(all & ((1u << lane) - 1)), first + lane, at_d * lines + at_h);
                before += __popc(all);
            }
            return before;
        };
        for (int i = threadIdx.x / 32; i < classes; i += WARPS) {
            const int pairs = each_pair(i, [](int, int, int) {});
            if (lane == 0) first_entry[i + 1] = (pairs * own.words * offset_count + 7) / 8 * 8;
        }
        meet_consumers();
        if (threadIdx.x == 0) {
            first_entry[0] = 0;
            for (int i = 0; i < classes; i++) first_entry[i + 1] += first_entry[i];
        }
        meet_consumers();
        // Offsets side by side, then channels, each by a warp: lanes read neighbours, and other channels in other banks.
        for (int i = 0; i < classes; i++)
            each_pair(i, [&](int number, int tap, int line) {
                for (int c = threadIdx.x / 32; c < own.words; c += WARPS) {
                    int4 *to = own.entry_list + (first_entry[i] + (number * own.words + c) * offset_count);
                    for (int k = 0; k < offset_count; k++) {
                        const int3 of = offsets[k];
                        const auto tap_of = [&](int along) { return along < 0 ? -1 : tap * w_kernel + along; };
                        *to++ = make_int4(line * PITCH + of.x + c * x_c, tap_of(of.y), tap_of(of.z), c * CHANNELS);
                    }
                }
            });
        for (int o = threadIdx.x; o < 8 * own.tiles; o += 32 * WARPS) {
            const int channel = own.group * out_per_group + min(o, out_per_group - 1);
            own.of_channel[o] = has_bias ? widen(bias[channel]) : 0.0f;
            own.of_channel[8 * own.tiles + o] = gamma ? widen(gamma[channel]) : 1.0f;
            own.of_channel[16 * own.tiles + o] = beta ? widen(beta[channel]) : 0.0f;
        }
        meet_consumers();

        const Element *const of_group = w + (long long)own.group * in_per_group * out_per_group * taps;
        unsigned most_weight = 0;
        // The group's weights, as a warp's lanes give them to the instruction: [step][tile][part][lane]. Of some at once, for
        // the way from memory.
        const int all = 4 * entries * own.tiles;
#if SCALED
        // Rows are scaled once all of a row is there: until then these are the numbers themselves. The first of the two rows of what a
        // lane gives to the instruction: `i` only grows, and so does its pair of residues.
        int of_class = 0;
        const auto row_of = [&](int i) {
            const int step = by.tiles.divide(i / 32), tile = i / 32 - step * own.tiles;
            while (first_entry[of_class + 1] <= 8 * step) of_class++;
            return own.row_most + (of_class * own.tiles + tile) * 16 + i % 32 / 4;
        };
#endif
#pragma unroll 1
        for (int first = threadIdx.x; first < all; first += AT_ONCE * 32 * WARPS) {
            alignas(4) Element v[AT_ONCE][2][2][CHANNELS];
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                const int i = first + n * 32 * WARPS, of_lane = i / 32, step = by.tiles.divide(of_lane);
                const int o = (of_lane - step * own.tiles) * 8 + i % 32 / 4;
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const int4 entry = i < all ? own.entry_list[step * 8 + i % 4 + 4 * k] : make_int4(0, -1, -1, 0);
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int tap = e ? entry.z : entry.y;
#pragma unroll
                        for (int c = 0; c < CHANNELS; c++) {
                            const bool there = tap >= 0 && o < out_per_group && entry.w + c < in_per_group;
                            v[n][k][e][c] = there ? of_group[((entry.w + c) * out_per_group + o) * taps + tap] : Element{};
                        }
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                const int i = first + n * 32 * WARPS;
                unsigned operand[4];
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
#pragma unroll
                        for (int c = 0; c < CHANNELS; c++) most_weight = max(most_weight, magnitude(widen(v[n][k][e][c])));
#if KIND == 0
                        operand[2 * k + e] = *(const unsigned *)v[n][k][e];
#elif KIND == 1
                        operand[2 * k + e] = round_tf32(v[n][k][e][0]);
#else
                        operand[2 * k + e] = __float_as_uint(v[n][k][e][0]);
#endif
                    }
                if (i >= all) break;
                own.weights[i / 32 * PARTS * 32 + i % 32] = make_uint4(operand[0], operand[1], operand[2], operand[3]);
#if SCALED
                unsigned *const rows = row_of(i);
#pragma unroll
                for (int e = 0; e < 2; e++) atomicMax(rows + 8 * e, max(operand[e] & 0x7fffffffu, operand[2 + e] & 0x7fffffffu));
#endif
            }
        }
        bool bad = any_of_consumers(most_weight >= 0x7f800000u);
#if SCALED
        of_class = 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < all; i += 32 * WARPS) {
            uint4 *const at = own.weights + i / 32 * PARTS * 32 + i % 32;
            alignas(16) float v[4];
            alignas(16) unsigned high[4], low[4];
            *(uint4 *)v = *at;
            const unsigned *const rows = row_of(i);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int exponent = exponent_of_any(rows[8 * e]);
                const float scale = power(exponent), most = fmaxf(fabsf(v[e]), fabsf(v[2 + e]));
                bad |= most > 0.0f && most * scale < LEAST_WEIGHT;
                if (rows[8 * e]) {
                    atomicMax(&most_exponent, (unsigned)(ZERO + exponent));
                    atomicMax(&most_negative, (unsigned)(ZERO - exponent));
                }
                high[e] = weight_parts(v[e] * scale, low[e]);
                high[2 + e] = weight_parts(v[2 + e] * scale, low[2 + e]);
            }
            at[0] = *(const uint4 *)high;
            at[32] = *(const uint4 *)low;
        }
        bad = any_of_consumers(bad);
#endif
        bad_weight[threadIdx.x / 32] = bad;
        __syncwarp();
    }
    // From here on of the lane's number only these are kept.
    const int g = hidden(lane / 4), t = hidden(lane % 4);
    Element *const area = own.areas + (threadIdx.x / 32 * 8 + (VOXELS ? 0 : g)) * run_pitch;
    const bool counts = BOTH || mode == 1;
    const long long plane = (long long)d_output * h_output * w_output;
    // The statistics.
    if (!BOTH && mode == 2) await_previous();
#pragma unroll 1
    while (true) {
        int number = 0;
        if (g + t == 0) number = take_next(&next_unit);
        number = __shfl_sync(0xffffffffu, number, 0);
        const int ordinal = by.units.divide(number), item = own.first_item + ordinal * blocks_of_group;
        if (item >= items) break;
        const Box box(item, by, boxes_w, boxes_h, boxes_d);
        const int unit = number - ordinal * (box_d * units_h * own.tiles / OF_UNIT), column = by.units_h.divide(unit), unit_h = unit - column * units_h;
        const int d = by.tiles.divide(OF_UNIT * column), first_tile = OF_UNIT * column - d * own.tiles, at_d = by.d_stride.divide(d);
        const int turn = by.stages.divide(ordinal), slot = ordinal - turn * stages;
        const int od = box.d * box_d + d, j = box.w * SPAN, columns = min(2 * SPAN, w_output - 2 * j);
        // Of the first tile, or the one at hand; of NDHWC there are whole units.
        int tile = first_tile, o = 8 * tile + g;
        const int channel = own.group * out_per_group + o;
        const bool there = o < out_per_group;
        const int first_pair = (d - at_d * d_stride) * h_stride;
        const unsigned barrier = shared(barriers + 2 * slot);
        float norm_mean[OF_UNIT] = {}, norm_rstd[OF_UNIT] = {};
        if (!BOTH && mode == 2 && there)
#pragma unroll
            for (int i = 0; i < OF_UNIT; i++) {
                const int at = box.sample * norm_groups + by.group_channels.divide(channel + 8 * i);
                norm_mean[i] = mean[at], norm_rstd[i] = rstd[at];
            }
        Tally own_tally;
        const auto tally_of = [&](int of_unit) -> Tally & { return TALLIED ? tallies[of_unit][threadIdx.x] : own_tally; };
        const int first_line = (box.h * units_h + unit_h) * blocks_h * (LINES * h_stride);
        const int unit_end = od < d_output ? min(h_output, first_line + blocks_h * (LINES * h_stride)) : first_line;
#pragma unroll
        for (int i = 0; i < OF_UNIT; i++)
            tally_of(i) = {0.0f, 0.0f, 0.0f, ((item * box_d + d) * units_h + unit_h) * channels + channel + 8 * i, max(unit_end - first_line, 0) * columns};
        const long long voxel = (long long)(od * h_output + first_line) * w_output + 2 * j;
        Element *to = y + box.sample * y_n + (VOXELS ? voxel * channels + channel - g : channel * plane + voxel);
        const unsigned *inputs =
            own.ring + slot * own.stage_words + (at_d * lines + unit_h * blocks_h * LINES) * PITCH + (MARGIN + position_of(g));
        barrier_wait(barrier, turn & 1);
        const int4 bad = bad_input[slot];
        bool defined = !(bad.x | bad.y | bad.z | bad.w | bad_weight[threadIdx.x / 32]);
#if SCALED
        // Sums are scaled back by normal numbers.
        const int box_exponent = exponent_of_any(largest_of(most_input[slot]));
        defined &= box_exponent + ZERO - (int)most_negative >= -127 && box_exponent + (int)most_exponent - ZERO <= 126;
#endif
        // Row block by row block.
#pragma unroll 1
        for (int oh = first_line; oh < unit_end; oh += LINES * h_stride, to += LINES * h_stride * w_output * (VOXELS ? channels : 1), inputs += LINES * PITCH) {
            const int here = min(unit_end - oh, LINES * h_stride), residues = min(here, h_stride);
#pragma unroll 1
            for (int part = 0; part < residues * OF_UNIT; part++) {
                const int residue = part / OF_UNIT, of_unit = part % OF_UNIT;
                if (OF_UNIT > 1) tile = first_tile + of_unit, o = 8 * tile + g;
                Tally &tally = tally_of(of_unit);
                Sums sum;
                float(&v)[SUMS] = *(float(*)[SUMS])sum;
                const float add = own.of_channel[o];
                // What scales sums back, and is added then.
                [[maybe_unused]] float back[2] = {1.0f, 1.0f}, then = 0.0f;
                // Lines of this residue that there are.
                int left = 0;
#pragma unroll
                for (int r = 0; r < LINES; r++) left += residue + r * h_stride < here;
                if (defined) {
                    const int end = first_entry[first_pair + residue + 1];
                    int at = first_entry[first_pair + residue];
                    // A step, and for the first of them what it adds to.
                    const auto step = [&](auto which) {
                        const unsigned *const one = inputs + own.entry_list[at + t].x, *const other = inputs + own.entry_list[at + 4 + t].x;
                        const uint4 *const of_step = own.weights + ((unsigned)at / 8 * own.tiles + tile) * PARTS * 32 + 4 * g + t;
                        const uint4 a = of_step[0];
                        [[maybe_unused]] const uint4 a_low = of_step[32 * (PARTS - 1)];
#pragma unroll
                        for (int r = 0; r < LINES * SEGMENTS; r++)
#pragma unroll
                            for (int n = 0; n < TILES; n++) {
                                const int far = r / SEGMENTS * PITCH + r % SEGMENTS * LANES + 8 * n;
                                const unsigned b0 = one[far], b1 = other[far];
                                if (SCALED && which.value == LATER) {
                                    float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                                    multiply(product, a_low, b0, b1);
                                    multiply(product, a, b0, b1);
#pragma unroll
                                    for (int e = 0; e < 4; e++) sum[r][n][e] += product[e];
                                    continue;
                                }
                                if (which.value == FIRST)
                                    multiply_onto(sum[r][n], SCALED ? 0.0f : add, SCALED ? a_low : a, b0, b1);
                                else
                                    multiply(sum[r][n], SCALED ? a_low : a, b0, b1);
                                if (SCALED) multiply(sum[r][n], a, b0, b1);
                            }
                    };
                    // Without taps: by instructions that the compiler does not execute in any case, to overwrite what they did.
                    if (at < end)
                        step(Step<FIRST>{});
                    else
#pragma unroll
                        for (int k = 0; k < SUMS; k++) asm volatile("mov.f32 %0, %1;" : "=f"(v[k]) : "f"(SCALED ? 0.0f : add));
                    at += 8;
                    const int together = SCALED ? min(end, at + 8 * (TOGETHER - 1)) : end;
#pragma unroll 1
                    for (; at < together; at += 8) step(Step<NEXT>{});
#if SCALED
#pragma unroll 1
                    for (; at < end; at += 8) step(Step<LATER>{});
                    const unsigned *const rows = own.row_most + ((first_pair + residue) * own.tiles + tile) * 16 + g;
                    back[0] = power(-(box_exponent + exponent_of_any(rows[0]))), back[1] = power(-(box_exponent + exponent_of_any(rows[8])));
                    then = add;
#endif
                } else {
#pragma unroll
                    for (int k = 0; k < SUMS; k++) v[k] = add;
#pragma unroll 1
                    for (int k = 0; k < SUMS; k++) {
                        const int r = k / (SEGMENTS * TILES * 4), column = k / 4 % (SEGMENTS * TILES) * 16 + column_of(k % 4), ow = 2 * j + column;
                        if (!there || r >= left || column >= columns) continue;
                        float of_definition = add;
#pragma unroll 1
                        for (int tap = 0; tap < taps; tap++) {
                            const int line = tap / hidden(w_kernel), kd = line / hidden(h_kernel);
                            const int id = depth.of_tap(od, kd, by.d_stride);
                            const int ih = height.of_tap(oh + residue + r * h_stride, line - kd * h_kernel, by.h_stride);
                            const int at = ow + w_padding - (tap - line * w_kernel) * w_dilation, iw = at / 2;
                            if ((unsigned)id >= (unsigned)d_input || (unsigned)ih >= (unsigned)h_input) continue;
                            if (at < 0 || at % 2 || iw >= w_input) continue;
                            const int in_plane = h_input * w_input;
                            const int in_channels = groups * in_per_group, first = own.group * in_per_group, voxel = id * in_plane + ih * w_input + iw;
                            const Element *value = x + box.sample * x_n + (OF_VOXELS ? (long long)voxel * in_channels + first : (long long)first * d_input * in_plane + voxel);
                            const Element *weight = w + ((long long)own.group * in_per_group * out_per_group * taps + (o * taps + tap));
#pragma unroll 1
                            for (int c = 0; c < in_per_group; c++, value += OF_VOXELS ? 1 : d_input * in_plane, weight += out_per_group * taps)
                                of_definition = fmaf(widen(*value), widen(*weight), of_definition);
                        }
#pragma unroll
                        for (int i = 0; i < SUMS; i++) v[i] = i == k ? of_definition : v[i];
                    }
                }
#if SCALED
                // Of both: else all sums are moved to where the others are.
#pragma unroll
                for (int k = 0; k < SUMS; k++) v[k] = fmaf(v[k], back[k % 4 / 2], then);
#endif
                // Adds the sums, through an activation, to the statistics.
                const auto count_sums = [&](int code, double slope) {
                    if (BOTH) as_stored(v);
                    const bool is_first = residue == 0 && oh == first_line;
                    // At once with the activation, but of 16 bits, where it is as fast one after the other.
                    if (KIND != 0 && !BOTH && !is_first && left == LINES && columns > 2 * SPAN - 16) {
                        const float around = tally.around;
                        float off[4] = {}, squares[4] = {};
                        bend(v, code, (float)slope, [&](int k, float x) {
                            // Only of a line's last tile some may not be in y: they do not count.
                            const int at = k / 4 % (SEGMENTS * TILES);
                            x = (at < SEGMENTS * TILES - 1 || 16 * at + column_of(k % 4) < columns ? x : around) - around;
                            off[k % 4] += x;
                            squares[k % 4] += x * x;
                            return x;
                        });
                        tally.off += off[0] + off[1] + (off[2] + off[3]);
                        tally.squares += squares[0] + squares[1] + (squares[2] + squares[3]);
                        return;
                    }
                    bend(v, code, (float)slope);
                    // What is not in y becomes what does not count. Mostly that is of a line's last tile alone.
                    const auto fill = [&](float by) {
                        const auto of_tiles = [&](int from, int end) {
#pragma unroll
                            for (int r = 0; r < LINES * SEGMENTS; r++)
#pragma unroll
                                for (int n = 0; n < TILES; n++)
#pragma unroll
                                    for (int e = 0; e < 4; e++)
                                        if (const int first = r % SEGMENTS * 64 + 16 * n; first >= from && first < end)
                                            sum[r][n][e] = r / SEGMENTS < left && first + column_of(e) < columns ? sum[r][n][e] : by;
                        };
                        of_tiles(2 * SPAN - 16, 2 * SPAN);
                        if (left < LINES || columns < 2 * SPAN - 16) of_tiles(0, 2 * SPAN - 16);
                    };
                    const auto total = [&](auto of) {
                        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                        for (int k = 0; k < SUMS; k++) part[k % 4] += of(v[k]);
                        return part[0] + part[1] + (part[2] + part[3]);
                    };
                    if (is_first) {
                        fill(0.0f);
                        tally.around = over_lanes(total([](float v) { return v; })) / (left * columns);
                    }
                    const float around = tally.around;
                    fill(around);
#pragma unroll
                    for (int k = 0; k < SUMS; k++) v[k] -= around;
                    tally.off += total([](float v) { return v; });
                    tally.squares += total([](float v) { return v * v; });
                };
                if (!BOTH && mode == 1) {
                    count_sums(activation, slope);
                    continue;
                }
                if (!BOTH && mode == 2) {
                    // By no number: arrays would not stay in registers.
                    const float less = of_unit ? norm_mean[OF_UNIT - 1] : norm_mean[0], rstd = of_unit ? norm_rstd[OF_UNIT - 1] : norm_rstd[0];
                    const float factor = rstd * own.of_channel[8 * own.tiles + o], addend = own.of_channel[16 * own.tiles + o];
                    bend(v, activation, (float)slope, [&](int, float x) { return (x - less) * factor + addend; });
                    bend(v, post_activation, (float)post_slope);
                } else {
                    bend(v, activation, (float)slope);
                }

                if constexpr (VOXELS) {
                    store_voxels(sum, area, to + residue * w_output * channels, columns, left, h_stride * w_output * channels, channels, of_unit);
                    continue;
                }
                // A run starts as far from a sector in shared memory as in y.
                Element *const line_to = to + (joined ? 0 : residue * w_output);
                const int ahead = past_whole<STORED>(line_to);
                const int first_of_run = oh + (joined ? 0 : residue), lines_of_run = joined ? here : 1;
                const bool follows = linked && first_of_run > first_line;
                if (residue == 0 || !joined) {
                    // The run before has left the area.
                    if (t == 0) stored_read();
                    meet();
                    if (follows) {
                        // What it has left of its last sector.
                        const int size = (joined ? LINES * h_stride : 1) * w_output, from = past_whole<STORED>(line_to - size) + size - ahead;
#pragma unroll
                        for (int first = 0; first < STORED; first += 4)
                            if (first + t < ahead) area[first + t] = area[from + first + t];
                        meet();
                    }
                }
                Element *const collected = area + (ahead + (joined ? residue * w_output : 0));
                const int next_line = h_stride * w_output;
                // Sums of a tile that is not whole, or of any; of those as many at once as lie beside each other, if they start so.
                const auto collect = [&](bool all, bool at_once) {
#pragma unroll
                    for (int r = 0; r < LINES * SEGMENTS; r++)
#pragma unroll
                        for (int n = 0; n < TILES; n++) {
                            const int first = r % SEGMENTS * 64 + 16 * n;
                            Element *const at = collected + (r / SEGMENTS * next_line + first);
                            if (at_once && (first + 16 < 2 * SPAN || first + 16 <= columns)) {
                                put_all(at, sum[r][n]);
                            } else if (all && first + 16 < 2 * SPAN || !all && first + 16 <= columns) {
#pragma unroll
                                for (int e = 0; e < 2; e++) put_both(at + column_of(e), sum[r][n][e], sum[r][n][e + 2]);
                            } else if (all || first < columns) {
#pragma unroll
                                for (int e = 0; e < 4; e++)
                                    if (first + column_of(e) < columns) narrow(sum[r][n][e], at + column_of(e));
                            }
                        }
                };
                const unsigned starts = shared(collected) | (LINES > 1 ? (unsigned)sizeof(Element) * next_line : 0);
                if (columns <= 2 * SPAN - 16)
                    collect(false, false);
                else if (__all_sync(0xffffffffu, starts % (KIND == 0 ? 4 : 16) == 0))
                    collect(true, true);
                else
                    collect(true, false);
                if (!joined || residue + 1 == residues) {
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    meet();
                    const int end = ahead + (joined ? here * w_output : columns), first = ahead && !follows ? STORED : 0;
                    const int whole = max(end / STORED * STORED, first);
                    const bool goes_on = linked && first_of_run + lines_of_run < unit_end;
                    if (there) {
                        if (t == 0 && whole > first) store(line_to + (first - ahead), shared(area + first), (whole - first) * (int)sizeof(Element));
#pragma unroll
                        for (int k = t; k < STORED + t; k += 4) {
                            if (k >= ahead && k < min(first, end)) line_to[k - ahead] = area[k];
                            if (!goes_on && whole + k < end) line_to[whole + k - ahead] = area[whole + k];
                        }
                    }
                    if (t == 0) stored();
                }
                if (BOTH) count_sums(post_activation, post_slope);
            }
        }
        // Each lane has what it needs of the stage.
        barrier_arrive(barrier + 8);
        if (counts)
#pragma unroll
            for (int i = 0; i < OF_UNIT; i++) {
                const Tally &tally = tally_of(i);
                const float all = over_lanes(tally.off), apart = all / max(tally.count, 1), m2 = over_lanes(tally.squares) - all * apart;
                if (t == 0 && there) {
                    part_mean[tally.partial] = tally.around + apart;
                    part_m2[tally.partial] = max(m2, 0.0f);
                    part_count[tally.partial] = tally.count;
                }
            }
    }
    if (!VOXELS && t == 0) stored_read();
}
