// Gather GEMM: `halo_gemm`'s matrix product for layers of many channels and few voxels.
//
// `halo_gemm`'s rows have gaps where taps reach past an edge, and its columns include residues along width that lack a tap:
// for a kernel of 3, a stride of 2 and 6 voxels a side more than half of what it multiplies are zeros. Here rows are
// positions without gaps, and residues along every axis are phases, so that only taps that are there are multiplied. Shifted
// rows of a plane without gaps are no regular pattern: each warp gathers its operand A with `ldmatrix`, whose lanes name the
// rows; a row whose tap reaches past an edge is one of zeros.
//
// # What is computed
//
// Per axis output `o = s*j + residue` of position `j` sums over the taps `t` with `t*d = o + p (mod s)`, each at input
// `i = (o + p - t*d)/s`. A row is a position: `R = ((n*pd + jd)*ph + jh)*pw + jw`. Residues are phases; with RW = 2, for a stride of
// 2 along width, both of them are columns: of each their channels. With RH = 2 as well both along height are, too: BN columns
// of each.
//
// - **A**, written by `halo_pack_input` without gaps: panels of 16 bytes a voxel (E elements: 8 of 16 bits or 4 of 32), voxels in
//   the order of NDHW. A slice (group) has `chunks * PANELS` panels; those past its last channel are zeros. Of two parts the low one
//   follows after `slices * chunks * PANELS` panels.
//   Panels are `a_rows` rows apart, at least `stage_rows` more than there are voxels; what those hold does not matter. With `in_place`
//   there is no A: rows are brought from x itself (`gather_rows.cuh`).
// - **B**, written by `halo_pack_weight`: of each tap PANELS panels of BN/RW rows (output channels) of 16 bytes, of two parts those of the
//   high one, then of the low one, in the order [slice][column block][td][chunk][th][tw]. A unit is a tap or, of two residues, a pair of
//   neighbours along width, or two pairs.
//
// # How
//
// Persistent blocks of WGS consumer warpgroups and one producer warp. A tile is BM = 64*MI*WGS rows of one phase by BN*RH columns.
// For each tap along depth that any row has, and each chunk of channels, the producer copies a stage of A, the voxels that the
// tile's rows reach by all taps along height and width, and for each of these taps a unit of B. A warp loads the fragments of the
// next unit's rows while the matrix instructions take those of this one from registers. Sums go to y as `halo_gemm`'s do.
//
// With KIND 2, float32 as two fp16, the matrix unit sums a unit's products of high parts, then those of a high and a low one, and both sums are
// added to registers (`gather_products.cuh`). The input is packed before, MI is 1, and rows are loaded when the unit before is done.
//
// With SPLIT, for few tiles, as many blocks are a cluster that does a tile together: each a range of its stages. Their sums meet in shared
// memory, where each block adds those of some rows, in the order of blocks, and ends them (`cluster_sums.cuh`).
//
// Shared memory, in order: barriers, at 1 KB divisors, rows of zeros, phases, at 4608 bytes tables of columns for each
// warpgroup, staging areas for each warp, A's ring (`a_stages`), B's ring (`b_stages`), with SPLIT sums of other blocks.
//
// # What it takes
//
// It may be launched so that it starts while the packs still run: it waits for them itself.
// With RW = 2 y in NDHWC wants whole vectors of 16 bytes of a slice's channels, and no curved activation.
//
// Block: 128 threads a warpgroup, and 128 for the producer. Grid: any number of blocks, or clusters, along the first axis. With `by_work`,
// for few tiles, phases with most taps come first, and a block's next tile is as far from the other end of all blocks' as
// its last one was from theirs; else tiles of a row are of one phase after the other. Bytes of dynamic shared memory:
// `4608 + WGS*(16*BN + 4096*MI + 1024) + PARTS*PANELS*16*(a_stages*stage_rows + b_stages*BN*RH)`, with SPLIT and `4*BM*BN*RH*(SPLIT - 1)/SPLIT`;
// `stage_rows` a multiple of 8, at least two stages of each, at most 60 of both together, with SPLIT 54; at most 64 phases, of at most 10
// taps along an axis.
//
// Parameters, in order:
//
// 1. `a`, `b`; for fp16 of float32 `scale_w` (2^-ew of each of slices*blocks*BN/RW channels); `bias`, `y`.
// 2. i32: `rows`, `voxels` (of all samples), `a_rows`, `pd`, `ph`, `pw` (positions), `in_d`, `in_h`, `in_w` (voxels), `back_d`,
//    `back_h`, `back_w` (voxels along an axis from a tap of a residue to the next).
// 3. Of depth: `kernel`, `stride`, `dilation`, `step`, `inverse`, `padding`, `out`; the same of height and width.
// 4. `chunks`, `slices`, `blocks` (of columns of a slice), `channels` (of a slice).
// 5. `y_n`, `y_c`, `y_d`, `y_h`, `y_w`.
// 6. `channels_first`, `has_bias`, `activation`, `slope` (f64).
// 7. `a_stages`, `stage_rows`, `b_stages`, `by_work`, `in_place` (channels of a slice of x, whose rows are brought from there, else 0: of 16
//    bits, voxels `x_w` elements apart, as whole 16 bytes, as slices' channels are; nothing is packed along, and A not looked at).
// 8. What `pack_ahead.cuh` asks for; then what `definition.cuh` does, as `halo_gemm` has it, but with COUNTS, which leaves it to
//    another launch.
// 9. With COUNTS, for statistics of y as `epilogue_statistics.cuh` has them: `parts`, `counts`, and chunks of a sample, phases
//    and channels there; `joined` (channels whose statistics are one); `relus` (they are of the ReLU of y).
// 10. With COUNTS, for the group norm of y in NCDHW beside the product, as `norm_behind.cuh` has it, where the input is packed along, or
//    of two parts before, and tiles are in the order of rows: `norm_words` (null: there is none), `norm_warps` (of the three that pack, those
//    that do it instead, 1 or 2, each with 16 KB of shared memory after the others' own; of two parts 2 or 3), `norm_sums` (4 doubles of each
//    sample, group and segment), `merged`, `gamma`, `beta`, `norm_groups`, `norm_segments` (in which a group's partial statistics are merged),
//    `y_voxels` (of a channel), the activation, its slope and `eps`.

/// Whether float32 is multiplied in two parts; what is not may be packed while it is multiplied.
#define PARTED (KIND == 2)
#define PACKS_AHEAD !PARTED

/// Residues along width that are columns, those of a channel in the epilogue beside each other.
#if RW == 2
#define TAPS 2
#define W_STRIDE 2
#endif

#include "cluster_sums.cuh"
#include "definition.cuh"
#include "gather_products.cuh"
#include "gather_rows.cuh"
#include "gather_tiles.cuh"
#include "halo_epilogue.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "pack_ahead.cuh"
#include "register_operand.cuh"
#ifdef COUNTS
#include "epilogue_statistics.cuh"
#include "norm_behind.cuh"
#endif

/// The most taps of a phase along an axis.
constexpr int TAPS_OF_AXIS = 10;
constexpr int FIXED = 4608;
#ifdef SPLIT
using Cluster = ClusterSums<SPLIT, 4 * WGS, RH * MI * REGISTERS / 4>;
#endif
/// Whether tables of columns are written for every tile: there is no register for which ones they are of.
#ifdef COUNTS
constexpr bool FORGETS = RH == 2;
#else
constexpr bool FORGETS = false;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) CLUSTER gather_gemm(
    const char *a, const char *b,
#if SCALED
    const float *scale_w,
#endif
    const Element *bias, Element *y, int rows, int voxels, int a_rows, int pd, int ph, int pw, int in_d,
    int in_h, int in_w, int back_d, int back_h, int back_w, int d_kernel, int d_stride, int d_dilation, int d_step, int d_inverse,
    int d_padding, int d_out, int h_kernel, int h_stride, int h_dilation, int h_step, int h_inverse, int h_padding, int h_out, int w_kernel,
    int w_stride, int w_dilation, int w_step, int w_inverse, int w_padding, int w_out, int chunks, int slices, int blocks, int channels, int y_n,
    int y_c, int y_d, int y_h, int y_w, int channels_first, int has_bias, int activation, double slope, int a_stages, int stage_rows,
    int b_stages, int by_work, int in_place, const Element *x, unsigned *control, int x_count, int x_depth, int x_height, int x_width,
    int panels, int x_n, int x_c, int x_d, int x_h, int x_w, int units, int before, int shift, int pieces, int ahead,
    DEFINITION_PARAMETERS
#ifdef COUNTS
    , float *parts, float *counts, int part_chunks, int part_phases, int out_channels, int joined, int relus,
    unsigned *norm_words, int norm_warps, double *norm_sums, float *merged, const Element *gamma, const Element *beta, int norm_groups, int norm_segments, int y_voxels,
    int norm_activation, double norm_slope, double eps
#endif
) {
    let_next_start();
    extern __shared__ __align__(128) char memory[];
    const Sizes s = {voxels, pd, ph, pw, in_d, in_h, in_w, back_d, back_h, back_w, by_work,
                     {d_kernel, d_stride, d_dilation, d_step, d_inverse, d_padding},
                     {h_kernel, h_stride, h_dilation, h_step, h_inverse, h_padding},
                     {w_kernel, w_stride, w_dilation, w_step, w_inverse, w_padding}};
    constexpr int UNIT = RH * RW * OF_TAP;
    const unsigned full_a = shared(memory), empty_a = full_a + 8 * a_stages;
    const unsigned full_b = empty_a + 8 * a_stages, empty_b = full_b + 8 * b_stages;
    const int panel_bytes = 16 * stage_rows, stage_bytes = PARTS * PANELS * panel_bytes;
    Divisors *const by = (Divisors *)(memory + 1024);
    uint4 *const zeros = (uint4 *)(memory + 1280);
    Phase *const phases = (Phase *)(memory + 1408);
    char *const tables = memory + FIXED;
    const unsigned ring_a = shared(memory) + FIXED + WGS * (16 * BN + 16 * STAGING), ring_b = ring_a + a_stages * stage_bytes;
    const int phase_count = d_stride * (h_stride / RH) * (w_stride / RW), all = slices * blocks, row_tiles = (rows + BM - 1) / BM;
    const int tiles = row_tiles * phase_count * all;
#ifdef COUNTS
    int *const finished = (int *)(by + 1);
    const NormBehind norm = {y, (float2 *)parts, counts, norm_words, (Segment *)norm_sums, (float2 *)merged, gamma, beta, x_count, out_channels,
                             norm_groups, norm_segments, y_voxels, part_chunks, part_phases, out_channels / joined, pd * ph * pw, all, norm_activation, norm_slope, eps};
#endif
#if PACKS_AHEAD
    const PackAhead packed = {x, (uint4 *)a, control, a_rows, 0, x_count, x_depth, x_height, x_width, 1, panels, x_n, x_c, x_d, x_h, x_w, before, shift, pieces, ahead};
#endif

#ifdef SPLIT
    const Cluster cluster = {ring_b + b_stages * UNIT, shared(memory) + 1024 - Cluster::BARRIERS};
#endif

    // Each part of this by threads of its own: they take long.
    if (threadIdx.x < 32) {
        for (int i = threadIdx.x; i < a_stages + b_stages; i += 32) {
            const bool of_a = i < a_stages;
            barrier_init(of_a ? full_a + 8 * i : full_b + 8 * (i - a_stages), of_a && in_place ? BRINGERS : 1);
            barrier_init(of_a ? empty_a + 8 * i : empty_b + 8 * (i - a_stages), of_a ? CONSUMERS : CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#ifdef SPLIT
    if (threadIdx.x >= 72 && threadIdx.x < 72 + Cluster::BARRIERS / 8) {
        cluster.begin(threadIdx.x - 72);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#endif
    if (threadIdx.x >= 32 && threadIdx.x < 32 + DIVISORS) {
        const int turn = max(teams() / (all * phase_count), 1), at = threadIdx.x - 32;
        const int numbers[DIVISORS] = {all, phase_count, row_tiles, turn, pw, ph, pd, x_width, x_height, x_depth, units};
        int number = 0;
#pragma unroll
        for (int i = 0; i < DIVISORS; i++) number = at == i ? numbers[i] : number;
        ((Divisor *)by)[at] = Divisor(number);
    }
#ifdef COUNTS
    if (threadIdx.x < 2 * WGS) finished[threadIdx.x] = 0;
#endif
    if (threadIdx.x >= 64 && threadIdx.x < 72) zeros[threadIdx.x - 64] = make_uint4(0, 0, 0, 0);
    // Where tables will be.
    Residue *const residues = (Residue *)tables;
    const int residue = threadIdx.x - 96;
    if (residue >= 0 && residue < s.residues()) residues[residue] = Residue(s, residue);
#ifdef SPLIT
    await_cluster();
#else
    __syncthreads();
#endif
    if (threadIdx.x < phase_count) {
        const Phase phase(s, residues, threadIdx.x);
        phases[by_work ? phase.rank(s, residues, threadIdx.x) : threadIdx.x] = phase;
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        static_assert(ALONE);
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x >= CONSUMERS + 32) {
            // The launch before, the weight's pack, has written nothing that this needs.
#if PACKS_AHEAD
            char *const rings = memory + (ring_b - shared(memory)) + b_stages * UNIT;
            const PackDivisors divisors = {by->x_line, by->x_plane, by->x_sample, by->units};
#endif
#ifdef COUNTS
            if (norm_words) {
                const Teller<Divisors> teller = {norm, *by, finished, tiles, rows};
                const int of_norm = (int)threadIdx.x / 32 - (THREADS / 32 - norm_warps);
#if PACKS_AHEAD
                if (of_norm >= 0)
                    norm.work<NormBehind::BY_RING>(rings + (3 - norm_warps) * ROUNDS * ROUND + of_norm * NormBehind::RING, [&] { return teller.all_written(); });
                else
                    packed.pack(divisors, rings, teller);
#else
                await_previous();
                if (of_norm >= 0)
                    norm.work<NormBehind::BY_FEW_REGISTERS>(nullptr, [&] {
                        teller.meanwhile();
                        return teller.all_written();
                    });
#endif
                while (!teller.told_all()) __nanosleep(256);
                return;
            }
#endif
#if PACKS_AHEAD
            if (ahead > 0) packed.pack(divisors, rings);
#endif
#if KIND == 0
            if (in_place) {
                const GatherRows from_input = {x, x_w, in_place, ring_a, full_a, empty_a, a_stages, stage_bytes};
                from_input.bring(s, *by, phases, tiles, blocks, chunks);
            }
#endif
            return;
        }
        // The producer: one warp.
        const int lane = threadIdx.x % 32;
        int at_a = 0, phase_a = 1, at_b = 0, phase_b = 1;
#pragma unroll 1
        for (int round = 0; round * teams() < tiles; round++) {
            const int index = tile_of(round, by_work);
            if (index >= tiles) continue;
            const Tile<const Phase &> t(s, *by, phases, index);
            const int slice = t.column_block / blocks;
            const int length = t.length(s);
            const Stages stages(t, chunks);
            await_previous();
#pragma unroll 1
            for (int ad = stages.first_ad; ad < stages.past_ad; ad++) {
                // Both operands have fewer pieces of 16 bytes than 2^31.
                const int first = t.from(s, ad), from = slice * chunks * PANELS * a_rows + first;
#if PACKS_AHEAD
                // From the first plane that a later tap along depth may read on.
                if (ad == t.first_ad) {
                    const int plane = min(max(t.at.d + t.phase.cd - (t.past_ad - 1) * back_d, 0), in_d);
                    packed.await((t.at.n * in_d + plane) * in_h * in_w, first + length - 1, {by->x_line, by->x_plane, by->x_sample, by->units});
                }
#endif
#pragma unroll 1
                for (int chunk = stages.first(ad); chunk < stages.past(ad, chunks); chunk++) {
                    if (!in_place) {
                        // Each lane for what it copies over.
                        barrier_wait(empty_a + 8 * at_a, phase_a);
                        if (lane == 0) barrier_expect(full_a + 8 * at_a, PARTS * PANELS * length * 16);
                        if (lane < PANELS)
#pragma unroll
                            for (int part = 0; part < PARTS; part++)
                                copy(ring_a + at_a * stage_bytes + (part * PANELS + lane) * panel_bytes,
                                     a + 16ll * (from + ((part * slices * chunks + chunk) * PANELS + lane) * a_rows), length * 16, full_a + 8 * at_a);
                        // Lanes that are ahead of one another would be held up by one another's waits.
                        __syncwarp();
                        if (++at_a == a_stages) at_a = 0, phase_a ^= 1;
                    }
#pragma unroll 1
                    for (int ah = 0; ah < t.phase.nh; ah++) {
                        const int td = t.phase.td + ad * d_step, th = t.phase.th + ah * (RH == 2 ? 2 : h_step);
                        const int first_h = max(th, 0), lines = RH == 2 ? min(th + 2, h_kernel) - first_h : 1;
                        const int line = ((t.column_block * d_kernel + td) * chunks + chunk) * h_kernel + first_h;
#pragma unroll 1
                        for (int aw = 0; aw < t.phase.nw; aw++) {
                            // Of pairs of taps what is there.
                            const int tap = t.phase.tw + aw * (RW == 2 ? 2 : w_step), first = max(tap, 0);
                            const int bytes = (RW == 2 ? min(tap + 2, w_kernel) - first : 1) * OF_TAP;
                            if (lane == 0) {
                                barrier_wait(empty_b + 8 * at_b, phase_b);
                                barrier_expect(full_b + 8 * at_b, lines * bytes);
                                for (int i = 0; i < lines; i++)
                                    copy(ring_b + at_b * UNIT + ((first_h - th + i) * RW + first - tap) * OF_TAP,
                                         b + (long long)((line + i) * w_kernel + first) * OF_TAP, bytes, full_b + 8 * at_b);
                            }
                            if (++at_b == b_stages) at_b = 0, phase_b ^= 1;
                        }
                    }
                }
            }
        }
#if PACKS_AHEAD
        packed.finish();
#endif
        return;
    }

    // A consumer.
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    int *column_at = (int *)(tables + warpgroup * 16 * BN), *column_rr = column_at + BN;
    float *column_bias = (float *)(column_rr + BN);
    [[maybe_unused]] float *column_scale = column_bias + BN;
    float *staged = (float *)(tables + WGS * 16 * BN) + threadIdx.x / 32 * STAGING;
#ifndef COUNTS
    const Definition definition = DEFINITION_OF_PARAMETERS;
    // Of each warpgroup whether its products are stored.
    int *const stored = (int *)(by + 1);
#endif
    const bool is_in_place = KIND == 0 && in_place;
    // The rows of zeros, and the panel that this lane names for `ldmatrix`.
    const unsigned zero = shared(zeros), panel = lane / 16 * panel_bytes;
    int at_a = 0, phase_a = 0, at_b = 0, phase_b = 0, known = -1;

#pragma unroll 1
    for (int round = 0; round * teams() < tiles; round++) {
        const int index = tile_of(round, by_work);
        if (index >= tiles) continue;
        const Tile<Phase> t(s, *by, phases, index);
        const int row = t.row0 + warpgroup * M + thread / 32 * ROWS + lane % ROWS;
        const Position at(s, *by, row);
        // The voxel that this lane's row reaches by the first taps, and the taps along each axis that reach one.
        const int id = at.d + t.phase.cd, ih = at.h + t.phase.ch, iw = at.w + t.phase.cw;
        const int own_voxel = ((at.n * in_d + id) * in_h + ih) * in_w + iw;
        unsigned own_mask = 0;
#pragma unroll 1
        for (int k = 0; k < max(max(t.phase.nd, t.phase.nh), t.phase.nw); k++) {
            own_mask |= ((unsigned)(iw - k * back_w) < (unsigned)in_w) << k | ((unsigned)(ih - k * back_h) < (unsigned)in_h) << (TAPS_OF_AXIS + k) |
                        ((unsigned)(id - k * back_d) < (unsigned)in_d) << (2 * TAPS_OF_AXIS + k);
        }
        if (row >= rows) own_mask = 0;
        // Those of the rows that it names.
        int voxel[MI];
        unsigned mask[MI];
#pragma unroll
        for (int i = 0; i < MI; i++) {
            const int source = (lane / 8 % 2 * MI + i) * 8 + lane % 8;
            voxel[i] = __shfl_sync(0xffffffffu, own_voxel, source);
            mask[i] = __shfl_sync(0xffffffffu, own_mask, source);
        }

        float sum[RH][MI][REGISTERS];
#if PARTED
        float part[RH][REGISTERS];
#endif
#pragma unroll
        for (int of = 0; of < RH; of++)
#pragma unroll
            for (int i = 0; i < MI; i++)
#pragma unroll
                for (int j = 0; j < REGISTERS; j++) sum[of][i][j] = 0.0f;

        // Of the next unit: the bits of its taps, and the voxel that its rows are counted from.
        constexpr unsigned W = 1, H = 1 << TAPS_OF_AXIS, D = H << TAPS_OF_AXIS;
        const unsigned past_w = W << t.phase.nw, past_h = H << t.phase.nh;
        const Stages stages(t, chunks);
        unsigned of_w = W, of_h = H, of_d = D << stages.first_ad;
        int ad = stages.first_ad, chunk = stages.first_chunk, left = stages.units;
        int behind = t.from(s, ad) + ad * back_d * in_h * in_w;
        // The stage before, of which each lane gives back the rows that it has named: when matrix instructions have begun that take them from
        // registers. An arrival may overtake `ldmatrix` that is under way, and what the next stage brings then is read instead.
        const auto give_back = [&] { barrier_arrive(empty_a + 8 * ((at_a ? at_a : a_stages) - 1)); };
        /// Its rows; which residues along width (1, 2) and height (4, 8) have a tap there.
        const auto load = [&](Rows &x) {
            int there_of = 15;
            if (RW == 2 && of_w == W && t.phase.tw < 0) there_of = 14;
            if (RW == 2 && of_w == past_w / 2 && (w_kernel - t.phase.tw) % 2) there_of = 13;
            if (RH == 2 && of_h == H && t.phase.th < 0) there_of &= 11;
            if (RH == 2 && of_h == past_h / 2 && (h_kernel - t.phase.th) % 2) there_of &= 7;
            if ((of_w | of_h) == (W | H)) {
                if (ad != stages.first_ad || chunk != stages.first_chunk) give_back();
                barrier_wait(full_a + 8 * at_a, phase_a);
            }
            const unsigned bits = of_w | of_h | of_d;
#pragma unroll
            for (int i = 0; i < MI; i++) {
                const bool there = (mask[i] & bits) == bits;
                // The row of zeros in the banks that the row would be in.
                const unsigned from = (voxel[i] - behind) * 16;
                unsigned address = there ? ring_a + at_a * stage_bytes + panel + from : zero + from % 128;
                int further = there ? 2 * panel_bytes : 0;
                // A row of its own, of all panels (`gather_rows.cuh`).
                if (is_in_place) address = (there ? ring_a + at_a * stage_bytes + from * 8 : zero) + (from % 128 ^ lane / 16 * 16), further = 0;
#pragma unroll
                for (int k = 0; k < STEPS; k++) {
                    load_matrices(x[k][i], is_in_place ? address ^ 32 * k : address);
                    if (PARTED) load_matrices(x[FRAGMENTS - STEPS + k][i], address + STEPS * further);
                    address += further;
                }
            }
            behind += back_w, of_w *= 2;
            if (of_w != past_w) return there_of;
            behind += back_h * in_w - t.phase.nw * back_w, of_w = W, of_h *= 2;
            if (of_h != past_h) return there_of;
            of_h = H;
            if (++at_a == a_stages) at_a = 0, phase_a ^= 1;
            behind -= t.phase.nh * back_h * in_w;
            if (++chunk != chunks) return there_of;
            chunk = 0, of_d *= 2;
            behind = t.from(s, ++ad) + ad * back_d * in_h * in_w;
            return there_of;
        };
#if PARTED
        // Its products, and gives their part of B back.
        const auto multiply_by = [&](const Rows &x, int there_of) {
            barrier_wait(full_b + 8 * at_b, phase_b);
            multiply_parts(x, there_of, ring_b + at_b * UNIT, part, sum);
            matrix_wait<0>();
            if (lane == 0) barrier_arrive(empty_b + 8 * at_b);
            if (++at_b == b_stages) at_b = 0, phase_b ^= 1;
            promote_cross(there_of, part, sum);
        };
#else
        // Starts its products. When this returns those of the unit before are done, and their part of B is given back.
        int held = -1;
        const auto multiply_by = [&](const Rows &x, int there_of) {
            barrier_wait(full_b + 8 * at_b, phase_b);
            multiply_unit(x, there_of, ring_b + at_b * UNIT, sum);
            matrix_wait<1>();
            if (held >= 0 && lane == 0) barrier_arrive(empty_b + 8 * held);
            held = at_b;
            if (++at_b == b_stages) at_b = 0, phase_b ^= 1;
        };
#endif
        // What is found out before this takes as long as a small pack.
        await_previous();
        // Where columns go.
        const int slice = t.column_block / blocks, channel0 = (t.column_block - slice * blocks) * CHANNELS;
        if (FORGETS || t.column_block != known) {
            known = t.column_block;
#if SCALED
            const float scale_x = power(-input_exponent(control));
#endif
            asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
#ifndef COUNTS
            if (thread == 0) stored[warpgroup] = !guarded || !definition.needed();
#endif
            for (int column = thread; column < BN; column += 128) {
                const int of_slice = channel0 + column % CHANNELS, channel = slice * channels + of_slice;
                // Of NDHWC both residues along width are columns of a row.
                const int residue = RW == 2 && !channels_first ? column / CHANNELS : 0;
                column_at[column] = channel * y_c + residue * y_w;
                column_rr[column] = of_slice < channels ? residue : NOWHERE;
                column_bias[column] = of_slice < channels && has_bias ? widen(bias[channel]) : 0.0f;
#if SCALED
                column_scale[column] = scale_x * scale_w[t.column_block * CHANNELS + column % CHANNELS];
#endif
            }
            asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
        }
        if (left > 0) {
#if PARTED
            // While one warpgroup adds sums to registers and loads rows, the other multiplies.
            Rows x;
#pragma unroll 1
            do {
                const int there_of = load(x);
                multiply_by(x, there_of);
            } while (--left);
            give_back();
#else
            Rows one, other;
#pragma unroll 1
            while (true) {
                multiply_by(one, load(one));
                if (--left == 0) break;
                multiply_by(other, load(other));
                if (--left == 0) break;
            }
            matrix_wait<0>();
            give_back();
            if (lane == 0) barrier_arrive(empty_b + 8 * held);
#endif
        }

#ifndef COUNTS
        if (!stored[warpgroup]) continue;
#endif
#ifdef SPLIT
        const auto of_vector = [&](int k) -> float * { return sum[k / (MI * REGISTERS / 4)][k / (REGISTERS / 4) % MI] + k % (REGISTERS / 4) * 4; };
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
        if (!cluster.are_all(of_vector, warp, round)) continue;
#endif
        // What is always so, but not for the compiler: without a branch it spills.
        if (SCALED ? rows > 0 : has_bias) {
#pragma unroll
            for (int j = 0; j < REGISTERS; j += 4) {
                const float2 add = *(const float2 *)&column_bias[2 * j + lane % 4 * 2];
#if SCALED
                const float2 by_column = *(const float2 *)&column_scale[2 * j + lane % 4 * 2];
#endif
#pragma unroll
                for (int i = 0; i < RH * MI; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float &v = sum[i / MI][i % MI][j + e];
#if SCALED
                        v *= e % 2 ? by_column.y : by_column.x;
#endif
                        v += e % 2 ? add.y : add.x;
                    }
            }
        }
#pragma unroll
        for (int of = 0; of < RH; of++) straighten(sum[of], activation, slope);
        // Offsets are 32-bit from the tile's first sample on.
        const int od = at.d * d_stride + t.phase.rd, oh = at.h * h_stride + t.phase.rh, ow = at.w * w_stride + t.phase.rw;
        // Where this lane's row goes, and how many lines of it there are.
        const int row_at = (at.n - t.at.n) * y_n + od * y_d + oh * y_h + ow * y_w, lines = row < rows && od < d_out ? h_out - oh : 0;
        const bool vectors = channels % 4 == 0 && y_w % 4 == 0 && (unsigned long long)y % (4 * sizeof(Element)) == 0;
        // Every row a voxel, in their order; a sample of whole vectors.
        const bool dense = channels_first && d_stride * h_stride * w_stride == 1 && pd == d_out && ph == h_out && pw == w_out && y_w == 1 &&
                           y_h == w_out && y_d == h_out * w_out &&
                           ((unsigned long long)y | (unsigned long long)(unsigned)y_c * sizeof(Element)) % 16 == 0;
        // With both residues along width lines of whole vectors, each of rows of one line.
        constexpr int VECTOR = 16 / sizeof(Element);
        const bool aligned = (unsigned long long)y % 16 == 0 && (unsigned)(y_n | y_d | y_h) % VECTOR == 0;
        const bool whole = !channels_first && aligned && y_w % VECTOR == 0 && channels % VECTOR == 0;
        const bool paired = channels_first && aligned && y_w == 1 && w_out == 2 * pw && w_out % VECTOR == 0 && y_c % VECTOR == 0;
#pragma unroll
        for (int of = 0; of < RH; of++) {
            const Epilogue epilogue = {y + (long long)t.at.n * y_n, row_at + of * y_h, of < lines ? ow : NOWHERE, column_at, column_rr, staged, activation,
                                       RW == 2 && whole ? COLUMNS : min(channels - channel0, CHANNELS) * RW, w_out, y_w, (slice * channels + channel0) * y_c, y_c};
            if constexpr (RW == 2) {
                if ((paired || whole) && activation <= 2) {
                    if (channels_first)
                        epilogue.pairs<1>(sum[of]);
                    else
                        epilogue.rows(sum[of]);
                    continue;
                }
            } else {
                if (whole && activation <= 2) {
                    epilogue.rows(sum[of]);
                    continue;
                }
                if (WHOLE_GROUPS && dense && activation <= 2) {
                    epilogue.dense<uint4>(sum[of], warpgroup, [&](int of_warpgroup) {
                        const int first = t.row0 + warpgroup * M + of_warpgroup, n = Position(s, *by, first).n;
                        return first < rows ? (n - t.at.n) * y_n + first - n * y_c : -1;
                    });
                    continue;
                }
            }
#pragma unroll 1
            for (int piece = 0; piece < BN; piece += PIECE) {
                epilogue.stage(sum[of], piece);
                if (activation > 2) epilogue.bend();
                if (RW == 1 && !channels_first)
                    epilogue.last(piece, vectors);
                else if (RW == 1 && dense)
                    epilogue.dense(piece);
                else
                    epilogue.first<RW>(piece);
            }
        }
#ifdef COUNTS
        {
            if (relus) {
#pragma unroll
                for (int of = 0; of < RH; of++) straighten(sum[of], 1, 0.0);
            }
            unsigned own = 0;
#pragma unroll
            for (int of = 0; of < RH; of++)
#pragma unroll
                for (int r = 0; r < RW; r++) own |= (of < lines && ow + r < w_out) << (of * RW + r);
            const Statistics statistics = {(float2 *)parts, counts, part_chunks, part_phases, out_channels / joined, joined, pd * ph * pw};
            const int phase = (t.phase.rd * (RH == 2 ? 1 : h_stride) + t.phase.rh) * (RW == 2 ? 1 : w_stride) + t.phase.rw;
            const int last = Position(s, *by, min(t.row0 + BM, rows) - 1).n;
            // Where outputs were staged for all of the warpgroup, they have been read.
            asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
#pragma unroll 1
            for (int n = t.at.n; n <= last; n++)
                count_outputs(sum, at.n == n ? own : 0, staged, slice * channels + channel0, min(channels - channel0, CHANNELS), statistics,
                              statistics.at(n, t.row0 / BM, warpgroup, phase), warpgroup);
        }
        Teller<Divisors>::finish(finished, warpgroup);
#endif
#ifdef SPLIT
        cluster.have_been_read(warp);
#endif
    }
#ifdef COUNTS
    if (norm_words) norm.work<NormBehind::BY_REGISTERS>(nullptr, [] { return true; });
#endif
#ifdef SPLIT
    // Others may still tell this block that they have read what it brought.
    await_cluster();
#endif
#ifndef COUNTS
    // Then no block has stored anything; each has had a tile.
    if (!stored[warpgroup])
        definition.compute<1>((long long)blockIdx.x * CONSUMERS + threadIdx.x, (long long)gridDim.x * CONSUMERS);
#endif
}
