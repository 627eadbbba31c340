// Halo GEMM: `linear_gemm`'s matrix product for Hopper, in CUDA C++, with its operands in shared memory.
//
// cuTile fetches a tile of A anew for every tap. With few columns that is the limit: the second-level
// cache delivers about 6 TB/s, 40 products a byte of it are not enough. Here a block fetches the rows of a
// tile once with their halo, and every tap along height and width is the same memory read from a shifted
// start. That needs an operand layout whose rows are 16 bytes apart, which no tile language offers.
//
// # What is computed
//
// Per axis let `u = o + p = s*q + r`. Output `o` of residue `r` sums over the taps `t` with
// `t*d = r (mod s)`, each at input `i = q - m`, `m = (t*d - r)/s`. Positions are `j = q - first`.
// Along width, `block` neighbouring positions make one row: `j = jb*block + jj`. With rows
// `R = ((n*pd + jd)*ph + jh)*pw + jb`,
//
// `Y[R, column] = sum over (td, th), step, k: A[R + offset, k] * B[td, th, step][column][k]`.
//
// - **A**, written by `halo_pack_input` or, without gaps, by `gradient_rows`: panels of 16 bytes a row (E elements: 8 of 16 bits or 4 of 32).
//   Panel `slice*chunks*chunk_panels + parity*channel_panels + c/E` of row `lead + R` holds channels c.. of the slice
//   at (n, jd, jh, jb*block + parity) of the input; what is no input is zero: gaps at the ends of rows,
//   planes and samples, `lead` rows before, channels past the slice's last. Rows past the last position's may be anything.
//   A slice has `chunks * chunk_panels` panels, an even number a chunk; those past the last are zeros.
//   Panels are `a_rows` rows apart. The split's low part follows after `slices*chunks*chunk_panels` panels.
// - **B**, written by `halo_pack_weight`: tiles of `chunk_panels` panels of BN rows (columns of Y) of 16
//   bytes, in the order [slice][column block][td][chunk][th][step]. Of two parts a panel holds BN rows of the high
//   one, then those of the low one, so that both may be columns of one instruction.
// - **Columns** of a slice: `outputs` = block * stride residues along width, `rr = jj*stride + r`, of each
//   of its `channels` output channels: `column = co*outputs + rr` if `channels_first`, else
//   `rr*channels + co`. `ow = jb*outputs + rr + w_shift`.
// - **Steps** along width: step i reads row `R + w_low + i*w_step`. With `e = jj + first - m` a column's
//   tap is in step i, parity `e mod block`, where `floor(e/block) = w_low + i*w_step`.
// - Residues along depth and height are phases; their taps are those of `linear_gemm`.
//
// With TAPS the taps along width have columns instead of steps: `column = t*CHANNELS + co` of CHANNELS = BN/TAPS channels,
// so that A is read once for all of them. `A[R + w_low] * B[.., t]` belongs to the output of residue `t mod W_STRIDE` in the
// row `far(t)` before R, `far(t) = w_reach - floor(t*w_dilation/W_STRIDE)`, at most 8. Sums are brought together by shuffles;
// those of a warp's last rows need products of the next warp's first ones, through shared memory. A tile has sums of
// its first `advance` rows, a multiple of 8 at least `w_reach` below BM, and the next tile starts there.
//
// # How
//
// Persistent blocks of WGS consumer warpgroups and one producer warp. A tile is BM = 64*MI*WGS rows, a
// warpgroup's after the other's, by BN columns of one phase. For each tap along depth and chunk of channels
// (and, if not `whole_h`, tap along height) the producer copies a stage: `chunk_panels` panels (twice for
// the split) of BM rows and their halo, no more. For each of its taps along height it copies units of B, of
// `unit_steps` steps each (1 or `w_steps`). `resident`: every unit that the block will ever need fits in
// the ring; each is copied once. Then the block keeps to one slice and column block, and the grid is a
// multiple of slices*blocks. Depth taps whose planes are all gaps are skipped. Sums go to y through shared
// memory, a warp's by itself, so that neighbouring lanes write neighbours. With SPLIT, for few tiles, without `resident`, as many blocks are
// a cluster that does a tile together, each a range of its chunks, of which there are no fewer (`cluster_sums.cuh`).
//
// Shared memory, in order: barriers, then at 1 KB divisors and phases, at 4 KB tables of columns for each
// warpgroup, staging areas for each warp, with TAPS products of each warp for the one before it, A's ring (`a_stages`), B's ring (`b_stages`),
// with SPLIT sums of other blocks.
//
// # Numbers
//
// As in `linear_gemm`: `KIND` 0, f16 or bf16; 1, float32 rounded to tf32; 2, float32 as two fp16, whose
// products of high parts are added to float32 registers every `promote` units of B; 3, float32 as two tf32, whose
// products all are: half as fast, and for magnitudes of any range beside each other; 5, float32 as one fp16: as many bits as tf32, at
// twice its rate, of the range that `operand.cuh` names.
//
// # What it takes
//
// It may be launched so that it starts while the packs still run: it waits for them itself.
//
// Block: 128 threads a warpgroup, and 128 where CTAS is 1, else 32, for the producer. Grid: any number of
// blocks or clusters along the first axis, with `resident` a multiple of slices*blocks. Tiles run over column blocks,
// slices, phases, rows; a block takes every grid-th. With `by_work`, for few tiles, phases are those with
// most taps first, a block's next tile is of the phase as far from the other end, and the grid is a multiple of
// slices*blocks*phases. Bytes of dynamic shared memory, with TAPS `32*WGS*BN*w_reach` more, with SPLIT
// `4*BM*BN*(SPLIT - 1)/SPLIT`:
// `4096 + WGS*(16*BN + 4096*MI + 1024) + a_stages*parts*chunk_panels*stage_rows*16 + b_stages*unit`,
// `unit = unit_steps*parts*chunk_panels*BN*16`; `stage_rows` a multiple of 8, at least two stages of each,
// at most 60 of both together, with SPLIT 54; `d_stride*h_stride` at most 64.
//
// Parameters, in order:
//
// 1. `a`, `b`, `control`; for fp16 of float32 `scale_w` (2^-ew of each of slices*blocks*BN columns);
//    `bias`, `y`.
// 2. i32: `rows`, `a_rows`, `lead`, `pd`, `ph`, `pw` (rows of a line).
// 3. Of depth: `kernel`, `stride`, `dilation`, `step`, `inverse`, `first`, `shift`, `out`; the same of height;
//    `d_input`.
// 4. `outputs`, `w_shift`, `w_out`, `w_low`, `w_steps`, `w_step`.
// 5. `chunk_panels`, `chunks`, `slices`, `blocks`, `channels`.
// 6. `y_n`, `y_c`, `y_d`, `y_h`, `y_w`.
// 7. `channels_first`, `has_bias`, `activation`, `slope` (f64).
// 8. `a_stages`, `stage_rows`, `whole_h`, `b_stages`, `unit_steps`, `resident`, `by_work`; for two parts `promote`, the
//    units of B after which high products are added to registers.
// 9. With SHORT, where some channels lack a tap: `class_panels`, a multiple of `chunk_panels`, of the channels that
//    have the same taps, `classes_h`, `classes_w`, and `full_d`, `full_h`, `full_w`: class `(jd*classes_h + jh)*classes_w +
//    jw` lacks the first tap along depth if `jd >= full_d`, likewise for height, and the last step along width if `jw >=
//    full_w`. The stride is 1, there is one phase, `chunks` at most 512.
// 10. With TAPS, of a kernel along width of at most so many: `advance`, `w_dilation`, `w_reach`. W_STRIDE is the stride along
//    width; `scale_w` is of each of slices*blocks*CHANNELS channels. `outputs` is W_STRIDE, `w_steps` 1; for W_STRIDE past
//    1, `channels_first`.
//     With BETWEEN, which is for outputs on a lattice with gaps along height, in NCDHW, whose residues are along depth alone, for rows of
//     one position and an activation that is a comparison, and leaves the definition to another launch: `advance`, of whole lines in 8
//     planes at most; `y_plane`, the elements of a plane of y, `y_head`, those before its first output, `y_past`, those from a line's first
//     output to the line's end; `place_bytes`, of a tile's lines of a channel and what is between, and a sector or two for each plane;
//     `y_depth`, planes of a channel, of which every `y_step`-th from `y_first` on has outputs. `by_work` is 0. Instead of staging areas
//     there are `Between::room` bytes of shared memory.
// 11. What `definition.cuh` asks for, before `unless`: with `guarded` control words are final when this starts, and where they say that
//    packed operands do not do, nothing is stored of the products, and the definition is computed instead; else all of it is zero.
// 12. Last, for two tf32: `unless` (null, or words after which the result of another kernel may stand; then nothing is done).
// 13. With COUNTS, which is for KIND 2 and a block that is alone, and leaves the definition to another launch, the two last items of
//    `gather_gemm`: statistics of y, where rows are one or two outputs of a channel, of two `channels_first`; and the group norm beside
//    the product, where `by_work` is 0, by 2 or 3 of the producer's warps.

/// The first tap of a chunk along height, and how many units and steps of one it has along width; a tap along depth that
/// it lacks is passed over. There is one phase.
#ifdef SHORT
#define LACKING(chunk)                 \
    const int lacks = lacking[chunk];  \
    if (ad == 0 && lacks & 1) continue;
#define FIRST_H (lacks >> 1 & 1)
#define UNITS_OF(units) (units - (unit_steps == 1 && lacks & 4 ? 1 : 0))
#define STEPS_OF(steps) (steps - (unit_steps > 1 && lacks & 4 ? 1 : 0))
#else
#define LACKING(chunk)
#define FIRST_H 0
#define UNITS_OF(units) units
#define STEPS_OF(steps) steps
#endif

/// Whether tiles are dealt out by their work: with BETWEEN there is no register for it.
#if defined(SHORT) || defined(BETWEEN)
#define BY_WORK 0
#else
#define BY_WORK by_work
#endif

/// A number that is known.
template <int COUNT> struct Count {
    static constexpr int value = COUNT;
};

/// Whether float32 is multiplied in two parts.
#define PARTED (KIND == 2 || KIND == 3)

/// Of two fp16 whether rows' high parts are multiplied by both parts of columns at once: below 64 columns an instruction waits for its
/// rows, and there are registers for the sums. The assembler does not let other instructions add to a part of an instruction's sums.
#define BOTH (KIND == 2 && BN <= (CTAS == 1 ? 48 : 32))

/// Of a tile's chunks those that a block multiplies.
#ifdef SPLIT
#define FIRST_CHUNK ((int)cluster_rank() * chunks / SPLIT)
#define PAST_CHUNK (((int)cluster_rank() + 1) * chunks / SPLIT)
#else
#define FIRST_CHUNK 0
#define PAST_CHUNK chunks
#endif

/// Whether the definition stands in this kernel, too: there are some that have no registers for it.
#if defined(COUNTS) || defined(BETWEEN)
#define WITHIN 0
#else
#define WITHIN !(BN == 64 && MI == 2 && WGS == 4)
#endif

/// Whether a block that is alone may pack the input while it multiplies.
#if defined(SHORT) || defined(BETWEEN) || PARTED || CTAS > 1
#define PACKS_AHEAD 0
#else
#define PACKS_AHEAD 1
#endif

#include "cluster_sums.cuh"
#include "definition.cuh"
#include "divisor.cuh"
#include "gradient_taps.cuh"
#include "halo_epilogue.cuh"
#ifdef TAPS
#include "halo_fold.cuh"
#endif
#ifdef BETWEEN
#include "halo_between.cuh"
#endif
#include "halo_tiles.cuh"
#include "launch.cuh"
#include "pack_ahead.cuh"
#ifdef COUNTS
#include "epilogue_statistics.cuh"
#include "norm_behind.cuh"
#endif

#include <type_traits>

#ifdef SPLIT
using Cluster = ClusterSums<SPLIT, 4 * WGS, MI * REGISTERS / 4>;
#endif
/// Whether there are registers for more than sums; what is kept in them if there are.
constexpr int SUMS = MI * REGISTERS * (BOTH ? 4 : KIND == 2 ? 3 : PARTED ? 2 : 1);
#if defined(SHORT)
constexpr int OTHERS = 48;
#elif defined(TAPS)
constexpr int OTHERS = 40;
#else
constexpr int OTHERS = 32;
#endif
constexpr bool ROOMY = SUMS + OTHERS <= (ALONE ? CONSUMER_REGISTERS : 112);
using Kept = std::conditional_t<ROOMY, const int, const int &>;

/// Whether tables of columns are written for every tile: there is no register for which ones they are of.
#ifdef COUNTS
constexpr bool FORGETS = !ROOMY;
#else
constexpr bool FORGETS = false;
#endif

#ifdef COUNTS
static_assert(KIND == 2 && ALONE);
#endif

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) CLUSTER halo_gemm(
    const char *a, const char *b, unsigned *control,
#if SCALED
    const float *scale_w,
#endif
    const Element *bias, Element *y, int rows, int a_rows, int lead, int pd, int ph, int pw, int d_kernel, int d_stride, int d_dilation,
    int d_step, int d_inverse, int d_first, int d_shift, int d_out, int h_kernel, int h_stride, int h_dilation, int h_step, int h_inverse,
    int h_first, int h_shift, int h_out, int d_input, int outputs, int w_shift, int w_out, int w_low, int w_steps, int w_step,
    int chunk_panels, int chunks, int slices, int blocks, int channels, int y_n, int y_c, int y_d, int y_h, int y_w, int channels_first,
    int has_bias, int activation, double slope, int a_stages, int stage_rows, int whole_h, int b_stages, int unit_steps, int resident,
    int by_work
#if PARTED
    , int promote
#endif
#ifdef SHORT
    , int class_panels, int classes_h, int classes_w, int full_d, int full_h, int full_w
#endif
#ifdef TAPS
    , int advance, int w_dilation, int w_reach
#endif
#ifdef BETWEEN
    , int advance, int y_plane, int y_head, int y_past, int place_bytes, int y_depth, int y_first, int y_step
#endif
    , const Element *x, int n, int height, int width, int block, int panels, int x_n, int x_c, int x_d, int x_h, int x_w,
    int units, int before, int shift, int pieces, int ahead, DEFINITION_PARAMETERS
#if KIND == 3
    , const unsigned *unless
#endif
#ifdef COUNTS
    , float *parts, float *counts, int part_chunks, int part_phases, int out_channels, int joined, int relus,
    unsigned *norm_words, int norm_warps, double *norm_sums, float *merged, const Element *gamma, const Element *beta, int norm_groups, int norm_segments, int y_voxels,
    int norm_activation, double norm_slope, double eps
#endif
) {
    let_next_start();
#if KIND == 3
    if (stands(unless)) {
        await_previous();
        return;
    }
#endif
    extern __shared__ __align__(128) char memory[];
#if !PARTED
    constexpr int promote = 0;
#endif
#if !defined(TAPS) && !defined(BETWEEN)
    constexpr int advance = BM;
#endif
    const Sizes s = {rows, a_rows, lead, pd, ph, pw,
                     {d_kernel, d_stride, d_dilation, d_step, d_inverse, d_first, d_shift, d_out},
                     {h_kernel, h_stride, h_dilation, h_step, h_inverse, h_first, h_shift, h_out},
                     d_input, outputs, w_shift, w_out, w_low, w_steps, w_step,
                     chunk_panels, chunks, slices, blocks, channels,
                     y_n, y_c, y_d, y_h, y_w, channels_first, has_bias, activation,
                     a_stages, stage_rows, whole_h, b_stages, unit_steps, resident, BY_WORK, promote, advance};
    const unsigned full_a = shared(memory), empty_a = full_a + 8 * a_stages;
    const unsigned full_b = empty_a + 8 * a_stages, empty_b = full_b + 8 * b_stages;
    const int panel_bytes = 16 * stage_rows, part_bytes = chunk_panels * panel_bytes, stage_bytes = PARTS * part_bytes;
    const int tap_bytes = PARTS * chunk_panels * BN * 16, unit_bytes = unit_steps * tap_bytes;
    Divisors *const by = (Divisors *)(memory + 1024);
    Phase *const phases = (Phase *)(memory + 1280);
    char *tables = memory + 4096;
#ifdef BETWEEN
    const Between between = {y_plane, y_head, y_past, place_bytes, tables + WGS * 16 * BN};
    unsigned ring_a = shared(between.memory) + Between::room(place_bytes);
#else
    unsigned ring_a = shared(memory) + 4096 + WGS * (16 * BN + 16 * STAGING);
#endif
#ifdef TAPS
    float *const edges = (float *)(tables + WGS * (16 * BN + 16 * STAGING));
    ring_a += Fold::bytes(w_reach);
#endif
    const unsigned ring_b = ring_a + a_stages * stage_bytes;
    const int tiles = (rows + advance - 1) / advance * d_stride * h_stride * slices * blocks;
#if PACKS_AHEAD
    const PackAhead packed = {x, (uint4 *)a, control, a_rows, lead, n, d_input, height, width, block, panels, x_n, x_c, x_d, x_h, x_w, before, shift, pieces, ahead};
#endif

#ifdef COUNTS
    int *const finished = (int *)(by + 1);
    const NormBehind norm = {y, (float2 *)parts, counts, norm_words, (Segment *)norm_sums, (float2 *)merged, gamma, beta, n, out_channels, norm_groups, norm_segments, y_voxels,
                             part_chunks, part_phases, out_channels / joined, pd * ph * pw, slices * blocks, norm_activation, norm_slope, eps};
    if (threadIdx.x >= 64 && threadIdx.x < 64 + 2 * WGS) finished[threadIdx.x - 64] = 0;
    // There is no register to keep it in, either.
    if (threadIdx.x == 96) finished[2 * WGS] = tiles;
    const auto tile_count = [&] { return *(const volatile int *)(finished + 2 * WGS); };
#elif defined(BETWEEN)
    // There is no register to keep it in.
    if (threadIdx.x == 96) *(int *)(by + 1) = tiles;
    const auto tile_count = [&] { return *(const volatile int *)(by + 1); };
#else
    const auto tile_count = [&] { return tiles; };
#endif

    if (threadIdx.x == 0) {
        for (int i = 0; i < a_stages; i++) {
            barrier_init(full_a + 8 * i, 1);
            barrier_init(empty_a + 8 * i, CONSUMERS / 32);
        }
        for (int i = 0; i < b_stages; i++) {
            barrier_init(full_b + 8 * i, 1);
            barrier_init(empty_b + 8 * i, CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Each by a thread of its own: they take long.
    if (threadIdx.x >= 32 && threadIdx.x < 32 + DIVISORS) {
        const int all = slices * blocks, phase_count = d_stride * h_stride, turn = max(teams() / (all * phase_count), 1);
        const int at = threadIdx.x - 32;
        ((Divisor *)by)[at] = Divisor(at == 0 ? all : at == 1 ? phase_count : at == 2 ? turn : at == 3 ? pw : at == 4 ? ph : at == 5 ? pd : units);
    }
    if (threadIdx.x < d_stride * h_stride) phases[threadIdx.x] = Phase(s, threadIdx.x);
#ifdef SHORT
    // What the channels of a chunk lack: 1, 2, 4 for depth, height, width.
    unsigned char *const lacking = (unsigned char *)memory + 3584;
    for (int chunk = threadIdx.x; chunk < chunks; chunk += THREADS) {
        const int j = chunk * chunk_panels / class_panels, line = j / classes_w;
        lacking[chunk] = (line / classes_h >= full_d) | (line % classes_h >= full_h) << 1 | (j - line * classes_w >= full_w) << 2;
    }
#endif
    const int back_h = h_dilation / (h_stride / h_step) * pw;
#ifdef SPLIT
    const Cluster cluster = {ring_b + b_stages * unit_bytes, shared(memory) + 1024 - Cluster::BARRIERS};
    if (threadIdx.x >= 64 && threadIdx.x < 64 + Cluster::BARRIERS / 8) {
        cluster.begin(threadIdx.x - 64);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    await_cluster();
#else
    __syncthreads();
#endif
    if (BY_WORK) {
        // Those with most taps first.
        const int count = d_stride * h_stride, at = threadIdx.x % count;
        const Phase own = phases[at];
        int rank = 0;
        for (int other = 0; other < count; other++) {
            const int more = phases[other].nd * phases[other].nh - own.nd * own.nh;
            rank += more > 0 || more == 0 && other < at;
        }
        __syncthreads();
        if (threadIdx.x < count) phases[rank] = own;
        __syncthreads();
    }
    if (threadIdx.x >= CONSUMERS) {
        if (ALONE) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x >= CONSUMERS + 32) {
#if PACKS_AHEAD
            // The launch before, the weight's pack, has written nothing that this needs.
            if (ahead > 0) packed.pack({by->line, by->height, by->depth, by->units}, memory + (ring_b - shared(memory)) + b_stages * unit_bytes);
#endif
#ifdef BETWEEN
            between.planes(y - y_first * y_plane - y_head, n, slices * channels, y_depth, y_first, y_step,
                           [&](int channel) { return Between::alike(straighten(has_bias ? widen(bias[channel]) : 0.0f, activation, (float)slope)); });
#endif
#ifdef COUNTS
            await_previous();
            if (norm_words) {
                const Teller<Divisors> teller = {norm, *by, finished, tile_count(), rows};
                const int of_norm = (int)threadIdx.x / 32 - (THREADS / 32 - norm_warps);
                if (of_norm >= 0)
                    norm.work<NormBehind::BY_FEW_REGISTERS>(nullptr, [&] {
                        teller.meanwhile();
                        return teller.all_written();
                    });
                while (!teller.told_all()) __nanosleep(256);
            }
#endif
            return;
        }
        // The producer: one warp.
        const int lane = threadIdx.x % 32;
        const long long a_panel = 16ll * a_rows;
        const int units = d_kernel * chunks * h_kernel * (w_steps / unit_steps);
        int at_a = 0, phase_a = 1, at_b = 0, phase_b = 1;
        if (resident) {
            await_previous();
            const char *from = b + (long long)(blockIdx.x % (slices * blocks)) * units * unit_bytes;
#pragma unroll 1
            for (int u = lane; u < units; u += 32) {
                barrier_expect(full_b + 8 * u, unit_bytes);
                copy(ring_b + u * unit_bytes, from + (long long)u * unit_bytes, unit_bytes, full_b + 8 * u);
            }
        }
#pragma unroll 1
        for (int tile = team(); tile < tile_count(); tile += teams()) {
            const Tile t(s, *by, phases, tile);
            const int slice = t.column_block / blocks;
            // What is found out before this takes as long as a small pack.
            await_previous();
#if PACKS_AHEAD
            const int of_row0 = t.row0 + t.phase.rows, behind = (t.phase.nd - 1) * t.phase.back_d * ph * pw + (t.phase.nh - 1) * back_h;
            packed.await(of_row0 - behind, of_row0 + BM - 1 + (w_steps - 1) * w_step, {by->line, by->height, by->depth, by->units});
#endif
#pragma unroll 1
            for (int ad = 0; ad < t.phase.nd; ad++) {
                if (t.skipped(ad)) continue;
#pragma unroll 1
                for (int chunk = FIRST_CHUNK; chunk < PAST_CHUNK; chunk++) {
                    LACKING(chunk)
#pragma unroll 1
                    for (int group = whole_h ? 0 : FIRST_H; group < (whole_h ? 1 : t.phase.nh); group++) {
                        const int first = whole_h ? FIRST_H : group, last = whole_h ? t.phase.nh - 1 : group;
                        const int length = BM + (last - first) * back_h + (w_steps - 1) * w_step;
                        if (lane == 0) {
                            barrier_wait(empty_a + 8 * at_a, phase_a);
                            barrier_expect(full_a + 8 * at_a, PARTS * chunk_panels * length * 16);
                        }
                        __syncwarp();
                        const char *from = a + 16ll * (t.row0 + t.phase.rows - ad * t.phase.back_d * ph * pw - last * back_h) + (long long)(slice * chunks + chunk) * chunk_panels * a_panel;
#pragma unroll 1
                        for (int p = lane; p < PARTS * chunk_panels; p += 32) {
                            const int part = p / chunk_panels, panel = p - part * chunk_panels;
                            copy(ring_a + at_a * stage_bytes + p * panel_bytes,
                                 from + ((long long)part * slices * chunks * chunk_panels + panel) * a_panel, length * 16, full_a + 8 * at_a);
                        }
                        if (++at_a == a_stages) at_a = 0, phase_a ^= 1;
                        if (resident) continue;
#pragma unroll 1
                        for (int ah = first; ah <= last; ah++) {
                            const int td = t.phase.td + ad * d_step, th = t.phase.th + ah * h_step;
                            long long unit = (((long long)t.column_block * d_kernel + td) * chunks + chunk) * h_kernel + th;
                            unit *= w_steps / unit_steps;
#pragma unroll 1
                            for (int u = 0; u < UNITS_OF(w_steps / unit_steps); u++) {
                                if (lane == 0) {
                                    barrier_wait(empty_b + 8 * at_b, phase_b);
                                    barrier_expect(full_b + 8 * at_b, unit_bytes);
                                    copy(ring_b + at_b * unit_bytes, b + (unit + u) * unit_bytes, unit_bytes, full_b + 8 * at_b);
                                }
                                if (++at_b == b_stages) at_b = 0, phase_b ^= 1;
                            }
                        }
                    }
                }
            }
        }
#if PACKS_AHEAD
        packed.finish();
#endif
        // What no tile has asked for may still be on its way to memory that the next block is given.
        if (resident)
            for (int u = lane; u < units; u += 32) barrier_wait(full_b + 8 * u, 0);
        return;
    }

    // A consumer.
    await_previous();
    if (ALONE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    int *column_at = (int *)(tables + warpgroup * 16 * BN), *column_rr = column_at + BN;
    float *column_bias = (float *)(column_rr + BN);
    [[maybe_unused]] float *column_scale = column_bias + BN;
#ifndef BETWEEN
    float *staged = (float *)(tables + WGS * 16 * BN) + threadIdx.x / 32 * STAGING;
#endif
    const auto at_hand = [](int x) { return ROOMY ? kept(x) : x; };
    const int steps = at_hand(chunk_panels / 2), units_of_w = at_hand(w_steps / unit_steps), steps_of_unit = at_hand(unit_steps);
    int at_a = 0, phase_a = 0, at_b = 0, phase_b = 0, known = -1;
#if WITHIN
    const Definition definition = DEFINITION_OF_PARAMETERS;
    // Of each warpgroup whether its products are stored.
    int *const stored = (int *)(by + 1);
#endif
#ifdef TAPS
    const Fold fold = {edges + threadIdx.x / 32 * 2 * BN * w_reach, w_reach, w_dilation};
    int turn = 0;
#endif

#ifdef SPLIT
    int round = -1;
#endif
    for (int tile = team(); tile < tile_count(); tile += teams()) {
        const Tile own(s, *by, phases, tile);
#ifdef SPLIT
        round++;
#endif
        float sum[MI][REGISTERS];
#if KIND == 2
        float cross[MI][REGISTERS];
#endif
#if PARTED
        float high[MI][BOTH ? 2 * REGISTERS : REGISTERS];
        int fresh = 1, units_since = 0;
        // Cross products of fp16 are 2^11 times too large.
        const auto promoted = [](const float *of, int j) { return BOTH ? fmaf(of[j + REGISTERS], 0.00048828125f, of[j]) : of[j]; };
#endif
        // What the matrix instructions in flight read, to be given back when they are done.
        int held_a = -1, held_b = -1;
        Kept nd = own.phase.nd, nh = own.phase.nh, td0 = own.phase.td, th0 = own.phase.th;
        // K: the steps of 32 bytes of a chunk, or 0 for any number of them.
        const auto products = [&](auto known) {
            constexpr int K = decltype(known)::value;
#pragma unroll
            for (int i = 0; i < MI; i++)
#pragma unroll
                for (int j = 0; j < REGISTERS; j++) {
                    sum[i][j] = 0.0f;
#if KIND == 2
                    cross[i][j] = 0.0f;
#endif
#if PARTED
                    high[i][j] = 0.0f;
                    if (BOTH) high[i][j + REGISTERS] = 0.0f;
#endif
                }
#pragma unroll 1
            for (int ad = 0; ad < nd; ad++) {
                if (own.skipped(ad)) continue;
#pragma unroll 1
                for (int chunk = FIRST_CHUNK, past = PAST_CHUNK; chunk < past; chunk++) {
                    LACKING(chunk)
                    const int units_w = UNITS_OF(units_of_w), steps_w = STEPS_OF(steps_of_unit);
#pragma unroll 1
                    for (int group = whole_h ? 0 : FIRST_H; group < (whole_h ? 1 : nh); group++) {
                        const int first = whole_h ? FIRST_H : group, last = whole_h ? nh - 1 : group;
                        barrier_wait(full_a + 8 * at_a, phase_a);
                        unsigned of_line = place(ring_a + at_a * stage_bytes + ((last - first) * back_h + warpgroup * M) * 16, panel_bytes);
#pragma unroll 1
                        for (int ah = first; ah <= last; ah++, of_line -= back_h) {
                            unsigned from_a = of_line;
                            int unit = resident ? (((td0 + ad * d_step) * chunks + chunk) * h_kernel + th0 + ah * h_step) * units_of_w : 0;
#pragma unroll 1
                            for (int u = 0; u < units_w; u++, unit++) {
                                const int slot = resident ? unit : at_b;
                                barrier_wait(full_b + 8 * slot, resident ? 0 : phase_b);
                                unsigned from_b = place(ring_b + slot * unit_bytes, PARTS * BN * 16);
                                matrix_fence();
                                [[maybe_unused]] int keep = 1;
#if PARTED
                                keep = !fresh;
#endif
                                const auto step = [&](unsigned a_step, unsigned b_step) {
                                    const unsigned long long wb = operand_at<1>(b_step);
#pragma unroll
                                    for (int i = 0; i < MI; i++) {
                                        const unsigned long long xa = operand_at<MI>(a_step + i * 8);
#if PARTED
                                        const unsigned long long xl = operand_at<MI>(a_step + i * 8 + part_bytes / 16);
                                        multiply(high[i], xa, wb, keep);
#if KIND == 2
                                        multiply(cross[i], xl, wb, 1);
                                        if (!BOTH) multiply(cross[i], xa, operand_at<1>(b_step + BN), 1);
#else
                                        multiply(high[i], xl, wb, 1);
                                        multiply(high[i], xa, operand_at<1>(b_step + BN), 1);
#endif
#else
                                        multiply(sum[i], xa, wb, 1);
#endif
                                    }
                                    keep = 1;
                                };
                                const auto tap = [&] {
                                    if constexpr (K > 0) {
#pragma unroll
                                        for (int k = 0; k < K; k++) step(from_a + k * (panel_bytes / 8), from_b + k * 2 * PARTS * BN);
                                    } else {
#pragma unroll 4
                                        for (int k = 0; k < steps; k++) step(from_a + k * (panel_bytes / 8), from_b + k * 2 * PARTS * BN);
                                    }
                                };
                                // The last one by itself: it is what the group ends with.
#pragma unroll 1
                                for (int w = 1; w < steps_w; w++, from_a += w_step, from_b += tap_bytes / 16) tap();
                                tap();
                                from_a += w_step;
                                matrix_commit();
#if PARTED
                                fresh = 0;
                                if (++units_since == promote) {
                                    matrix_wait<0>();
#pragma unroll
                                    for (int i = 0; i < MI; i++)
#pragma unroll
                                        for (int j = 0; j < REGISTERS; j++) sum[i][j] += promoted(high[i], j);
                                    fresh = 1;
                                    units_since = 0;
                                } else {
                                    matrix_wait<1>();
                                }
#else
                                matrix_wait<1>();
#endif
                                if (lane == 0) {
                                    if (held_a >= 0) barrier_arrive(empty_a + 8 * held_a);
                                    if (held_b >= 0) barrier_arrive(empty_b + 8 * held_b);
                                }
                                held_a = -1;
                                held_b = -1;
                                if (!resident) {
                                    held_b = at_b;
                                    if (++at_b == b_stages) at_b = 0, phase_b ^= 1;
                                }
                                if (ah == last && u == units_w - 1) held_a = at_a;
                            }
                        }
                        if (++at_a == a_stages) at_a = 0, phase_a ^= 1;
                    }
                }
            }
            matrix_wait<0>();
        };
        if (!ROOMY)
            products(Count<0>());
        else if (steps == 1)
            products(Count<1>());
        else if (steps == 2)
            products(Count<2>());
        else if (steps == 3)
            products(Count<3>());
        else if (steps == 4)
            products(Count<4>());
        else
            products(Count<0>());
        if (lane == 0) {
            if (held_a >= 0) barrier_arrive(empty_a + 8 * held_a);
            if (held_b >= 0) barrier_arrive(empty_b + 8 * held_b);
        }
#if PARTED
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
            for (int j = 0; j < REGISTERS; j++) {
                sum[i][j] += fresh ? 0.0f : promoted(high[i], j);
#if KIND == 2
                sum[i][j] += cross[i][j] * 0.00048828125f;
#endif
            }
#endif

#ifdef COUNTS
        // Found anew: there are no registers to keep it in.
        const Tile t(s, *by, phases, kept(tile));
#else
        const Tile &t = own;
#endif
        // Where rows and columns go. Offsets are 32-bit from the tile's first sample on.
        const int slice = t.column_block / blocks, column0 = (t.column_block - slice * blocks) * COLUMNS;
        if (FORGETS || t.column_block != known) {
            known = t.column_block;
#if SCALED
            const float scale_x = power(-input_exponent(control));
#endif
            asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
#if WITHIN
            if (thread == 0) stored[warpgroup] = !guarded || !definition.needed();
#endif
#ifdef TAPS
            for (int column = thread; column < BN; column += 128) {
                const int channel = column0 / outputs + column % CHANNELS;
                column_bias[column] = channel < channels && has_bias ? widen(bias[slice * channels + channel]) : 0.0f;
#if SCALED
                column_scale[column] = scale_x * scale_w[t.column_block * CHANNELS + column % CHANNELS];
#endif
            }
#endif
            if (thread < COLUMNS) {
                const int column = column0 + thread;
                const int inner = channels_first ? outputs : channels;
                const int large = column / inner, small = column - large * inner;
                const int co = channels_first ? large : small, rr = channels_first ? small : large;
                const bool here = co < channels && rr < outputs;
                const int channel = slice * channels + co;
                column_at[thread] = channel * y_c + rr * y_w;
                column_rr[thread] = here ? rr : NOWHERE;
#ifndef TAPS
                column_bias[thread] = here && has_bias ? widen(bias[channel]) : 0.0f;
#if SCALED
                column_scale[thread] = scale_x * scale_w[t.column_block * BN + thread];
#endif
#endif
            }
            asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
        }
#if WITHIN
        if (!stored[warpgroup]) continue;
#endif
#ifdef SPLIT
        const auto of_vector = [&](int k) -> float * { return sum[k / (REGISTERS / 4)] + k % (REGISTERS / 4) * 4; };
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
        if (!cluster.are_all(of_vector, warp, round)) continue;
#endif
        // Scale, bias and straight activations in registers; what is not there costs nothing.
#ifdef TAPS
#if SCALED
        // Taps of a channel have its scale.
#pragma unroll
        for (int j = 0; j < REGISTERS; j += 4) {
            const float2 sw = *(const float2 *)&column_scale[2 * j + lane % 4 * 2];
#pragma unroll
            for (int i = 0; i < MI; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[i][j + e] *= e % 2 ? sw.y : sw.x;
        }
#endif
        fold(sum, turn);
        turn ^= 1;
#endif
        // What is always so, but not for the compiler: without a branch it spills.
        if (SCALED && !FIRST_SUM ? rows > 0 : has_bias) {
#pragma unroll
            for (int j = FIRST_SUM; j < REGISTERS; j += 4) {
                const float2 add = *(const float2 *)&column_bias[2 * j + lane % 4 * 2];
#if SCALED && !defined(TAPS)
                const float2 sw = *(const float2 *)&column_scale[2 * j + lane % 4 * 2];
#endif
#pragma unroll
                for (int i = 0; i < MI; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float &v = sum[i][j + e];
#if SCALED && !defined(TAPS)
                        v *= e % 2 ? sw.y : sw.x;
#endif
                        v += e % 2 ? add.y : add.x;
                    }
            }
        }
        straighten(sum, activation, slope);
#ifdef BETWEEN
        const int sample0 = by->depth.divide(by->height.divide(by->line.divide(t.row0)));
        between.write(sum, s, *by, t, y + (long long)sample0 * y_n + (long long)(slice * channels + column0) * y_c, channels - column0,
                      [&](int column) { return Between::alike(straighten(column_bias[column], activation, (float)slope)); });
#else
        const int row = t.row0 + warpgroup * M + thread / 32 * ROWS + lane % ROWS;
        const int line = by->line.divide(row), jb = row - line * pw, plane = by->height.divide(line), jh = line - plane * ph;
        const int n = by->depth.divide(plane), jd = plane - n * pd;
        const int sample0 = by->depth.divide(by->height.divide(by->line.divide(t.row0)));
        const int od = jd * d_stride + d_shift + t.phase.rd, oh = jh * h_stride + h_shift + t.phase.rh, ow = jb * outputs + w_shift;
        const bool here = row < (FIRST_SUM ? min(rows, t.row0 + advance) : rows) && (unsigned)od < (unsigned)d_out && (unsigned)oh < (unsigned)h_out;
        const Epilogue epilogue = {y + (long long)sample0 * y_n, (n - sample0) * y_n + od * y_d + oh * y_h + ow * y_w, here ? ow : NOWHERE,
                                   column_at, column_rr, staged, activation, min(channels * outputs - column0, COLUMNS), w_out, y_w,
                                   (slice * channels + column0 / outputs) * y_c, y_c};
        const bool vectors = channels % 4 == 0 && y_w % 4 == 0 && (unsigned long long)y % (4 * sizeof(Element)) == 0;
        // Every row a voxel, in their order; a sample of whole vectors.
        const bool dense = channels_first && d_stride * h_stride == 1 && pd == d_out && ph == h_out && pw * outputs == w_out &&
                           y_w == 1 && y_h == w_out && y_d == h_out * w_out && w_shift == 0 && d_shift == 0 && h_shift == 0 &&
                           ((unsigned long long)y | (unsigned long long)(unsigned)y_c * sizeof(Element)) % 16 == 0;
        constexpr int VECTOR = 16 / sizeof(Element);
        const auto write = [&] {
            if constexpr (RESIDUES == 1) {
                if (!channels_first && activation <= 2 && (unsigned long long)y % 16 == 0 && (channels | y_n | y_d | y_h | y_w) % VECTOR == 0) {
                    epilogue.rows(sum);
                    return;
                }
            }
            if (dense && outputs == 2 && activation <= 2) {
                epilogue.pairs<2 / RESIDUES>(sum);
                return;
            }
            if (WHOLE_GROUPS && dense && outputs == 1 && activation <= 2) {
                epilogue.dense<uint4>(sum, warpgroup, [&](int of_warpgroup) {
                    const int first = t.row0 + warpgroup * M + of_warpgroup, of_sample = by->depth.divide(by->height.divide(by->line.divide(first)));
                    return first < (FIRST_SUM ? min(rows, t.row0 + advance) : rows) ? (of_sample - sample0) * y_n + first - of_sample * y_c : -1;
                });
                return;
            }
#pragma unroll 1
            for (int piece = 0; piece < COLUMNS; piece += PIECE) {
                epilogue.stage(sum, piece);
                if (activation > 2) epilogue.bend();
                if (!channels_first)
                    epilogue.last(piece, vectors);
                else if (dense && outputs == 1)
                    epilogue.dense(piece);
                else if (outputs == 1)
                    epilogue.first<1>(piece);
                else if (outputs == 2)
                    epilogue.first<2>(piece);
                else if (outputs == 4)
                    epilogue.first<4>(piece);
                else if (outputs == 8)
                    epilogue.first<8>(piece);
                else
                    epilogue.first<0>(piece);
            }
        };
        write();
#endif
#ifdef SPLIT
        cluster.have_been_read(warp);
#endif
#ifdef COUNTS
        if (relus) straighten(sum, 1, 0.0);
        const unsigned there = here ? ((unsigned)ow < (unsigned)w_out) | ((unsigned)(ow + outputs - 1) < (unsigned)w_out) << 1 : 0;
        const Statistics statistics = {(float2 *)parts, counts, part_chunks, part_phases, out_channels / joined, joined * outputs, pd * ph * pw};
        const int last = by->depth.divide(by->height.divide(by->line.divide(min(t.row0 + BM, rows) - 1)));
        // Where outputs were staged for all of the warpgroup, they have been read.
        asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
#pragma unroll 1
        for (int sample = sample0; sample <= last; sample++)
            count_outputs(*(float(*)[1][MI][REGISTERS])sum, n == sample ? there : 0, staged, slice * channels * outputs + column0,
                          min(channels * outputs - column0, COLUMNS), statistics,
                          statistics.at(sample, t.row0 / BM, warpgroup, t.phase.rd * h_stride + t.phase.rh), warpgroup);
        Teller<Divisors>::finish(finished, warpgroup);
#endif
    }
#ifdef BETWEEN
    Between::finish();
#endif
#ifdef COUNTS
    if (norm_words) norm.work<NormBehind::BY_REGISTERS>(nullptr, [] { return true; });
#endif
#ifdef SPLIT
    // Others may still tell this block that they have read what it brought.
    await_cluster();
#endif
#if WITHIN
    // Then no block has stored anything; each has had a tile.
    if (!stored[warpgroup])
        definition.compute<1>((long long)blockIdx.x * CONSUMERS + threadIdx.x, (long long)gridDim.x * CONSUMERS);
#endif
}
