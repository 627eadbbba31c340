// The gradient of the weight on Hopper's matrix instructions, from the input as it lies and rows of `gradient_rows` of the
// output's gradient.
//
// `C[channel of the input][channel of the gradient] = sum over the input's voxels of X[voxel][.] * G[row of the voxel + shift][.]`
// for each tap: what a tap reads is `m` times a constant number of rows further on than the voxel's own row, in the channels of
// its class. Only the input's voxels are added up, not the rows between them.
//
// # How
//
// Voxels come by lines along width, cut in strips of `steps` steps of K (16 voxels, or 8 of 32 bits); what is past the end of a
// line is zero in X. Of one pair of channel tiles a block has TAPS = 9 neighbouring taps of one plane of the kernel, three
// for each of its three warpgroups, over a share of all lines. Neighbouring lines of the input read neighbouring lines of G, so
// that each line of both is copied once for all nine: shared memory holds two rings of lines. A fourth warpgroup fills
// them, as far ahead as there is room.
//
// - **X** is operand A, 64 channels an instruction, from registers: shared memory holds it by channels or by voxels, as
//   the tensor does (`last`: channels together).
// - **G** is operand B. Of 16 bits: panels of 8 channels, a row 16 bytes, columns side by side, so that a tap starts at any
//   row. Instructions for float32 want what is added up side by side, four rows in 16 bytes, which a tap's start would have
//   to be a multiple of: there a line is stored once for each tap along width, turned on the way through registers.
//
// What of a tile is no channel of the group, and what of a block is no tap, is dropped at the end.
//
// # Numbers
//
// `KIND` 0, f16 or bf16; 1, float32, X rounded to tf32 here, G already; 3, float32 as two tf32, whose products of a line are
// added to float32 registers; 2, both as two fp16 already (`half_parts.cuh`), whose products of lines of PROMOTED voxels are. Sums of a block's share of the lines, to be added up by `weight_gradient_sum`.
//
// # What it takes
//
// Parameters: `x`, `rows` (multiples of 16 bytes), `partial` (as `direct_weight_gradient` has it, a share a split), `control`
// (the word of the input's largest magnitude, as bits of float32); i32: `batch`, `depth`, `height`, `width` (of the input),
// `strips`, `steps` (of a strip, at most 16), `groups`, `group_in`, `group_out`, `slots`; of depth,
// height, width: rows, `apart` (rows from one tap of a class to its next), kernel, classes, step; `x_slots`, `g_slots` (lines
// that the rings hold: at least 3, and of G as many more as the taps of a block are lines apart), `share` (lines); i64: strides of
// `x`: n, c, d, h, w, and `row` and `panel` of the rows, which for KIND 3 follow each other; for KIND 2 elements from a high part to its low one of
// `x` and of the rows, `x_low` and `g_low`. Channels or voxels of a line lie together, the other strides are multiples of 16 bytes, so is a line of
// voxels. `group_out` and `slots` are multiples of 8 of 16 bits, of 2 else, where (kernel_w - 1) / step_w * apart_w is at
// most HALO. The lines and the rows of all samples are fewer than 2^30.
//
// Threads: 512. Grid: (ceil(kernel_h * kernel_w / TAPS) * kernel_d * tiles of NC channels of G * tiles of 64*MI of X * groups,
// splits), in this order, the first fastest. Bytes of dynamic shared memory: 1024, then g_slots lines of G, then x_slots of X.
// A line of G has, of 16 bits, classes_h * classes_w * NC / 8 panels of 16 * (16 * steps + span | 1) bytes, `span` being
// (kernel_w - 1) / step_w * apart_w; else PARTS * classes_h * kernel_w * 2 * steps * NC * 16. One of X has 64 * MI * (32 * steps +
// 16) bytes, `last` 32 * steps / SIZE * (64 * MI * SIZE + PAD).

#include "copy_async.cuh"
#include "digits.cuh"
#include "mma.cuh"
#include "operand.cuh"
#include "register_operand.cuh"
#include "row_layout.cuh"
#if KIND == 2
#include "half_parts.cuh"
#endif

#if !defined(MI) || !defined(NC)
#error "MI: 64 channels of the input; NC: channels of the gradient of a tap"
#endif

constexpr int WARPGROUPS = 3, OWN = 3, TAPS = WARPGROUPS * OWN, FILLERS = 128, CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + FILLERS;
/// Channels of G that a thread turns at once: neighbours, which then are so many columns apart.
constexpr int WIDE = KIND == 1 ? 2 : 1, COLUMNS = NC / WIDE;
/// Whether operands are of 16 bits, and what they are in memory.
constexpr bool NARROW = KIND == 0 || KIND == 2;
using Operand = std::conditional_t<KIND == 2, Half, Element>;
constexpr int SIZE = sizeof(Operand), STEP = 32 / SIZE, CHANNELS = 64 * MI, HALO = 2;
/// Threads that fill a line of X, those that fill one of G, and copies of a thread without a loop. What a line takes beside its copies
/// keeps a warp busier than these: of 16 bits each has lines of its own.
constexpr int X_FILLERS = 32, G_FILLERS = NARROW ? 32 : FILLERS, AT_ONCE = NARROW ? 4 : 2;
/// Bytes after a voxel's channels, such that reads of a warp meet no bank conflict.
constexpr int PAD = NARROW ? 16 : 32;
constexpr int CONSUMER_REGISTERS = NARROW ? 144 : 136, FILLER_REGISTERS = NARROW ? 80 : 104;
static_assert(PARTS * MI * NC <= 64, "the accumulators of three taps fit in registers");

/// Voxels whose products of two fp16 are added up by the matrix instructions, which round to zero, before registers do.
constexpr int PROMOTED = 192;

/// A place in a ring of barriers and memory.
struct Place {
    int at = 0, phase;
    __device__ __forceinline__ explicit Place(int phase) : phase(phase) {}
    __device__ __forceinline__ void advance(int count) {
        if (++at == count) at = 0, phase ^= 1;
    }
    __device__ __forceinline__ void advance(int count, int by) {
        for (at += by; at >= count; at -= count) phase ^= 1;
    }
};

/// Lines that follow each other along height.
struct Run {
    int n, d, strip, h, length;
    __device__ __forceinline__ Run(int line, int last, int strips, int depth, int height) {
        Digits<int> digits = {line};
        h = digits.next(height);
        strip = digits.next(strips);
        d = digits.next(depth);
        n = digits.rest;
        length = min(height - h, last - line);
    }
};

/// Copies 16 bytes so many times, of rows that are `every` apart; of rows past those that are left it writes zeros.
__device__ __forceinline__ void copy_rows(unsigned to, int to_step, const Operand *from, long long step, int copies, int left, int every) {
#pragma unroll 1
    for (int k = 0; k < copies; k += AT_ONCE)
#pragma unroll
        for (int e = 0; e < AT_ONCE; e++) {
            if (k + e < copies) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(left > 0 ? 16 : 0) : "memory");
            to += to_step;
            from += step;
            left -= every;
        }
}

/// What a thread that fills the rings has of a line of G whose rows are turned: eight rows of its channels, and those
/// after them that later taps read; where they go, and for which tap along width first.
struct Piece {
    float v[WIDE][8 + HALO];
    /// In one register: places are multiples of 16 below 2^18.
    int packed;
    __device__ __forceinline__ int at() const { return (packed & 0x3fff) * 16; }
    __device__ __forceinline__ int tw() const { return packed >> 14; }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) weight_gradient_lines(
    const Operand *x, const Operand *rows, float *partial, unsigned *control, int batch, int depth, int height, int width, int strips, int steps,
    int groups, int group_in, int group_out, int slots, int rows_d, int apart_d, int kernel_d, int classes_d, int step_d, int rows_h,
    int apart_h, int kernel_h, int classes_h, int step_h, int rows_w, int apart_w, int kernel_w, int classes_w, int step_w, int x_slots,
    int g_slots, int share, long long x_n, long long x_c, long long x_d, long long x_h, long long x_w, long long row, long long panel
#if KIND == 2
    , long long x_low, long long g_low
#endif
) {
    extern __shared__ __align__(128) char memory[];
    const int lines = batch * depth * strips * height, first_line = blockIdx.y * share, last_line = min(first_line + share, lines);
    const int in_tiles = (group_in + CHANNELS - 1) / CHANNELS, out_tiles = (group_out + NC - 1) / NC, plane = kernel_h * kernel_w;
    Digits<int> digits = {(int)blockIdx.x};
    const int tap0 = digits.next((plane + TAPS - 1) / TAPS) * TAPS, td = digits.next(kernel_d);
    const int co0 = digits.next(out_tiles) * NC, ci0 = digits.next(in_tiles) * CHANNELS, group = digits.rest;
    // Lines of G from the first that a line of the input reads to the last.
    const int low = tap0 / kernel_w / step_h * apart_h, span = (min(tap0 + TAPS, plane) - 1) / kernel_w / step_h * apart_h - low;
    const int line_rows = STEP * steps + (kernel_w - 1) / step_w * apart_w;
    const int panel_bytes = NARROW ? 16 * (line_rows | 1) : 16 * NC, panels = NARROW ? NC / 8 : 2 * steps;
    const int part_bytes = classes_h * (NARROW ? classes_w : kernel_w) * panels * panel_bytes, g_bytes = PARTS * part_bytes;
    const bool last = x_c == 1;
    const int x_pitch = last ? CHANNELS * SIZE + PAD : 32 * steps + 16, x_part = x_pitch * (last ? STEP * steps : CHANNELS);
    const int x_bytes = (KIND == 2 ? 2 : 1) * x_part;
    const unsigned full_g = shared(memory), empty_g = full_g + 8 * g_slots, full_x = empty_g + 8 * g_slots, empty_x = full_x + 8 * x_slots;
    const unsigned ring_g = shared(memory) + 1024, ring_x = ring_g + g_slots * g_bytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < g_slots; i++) {
            barrier_init(full_g + 8 * i, G_FILLERS);
            barrier_init(empty_g + 8 * i, CONSUMERS / 32);
        }
        for (int i = 0; i < x_slots; i++) {
            barrier_init(full_x + 8 * i, X_FILLERS);
            barrier_init(empty_x + 8 * i, CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FILLER_REGISTERS));
        // Of few warps each instruction takes its full latency: nothing is divided for each line.
        const int thread = threadIdx.x - CONSUMERS;
        Place to_g(1), to_x(1);
        const Operand *const own_x = x + (group * group_in + ci0) * x_c;
        // A line of the input from a place on, of a strip that starts at a voxel: a lane copies the same 16 bytes of every so many
        // channels, or voxels.
        const auto fill_x = [&](const Operand *from, int w0, int lane) {
            const int per = last ? CHANNELS * SIZE / 16 : 2 * steps, apart = X_FILLERS / per, count = last ? STEP * steps : CHANNELS;
            const int row = lane / per, first = row < apart ? row : count, minor = (lane - row * per) * (16 / SIZE);
            const int left = (last ? ci0 + minor < group_in : w0 + minor < width) ? (last ? width - w0 : group_in - ci0) : 0;
            const long long stride = last ? x_w : x_c;
            barrier_wait(empty_x + 8 * to_x.at, to_x.phase);
            const unsigned to = ring_x + to_x.at * x_bytes + first * x_pitch + minor * SIZE;
            const int copies = (count - first + apart - 1) / apart;
            from += first * stride + minor;
            copy_rows(to, apart * x_pitch, from, apart * stride, copies, left - first, apart);
#if KIND == 2
            copy_rows(to + x_part, apart * x_pitch, from + x_low, apart * stride, copies, left - first, apart);
#endif
        };
        // The first slot of G, of the first class.
        const int own_g = group * slots + td % step_d * classes_h * classes_w * group_out + co0;
        const RowLayout layout = {row, panel};
        // Of as many bits as leave enough registers.
        const int pitch = (int)row;
        const std::conditional_t<KIND == 3, int, long long> line_pitch = row;
        // The first row of G and the first voxel of a run.
        const auto rows_of = [&](const Run &run) {
            const long long line = ((long long)run.n * rows_d + run.d + td / step_d * apart_d) * rows_h + run.h + low;
            return (line * rows_w + run.strip * STEP * steps) * line_pitch;
        };
        const auto voxels_of = [&](const Run &run) { return run.n * x_n + run.d * x_d + run.h * x_h + run.strip * STEP * steps * x_w; };
#if KIND == 0 || KIND == 2
        constexpr int VECTOR = 16 / SIZE, PER = NC / VECTOR, ROWS = G_FILLERS / PER;
        const int lane = thread % 32, warp = __shfl_sync(0xffffffffu, thread / 32, 0), classes = classes_h * classes_w;
        // Neighbouring lanes copy neighbours, of a row or of a panel: the rows of a piece of a row, or the panels of a row, of all classes
        // at once if a tile has all their channels.
        const bool by_panels = pitch == VECTOR;
        const int of_row = by_panels ? 0 : lane % PER, row0 = by_panels ? lane : lane / PER, rows_apart = by_panels ? 32 : line_rows;
        const int together = by_panels && group_out == NC ? classes : 1, panels_left = together * ((group_out - co0) / VECTOR) - of_row;
        const int copies = by_panels ? together * PER : (line_rows - row0 + ROWS - 1) / ROWS, to_step = by_panels ? panel_bytes : ROWS * 16;
        const long long from_step = by_panels ? layout.panel : ROWS * row;
        // The next line of G, counted from the first of a run, that is this warp's; a line of X is whose line of G is the last that it reads.
        int next = warp, lines_x = 0;
        to_g.advance(g_slots, warp);
#pragma unroll 1
        for (int line = first_line; line < last_line;) {
            const Run run(line, last_line, strips, depth, height);
            const int w0 = run.strip * STEP * steps;
            const Operand *const of_run = rows + rows_of(run) + layout.slot<VECTOR>(own_g) + of_row * layout.panel, *const of_x = own_x + voxels_of(run);
#pragma unroll 1
            for (; next < run.length + span; next += FILLERS / 32) {
                const Operand *from = of_run + (long long)next * rows_w * line_pitch;
                unsigned to = ring_g + to_g.at * g_bytes + of_row * panel_bytes;
                barrier_wait(empty_g + 8 * to_g.at, to_g.phase);
#pragma unroll 1
                for (int j = 0; j < classes; j += together) {
#pragma unroll 1
                    for (int r = row0; r < line_rows; r += rows_apart) {
                        const int left = panels_left <= 0 ? 0 : by_panels ? (r < rows_w - w0 ? panels_left : 0) : rows_w - w0 - r;
                        copy_rows(to + r * 16, to_step, from + r * pitch, from_step, copies, left, by_panels ? 1 : ROWS);
#if KIND == 2
                        copy_rows(to + part_bytes + r * 16, to_step, from + g_low + r * pitch, from_step, copies, left, by_panels ? 1 : ROWS);
#endif
                    }
                    from += group_out / VECTOR * layout.panel;
                    to += PER * panel_bytes;
                }
                arrive_with_copies(full_g + 8 * to_g.at);
                to_g.advance(g_slots, FILLERS / 32);
                if (next >= span) {
                    const int of_all = line - first_line + next - span;
                    to_x.advance(x_slots, of_all - lines_x);
                    lines_x = of_all;
                    fill_x(of_x + (next - span) * x_h, w0, lane);
                    arrive_with_copies(full_x + 8 * to_x.at);
                }
            }
            next -= run.length + span;
            line += run.length;
        }
#else
        // Pieces of lines in their order, each loaded some before it is stored: eight rows of WIDE channels, then those of the
        // next. A thread keeps to its channels.
        constexpr int AHEAD = 2, OCTETS = FILLERS / COLUMNS;
        const int c = thread % COLUMNS, octet0 = thread / COLUMNS, octets = classes_h * classes_w * steps, turns = (octets + OCTETS - 1) / OCTETS;
        const int row_bytes = panels * panel_bytes, warp = __shfl_sync(0xffffffffu, thread / 32, 0);
        Piece held[AHEAD];
        // The barrier of the line of X whose copies are on their way.
        unsigned owed_x = 0;
        const auto settle = [&]() {
            if (owed_x == 0) return;
            await_all_copies();
            barrier_arrive(owed_x);
            owed_x = 0;
        };
        // The next piece to be loaded, and how many there have been; what follows from this thread's octet alone.
        int line = first_line, i = 0, turn = 0, loaded = 0, stored = 0, store_turn = 0, lines_x = 0;
        int octet = octet0, j = octet0 / steps, in_class = octet0 - j * steps;
        Run run(line, last_line, strips, depth, height);
        long long of_line = rows_of(run), of_x = voxels_of(run);
        const auto load_next = [&](Piece &to) {
            if (line >= last_line) return;
            const int left = octet < octets && co0 + WIDE * c < group_out ? rows_w - (run.strip * steps + in_class) * 8 : 0;
            const int slot = own_g + WIDE * c + j * group_out, ahead = in_class * 8 * pitch;
            const float *from = rows + of_line + (KIND == 3 ? slot + ahead : layout.slot(slot) + ahead);
#pragma unroll
            for (int e = 0; e < 8 + HALO; e++) {
#if KIND == 1
                const float2 both = e < left ? __ldg((const float2 *)(from + e * pitch)) : make_float2(0.0f, 0.0f);
                to.v[0][e] = both.x;
                to.v[1][e] = both.y;
#else
                to.v[0][e] = e < left ? __ldg(from + e * pitch) : 0.0f;
#endif
            }
            const int jh = classes_w == 1 ? j : j / classes_w, jw = j - jh * classes_w;
            to.packed = octet < octets ? jw << 14 | (jh * kernel_w * row_bytes / 16 + in_class * 2 * NC + c) : kernel_w << 14;
            octet += OCTETS;
            in_class += OCTETS;
            while (in_class >= steps) in_class -= steps, j++;
            loaded++;
            if (++turn < turns) return;
            turn = 0;
            octet = octet0;
            j = octet0 / steps;
            in_class = octet0 - j * steps;
            of_line += (long long)rows_w * line_pitch;
            if (i >= span) {
                // Each warp has every fourth line of X.
                if (++lines_x % (FILLERS / X_FILLERS) == warp) {
                    // What follows from a lane that it knew the compiler would keep, for which there are no registers.
                    int lane;
                    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
                    fill_x(own_x + of_x, run.strip * STEP * steps, lane);
                    owed_x = full_x + 8 * to_x.at;
                }
                to_x.advance(x_slots);
                of_x += x_h;
            }
            if (++i < run.length + span) return;
            i = 0;
            line += run.length;
            run = Run(line, last_line, strips, depth, height);
            of_line = rows_of(run);
            of_x = voxels_of(run);
        };
        const auto store = [&](Piece &from) {
            if (store_turn == 0) barrier_wait(empty_g + 8 * to_g.at, to_g.phase);
            const unsigned at = ring_g + to_g.at * g_bytes + from.at();
            // Of two parts the high one first, the other then takes its place.
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                int tw = from.tw(), next_shift = 0;
                unsigned to = at + part * part_bytes + tw * row_bytes, v[WIDE][8 + HALO];
#pragma unroll
                for (int one = 0; one < WIDE; one++)
#pragma unroll
                    for (int e = 0; e < 8 + HALO; e++) {
                        unsigned low;
                        v[one][e] = __float_as_uint(from.v[one][e]);
                        if (PARTS == 2 && part == 0) {
                            part_tf32(v[one][e], low);
                            from.v[one][e] = __uint_as_float(low);
                        }
                    }
#pragma unroll
                for (int shift = 0; shift <= HALO; shift++) {
                    if (shift != next_shift || tw >= kernel_w) continue;
#pragma unroll
                    for (int one = 0; one < WIDE; one++)
#pragma unroll
                        for (int e = shift; e < shift + 8; e += 4)
                            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + e / 4 * 16 * NC + one * 16 * COLUMNS), "r"(v[one][e]),
                                         "r"(v[one][e + 1]), "r"(v[one][e + 2]), "r"(v[one][e + 3])
                                         : "memory");
                    tw += step_w;
                    next_shift += apart_w;
                    to += step_w * row_bytes;
                }
            }
            stored++;
            if (++store_turn < turns) return;
            store_turn = 0;
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            barrier_arrive(full_g + 8 * to_g.at);
            to_g.advance(g_slots);
        };
#pragma unroll
        for (int k = 0; k < AHEAD - 1; k++) {
            load_next(held[k]);
            settle();
        }
#pragma unroll 1
        while (stored < loaded) {
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                load_next(held[(k + AHEAD - 1) % AHEAD]);
                if (stored < loaded) store(held[k]);
                settle();
            }
        }
#endif
        await_all_copies();
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    // In steps of 16 bytes, as the instructions count: of each tap its line after a voxel's first, and where that starts; a line, all
    // lines, and a step of K.
    unsigned place_of[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int tap = tap0 + warpgroup * OWN + i < plane ? tap0 + warpgroup * OWN + i : tap0, th = tap / kernel_w, tw = tap - th * kernel_w;
        const int start = NARROW ? (th % step_h * classes_w + tw % step_w) * panels * panel_bytes + tw / step_w * apart_w * 16
                                    : (th % step_h * kernel_w + tw) * panels * panel_bytes;
        place_of[i] = ((th / step_h * apart_h - low) * g_bytes + start) / 16;
    }
    const unsigned g_line = g_bytes / 16, g_ring = g_slots * g_line, g_step = NARROW ? 16 : 2 * NC;
    // Of 16 bits columns lie in panels, in which what is added up follows row by row; else rows.
    const unsigned low_word = ring_g >> 4 | (NARROW ? 8 : NC) << 16, high_word = NARROW ? panel_bytes >> 4 : 8;
    // Where this thread reads X, and how far the next step and the next 64 channels are.
    const int by_voxels = NARROW ? (lane % 8 + lane / 16 * 8) * x_pitch + (warp * 16 + lane / 8 % 2 * 8) * 2 : t * x_pitch + (warp * 16 + g) * 4;
    const int own = last ? by_voxels : (warp * 16 + lane % 8 + lane / 8 % 2 * 8) * x_pitch + lane / 16 * 16;
    const int next_step = last ? STEP * x_pitch : 32, next_slab = last ? 64 * SIZE : 64 * x_pitch;
    float sum[OWN][MI][NC / 2] = {};
#if KIND == 3 || KIND == 2
    float product[OWN][MI][NC / 2];
#endif
    unsigned most = 0;
    Place of_g(0), of_x(0);
    // The line of G that is given back next, and where the one lies that a line of the input reads first.
    int given = 0;
    unsigned head = 0;
    const auto release = [&]() {
        if (lane == 0) barrier_arrive(empty_g + 8 * given);
        if (++given == g_slots) given = 0;
    };
    const auto release_x = [&]() {
        if (lane == 0) barrier_arrive(empty_x + 8 * (of_x.at == 0 ? x_slots - 1 : of_x.at - 1));
    };
    const bool watches = warpgroup == 0 && tap0 == 0 && td == 0 && co0 == 0;
    const auto await_g = [&]() {
        barrier_wait(full_g + 8 * of_g.at, of_g.phase);
        of_g.advance(g_slots);
    };
    // One step of K, and on to the next.
    const auto step = [&](unsigned (&a)[PARTS][MI][4], unsigned &from, unsigned (&b)[OWN], bool fresh) {
#pragma unroll
        for (int i = 0; i < MI; i++) {
            const unsigned at = from + i * next_slab;
#if KIND == 0 || KIND == 2
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                if (last)
                    load_transposed(a[part][i], at + part * x_part);
                else
                    load_matrices(a[part][i], at + part * x_part);
#else
            if (last) {
#pragma unroll
                for (int e = 0; e < 4; e++)
                    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(a[0][i][e]) : "r"(at + e % 2 * 32 + e / 2 * 4 * x_pitch));
            } else {
                load_matrices(a[0][i], at);
            }
#endif
        }
        from += next_step;
        // Of two fp16 somebody has looked before.
        if (KIND != 2 && watches) {
#pragma unroll
            for (int i = 0; i < MI; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) most = KIND == 0 ? __vmaxu2(most, a[0][i][e] & 0x7fff7fffu) : max(most, a[0][i][e] & 0x7fffffffu);
        }
#if KIND == 1 || KIND == 3
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                // The instructions cut off what tf32 does not hold.
                if (KIND == 1) a[0][i][e] += 0x1000u;
                if (KIND == 3) part_tf32(a[0][i][e], a[PARTS - 1][i][e]);
            }
#endif
#if KIND == 2
        unsigned scaled[MI][4];
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) scaled[i][e] = by_low(a[0][i][e]);
#endif
        matrix_fence();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const unsigned long long high = (unsigned long long)high_word << 32 | b[i];
#pragma unroll
            for (int m = 0; m < MI; m++) {
#if KIND == 3
                const unsigned long long low = (unsigned long long)high_word << 32 | (b[i] + part_bytes / 16);
                multiply(product[i][m], a[1][m], high, !fresh);
                multiply(product[i][m], a[0][m], low, 1);
                multiply(product[i][m], a[0][m], high, 1);
#elif KIND == 2
                const unsigned long long low = (unsigned long long)high_word << 32 | (b[i] + part_bytes / 16);
                multiply<1>(product[i][m], a[1][m], high, !fresh);
                multiply<1>(product[i][m], scaled[m], low, 1);
                multiply<1>(product[i][m], a[0][m], high, 1);
#else
                multiply<KIND == 0>(sum[i][m], a[0][m], high, 1);
#endif
            }
            b[i] += g_step;
        }
        matrix_commit();
    };
    // A line is given back when instructions of the next one have started, so that there are always some on their way.
    constexpr bool LATE = NARROW;
    // Where registers suffice operands are loaded while the instructions before are on their way.
    constexpr int BUFFERS = NARROW || KIND == 1 && MI == 1 ? 2 : 1;
    [[maybe_unused]] bool fresh = true;
    [[maybe_unused]] int since = 0;
    // Of two parts the products so far, to registers that round to nearest.
    const auto promote = [&]() {
#if KIND == 3 || KIND == 2
        matrix_wait<0>();
#pragma unroll
        for (int i = 0; i < OWN; i++)
#pragma unroll
            for (int m = 0; m < MI; m++)
#pragma unroll
                for (int j = 0; j < NC / 2; j++) sum[i][m][j] += product[i][m][j];
        fresh = true;
        since = 0;
#endif
    };
    unsigned a[BUFFERS][PARTS][MI][4];
#pragma unroll 1
    for (int line = first_line; line < last_line;) {
        const Run run(line, last_line, strips, depth, height);
        line += run.length;
#pragma unroll 1
        for (int i = 0; i < span; i++) await_g();
#pragma unroll 1
        for (int h = 0; h < run.length; h++) {
            await_g();
            barrier_wait(full_x + 8 * of_x.at, of_x.phase);
#if KIND == 0 || KIND == 2
            // What copies have written the matrix instructions may read.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
            unsigned b[OWN];
#pragma unroll
            for (int i = 0; i < OWN; i++) b[i] = min(head + place_of[i], head + place_of[i] - g_ring) + low_word;
            head += g_line;
            if (head == g_ring) head = 0;
            unsigned from = ring_x + of_x.at * x_bytes + own;
            int left = steps;
            if (BUFFERS == 2) {
#pragma unroll 1
                for (; left > 1; left -= 2) {
                    step(a[0], from, b, fresh);
                    matrix_wait<1>();
                    step(a[BUFFERS - 1], from, b, false);
                    matrix_wait<1>();
                    fresh = false;
                }
            }
#pragma unroll 1
            for (; left > 0; left--) {
                step(a[0], from, b, fresh);
                matrix_wait<0>();
                fresh = false;
            }
            since += STEP * steps;
            if (PARTS == 2 && (KIND == 3 || since >= PROMOTED)) promote();
            if (LATE ? h > 0 : true) {
                if (!LATE) matrix_wait<0>();
                if (!LATE) of_x.advance(x_slots);
                release_x();
                release();
            }
            if (LATE) of_x.advance(x_slots);
        }
        if (LATE) {
            matrix_wait<0>();
            release_x();
            release();
        }
#pragma unroll 1
        for (int i = 0; i < span; i++) {
            release();
            head += g_line;
            if (head == g_ring) head = 0;
        }
    }
    if (PARTS == 2 && !fresh) promote();
    matrix_wait<0>();
    if (KIND != 2 && watches) raise(control, as_float32(Element{}, largest(Element{}, most)));

    const int all_in = groups * group_in, taps = kernel_d * plane;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int tap = tap0 + warpgroup * OWN + i;
        if (tap >= plane) continue;
        float *const to = partial + ((long long)blockIdx.y * taps + td * plane + tap) * all_in * group_out;
#pragma unroll
        for (int m = 0; m < MI; m++)
#pragma unroll
            for (int j = 0; j < NC / 2; j++) {
                const int ci = ci0 + 64 * m + 16 * warp + g + j / 2 % 2 * 8, n = j / 4 * 8 + 2 * t + j % 2, co = co0 + n % COLUMNS * WIDE + n / COLUMNS;
                if (ci < group_in && co < group_out) to[(long long)(group * group_in + ci) * group_out + co] = sum[i][m][j];
            }
    }
}
