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
// - **A**, written by `halo_pack_input`: panels of 16 bytes a row (E elements: 8 of 16 bits or 4 of 32).
//   Panel `slice*chunks*chunk_panels + parity*channel_panels + c/E` of row `lead + R` holds channels c.. of the slice
//   at (n, jd, jh, jb*block + parity) of the input; what is no input is zero: gaps at the ends of rows,
//   planes and samples, `lead` rows before, all rows to `a_rows` after, channels past the slice's last.
//   A slice has `chunks * chunk_panels` panels, an even number a chunk; those past the last are zeros.
//   Panels are `a_rows` rows apart. The split's low part follows after `slices*chunks*chunk_panels` panels.
// - **B**, written by `halo_pack_weight`: tiles of `chunk_panels` panels of BN rows (columns of Y) of 16
//   bytes, in the order [slice][column block][td][chunk][th][step]. The split's tile holds the high
//   part's panels, then the low part's.
// - **Columns** of a slice: `outputs` = block * stride residues along width, `rr = jj*stride + r`, of each
//   of its `channels` output channels: `column = co*outputs + rr` if `channels_first`, else
//   `rr*channels + co`. `ow = jb*outputs + rr + w_shift`.
// - **Steps** along width: step i reads row `R + w_low + i*w_step`. With `e = jj + first - m` a column's
//   tap is in step i, parity `e mod block`, where `floor(e/block) = w_low + i*w_step`.
// - Residues along depth and height are phases; their taps are those of `linear_gemm`.
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
// memory, a warp's by itself, so that neighbouring lanes write neighbours.
//
// Shared memory, in order: barriers, then at 1 KB divisors and phases, at 4 KB tables of columns for each
// warpgroup, staging areas for each warp, A's ring (`a_stages`), B's ring (`b_stages`).
//
// # Numbers
//
// As in `linear_gemm`: `KIND` 0, f16 or bf16; 1, float32 rounded to tf32; 2, float32 as two fp16, whose
// products of high parts are added to float32 registers every `promote` units of B.
//
// # What it takes
//
// Block: 128 threads a warpgroup, and 128 where CTAS is 1, else 32, for the producer. Grid: any number of
// blocks along the first axis, with `resident` a multiple of slices*blocks. Tiles run over column blocks,
// slices, phases, rows; a block takes every grid-th. Bytes of dynamic shared memory:
// `4096 + WGS*(16*BN + 4096*MI + 1024) + a_stages*parts*chunk_panels*stage_rows*16 + b_stages*unit`,
// `unit = unit_steps*parts*chunk_panels*BN*16`; `stage_rows` a multiple of 8, at least two stages of each,
// at most 60 of both together; `d_stride*h_stride` at most 64.
//
// Parameters, in order:
//
// 1. `a`, `b`; for the split `scale_x` (2^-ex), `scale_w` (2^-ew of each of slices*blocks*BN columns);
//    `bias`, `y`.
// 2. i32: `rows`, `a_rows`, `lead`, `pd`, `ph`, `pw` (rows of a line).
// 3. Of depth: `kernel`, `stride`, `dilation`, `step`, `inverse`, `first`, `shift`, `out`; the same of height;
//    `d_input`.
// 4. `outputs`, `w_shift`, `w_out`, `w_low`, `w_steps`, `w_step`.
// 5. `chunk_panels`, `chunks`, `slices`, `blocks`, `channels`.
// 6. `y_n`, `y_c`, `y_d`, `y_h`, `y_w`.
// 7. `channels_first`, `has_bias`, `activation`, `slope` (f64).
// 8. `a_stages`, `stage_rows`, `whole_h`, `b_stages`, `unit_steps`, `resident`; for the split `promote`, the
//    units of B after which high products are added to registers.
//
// `halo_pack_input`: `x`, `out`, `control`; i32: `a_rows`, `lead`, `pd`, `ph`, `pw`, `block`, `n`, `depth`,
// `height`, `width`, `slices`, `slice_in`, `panels` (of a slice: chunks*chunk_panels), `channel_panels`,
// `x_n`, `x_c`, `x_d`, `x_h`, `x_w`, `lanes`. Threads: 256; `lanes` of them (1, 2, 4 or 8) share a row.
// `x_c` = 1 is read by vectors where channels and addresses allow. Grid: (ceil(a_rows / (256/lanes)), block).
// Control words as in `pack`; the split reads word 0, which `pack_largest` has filled.
//
// `halo_pack_weight`: `w`, `out`, then for the split `scale` of `pack_weight_scale`, else `control`; i32:
// `items` (16-byte pieces of a part: all of B / parts / 16), `chunk_panels`, `chunks`, `columns` (BN),
// `blocks`, `channels`, `slice_in`, `in_per_group`, `out_per_group`, `in_channels`, `out_channels`, `outputs`,
// `channels_first`, `block`, `channel_panels`, `w_first`, `w_stride`, `w_dilation`, `d_kernel`, `h_kernel`,
// `w_kernel`, `w_low`, `w_steps`, `w_step`. Threads: 256. Grid: (ceil(items / 256), 1).

#ifndef KIND
#error "KIND, TYPE_F16 or TYPE_BF16, and HALO_PACK_INPUT, HALO_PACK_WEIGHT, or HALO_GEMM with BN, MI, CTAS and WGS"
#endif

/// float16 and bfloat16 as what they are in memory.
struct Half {
    unsigned short bits;
};
struct Bfloat {
    unsigned short bits;
};

#if KIND == 0
#ifdef TYPE_F16
using Element = Half;
#define OPERAND "f16"
#else
using Element = Bfloat;
#define OPERAND "bf16"
#endif
#else
using Element = float;
#if KIND == 1
#define OPERAND "tf32"
#else
#define OPERAND "f16"
#endif
#endif

/// Parts of an operand, and elements of 16 bytes of it.
constexpr int PARTS = KIND == 2 ? 2 : 1;
constexpr int E = KIND == 1 ? 4 : 8;
constexpr unsigned INFINITE = 0x7f800000u;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(Half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ float widen(Bfloat x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ void narrow(float x, float *y) { *y = x; }
__device__ __forceinline__ void narrow(float x, Half *y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y->bits) : "f"(x)); }
__device__ __forceinline__ void narrow(float x, Bfloat *y) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y->bits) : "f"(x)); }

#ifdef HALO_GEMM

/// Rows of a warpgroup and of a tile.
constexpr int M = 64 * MI, BM = WGS * M;
/// Alone on its multiprocessor, a block's producer is a warpgroup that leaves its registers to the consumers.
constexpr bool ALONE = CTAS == 1;
constexpr int CONSUMERS = 128 * WGS, THREADS = CONSUMERS + (ALONE ? 128 : 32);
constexpr int CONSUMER_REGISTERS = WGS == 4 ? 104 : WGS == 3 ? 152 : 224, PRODUCER_REGISTERS = 56;
constexpr int REGISTERS = BN / 2;
/// Rows of a warp: neighbours. Columns that it stages at a time, and floats from one to the next, such that no two
/// lanes that write meet in a bank.
constexpr int ROWS = 16 * MI, PIECE = 16, COLUMN_PITCH = ROWS + 4, STAGING = PIECE * COLUMN_PITCH;
/// What no column or row is at, so that no sum of two is an output.
constexpr int NOWHERE = 1 << 29;

__device__ __forceinline__ unsigned shared(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(unsigned barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra reached;\n"
        "bra again;\n"
        "reached:\n"
        "}" ::"r"(barrier), "r"(parity)
        : "memory");
}

/// Copies whole 16-byte rows from global to shared memory; the barrier counts the bytes.
__device__ __forceinline__ void copy(unsigned to, const void *from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

/// An operand of the tensor core: rows 16 bytes apart, eights of rows STRIDE eights apart, `panel` bytes from one
/// piece of K to the next. No swizzle, hence any row may be the first.
template <int STRIDE> __device__ __forceinline__ unsigned long long descriptor(unsigned address, unsigned panel) {
    return ((unsigned long long)(address & 0x3ffff) >> 4) | ((unsigned long long)(panel >> 4) << 16) | (8ull * STRIDE << 32);
}

__device__ __forceinline__ void matrix_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void matrix_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void matrix_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define N8(j) "+f"(d[4 * (j)]), "+f"(d[4 * (j) + 1]), "+f"(d[4 * (j) + 2]), "+f"(d[4 * (j) + 3])
#if BN == 16
#define SUMS N8(0), N8(1)
#define SUM_NAMES "%0,%1,%2,%3,%4,%5,%6,%7"
#define OPERAND_NAMES "%8,%9"
#define KEEP_NAME "%10"
#elif BN == 24
#define SUMS N8(0), N8(1), N8(2)
#define SUM_NAMES "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
#define OPERAND_NAMES "%12,%13"
#define KEEP_NAME "%14"
#elif BN == 32
#define SUMS N8(0), N8(1), N8(2), N8(3)
#define SUM_NAMES "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define OPERAND_NAMES "%16,%17"
#define KEEP_NAME "%18"
#elif BN == 48
#define SUMS N8(0), N8(1), N8(2), N8(3), N8(4), N8(5)
#define SUM_NAMES "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define OPERAND_NAMES "%24,%25"
#define KEEP_NAME "%26"
#elif BN == 64
#define SUMS N8(0), N8(1), N8(2), N8(3), N8(4), N8(5), N8(6), N8(7)
#define SUM_NAMES                                                                                                                \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define OPERAND_NAMES "%32,%33"
#define KEEP_NAME "%34"
#elif BN == 96
#define SUMS N8(0), N8(1), N8(2), N8(3), N8(4), N8(5), N8(6), N8(7), N8(8), N8(9), N8(10), N8(11)
#define SUM_NAMES                                                                                                                \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"     \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define OPERAND_NAMES "%48,%49"
#define KEEP_NAME "%50"
#elif BN == 128
#define SUMS                                                                                                                     \
    N8(0), N8(1), N8(2), N8(3), N8(4), N8(5), N8(6), N8(7), N8(8), N8(9), N8(10), N8(11), N8(12), N8(13), N8(14), N8(15)
#define SUM_NAMES                                                                                                                \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"     \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,"   \
    "%62,%63"
#define OPERAND_NAMES "%64,%65"
#define KEEP_NAME "%66"
#endif
#if KIND == 1
#define DEPTH "8"
#define MODIFIERS "p, 1, 1"
#else
#define DEPTH "16"
#define MODIFIERS "p, 1, 1, 0, 0"
#endif

/// Adds 64 rows by BN columns of one step of 32 bytes of K; without `keep`, to nothing.
__device__ __forceinline__ void multiply(float (&d)[REGISTERS], unsigned long long a, unsigned long long b, int keep) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " KEEP_NAME ", 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n" TEXT(BN) "k" DEPTH ".f32." OPERAND "." OPERAND " {" SUM_NAMES "}, " OPERAND_NAMES
                 ", " MODIFIERS ";\n}"
                 : SUMS
                 : "l"(a), "l"(b), "r"(keep));
}

/// A value through one of the curved activations, as in `epilogue`.
__device__ __forceinline__ float curve(float x, int code) {
    switch (code) {
    case 3: return __fdividef(x, 1.0f + expf(-x));
    case 4: return 0.5f * x * erfcf(-0.70710678f * x);
    case 5: return __fdividef(x, 1.0f + expf(-x * (1.59576912f + 0.0713548163f * x * x)));
    case 6: return x * (fminf(fmaxf(x + 3.0f, 0.0f), 6.0f) * 0.166666667f);
    case 7: return __fdividef(1.0f, 1.0f + expf(-x));
    default: return tanhf(x);
    }
}

/// Division of numbers below 2^31 by one that is known when the kernel starts (Granlund and Montgomery, 1994).
struct Divisor {
    int by;
    unsigned factor, shift;

    __device__ Divisor(int by) : by(by), shift(by > 1 ? 32 - __clz(by - 1) : 0) {
        factor = (unsigned)(((1ull << 32) * ((1ull << shift) - by)) / by + 1);
    }
    __device__ __forceinline__ int divide(int x) const { return (__umulhi(factor, x) + x) >> shift; }
};

/// What the numbers of all tiles are divided by.
struct Divisors {
    Divisor all, phases, turn, line, height, depth;
};

/// One axis whose residues are phases.
struct Axis {
    int kernel, stride, dilation, step, inverse, first, shift, out;

    /// The first tap of a residue, `kernel` if there is none, and how many taps it has.
    __device__ int first_tap(int residue) const {
        int gcd = stride / step;
        return residue % gcd ? kernel : (residue / gcd * inverse) % step;
    }
    __device__ int taps(int first) const { return max(kernel - first + step - 1, 0) / step; }
};

struct Sizes {
    int rows, a_rows, lead, pd, ph, pw;
    Axis d, h;
    int d_input;
    int outputs, w_shift, w_out, w_low, w_steps, w_step;
    int chunk_panels, chunks, slices, blocks, channels;
    int y_n, y_c, y_d, y_h, y_w;
    int channels_first, has_bias, activation;
    int a_stages, stage_rows, whole_h, b_stages, unit_steps, resident, promote;
};

/// One pair of residues along depth and height.
struct Phase {
    int rd, rh, td, th, nd, nh;
    /// Rows from a tile's first to the one that its first taps read; planes likewise.
    int rows, planes;

    __device__ Phase(const Sizes &s, int phase) {
        rd = phase / s.h.stride;
        rh = phase % s.h.stride;
        td = s.d.first_tap(rd);
        th = s.h.first_tap(rh);
        nd = s.d.taps(td);
        nh = s.h.taps(th);
        if (nd == 0 || nh == 0) nd = nh = 0;
        const int md = (td * s.d.dilation - rd) / s.d.stride, mh = (th * s.h.dilation - rh) / s.h.stride;
        planes = s.d.first - md;
        rows = s.lead + (planes * s.ph + s.h.first - mh) * s.pw + s.w_low;
    }
};

/// A tile: rows of one phase by a block of columns.
struct Tile {
    int row0, column_block, plane0, plane1, pd, d_input, back_d;
    const Phase &phase;
    const Divisor &depth;

    __device__ __forceinline__ Tile(const Sizes &s, const Divisors &by, const Phase *phases, int back_d, int tile)
        : pd(s.pd), d_input(s.d_input), back_d(back_d), phase(phases[turned(by, tile)]), depth(by.depth) {
        const int rest = by.all.divide(tile);
        column_block = tile - rest * by.all.by;
        row0 = by.phases.divide(rest) * BM;
        plane0 = by.height.divide(by.line.divide(row0)) + phase.planes;
        plane1 = by.height.divide(by.line.divide(min(row0 + BM, s.rows) - 1)) + phase.planes;
    }

    /// A tile's phase. Phases differ in their work, so a block's turns through all of them.
    __device__ __forceinline__ static int turned(const Divisors &by, int tile) {
        const int rest = by.all.divide(tile), row_tile = by.phases.divide(rest);
        const int phase = rest - row_tile * by.phases.by + by.turn.divide(row_tile);
        return phase - by.phases.divide(phase) * by.phases.by;
    }

    /// Whether a plane is a gap.
    __device__ __forceinline__ bool gap(int plane) const { return plane < 0 || plane - depth.divide(plane) * pd >= d_input; }

    /// Whether a tap along depth reads nothing but gaps.
    __device__ __forceinline__ bool skipped(int ad) const {
        const int first = plane0 - ad * back_d, last = plane1 - ad * back_d;
        return last - first <= 1 && gap(first) && gap(last);
    }
};

/// What follows a warp's sums: scale, bias, activation, and the way to y.
struct Epilogue {
    Element *y;
    /// Of the row of this lane: where it starts, and which output along width that is.
    int row_at, row_ow;
    const int *column_at, *column_rr;
    float *staged;
    int curved, columns, w_out, y_w, channel0, y_c;

    /// A piece of columns to shared memory, a column after the other. Which ones is known when this is compiled, so
    /// that sums stay registers.
    __device__ __forceinline__ void stage(const float (&sum)[MI][REGISTERS], int piece) const {
        const int lane = threadIdx.x % 32;
        float *const to = staged + lane % 4 * 2 * COLUMN_PITCH + lane / 4;
        __syncwarp();
#pragma unroll
        for (int p = 0; p < BN; p += PIECE)
            if (p == piece)
#pragma unroll
                for (int j = 0; j < PIECE / 8; j++)
#pragma unroll
                    for (int i = 0; i < MI; i++) {
                        if (p + 8 * j >= BN) continue;
                        const float *v = &sum[i][(p / 8 + j) * 4];
                        float *const at = to + 8 * j * COLUMN_PITCH + 8 * i;
                        at[0] = v[0];
                        at[COLUMN_PITCH] = v[1];
                        at[8 * MI] = v[2];
                        at[COLUMN_PITCH + 8 * MI] = v[3];
                    }
        __syncwarp();
    }

    /// Curved activations, in place: one copy of their code.
    __device__ __forceinline__ void bend() const {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int i = lane; i < PIECE * ROWS; i += 32) {
            float *const at = &staged[i / ROWS * COLUMN_PITCH + i % ROWS];
            *at = curve(*at, curved);
        }
        __syncwarp();
    }

    /// NCDHW: neighbouring lanes write neighbours, which are rows and, within a row, its OUTPUTS residues along width
    /// (0: any number, each on its own).
    template <int OUTPUTS> __device__ __forceinline__ void first(int piece) const {
        constexpr int L = OUTPUTS ? OUTPUTS : 1, PLACES = ROWS * L > 32 ? ROWS * L / 32 : 1, SPREAD = ROWS * L < 32 ? 32 / (ROWS * L) : 1;
        constexpr int COUNT = PIECE / L / SPREAD;
        const int lane = threadIdx.x % 32, rr = lane % L;
        const int c0 = SPREAD > 1 ? lane / (ROWS * L) * COUNT : 0;
        const long long step = (long long)y_c * sizeof(Element);
#pragma unroll
        for (int i = 0; i < PLACES; i++) {
            const int r = (lane + 32 * i) % (ROWS * L) / L;
            const int ow = __shfl_sync(0xffffffffu, row_ow, r) + rr, at = __shfl_sync(0xffffffffu, row_at, r) + rr * y_w;
            const float *from = &staged[(c0 * L + rr) * COLUMN_PITCH + r];
            float v[COUNT];
#pragma unroll
            for (int k = 0; k < COUNT; k++) v[k] = from[k * L * COLUMN_PITCH];
            if (OUTPUTS) {
                char *to = (char *)(y + at + channel0 + (piece / L + c0) * y_c);
                const int there = (unsigned)ow < (unsigned)w_out ? columns - piece - c0 * L - rr : 0;
#pragma unroll
                for (int k = 0; k < COUNT; k++) {
                    store((Element *)to, v[k], k * L < there);
                    to += step;
                }
            } else {
#pragma unroll
                for (int k = 0; k < COUNT; k++) {
                    const int c = piece + c0 + k, in = min(c, BN - 1);
                    store(y + at + column_at[in], v[k], c < columns && (unsigned)(ow + column_rr[in]) < (unsigned)w_out);
                }
            }
        }
    }

    /// NCDHW where rows lie as voxels do, in whole vectors: 16 bytes a lane.
    __device__ __forceinline__ void dense(int piece) const {
        constexpr int VECTOR = 16 / sizeof(Element), LANES = ROWS / VECTOR, COLUMNS = 32 / LANES;
        const int lane = threadIdx.x % 32, r = lane % LANES * VECTOR;
        const int at = __shfl_sync(0xffffffffu, row_at, r), here = __shfl_sync(0xffffffffu, row_ow, r) != NOWHERE;
        Element *to = y + at + channel0 + (long long)(piece + lane / LANES) * y_c;
#pragma unroll
        for (int c = lane / LANES; c < PIECE; c += COLUMNS) {
            const float *from = &staged[c * COLUMN_PITCH + r];
            float v[VECTOR];
#pragma unroll
            for (int k = 0; k < VECTOR; k += 4) *(float4 *)&v[k] = *(const float4 *)&from[k];
            store(to, v, here && piece + c < columns);
            to += (long long)COLUMNS * y_c;
        }
    }

    /// NDHWC: neighbouring lanes write neighbouring columns, four of them each; at once with `vectors`.
    __device__ __forceinline__ void last(int piece, bool vectors) const {
        const int lane = threadIdx.x % 32, quarter = lane % 4 * 4, column = piece + quarter;
        const int4 rr = *(const int4 *)&column_rr[min(column, BN - 4)], to = *(const int4 *)&column_at[min(column, BN - 4)];
#pragma unroll 4
        for (int i = 0; i < ROWS / 8; i++) {
            const int r = lane / 4 + 8 * i;
            const int ow = __shfl_sync(0xffffffffu, row_ow, r);
            Element *const at = y + __shfl_sync(0xffffffffu, row_at, r);
            float v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) v[k] = staged[(quarter + k) * COLUMN_PITCH + r];
            if (vectors) {
                store(at + to.x, v, column < columns && (unsigned)(ow + rr.x) < (unsigned)w_out);
            } else {
                store(at + to.x, v[0], column < columns && (unsigned)(ow + rr.x) < (unsigned)w_out);
                store(at + to.y, v[1], column + 1 < columns && (unsigned)(ow + rr.y) < (unsigned)w_out);
                store(at + to.z, v[2], column + 2 < columns && (unsigned)(ow + rr.z) < (unsigned)w_out);
                store(at + to.w, v[3], column + 3 < columns && (unsigned)(ow + rr.w) < (unsigned)w_out);
            }
        }
    }

    // Predicated stores: the compiler would branch around each, and compute its address there.

    __device__ __forceinline__ static void store(float *to, float v, bool here) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.f32 [%0], %1;}" ::"l"(to), "f"(v), "r"((int)here) : "memory");
    }
    template <typename T> __device__ __forceinline__ static void store(T *to, float v, bool here) {
        T x;
        narrow(v, &x);
        asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b16 [%0], %1;}" ::"l"(to), "h"(x.bits), "r"((int)here) : "memory");
    }
    /// Four neighbours at once.
    __device__ __forceinline__ static void store(float *to, const float (&v)[4], bool here) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.f32 [%0], {%1, %2, %3, %4};}" ::"l"(to), "f"(v[0]), "f"(v[1]),
                     "f"(v[2]), "f"(v[3]), "r"((int)here)
                     : "memory");
    }
    template <typename T> __device__ __forceinline__ static void store(T *to, const float (&v)[8], bool here) {
        unsigned words[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            T x[2];
            narrow(v[2 * k], &x[0]);
            narrow(v[2 * k + 1], &x[1]);
            words[k] = x[0].bits | (unsigned)x[1].bits << 16;
        }
        asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.b32 [%0], {%1, %2, %3, %4};}" ::"l"(to), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"((int)here)
                     : "memory");
    }
    template <typename T> __device__ __forceinline__ static void store(T *to, const float (&v)[4], bool here) {
        T x[4];
#pragma unroll
        for (int k = 0; k < 4; k++) narrow(v[k], &x[k]);
        asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p st.global.v2.b32 [%0], {%1, %2};}" ::"l"(to),
                     "r"(x[0].bits | (unsigned)x[1].bits << 16), "r"(x[2].bits | (unsigned)x[3].bits << 16), "r"((int)here)
                     : "memory");
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) halo_gemm(
    const char *a, const char *b,
#if KIND == 2
    const float *scale_x, const float *scale_w,
#endif
    const Element *bias, Element *y, int rows, int a_rows, int lead, int pd, int ph, int pw, int d_kernel, int d_stride, int d_dilation,
    int d_step, int d_inverse, int d_first, int d_shift, int d_out, int h_kernel, int h_stride, int h_dilation, int h_step, int h_inverse,
    int h_first, int h_shift, int h_out, int d_input, int outputs, int w_shift, int w_out, int w_low, int w_steps, int w_step,
    int chunk_panels, int chunks, int slices, int blocks, int channels, int y_n, int y_c, int y_d, int y_h, int y_w, int channels_first,
    int has_bias, int activation, double slope, int a_stages, int stage_rows, int whole_h, int b_stages, int unit_steps, int resident
#if KIND == 2
    , int promote
#endif
) {
    extern __shared__ __align__(128) char memory[];
#if KIND != 2
    constexpr int promote = 0;
#endif
    const Sizes s = {rows, a_rows, lead, pd, ph, pw,
                     {d_kernel, d_stride, d_dilation, d_step, d_inverse, d_first, d_shift, d_out},
                     {h_kernel, h_stride, h_dilation, h_step, h_inverse, h_first, h_shift, h_out},
                     d_input, outputs, w_shift, w_out, w_low, w_steps, w_step,
                     chunk_panels, chunks, slices, blocks, channels,
                     y_n, y_c, y_d, y_h, y_w, channels_first, has_bias, activation,
                     a_stages, stage_rows, whole_h, b_stages, unit_steps, resident, promote};
    const unsigned full_a = shared(memory), empty_a = full_a + 8 * a_stages;
    const unsigned full_b = empty_a + 8 * a_stages, empty_b = full_b + 8 * b_stages;
    const int panel_bytes = 16 * stage_rows, part_bytes = chunk_panels * panel_bytes, stage_bytes = PARTS * part_bytes;
    const int tap_bytes = PARTS * chunk_panels * BN * 16, unit_bytes = unit_steps * tap_bytes;
    Divisors *const by = (Divisors *)(memory + 1024);
    Phase *const phases = (Phase *)(memory + 1280);
    char *tables = memory + 4096;
    const unsigned ring_a = shared(memory) + 4096 + WGS * (16 * BN + 16 * STAGING);
    const unsigned ring_b = ring_a + a_stages * stage_bytes;
    const int tiles = (rows + BM - 1) / BM * d_stride * h_stride * slices * blocks;

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
        const int all = slices * blocks, phase_count = d_stride * h_stride;
        *by = {Divisor(all), Divisor(phase_count), Divisor(max((int)gridDim.x / (all * phase_count), 1)), Divisor(pw), Divisor(ph), Divisor(pd)};
    }
    if (threadIdx.x < d_stride * h_stride) phases[threadIdx.x] = Phase(s, threadIdx.x);
    const int back_d = d_dilation / (d_stride / d_step), back_h = h_dilation / (h_stride / h_step) * pw;
    __syncthreads();

    if (threadIdx.x >= CONSUMERS) {
        // The producer: one warp.
        if (ALONE) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x >= CONSUMERS + 32) return;
        const int lane = threadIdx.x % 32;
        const long long a_panel = 16ll * a_rows;
        const int units = d_kernel * chunks * h_kernel * (w_steps / unit_steps);
        int at_a = 0, phase_a = 1, at_b = 0, phase_b = 1;
        if (resident) {
            const char *from = b + (long long)(blockIdx.x % (slices * blocks)) * units * unit_bytes;
#pragma unroll 1
            for (int u = lane; u < units; u += 32) {
                barrier_expect(full_b + 8 * u, unit_bytes);
                copy(ring_b + u * unit_bytes, from + (long long)u * unit_bytes, unit_bytes, full_b + 8 * u);
            }
        }
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const Tile t(s, *by, phases, back_d, tile);
            const int slice = t.column_block / blocks;
#pragma unroll 1
            for (int ad = 0; ad < t.phase.nd; ad++) {
                if (t.skipped(ad)) continue;
#pragma unroll 1
                for (int chunk = 0; chunk < chunks; chunk++) {
#pragma unroll 1
                    for (int group = 0; group < (whole_h ? 1 : t.phase.nh); group++) {
                        const int first = whole_h ? 0 : group, last = whole_h ? t.phase.nh - 1 : group;
                        const int length = BM + (last - first) * back_h + (w_steps - 1) * w_step;
                        if (lane == 0) {
                            barrier_wait(empty_a + 8 * at_a, phase_a);
                            barrier_expect(full_a + 8 * at_a, PARTS * chunk_panels * length * 16);
                        }
                        __syncwarp();
                        const char *from = a + 16ll * (t.row0 + t.phase.rows - ad * back_d * ph * pw - last * back_h) + (long long)(slice * chunks + chunk) * chunk_panels * a_panel;
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
                            for (int u = 0; u < w_steps / unit_steps; u++) {
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
        // What no tile has asked for may still be on its way to memory that the next block is given.
        if (resident)
            for (int u = lane; u < units; u += 32) barrier_wait(full_b + 8 * u, 0);
        return;
    }

    // A consumer.
    if (ALONE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    int *column_at = (int *)(tables + warpgroup * 16 * BN), *column_rr = column_at + BN;
    float *column_bias = (float *)(column_rr + BN), *column_scale = column_bias + BN;
    float *staged = (float *)(tables + WGS * 16 * BN) + threadIdx.x / 32 * STAGING;
    const int steps = chunk_panels / 2;
    int at_a = 0, phase_a = 0, at_b = 0, phase_b = 0, known = -1;

    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Tile t(s, *by, phases, back_d, tile);
        float sum[MI][REGISTERS];
#if KIND == 2
        float cross[MI][REGISTERS], high[MI][REGISTERS];
        int fresh = 1, units_since = 0;
#endif
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
            for (int j = 0; j < REGISTERS; j++) {
                sum[i][j] = 0.0f;
#if KIND == 2
                cross[i][j] = 0.0f;
                high[i][j] = 0.0f;
#endif
            }
        // What the matrix instructions in flight read, to be given back when they are done.
        int held_a = -1, held_b = -1;
        for (int ad = 0; ad < t.phase.nd; ad++) {
            if (t.skipped(ad)) continue;
            for (int chunk = 0; chunk < chunks; chunk++) {
                for (int group = 0; group < (whole_h ? 1 : t.phase.nh); group++) {
                    const int first = whole_h ? 0 : group, last = whole_h ? t.phase.nh - 1 : group;
                    barrier_wait(full_a + 8 * at_a, phase_a);
                    for (int ah = first; ah <= last; ah++) {
                        unsigned from_a = ring_a + at_a * stage_bytes + ((last - ah) * back_h + warpgroup * M) * 16;
                        const int unit0 = (((t.phase.td + ad * d_step) * chunks + chunk) * h_kernel + t.phase.th + ah * h_step) * (w_steps / unit_steps);
                        for (int u = 0; u < w_steps / unit_steps; u++) {
                            const int slot = resident ? unit0 + u : at_b;
                            barrier_wait(full_b + 8 * slot, resident ? 0 : phase_b);
                            unsigned from_b = ring_b + slot * unit_bytes;
                            matrix_fence();
                            for (int w = 0; w < unit_steps; w++) {
                                for (int k = 0; k < steps; k++) {
                                    const unsigned long long wb = descriptor<1>(from_b + k * 2 * BN * 16, BN * 16);
#pragma unroll
                                    for (int i = 0; i < MI; i++) {
                                        const unsigned long long xa = descriptor<MI>(from_a + i * 128 + 2 * k * panel_bytes, panel_bytes);
#if KIND == 2
                                        const unsigned long long xl = descriptor<MI>(from_a + part_bytes + i * 128 + 2 * k * panel_bytes, panel_bytes);
                                        const unsigned long long wl = descriptor<1>(from_b + (chunk_panels + k * 2) * BN * 16, BN * 16);
                                        multiply(high[i], xa, wb, !(fresh && w + k == 0));
                                        multiply(cross[i], xl, wb, 1);
                                        multiply(cross[i], xa, wl, 1);
#else
                                        multiply(sum[i], xa, wb, 1);
#endif
                                    }
                                }
                                from_a += w_step * 16;
                                from_b += tap_bytes;
                            }
                            matrix_commit();
#if KIND == 2
                            fresh = 0;
                            if (++units_since == promote) {
                                matrix_wait<0>();
#pragma unroll
                                for (int i = 0; i < MI; i++)
#pragma unroll
                                    for (int j = 0; j < REGISTERS; j++) sum[i][j] += high[i][j];
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
                            if (ah == last && u == w_steps / unit_steps - 1) held_a = at_a;
                        }
                    }
                    if (++at_a == a_stages) at_a = 0, phase_a ^= 1;
                }
            }
        }
        matrix_wait<0>();
        if (lane == 0) {
            if (held_a >= 0) barrier_arrive(empty_a + 8 * held_a);
            if (held_b >= 0) barrier_arrive(empty_b + 8 * held_b);
        }
#if KIND == 2
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
            for (int j = 0; j < REGISTERS; j++) sum[i][j] = (sum[i][j] + (fresh ? 0.0f : high[i][j])) + cross[i][j] * 0.00048828125f;
#endif

        // Where rows and columns go. Offsets are 32-bit from the tile's first sample on.
        const int slice = t.column_block / blocks, column0 = (t.column_block - slice * blocks) * BN;
        if (t.column_block != known) {
            known = t.column_block;
            asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
            if (thread < BN) {
                const int column = column0 + thread;
                const int inner = channels_first ? outputs : channels;
                const int large = column / inner, small = column - large * inner;
                const int co = channels_first ? large : small, rr = channels_first ? small : large;
                const bool here = co < channels && rr < outputs;
                const int channel = slice * channels + co;
                column_at[thread] = channel * y_c + rr * y_w;
                column_rr[thread] = here ? rr : NOWHERE;
                column_bias[thread] = here && has_bias ? widen(bias[channel]) : 0.0f;
#if KIND == 2
                column_scale[thread] = scale_w[t.column_block * BN + thread];
#endif
            }
            asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
        }
        // Scale, bias and straight activations in registers: what is not above zero is multiplied by `below`.
        const float below = activation == 1 ? 0.0f : activation == 2 ? (float)slope : 1.0f;
#if KIND == 2
        const float sx = *scale_x;
#endif
#pragma unroll
        for (int j = 0; j < REGISTERS; j += 4) {
            const float2 add = *(const float2 *)&column_bias[2 * j + lane % 4 * 2];
#if KIND == 2
            const float2 sw = *(const float2 *)&column_scale[2 * j + lane % 4 * 2];
#endif
#pragma unroll
            for (int i = 0; i < MI; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float v = sum[i][j + e];
#if KIND == 2
                    v = v * sx * (e % 2 ? sw.y : sw.x);
#endif
                    v += e % 2 ? add.y : add.x;
                    // Not -infinity times zero.
                    sum[i][j + e] = v > 0.0f ? v : activation == 1 && v <= 0.0f ? 0.0f : v * below;
                }
        }
        const int row = t.row0 + warpgroup * M + thread / 32 * ROWS + lane % ROWS;
        const int line = by->line.divide(row), jb = row - line * pw, plane = by->height.divide(line), jh = line - plane * ph;
        const int n = by->depth.divide(plane), jd = plane - n * pd;
        const int sample0 = by->depth.divide(by->height.divide(by->line.divide(t.row0)));
        const int od = jd * d_stride + d_shift + t.phase.rd, oh = jh * h_stride + h_shift + t.phase.rh, ow = jb * outputs + w_shift;
        const bool here = row < rows && (unsigned)od < (unsigned)d_out && (unsigned)oh < (unsigned)h_out;
        const Epilogue epilogue = {y + (long long)sample0 * y_n, (n - sample0) * y_n + od * y_d + oh * y_h + ow * y_w, here ? ow : NOWHERE,
                                   column_at, column_rr, staged, activation, min(channels * outputs - column0, BN), w_out, y_w,
                                   (slice * channels + column0 / outputs) * y_c, y_c};
        const bool vectors = channels % 4 == 0 && y_w % 4 == 0 && (unsigned long long)y % (4 * sizeof(Element)) == 0;
        // Every row a voxel, in their order; a sample of whole vectors.
        const bool dense = channels_first && outputs == 1 && d_stride * h_stride == 1 && pd == d_out && ph == h_out && pw == w_out &&
                           w_shift == 0 && d_shift == 0 && h_shift == 0 &&
                           ((unsigned long long)y | (unsigned long long)(unsigned)y_c * sizeof(Element)) % 16 == 0;
#pragma unroll 1
        for (int piece = 0; piece < BN; piece += PIECE) {
            epilogue.stage(sum, piece);
            if (activation > 2) epilogue.bend();
            if (!channels_first)
                epilogue.last(piece, vectors);
            else if (dense)
                epilogue.dense(piece);
            else if (outputs == 1)
                epilogue.first<1>(piece);
            else if (outputs == 2)
                epilogue.first<2>(piece);
            else if (outputs == 4)
                epilogue.first<4>(piece);
            else
                epilogue.first<0>(piece);
        }
    }
}

#endif

#ifndef HALO_GEMM

/// float32 rounded to tf32, to nearest, ties away from zero; past the largest it stays finite. Infinities
/// and NaN stay what they are.
__device__ __forceinline__ unsigned round_tf32(float x) {
    const unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu, sign = bits ^ size;
    if (size >= INFINITE) return sign | (size > INFINITE ? 0x7fc00000u : INFINITE);
    return sign | (min(size + 0x1000u, 0x7f7fe000u) & 0xffffe000u);
}

/// The exponent that brings a magnitude, given as bits, to [2^14, 2^15), within what float32 can scale by.
__device__ __forceinline__ int exponent(unsigned bits) { return min(141 - (int)(bits >> 23), 120); }

__device__ __forceinline__ float power(int e) { return __uint_as_float((unsigned)(e + 127) << 23); }

/// The largest of a warp's magnitudes, into a control word.
__device__ __forceinline__ void raise(unsigned *word, unsigned most) {
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0 && most > *(volatile unsigned *)word) atomicMax(word, most);
}

/// Bits of |x|, and of float32 that are as large.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
template <typename T> __device__ __forceinline__ unsigned magnitude(T x) { return x.bits & 0x7fffu; }
__device__ __forceinline__ unsigned as_float32(float, unsigned most) { return most; }
template <typename T> __device__ __forceinline__ unsigned as_float32(T, unsigned most) {
    return __float_as_uint(widen(T{(unsigned short)most}));
}

/// Elements as an operand's 16 bytes; the split's low part in `low`.
__device__ __forceinline__ uint4 operand(const Element (&v)[E], float scale, uint4 *low) {
#if KIND == 0
    return *(const uint4 *)v;
#elif KIND == 1
    return make_uint4(round_tf32(v[0]), round_tf32(v[1]), round_tf32(v[2]), round_tf32(v[3]));
#else
    unsigned hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Half h[2], l[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float x = v[2 * i + e] * scale;
            narrow(x, &h[e]);
            narrow((x - widen(h[e])) * 2048.0f, &l[e]);
        }
        hi[i] = h[0].bits | (unsigned)h[1].bits << 16;
        lo[i] = l[0].bits | (unsigned)l[1].bits << 16;
    }
    *low = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    return make_uint4(hi[0], hi[1], hi[2], hi[3]);
#endif
}

#endif

#ifdef HALO_PACK_INPUT

extern "C" __global__ void __launch_bounds__(256) halo_pack_input(
    const Element *x, uint4 *out, unsigned *control, int a_rows, int lead, int pd, int ph, int pw, int block, int n, int depth, int height,
    int width, int slices, int slice_in, int panels, int channel_panels, int x_n, int x_c, int x_d, int x_h, int x_w, int lanes) {
    const int block_rows = 256 / lanes;
    // Neighbouring threads read neighbours: channels or rows.
    const bool dense = x_c == 1;
    const int lane = dense ? threadIdx.x % lanes : threadIdx.x / block_rows;
    const int local = dense ? threadIdx.x / lanes : threadIdx.x % block_rows;
    const int row = blockIdx.x * block_rows + local, parity = blockIdx.y;
    const int position = row - lead;
    const int line = position / pw, iw = (position - line * pw) * block + parity, plane = line / ph, ih = line - plane * ph;
    const int sample = plane / pd, id = plane - sample * pd;
    const bool here = position >= 0 && row < a_rows && sample < n && id < depth && ih < height && iw < width;
    const Element *from = x + (here ? (long long)sample * x_n + id * x_d + ih * x_h + iw * x_w : 0);
    const bool vectors = dense && ((unsigned long long)x | (x_n | x_d | x_h | x_w | slice_in) * sizeof(Element)) % 16 == 0;
    const int all = slices * panels;
    unsigned most = 0;
    float scale = 1.0f;
#if KIND == 2
    const unsigned largest = control[0];
    scale = power(exponent(largest));
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) control[4] = __float_as_uint(power(-exponent(largest)));
#endif
    const int count = block * channel_panels;
    int slice = lane / channel_panels, cp = lane - slice * channel_panels;
    uint4 *to = out + (long long)(slice * panels + parity * channel_panels + cp) * a_rows + row;
#pragma unroll (16 / E)
    for (int p = lane; p < slices * channel_panels; p += lanes) {
        const int c = cp * E;
        alignas(16) Element v[E];
        if (vectors && here) {
#pragma unroll
            for (int i = 0; i < (int)(E * sizeof(Element) / 16); i++)
                *(uint4 *)&v[i * 16 / sizeof(Element)] =
                    c + i * 16 / (int)sizeof(Element) < slice_in ? ((const uint4 *)(from + slice * slice_in + c))[i] : make_uint4(0, 0, 0, 0);
        } else {
            const Element *const first = from + (long long)(slice * slice_in + c) * x_c;
#pragma unroll
            for (int e = 0; e < E; e++) v[e] = here && c + e < slice_in ? first[(long long)e * x_c] : Element{};
        }
#pragma unroll
        for (int e = 0; e < E; e++) most = max(most, magnitude(v[e]));
        if (row < a_rows) {
            uint4 low;
            *to = operand(v, scale, &low);
#if KIND == 2
            to[(long long)all * a_rows] = low;
#endif
        }
        cp += lanes;
        to += (long long)lanes * a_rows;
        while (cp >= channel_panels) cp -= channel_panels, slice++, to += (long long)(panels - channel_panels) * a_rows;
    }
    // Panels that only fill a chunk.
    if (parity == 0 && row < a_rows)
        for (int p = lane; p < slices * (panels - count); p += lanes) {
            const int slice = p / (panels - count), panel = count + p % (panels - count);
            for (int part = 0; part < PARTS; part++)
                out[((long long)part * all + slice * panels + panel) * a_rows + row] = make_uint4(0, 0, 0, 0);
        }
#if KIND == 2
    // A voxel is coarse if all its channels lie below 2^-26 of the largest, but not all at zero.
    __shared__ unsigned largest_of[256];
    largest_of[threadIdx.x] = most;
    __syncthreads();
    bool coarse = false;
    if (lane == 0) {
        for (int l = 1; l < lanes; l++) most = max(most, largest_of[dense ? local * lanes + l : l * block_rows + local]);
        coarse = most > 0 && __uint_as_float(most) * scale < 0.000244140625f;
    }
    const int coarse_ones = __syncthreads_count(coarse);
    if (threadIdx.x == 0 && coarse_ones) atomicAdd(&control[2], (unsigned)coarse_ones);
#else
    raise(&control[0], as_float32(Element{}, most));
#endif
}

#endif

#ifdef HALO_PACK_WEIGHT

extern "C" __global__ void __launch_bounds__(256) halo_pack_weight(
    const Element *w, uint4 *out,
#if KIND == 2
    const float *scale_w,
#else
    unsigned *control,
#endif
    int items, int chunk_panels, int chunks, int columns, int blocks, int channels, int slice_in, int in_per_group, int out_per_group,
    int in_channels, int out_channels, int outputs, int channels_first, int block, int channel_panels, int w_first, int w_stride,
    int w_dilation, int d_kernel, int h_kernel, int w_kernel, int w_low, int w_steps, int w_step) {
    const int item = blockIdx.x * 256 + threadIdx.x;
    const bool real = item < items;
    int rest = real ? item : 0;
    const int in_block = rest % columns;
    rest /= columns;
    const int in_chunk = rest % chunk_panels;
    rest /= chunk_panels;
    const int tap_tile = rest, step = rest % w_steps;
    rest /= w_steps;
    const int th = rest % h_kernel;
    rest /= h_kernel;
    const int chunk = rest % chunks;
    rest /= chunks;
    const int td = rest % d_kernel;
    rest /= d_kernel;
    const int column_block = rest, slice = rest / blocks;
    const int column = column_block % blocks * columns + in_block;
    const int inner = channels_first ? outputs : channels;
    const int large = column / inner, small = column - large * inner;
    const int co = channels_first ? large : small, rr = channels_first ? small : large;
    const int out_channel = slice * channels + co;
    const int panel = chunk * chunk_panels + in_chunk, parity = panel / channel_panels;
    const int c0 = (panel - parity * channel_panels) * E;
    // The tap along width: e = jj + first - m, t*dilation = stride*m + r.
    const int jj = rr / w_stride, residue = rr - jj * w_stride;
    const int m = jj + w_first - ((w_low + step * w_step) * block + parity);
    const int far = m * w_stride + residue, tw = far / w_dilation;
    const bool tap = real && co < channels && rr < outputs && parity < block && out_channel < out_channels && m >= 0 &&
                     tw * w_dilation == far && tw < w_kernel;
    alignas(16) Element v[E];
    unsigned most = 0;
#pragma unroll
    for (int e = 0; e < E; e++) {
        const int ci = slice * slice_in + c0 + e;
        const bool here = tap && c0 + e < slice_in && ci < in_channels && ci / in_per_group == out_channel / out_per_group;
        const long long at = (((long long)ci * out_per_group + out_channel % out_per_group) * d_kernel + td) * h_kernel + th;
        v[e] = here ? w[at * w_kernel + tw] : Element{};
        most = max(most, magnitude(v[e]));
    }
    float scale = 1.0f;
#if KIND == 2
    // A power of two: exact.
    if (real) scale = 1.0f / scale_w[column_block * columns + in_block];
#else
    raise(&control[1], as_float32(Element{}, most));
#endif
    if (real) {
        uint4 low;
        uint4 *to = out + ((long long)tap_tile * PARTS * chunk_panels + in_chunk) * columns + in_block;
        *to = operand(v, scale, &low);
#if KIND == 2
        to[(long long)chunk_panels * columns] = low;
#endif
    }
}

#endif
