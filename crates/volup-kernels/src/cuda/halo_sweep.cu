// Halo sweep: `halo_gemm` along the depth of the input, with the taps along it as columns.
//
// `halo_gemm` adds up each output over all taps, so it multiplies gaps as well: an axis of D positions and K taps has D + K - 1
// outputs, each of K products. Here a block takes the planes of the input one after the other, and multiplies each once, by all taps
// along depth at the same time: input plane i and tap t belong to output plane i + t. Sums of as many output planes as there are taps
// stay in registers; after each input plane the first of them is whole, is written, and the others move up. Depth so has no product
// too many, A is read once instead of once a tap, and instructions have PLANES times as many columns: below 64 they wait for rows.
//
// # What is computed
//
// Along height and width what `halo_gemm` computes, of stride 1, with rows of one position, of one slice. Rows are
// `R = ((i*n + sample)*ph + jh)*pw + jw`: a plane of all samples, `rows` of them, and then the next. With `i` the plane,
//
// `Y[i + td, r, column] += sum over th, tw, k: A[i*rows + r + offset, k] * B[th, tw][td*BN + column][k]`.
//
// - **A**, written by `halo_pack_input` with depth and samples in each other's place: panels of 16 bytes a row, `a_rows` rows apart, of
//   which the first `lead` come before the first position's; of two parts the low one's panels follow. With `in_place` there is no A: rows
//   are brought from x itself (`sweep_rows.cuh`).
// - **B**, written by `halo_pack_weight` with `sweeps`: tiles of `chunk_panels` panels of PLANES*BN rows of 16 bytes, of two parts those of
//   the high one, then those of the low one, in the order [column block][chunk][th][tw].
//
// # How
//
// Persistent blocks of WGS consumer warpgroups, and one whose first warp copies and whose others may pack the input beside the products
// (`pack_ahead.cuh`). A piece is BM = 64*MI*WGS rows of every plane, by BN columns of the output. A block keeps to a column block, of
// which `gridDim.x/blocks` blocks share the pieces: all planes of `whole` pieces each, one after the other, then as many of the planes of
// what is left. Where it does not start with a piece's first plane, it multiplies the PLANES - 1 planes before, too, without writing.
// For each chunk of channels of a plane the producer copies a stage of A with its halo, for each `unit_lines` taps along height a unit of B
// with all taps along width; `resident`: all units fit in the ring, and are copied once.
//
// With COUNTS statistics of y are taken for a group norm, of each share of a piece's planes (`sweep_statistics.cuh`): those of a plane while the
// next one's products are under way.
//
// Shared memory, in order: barriers, at 1 KB divisors, with `in_place` places of rows, at 4 KB tables of columns for each warpgroup, staging
// areas for each warp, with COUNTS means for each warp, A's ring (`a_stages`), B's (`b_stages`), what packing takes.
//
// # Numbers
//
// KIND 0, 2 and 5 of `halo_gemm`. Of two fp16 a unit is gone through three times: by the rows' low part, the columns', and by both high ones,
// in every other unit the other way round. Products of high parts and cross products, 2^11 times too large, so are added up by the same
// registers one after the other, and go from there to float32 sums each time that the kind changes; without `alternates`, also after each
// unit's high ones.
//
// # What it takes
//
// It may be launched so that it starts while the packs still run. Block: 128 threads a warpgroup, and 128. Grid: a multiple of `blocks`
// along the first axis. Bytes of dynamic shared memory:
// `4096 + WGS*(16*BN + 4096*MI + 1024) + a_stages*parts*chunk_panels*stage_rows*16 + b_stages*unit_lines*w_kernel*parts*chunk_panels*PLANES*BN*16`,
// with COUNTS `32*WGS*BN`, and those of the packers; with `in_place` stages are of 2, 4 or 8 panels, and at most 704 rows; `stage_rows` a multiple of 8, at least two
// stages of each, at most 60 of both together.
//
// Parameters, in order:
//
// 1. `a`, `b`, `control`; for fp16 of float32 `scale_w` (2^-ew of each of blocks*BN columns); `bias`, `y`.
// 2. i32: `rows`, `a_rows`, `lead`, `n`, `ph`, `pw`, `planes` (of the input).
// 3. `d_shift` (the output plane of the first input plane's first tap: negative where there is padding), `d_out`; `h_kernel`,
//    `back_h` (rows from a tap to the one before), `h_shift`, `h_out`; `w_kernel`, `w_step` (rows from a tap to the one before),
//    `w_shift`, `w_out`; `offset` (rows from a position to the one that its first tap along height and last along width reads).
// 4. `chunk_panels`, `chunks`, `blocks`, `channels`.
// 5. `y_n`, `y_c`, `y_d`, `y_h`, `y_w`.
// 6. `channels_first`, `has_bias`, `activation`, `slope` (f64).
// 7. `a_stages`, `stage_rows`, `b_stages`, `unit_lines` (of taps along height: 1, or all), `resident`, `whole`.
// 8. Of the input, to pack it, for which its planes are samples of which each has `n` planes: `x`, `height`, `width`, `panels`, `x_n`,
//    `x_c`, `x_d`, `x_h`, `x_w`, `units`, `before`, `shift`, `pieces`, `ahead` (0: it is packed); `pack_rounds`, 2 or 3; `in_place` (channels
//    of x, whose rows are brought from there, else 0: of 16 bits, side by side in whole pieces of 16 bytes, as voxels are; `ahead` is 0).
// 9. Of two fp16, for which `ahead` and `in_place` are 0: `alternates`.
// 10. With COUNTS, for which a sample has at least BM rows, all outputs are of some rows, and the activation is straight: statistics as
//    `epilogue_statistics.cuh` has them: `parts`, `counts`, and chunks of a sample, phases (as many as a piece has shares at most) and
//    channels there; `joined` (channels whose statistics are one); `relus` (they are of the ReLU of y).

/// What hides the memory's latency: a block's products leave three warps to pack.
#define MORE_PACK_ROUNDS
#define PACK_VOXELS (KIND == 0 ? 8 : 4)
/// Rows meet the weights of their taps only: an input's numbers that are none come where they should.
#define PACK_ASKS (KIND != 0)

#include "divisor.cuh"
#include "halo_epilogue.cuh"
#include "launch.cuh"
#include "pack_ahead.cuh"
#include "sweep_columns.cuh"
#include "sweep_rows.cuh"
#ifdef COUNTS
#include "sweep_statistics.cuh"
#endif

#if !defined(PLANES)
#error "PLANES: taps along depth"
#endif
static_assert(CTAS == 1 && (KIND == 0 || KIND == 2 || KIND == 5));

/// Columns of an instruction, and registers of their sums.
constexpr int ALL_COLUMNS = PLANES * BN, ALL_REGISTERS = PLANES * REGISTERS;

/// Registers of a thread: with two parts sums stand twice, and nothing is packed.
constexpr int OF_CONSUMER = KIND != 2 ? CONSUMER_REGISTERS : WGS == 2 ? 232 : 152;
constexpr int OF_PRODUCER = KIND != 2 ? PRODUCER_REGISTERS : WGS == 2 ? 40 : 56;
static_assert(KIND != 2 || WGS == 2 || WGS == 3);

/// How often a unit's taps are multiplied, and which parts of both operands.
constexpr int PASSES = KIND == 2 ? 3 : 1, BOTH_HIGH = 0, LOW_ROWS = 1, LOW_COLUMNS = 2;

/// Bytes of shared memory of a warpgroup: tables of columns, staging areas, and for statistics means.
#ifdef COUNTS
constexpr int OF_WARPGROUP = 16 * BN + 16 * STAGING + 4 * MEANS_BYTES;
#else
constexpr int OF_WARPGROUP = 16 * BN + 16 * STAGING;
#endif

/// A number that is known.
template <int COUNT> struct Count {
    static constexpr int value = COUNT;
};

/// How sums come to y: from registers, where every row of a plane is a voxel, in their order, by 16 bytes or 8; by whole pieces of 16 bytes
/// of voxels; through shared memory by vectors of rows or of channels; by single elements.
enum Way { BY_16, BY_8, WHOLE_VOXELS, IN_ORDER, VECTORS, ONE_BY_ONE };

/// What numbers are divided by.
struct Divisors {
    Divisor line, height, samples, units;
};

/// What a block does one after the other: planes of a piece.
struct Work {
    int piece, from, to;

    /// The `turn`th; without planes if there is no such work.
    __device__ __forceinline__ Work(int turn, int worker, int workers, int pieces, int planes, int whole) {
        piece = turn * workers + worker, from = 0, to = planes;
        if (turn < whole) return;
        // Of the planes of all pieces that are left neighbouring ones, of two pieces at most.
        const int left = (pieces - whole * workers) * planes, first = (int)((long long)left * worker / workers);
        const int last = (int)((long long)left * (worker + 1) / workers), of_first = first / planes, of_turn = of_first + turn - whole;
        piece = whole * workers + of_turn;
        from = max(first - of_turn * planes, 0);
        to = turn - whole < 2 ? min(last - of_turn * planes, planes) : 0;
    }
    __device__ __forceinline__ bool none() const { return from >= to; }
    /// The first plane that is multiplied.
    __device__ __forceinline__ int first() const { return max(from - (PLANES - 1), 0); }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) halo_sweep(
    const char *a, const char *b, unsigned *control,
#if SCALED
    const float *scale_w,
#endif
    const Element *bias, Element *y, int rows, int a_rows, int lead, int n, int ph, int pw, int planes, int d_shift, int d_out, int h_kernel,
    int back_h, int h_shift, int h_out, int w_kernel, int w_step, int w_shift, int w_out, int offset, int chunk_panels, int chunks, int blocks,
    int channels, int y_n, int y_c, int y_d, int y_h, int y_w, int channels_first, int has_bias, int activation, double slope, int a_stages,
    int stage_rows, int b_stages, int unit_lines, int resident, int whole, const Element *x, int height, int width, int panels,
    int x_n, int x_c, int x_d, int x_h, int x_w, int units, int before, int shift, int pieces, int ahead,
    int pack_rounds, int in_place
#if KIND == 2
    , int alternates
#endif
#ifdef COUNTS
    , float *parts, float *counts, int part_chunks, int part_phases, int out_channels, int joined, int relus
#endif
) {
    let_next_start();
    extern __shared__ __align__(128) char memory[];
    const unsigned full_a = shared(memory), empty_a = full_a + 8 * a_stages;
    const unsigned full_b = empty_a + 8 * a_stages, empty_b = full_b + 8 * b_stages;
    // Of a row of A in shared memory, which is 16 bytes of each panel by itself, or all of it.
    const bool is_in_place = KIND == 0 && in_place;
    const int pitch = is_in_place ? chunk_panels * 16 : 16, panel_bytes = 16 * stage_rows, part_bytes = chunk_panels * panel_bytes;
    const int stage_bytes = PARTS * part_bytes;
    const int tap_bytes = PARTS * chunk_panels * ALL_COLUMNS * 16, unit_bytes = unit_lines * w_kernel * tap_bytes;
    Divisors *const by = (Divisors *)(memory + 1024);
    char *tables = memory + 4096;
    const unsigned ring_a = shared(memory) + 4096 + WGS * OF_WARPGROUP, ring_b = ring_a + a_stages * stage_bytes;
    const PackAhead packed = {x, (uint4 *)a, control, a_rows, lead, planes, n, height, width, 1, panels, x_n, x_c, x_d, x_h, x_w, before, shift, pieces, ahead, pack_rounds};
    const int row_pieces = (rows + BM - 1) / BM, workers = gridDim.x / blocks, worker = blockIdx.x / blocks, block = blockIdx.x - worker * blocks;
    const int units_of_chunk = h_kernel / unit_lines, b_units = chunks * units_of_chunk;

    if (threadIdx.x == 0) {
        for (int i = 0; i < a_stages; i++) {
            barrier_init(full_a + 8 * i, in_place ? BRINGERS : 1);
            barrier_init(empty_a + 8 * i, CONSUMERS / 32);
        }
        for (int i = 0; i < b_stages; i++) {
            barrier_init(full_b + 8 * i, 1);
            barrier_init(empty_b + 8 * i, CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Each by a thread of its own: they take long.
    if (threadIdx.x >= 32 && threadIdx.x < 36) {
        const int at = threadIdx.x - 32;
        ((Divisor *)by)[at] = Divisor(at == 0 ? pw : at == 1 ? ph : at == 2 ? n : units);
    }
    __syncthreads();
    const auto work = [&](int turn) { return Work(turn, worker, workers, row_pieces, planes, whole); };

    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OF_PRODUCER));
        const PackDivisors lines = {by->line, by->height, by->samples, by->units};
        if (threadIdx.x >= CONSUMERS + 32) {
            // The launch before, the weight's pack, has written nothing that this needs.
            if (KIND != 2 && ahead > 0) packed.pack(lines, memory + (ring_b - shared(memory)) + b_stages * unit_bytes);
#if KIND == 0
            if (in_place) {
                SweepRows from_input = {x, n, pw, ph, width, height, in_place, x_n, x_d, x_h, x_w, ring_a, full_a, empty_a,
                                        a_stages, stage_bytes, chunk_panels, chunks, (int *)(memory + PLACES_AT)};
                const int length = BM + (h_kernel - 1) * back_h + (w_kernel - 1) * w_step;
#pragma unroll 1
                for (int turn = 0;; turn++) {
                    const Work w = work(turn);
                    if (w.none()) break;
                    from_input.find(by->line, by->height, w.piece * BM + offset - (h_kernel - 1) * back_h, length);
#pragma unroll 1
                    for (int plane = w.first(); plane < w.to; plane++) from_input.bring(plane, length);
                }
                from_input.tell<0>();
            }
#endif
            return;
        }
        // The producer: one warp.
        await_previous();
        const int lane = threadIdx.x % 32, length = BM + (h_kernel - 1) * back_h + (w_kernel - 1) * w_step;
        const char *const of_block = b + (long long)block * b_units * unit_bytes;
        int at_a = 0, phase_a = 1, at_b = 0, phase_b = 1;
        if (resident) {
#pragma unroll 1
            for (int u = lane; u < b_units; u += 32) {
                barrier_expect(full_b + 8 * u, unit_bytes);
                copy(ring_b + u * unit_bytes, of_block + (long long)u * unit_bytes, unit_bytes, full_b + 8 * u);
            }
        }
#pragma unroll 1
        for (int turn = 0;; turn++) {
            const Work w = work(turn);
            if (w.none()) break;
#pragma unroll 1
            for (int plane = w.first(); plane < w.to; plane++) {
                const int row = lead + plane * rows + w.piece * BM + offset - (h_kernel - 1) * back_h;
                if (KIND != 2) packed.await(row, row + length - 1, lines);
#pragma unroll 1
                for (int chunk = 0; chunk < chunks; chunk++) {
                    if (!in_place) {
                        if (lane == 0) {
                            barrier_wait(empty_a + 8 * at_a, phase_a);
                            barrier_expect(full_a + 8 * at_a, PARTS * chunk_panels * length * 16);
                        }
                        __syncwarp();
#pragma unroll 1
                        for (int p = lane; p < PARTS * chunk_panels; p += 32) {
                            const int part = p / chunk_panels, panel = (part * chunks + chunk) * chunk_panels + p - part * chunk_panels;
                            copy(ring_a + at_a * stage_bytes + p * panel_bytes, a + 16ll * row + 16ll * panel * a_rows, length * 16, full_a + 8 * at_a);
                        }
                        if (++at_a == a_stages) at_a = 0, phase_a ^= 1;
                    }
                    if (resident) continue;
#pragma unroll 1
                    for (int unit = 0; unit < units_of_chunk; unit++) {
                        if (lane == 0) {
                            barrier_wait(empty_b + 8 * at_b, phase_b);
                            barrier_expect(full_b + 8 * at_b, unit_bytes);
                            copy(ring_b + at_b * unit_bytes, of_block + (long long)(chunk * units_of_chunk + unit) * unit_bytes, unit_bytes, full_b + 8 * at_b);
                        }
                        if (++at_b == b_stages) at_b = 0, phase_b ^= 1;
                    }
                }
            }
        }
        if (KIND != 2) packed.finish();
        // What no work has asked for may still be on its way to memory that the next block is given.
        if (resident)
            for (int u = lane; u < b_units; u += 32) barrier_wait(full_b + 8 * u, 0);
        return;
    }

    // A consumer.
    await_previous();
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(OF_CONSUMER));
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    int *column_at = (int *)(tables + warpgroup * 16 * BN), *column_rr = column_at + BN;
    float *column_bias = (float *)(column_rr + BN);
    [[maybe_unused]] float *column_scale = column_bias + BN;
    float *staged = (float *)(tables + WGS * 16 * BN) + threadIdx.x / 32 * STAGING;
    const int column0 = block * BN;
    {
#if SCALED
        const float scale_x = power(-input_exponent(control));
#endif
        if (thread < BN) {
            const int channel = column0 + thread;
            const bool here = channel < channels;
            column_at[thread] = channel * y_c;
            column_rr[thread] = here ? 0 : NOWHERE;
            column_bias[thread] = here && has_bias ? widen(bias[channel]) : 0.0f;
#if SCALED
            column_scale[thread] = scale_x * scale_w[channel];
#endif
        }
        asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
    }
    const int steps = chunk_panels / 2, taps = unit_lines * w_kernel;
    // Of A's descriptors: pieces of 16 bytes from a row to the next, and from a step of K to the next; what does not change.
    const int of_row = pitch / 16, of_step = is_in_place ? 2 : panel_bytes / 8, step_w = w_step * of_row, step_h = back_h * of_row;
    const unsigned kind_of_a = kind_of_rows(pitch, MI);
    int at_a = 0, phase_a = 0, at_b = 0, phase_b = 0;
    // Whether all units have been waited for.
    bool there = false;
    // Every row of a plane of a sample a voxel, in their order; of so many bytes each such plane is a multiple.
    const unsigned of = (unsigned)(unsigned long long)y | (unsigned)(y_c | y_d | y_n) * (unsigned)sizeof(Element);
    const bool in_order = channels_first && ph == h_out && pw == w_out && y_w == 1 && y_h == w_out && w_shift == 0 && h_shift == 0 && y_d == ph * pw;
    const bool straight = activation <= 2, in_pieces = (channels | y_n | y_d | y_h | y_w) * sizeof(Element) % 16 == 0 && (unsigned long long)y % 16 == 0;
    const bool vectors = channels % 4 == 0 && y_w % 4 == 0 && (unsigned long long)y % (4 * sizeof(Element)) == 0;
    const Way way = in_order && of % 16 == 0 ? (straight ? BY_16 : IN_ORDER)
                    : in_order && sizeof(Element) == 2 && of % 8 == 0 && straight ? BY_8
                    : !channels_first && in_pieces && straight ? WHOLE_VOXELS
                    : vectors ? VECTORS : ONE_BY_ONE;

    for (int turn = 0;; turn++) {
        const Work work_of = work(turn);
        if (work_of.none()) break;
        // Sums of the output planes that the next input plane belongs to.
        float sums[MI][ALL_REGISTERS];
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
            for (int j = 0; j < ALL_REGISTERS; j++) sums[i][j] = 0.0f;
        // Where this thread's row is in a plane of y: of those that it writes, or of those whose sums it has.
        int at_row, row_ow;
        {
            const int of_vector = way == BY_16 ? 16 / sizeof(Element) : 4, own = thread / 32 * ROWS + lane % ROWS;
            const int row = work_of.piece * BM + warpgroup * M + (way <= BY_8 ? thread % (M / of_vector) * of_vector : own);
            const int line = by->line.divide(row), of_sample = by->height.divide(line), oh = line - of_sample * ph + h_shift;
            row_ow = row < rows && (unsigned)oh < (unsigned)h_out ? row - line * pw + w_shift : NOWHERE;
            at_row = of_sample * y_n + oh * y_h + (row - line * pw + w_shift) * y_w;
        }
#ifdef COUNTS
        const auto sample_of = [&](int row) { return by->height.divide(by->line.divide(row)); };
        const int row0 = work_of.piece * BM, first_sample = sample_of(row0);
        int own = row0 + warpgroup * M + thread / 32 * ROWS + lane % ROWS;
        {
            const int line = by->line.divide(own), sample = by->height.divide(line);
            const bool is = own < rows && (unsigned)(line - sample * ph + h_shift) < (unsigned)h_out && (unsigned)(own - line * pw + w_shift) < (unsigned)w_out;
            own = is ? sample - first_sample : -1;
        }
        SweepStatistics statistics(own);
        const auto means = [&] { return (float *)(tables + WGS * (16 * BN + 16 * STAGING)) + threadIdx.x / 32 * (MEANS_BYTES / 4); };
        // Outputs of the plane before, if there are any that are not counted.
        float uncounted[MI][REGISTERS];
        bool are_uncounted = false;
        const auto count = [&] {
            if constexpr (HAS_ROOM)
                if (are_uncounted) {
                    statistics.add(uncounted, means());
                    are_uncounted = false;
                }
        };
#endif
        // After the last input plane, those that it has not made whole.
        const int end = work_of.to == planes ? planes + PLANES - 1 : work_of.to;
#pragma unroll 1
        for (int plane = work_of.first(); plane < end; plane++) {
            if (plane < work_of.to) {
                // What the matrix instructions in flight read, to be given back when they are done.
                int held_a = -1, held_b = -1;
#if KIND == 2
                // Sums of products of some parts; whether there are none yet, and whether a unit's high parts come first.
                float running[MI][ALL_REGISTERS];
                int fresh = 1, high_first = 0;
                const auto promote = [&](int parts) {
                    const float times = parts == BOTH_HIGH ? 1.0f : 0.00048828125f;
#pragma unroll
                    for (int i = 0; i < MI; i++)
#pragma unroll
                        for (int j = 0; j < ALL_REGISTERS; j++) sums[i][j] = fmaf(running[i][j], times, sums[i][j]);
                    fresh = 1;
                };
#else
                float(&running)[MI][ALL_REGISTERS] = sums;
                constexpr int fresh = 0, high_first = 0;
#endif
                // K: the steps of 32 bytes of a chunk, or 0 for any number of them.
                const auto products = [&](auto known) {
                    constexpr int K = decltype(known)::value;
#pragma unroll 1
                    for (int chunk = 0; chunk < chunks; chunk++) {
                        barrier_wait(full_a + 8 * at_a, phase_a);
                        unsigned of_line = place(ring_a + at_a * stage_bytes + ((h_kernel - 1) * back_h + warpgroup * M) * pitch, panel_bytes);
#pragma unroll 1
                        for (int unit = 0; unit < units_of_chunk; unit++) {
                            const int slot = resident ? chunk * units_of_chunk + unit : at_b;
                            if (!there) barrier_wait(full_b + 8 * slot, resident ? 0 : phase_b);
#pragma unroll 1
                            for (int pass = 0; pass < PASSES; pass++) {
                                const int parts = PASSES == 1 ? BOTH_HIGH : (high_first ? PASSES - pass : pass + 1) % PASSES;
                                unsigned from_line = of_line + (parts == LOW_ROWS ? part_bytes / 16 : 0), from_a = from_line;
                                unsigned from_b = place(ring_b + slot * unit_bytes, PARTS * ALL_COLUMNS * 16) + (parts == LOW_COLUMNS ? ALL_COLUMNS : 0);
                                int keep = !fresh;
                                const auto tap = [&] {
#pragma unroll(K > 0 ? K : 1)
                                    for (int k = 0; k < (K > 0 ? K : steps); k++) {
                                        const unsigned long long columns = operand_at<1>(from_b + k * 2 * PARTS * ALL_COLUMNS);
#pragma unroll
                                        for (int i = 0; i < MI; i++)
                                            multiply(running[i], (unsigned long long)kind_of_a << 32 | from_a + i * 8 * of_row + k * of_step, columns, keep);
                                        keep = 1;
                                    }
                                };
                                matrix_fence();
                                // The last one by itself: it is what the group ends with.
                                int aw = 1;
#pragma unroll 1
                                for (int t = 1; t < taps; t++, aw++) {
                                    tap();
                                    from_b += tap_bytes / 16;
                                    from_a += step_w;
                                    if (aw == w_kernel) aw = 0, from_line -= step_h, from_a = from_line;
                                }
                                tap();
                                matrix_commit();
#ifdef COUNTS
                                count();
#endif
#if KIND == 2
                                fresh = 0;
                                const bool other_next = pass == (high_first ? 0 : 1);
                                if (other_next || pass == 2 && parts == BOTH_HIGH && !alternates) {
                                    matrix_wait<0>();
                                    promote(parts);
                                } else {
                                    matrix_wait<1>();
                                }
#else
                                matrix_wait<1>();
#endif
                                if (pass == 0 && lane == 0) {
                                    if (held_a >= 0) barrier_arrive(empty_a + 8 * held_a);
                                    if (held_b >= 0) barrier_arrive(empty_b + 8 * held_b);
                                }
                            }
                            of_line -= unit_lines * step_h;
#if KIND == 2
                            high_first ^= 1;
#endif
                            held_a = unit + 1 == units_of_chunk ? at_a : -1;
                            held_b = -1;
                            if (!resident) {
                                held_b = at_b;
                                if (++at_b == b_stages) at_b = 0, phase_b ^= 1;
                            }
                        }
                        if (++at_a == a_stages) at_a = 0, phase_a ^= 1;
                    }
                    matrix_wait<0>();
#if KIND == 2
                    if (!fresh) promote(high_first ? BOTH_HIGH : LOW_COLUMNS);
#endif
                };
                if (steps == 1)
                    products(Count<1>());
                else if (steps == 2)
                    products(Count<2>());
                else if (steps == 3)
                    products(Count<3>());
                else if (steps == 4)
                    products(Count<4>());
                else
                    products(Count<0>());
                there = resident;
                if (lane == 0) {
                    if (held_a >= 0) barrier_arrive(empty_a + 8 * held_a);
                    if (held_b >= 0) barrier_arrive(empty_b + 8 * held_b);
                }
            }
#ifdef COUNTS
            count();
#endif
            float sum[MI][REGISTERS];
#pragma unroll
            for (int i = 0; i < MI; i++)
#pragma unroll
                for (int j = 0; j < ALL_REGISTERS; j++) {
                    if (j < REGISTERS) sum[i][j] = sums[i][j];
                    sums[i][j] = j + REGISTERS < ALL_REGISTERS ? sums[i][j + REGISTERS] : 0.0f;
                }
            const int od = plane + d_shift;
            if (plane < work_of.from || (unsigned)od >= (unsigned)d_out) continue;

            // What is always so, but not for the compiler: without a branch it spills.
            if (SCALED ? rows > 0 : has_bias) {
#pragma unroll
                for (int j = 0; j < REGISTERS; j += 4) {
                    const float2 add = *(const float2 *)&column_bias[2 * j + lane % 4 * 2];
#if SCALED
                    const float2 sw = *(const float2 *)&column_scale[2 * j + lane % 4 * 2];
#endif
#pragma unroll
                    for (int i = 0; i < MI; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            float &v = sum[i][j + e];
#if SCALED
                            v *= e % 2 ? sw.y : sw.x;
#endif
                            v += e % 2 ? add.y : add.x;
                        }
                }
            }
            straighten(sum, activation, slope);
            const int at = at_row + od * y_d;
            const Epilogue epilogue = {y, at, row_ow, column_at, column_rr, staged, activation, min(channels - column0, BN), w_out, y_w, column0 * y_c, y_c};
            const auto place = [&](int) { return row_ow == NOWHERE ? -1 : at; };
            if (way == WHOLE_VOXELS) {
                epilogue.rows(sum);
            } else if (way == BY_16) {
                epilogue.dense<uint4>(sum, warpgroup, place);
            } else if (way == BY_8) {
                epilogue.dense<uint2>(sum, warpgroup, place);
            } else {
#pragma unroll 1
                for (int part = 0; part < BN; part += PIECE) {
                    epilogue.stage(sum, part);
                    if (activation > 2) epilogue.bend();
                    if (!channels_first)
                        epilogue.last(part, way == VECTORS);
                    else if (way == IN_ORDER)
                        epilogue.dense(part);
                    else
                        epilogue.first<1>(part);
                }
            }
#ifdef COUNTS
            if (relus) straighten(sum, 1, 0.0);
            if constexpr (HAS_ROOM) {
#pragma unroll
                for (int i = 0; i < MI; i++)
#pragma unroll
                    for (int j = 0; j < REGISTERS; j++) uncounted[i][j] = sum[i][j];
                are_uncounted = true;
            } else if (joined > 0) {
                // As above: else sums are moved while the matrix instructions add to them.
                statistics.add(sum, means());
            }
#endif
        }
#ifdef COUNTS
        count();
        // Which of its planes' shares this is, and how many there are.
        int share = 0, shares = 1;
        if (const int of_left = work_of.piece - whole * workers; of_left >= 0) {
            const int left = (row_pieces - whole * workers) * planes;
            const auto worker_of = [&](int plane) { return (int)(((plane + 1ll) * workers + left - 1) / left) - 1; };
            const int first = worker_of(of_left * planes);
            share = worker - first, shares = worker_of((of_left + 1) * planes - 1) - first + 1;
        }
        statistics.write({(float2 *)parts, counts, part_chunks, part_phases, out_channels / joined, joined, ph * pw}, means(), staged, first_sample,
                         sample_of(min(row0 + BM, rows) - 1), work_of.piece, share, shares, warpgroup, column0, min(channels - column0, BN));
#endif
    }
}
