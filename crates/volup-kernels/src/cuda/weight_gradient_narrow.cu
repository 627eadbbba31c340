// The gradient of the weight where the input has few channels, from rows of `gradient_rows` of the input and of the output's
// gradient.
//
// `C[slot of G][shift and channel of X] = sum over rows r of G[r][slot] * X[r - shift][channel]`, as `weight_gradient` has it.
// There each shift reads G anew, which is the larger operand by far; here G is read once, and X, whose row is 16 bytes, at all
// shifts.
//
// # How
//
// A block has SLOTS neighbouring slots and COLUMNS neighbouring pairs of shift and channel, channels first, over a share of all
// rows. A stage is KC rows of G, and for each pair of shifts along depth and height that the block has a window of X: as
// many rows and those that shifts along width reach back to. Copies run STAGES - 1 stages ahead. Each warp multiplies every
// WARPS-th step of a stage, and their sums are added up at the end. So few slots are read of a row that neighbouring rows of
// panels, where G lies so, are long runs. What of a tile is no tap of the convolution is dropped at the end.
//
// # Numbers
//
// `KIND` 0, f16 or bf16; 1, float32 that is rounded to tf32 already; 3, float32 as two tf32, whose products of 8 rows are added
// to float32 registers; 2, both as two fp16 already (`half_parts.cuh`), likewise for 16 rows: a row of X has the low parts of its channels
// in its last 8 bytes. Sums of a block's share of the rows, to be added up by `weight_gradient_sum`.
//
// # What it takes
//
// Parameters: `x`, `rows` (multiples of 16 bytes), `partial` (as `direct_weight_gradient` has it, a share a split); i32: `count`
// (rows), `shift_d`, `shift_h`, `shift_w` (rows from one tap of a class to its next), `group_in` (at most 16 bytes, 4 for KIND 2), `group_out`,
// `slots` (a multiple of 16 bytes); of depth, height, width: kernel, classes, step, count (the taps of the class that has most);
// `windows` (that a stage has room for: at least as many as any block has), `share` (rows, a multiple of KC); i64: `row` and
// `panel` of G's rows, for KIND 2 `g_low`, elements from a high part of them to its low one. A row of X has 16 bytes; there is one group. Threads: 32 * WARPS. Grid: (ceil(shifts * group_in / COLUMNS) *
// ceil(slots / SLOTS), splits), in this order, the first fastest; `shifts` is the product of the counts. Bytes of dynamic shared
// memory: STAGES * (SLOTS elements of 16 bytes each, for KIND 2 twice, * (16 * KC + 64) + windows * (KC + (count_w - 1) * shift_w) * 16).

#include "copy_async.cuh"
#include "digits.cuh"
#include "mma.cuh"
#include "operand.cuh"
#if KIND == 2
#include "half_parts.cuh"
#endif

#include <type_traits>

#ifndef CTAS
#error "CTAS: blocks of a multiprocessor"
#endif

constexpr int SLOTS = 32, COLUMNS = 24, WARPS = 4, THREADS = 32 * WARPS, STAGES = 4;
/// Whether operands are of 16 bits, what they are in memory, and of how many of their parts this has copies.
constexpr bool NARROW = KIND == 0 || KIND == 2;
using Operand = std::conditional_t<KIND == 2, Half, Element>;
constexpr int STORED = KIND == 2 ? 2 : 1;
constexpr int KC = KIND == 0 ? 128 : 64, STEP = NARROW ? 16 : 8, SIZE = sizeof(Operand), VECTOR = 16 / SIZE;
constexpr int MT = SLOTS / 16, NT = COLUMNS / 8;
/// G lies in shared memory by panels, too: copies of neighbours to neighbours ask the second-level cache for whole lines, others for
/// each sector by itself. Copies of a row, and bytes from a panel to the next, such that reads of a warp meet no bank conflict.
constexpr int PER = SLOTS / VECTOR, PANEL = 16 * KC + 64;
static_assert(KC * PER % THREADS == 0 && KC % (THREADS / PER) == 0, "every thread copies as many vectors");

/// Takes a float32 apart where there are two parts.
__device__ __forceinline__ void prepare(unsigned &high, unsigned &low) {
    if (KIND == 3) part_tf32(high, low);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) weight_gradient_narrow(
    const Operand *x, const Operand *rows, float *partial, int count, int shift_d, int shift_h, int shift_w, int group_in, int group_out, int slots,
    int kernel_d, int classes_d, int step_d, int count_d, int kernel_h, int classes_h, int step_h, int count_h, int kernel_w, int classes_w,
    int step_w, int count_w, int windows, int share, long long row, long long panel
#if KIND == 2
    , long long g_low
#endif
) {
    extern __shared__ __align__(128) char memory[];
    const unsigned ring = (unsigned)__cvta_generic_to_shared(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int all_columns = count_d * count_h * count_w * group_in;
    Digits<int> digits = {(int)blockIdx.x};
    const int n0 = digits.next((all_columns + COLUMNS - 1) / COLUMNS) * COLUMNS, m0 = digits.rest * SLOTS;
    const long long first = (long long)blockIdx.y * share;
    const int stages = (int)((min(first + share, (long long)count) - first + KC - 1) / KC);

    // The pairs of shifts along depth and height of the block's columns, and the rows of a window.
    const int first_pair = n0 / group_in / count_w, pairs = (min(n0 + COLUMNS, all_columns) - 1) / group_in / count_w - first_pair + 1;
    constexpr int PART = PER * PANEL, G_BYTES = STORED * PART;
    const int halo = (count_w - 1) * shift_w, window = KC + halo, stage_bytes = G_BYTES + windows * window * 16;
    const auto fetch_stage = [&](int stage) {
        if (stage < stages) {
            const unsigned to_g = ring + stage % STAGES * stage_bytes, to_x = to_g + G_BYTES;
            const long long at = first + stage * KC;
            // Neighbouring threads copy neighbours, of a row or of a panel.
            const bool by_panels = row == VECTOR;
#pragma unroll
            for (int k = 0; k < KC * PER / THREADS; k++) {
                const int i = threadIdx.x + k * THREADS, of_panel = by_panels ? i / KC : i % PER, r = by_panels ? i % KC : i / PER;
                const bool here = at + r < count && m0 + of_panel * VECTOR < slots;
                const Operand *const from = rows + (at + r) * row + (m0 / VECTOR + of_panel) * panel;
                copy_async<16>(to_g + of_panel * PANEL + r * 16, here ? from : rows, here);
#if KIND == 2
                copy_async<16>(to_g + PART + of_panel * PANEL + r * 16, here ? from + g_low : rows, here);
#endif
            }
#pragma unroll 1
            for (int pair = 0; pair < pairs; pair++) {
                const int md = (first_pair + pair) / count_h, mh = first_pair + pair - md * count_h;
                const long long from = at - halo - (long long)md * shift_d - (long long)mh * shift_h;
#pragma unroll 1
                for (int i = threadIdx.x; i < window; i += THREADS) {
                    const bool here = from + i >= 0 && from + i < count;
                    copy_async<16>(to_x + (pair * window + i) * 16, here ? x + (from + i) * VECTOR : x, here);
                }
            }
        }
        end_copies();
    };

    // Where the lane's columns of X lie from a stage's windows on, for its first row.
    unsigned of_column[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) {
        const int n = min(n0 + 8 * j + g, all_columns - 1), shift = n / group_in, pair = shift / count_w, mw = shift - pair * count_w;
        of_column[j] = ((pair - first_pair) * window + halo - mw * shift_w + (NARROW ? 2 * t : t)) * 16 + (n - shift * group_in) * SIZE;
    }
    float sum[MT][NT][4] = {};
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) fetch_stage(stage);
#pragma unroll 1
    for (int stage = 0; stage < stages; stage++) {
        await_copies<STAGES - 2>();
        __syncthreads();
        fetch_stage(stage + STAGES - 1);
        const unsigned of_g = ring + stage % STAGES * stage_bytes, of_x = of_g + G_BYTES;
#pragma unroll
        for (int step = 0; step < KC / STEP / WARPS; step++) {
            const int k0 = (step * WARPS + warp) * STEP;
            // Of two fp16 last the high one that low parts are multiplied by.
            unsigned b[KIND == 2 ? 3 : PARTS][NT][2];
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const unsigned from = of_x + of_column[j] + (k0 + half * STEP / 2) * 16;
#if KIND == 0 || KIND == 2
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        unsigned short one, two;
                        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(one) : "r"(from + 8 * part));
                        asm volatile("ld.shared.u16 %0, [%1+16];" : "=h"(two) : "r"(from + 8 * part));
                        b[part][j][half] = one | (unsigned)two << 16;
                    }
#if KIND == 2
                    b[2][j][half] = by_low(b[0][j][half]);
#endif
#else
                    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(b[0][j][half]) : "r"(from));
                    prepare(b[0][j][half], b[PARTS - 1][j][half]);
#endif
                }
#if KIND == 1 || KIND == 3
            // Neighbouring slots at once, which then are rows of two instructions.
            uint4 wide[2];
#pragma unroll
            for (int half = 0; half < 2; half++)
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(wide[half].x), "=r"(wide[half].y), "=r"(wide[half].z), "=r"(wide[half].w)
                             : "r"(of_g + g * PANEL + (k0 + t + 4 * half) * 16));
#endif
#pragma unroll
            for (int i = 0; i < MT; i++) {
                unsigned a[PARTS][4];
#if KIND == 0 || KIND == 2
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    load_transposed(a[part], of_g + part * PART + (2 * i + lane / 8 % 2) * PANEL + (k0 + lane % 8 + lane / 16 * 8) * 16);
#else
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const uint4 &of = wide[e / 2];
                    a[0][e] = i == 0 ? (e % 2 == 0 ? of.x : of.y) : (e % 2 == 0 ? of.z : of.w);
                    prepare(a[0][e], a[PARTS - 1][e]);
                }
#endif
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    const auto add = [&](float(&to)[4], int of_a, int of_b) {
                        if (KIND == 2 && of_a) of_b = 2;
                        multiply(to, make_uint4(a[of_a][0], a[of_a][1], a[of_a][2], a[of_a][3]), b[of_b][j][0], b[of_b][j][1]);
                    };
                    add_products(sum[i][j], add);
                }
            }
        }
    }

    // The warps' sums, in their order, where the stages were.
    await_all_copies();
    __syncthreads();
    static_assert((WARPS - 1) * MT * NT * 4 * 32 * 4 <= STAGES * G_BYTES, "they fit there");
    float(*const of_warp)[MT * NT * 4][32] = (float(*)[MT * NT * 4][32])memory;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (warp > 0) of_warp[warp - 1][(i * NT + j) * 4 + e][lane] = sum[i][j][e];
    __syncthreads();
    if (warp > 0) return;
    const int taps = kernel_d * kernel_h * kernel_w;
    float *const to = partial + (long long)blockIdx.y * taps * group_in * group_out;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int slot = m0 + (NARROW ? 16 * i + g + 8 * half : 4 * g + 2 * i + half), c = slot / group_out, co = slot - c * group_out;
            const int of_line = c / classes_w, jd = of_line / classes_h;
            const int td0 = jd, th0 = of_line - jd * classes_h, tw0 = c - of_line * classes_w;
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float total = sum[i][j][2 * half + e];
#pragma unroll
                    for (int other = 0; other < WARPS - 1; other++) total += of_warp[other][(i * NT + j) * 4 + 2 * half + e][lane];
                    const int n = n0 + 8 * j + 2 * t + e, shift = n / group_in, pair = shift / count_w;
                    const int td = td0 + pair / count_h * step_d, th = th0 + pair % count_h * step_h, tw = tw0 + (shift - pair * count_w) * step_w;
                    if (jd < classes_d && n < all_columns && td < kernel_d && th < kernel_h && tw < kernel_w)
                        to[((long long)((td * kernel_h + th) * kernel_w + tw) * group_in + (n - shift * group_in)) * group_out + co] = total;
                }
        }
}
