// The gradient of the weight on tensor cores, from rows of `gradient_rows` of the input and of the output's gradient.
//
// The rows of both follow each other alike, so that a tap that is `m` of its class is the gradient's rows `m` times a constant
// further on: `C[channel of a row of the gradient][channel of the input] = sum over rows of G[row + shift][.] * X[row][.]`,
// without a bound to look at. Rows that no voxel of the input has are zeros of X.
//
// # How
//
// A block has BM neighbouring channels of G's rows and BN of X's, and TAPS neighbouring shifts along width, of one pair of
// shifts along depth and height, over a share of all rows. Stages of KC rows (G's with those that later shifts read) come
// by cp.async, as they lie; matrix instructions read them transposed, for which the tensors' order is the right one. Of
// float32 a thread reads neighbouring channels at once, which then are rows and columns of several instructions. What of a
// tile is no tap of the convolution, or of another of its groups, is dropped at the end.
//
// # Numbers
//
// `KIND` 0, f16 or bf16; 1, float32 that is rounded to tf32 already; 3, float32 as two tf32, whose products of 8 rows are added to float32
// registers. Sums of a block's share of the rows, to be added up by `weight_gradient_sum`.
//
// # What it takes
//
// Parameters: `x`, `rows`, `partial` (as `direct_weight_gradient` has it, a share a split); i32: `count` (rows), `x_pitch`,
// `pitch` (elements of a row of each, multiples of 16 bytes), `shift_d`, `shift_h`, `shift_w` (rows from one tap of a class
// to its next; TAPS-1 times the last at most HALO), `groups`, `group_in`, `group_out`, `slots`; of depth, height, width:
// kernel, classes, step, counts (the taps of the class that has most); `splits`, `share` (rows, a multiple of KC). Threads:
// 32 * WARPS_M * WARPS_N. Grid: (ceil(count_w / TAPS) * count_h * count_d * N tiles * M tiles, splits), in this order, the
// first fastest. Bytes of dynamic shared memory: STAGES * ((KC + HALO) * (BM + 8) + KC * (BN + 8)) elements.

#include "copy_async.cuh"
#include "digits.cuh"
#include "mma.cuh"
#include "operand.cuh"

#if !defined(WARP_M) || !defined(WARP_N) || !defined(WARPS_M) || !defined(WARPS_N) || !defined(TAPS) || !defined(CTAS)
#error "WARP_M and WARP_N: a warp's channels; WARPS_M and WARPS_N of a block; TAPS of a block; CTAS of a multiprocessor"
#endif

constexpr int BM = WARP_M * WARPS_M, BN = WARP_N * WARPS_N, THREADS = 32 * WARPS_M * WARPS_N;
constexpr int KC = KIND == 0 ? 64 : 32, STAGES = 3, HALO = TAPS > 1 ? 4 : 0, SIZE = sizeof(Element), VECTOR = 16 / SIZE;
/// Rows of a matrix instruction, its tiles of a warp.
constexpr int STEP = KIND == 0 ? 16 : 8, MT = WARP_M / 16, NT = WARP_N / 8, AT_ONCE = KIND == 3 ? 1 : KC / STEP;
/// Channels that are read at once: of the gradient's rows for two tiles.
constexpr int WIDE_M = KIND == 0 ? 1 : 4, WIDE_N = KIND == 0 ? 1 : NT % 4 == 0 ? 4 : NT % 2 == 0 ? 2 : 1;
/// Elements from a row to the next in shared memory: reads of a warp meet no bank conflict.
constexpr int PITCH_M = BM + 8, PITCH_N = BN + 8, STAGE = (KC + HALO) * PITCH_M + KC * PITCH_N;

/// Neighbours in shared memory.
template <int COUNT> __device__ __forceinline__ void read(unsigned (&v)[COUNT], unsigned at) {
    if constexpr (COUNT == 4)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
    else if constexpr (COUNT == 2)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(at));
    else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[0]) : "r"(at));
}

/// So many rows of so many channels to shared memory; zeros past the ends of what there is.
template <int ROWS, int WIDE, int PITCH>
__device__ __forceinline__ void fetch(unsigned to, const Element *from, int pitch, long long first, int count, int channel, int channels) {
    constexpr int PER = WIDE / VECTOR, TURNS = (ROWS * PER + THREADS - 1) / THREADS;
    static_assert(THREADS % PER == 0, "a thread keeps to its channels");
    const int row0 = threadIdx.x / PER, c = threadIdx.x % PER * VECTOR;
    // Rows from this thread's first on.
    const int left = channel + c < channels ? (int)max(min(count - first - row0, (long long)ROWS), 0ll) : 0;
    const Element *source = from + ((first + row0) * pitch + channel + c);
    unsigned target = to + SIZE * (row0 * PITCH + c);
#pragma unroll
    for (int k = 0; k < TURNS; k++) {
        const int row = k * (THREADS / PER);
        if (ROWS * PER % THREADS != 0 && k == TURNS - 1 && row0 + row >= ROWS) break;
        copy_async<16>(target, row < left ? source : from, row < left);
        source += (long long)(THREADS / PER) * pitch;
        target += SIZE * (THREADS / PER) * PITCH;
    }
}

/// Takes a float32 apart where there are two parts.
__device__ __forceinline__ void prepare(unsigned &high, unsigned &low) {
    if (KIND == 3) part_tf32(high, low);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) weight_gradient(
    const Element *x, const Element *rows, float *partial, int count, int x_pitch, int pitch, int shift_d, int shift_h, int shift_w, int groups,
    int group_in, int group_out, int slots, int kernel_d, int classes_d, int step_d, int count_d, int kernel_h, int classes_h, int step_h,
    int count_h, int kernel_w, int classes_w, int step_w, int count_w, int splits, int share) {
    extern __shared__ __align__(128) char memory[];
    const unsigned ring = (unsigned)__cvta_generic_to_shared(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int m_warp = warp % WARPS_M * WARP_M, n_warp = warp / WARPS_M * WARP_N;
    const int all_m = groups * slots, all_n = groups * group_in, tiles_n = (all_n + BN - 1) / BN, tiles_m = (all_m + BM - 1) / BM;
    Digits<int> digits = {(int)blockIdx.x};
    const int mw0 = digits.next((count_w + TAPS - 1) / TAPS) * TAPS, mh = digits.next(count_h), md = digits.next(count_d);
    const int n0 = digits.next(tiles_n) * BN, m0 = digits.next(tiles_m) * BM;
    // The tap of a slot at a shift, -1 if there is none.
    const auto tap_of = [&](int slot, int mw) {
        int j = slot / group_out;
        const int jw = j % classes_w;
        j /= classes_w;
        const int td = j / classes_h + md * step_d, th = j % classes_h + mh * step_h, tw = jw + mw * step_w;
        return j / classes_h < classes_d && td < kernel_d && th < kernel_h && tw < kernel_w ? (td * kernel_h + th) * kernel_w + tw : -1;
    };
    // Tiles without a pair of channels of one group, or without a tap.
    const int first_group = m0 / slots, last_group = min(m0 + BM, all_m) - 1;
    if (last_group / slots < n0 / group_in || first_group > (min(n0 + BN, all_n) - 1) / group_in) return;
    bool any = false;
    for (int c = threadIdx.x; c < BM && m0 + c < all_m; c += THREADS)
        for (int k = 0; k < TAPS; k++) any |= mw0 + k < count_w && tap_of((m0 + c) % slots, mw0 + k) >= 0;
    if (!__syncthreads_or(any)) return;

    const long long first = (long long)blockIdx.y * share;
    const int stages = max((int)((min(first + share, (long long)count) - first + KC - 1) / KC), 0);
    const long long shifted = first + (long long)md * shift_d + (long long)mh * shift_h + (long long)mw0 * shift_w;
    const auto fetch_stage = [&](int stage) {
        if (stage < stages) {
            const unsigned to = ring + stage % STAGES * (STAGE * SIZE);
            fetch<KC + HALO, BM, PITCH_M>(to, rows, pitch, shifted + stage * KC, count, m0, all_m);
            fetch<KC, BN, PITCH_N>(to + (KC + HALO) * PITCH_M * SIZE, x, x_pitch, first + stage * KC, count, n0, x_pitch);
        }
        end_copies();
    };
    float sum[TAPS][MT][NT][4] = {};
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) fetch_stage(stage);
#pragma unroll 1
    for (int stage = 0; stage < stages; stage++) {
        await_copies<STAGES - 2>();
        __syncthreads();
        fetch_stage(stage + STAGES - 1);
        const unsigned of_g = ring + stage % STAGES * (STAGE * SIZE), of_x = of_g + (KC + HALO) * PITCH_M * SIZE;
// Of the split the loads of one step at a time: registers are scarce.
#pragma unroll(AT_ONCE)
        for (int k0 = 0; k0 < KC; k0 += STEP) {
            unsigned b[PARTS][NT][2];
#if KIND == 0
            if (NT == 1) {
                unsigned at = of_x + SIZE * ((k0 + lane % 16) * PITCH_N + n_warp);
                asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(b[0][0][0]), "=r"(b[0][0][1]) : "r"(at));
            } else {
#pragma unroll
                for (int j = 0; j + 1 < NT; j += 2) {
                    unsigned v[4];
                    load_transposed(v, of_x + SIZE * ((k0 + lane % 16) * PITCH_N + n_warp + 8 * j + lane / 16 * 8));
                    b[0][j][0] = v[0], b[0][j][1] = v[1], b[0][j + 1][0] = v[2], b[0][j + 1][1] = v[3];
                }
            }
#else
#pragma unroll
            for (int j = 0; j < NT; j += WIDE_N)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    unsigned v[WIDE_N];
                    read(v, of_x + SIZE * ((k0 + t + 4 * half) * PITCH_N + n_warp + 8 * j + WIDE_N * g));
#pragma unroll
                    for (int e = 0; e < WIDE_N; e++) {
                        b[0][j + e][half] = v[e];
                        prepare(b[0][j + e][half], b[PARTS - 1][j + e][half]);
                    }
                }
#endif
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++) {
                unsigned from = of_g + SIZE * ((k0 + tap * shift_w) * PITCH_M + m_warp);
#if KIND == 3
                // A tap's loads come after the products of the one before: registers are scarce.
                if (tap > 0) asm volatile("" : "+r"(from), "+f"(sum[tap > 0 ? tap - 1 : 0][MT - 1][NT - 1][3]));
#endif
#if KIND != 0
                unsigned wide[MT / 2][2][4];
#pragma unroll
                for (int i = 0; i < MT / 2; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++) read(wide[i][half], from + SIZE * ((t + 4 * half) * PITCH_M + 32 * i + 4 * g));
#endif
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    unsigned a[PARTS][4];
#if KIND == 0
                    load_transposed(a[0], from + SIZE * ((lane % 8 + lane / 16 * 8) * PITCH_M + 16 * i + lane / 8 % 2 * 8));
#else
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        a[0][e] = wide[i / 2][e / 2][i % 2 * 2 + e % 2];
                        prepare(a[0][e], a[PARTS - 1][e]);
                    }
#endif
#pragma unroll
                    for (int j = 0; j < NT; j++) {
                        const auto add = [&](float(&to)[4], int of_a, int of_b) {
                            multiply(to, make_uint4(a[of_a][0], a[of_a][1], a[of_a][2], a[of_a][3]), b[of_b][j][0], b[of_b][j][1]);
                        };
#if KIND == 3
                        float product[4] = {};
                        add(product, 1, 0);
                        add(product, 0, 1);
                        add(product, 0, 0);
#pragma unroll
                        for (int e = 0; e < 4; e++) sum[tap][i][j][e] += product[e];
#else
                        add(sum[tap][i][j], 0, 0);
#endif
                    }
                }
            }
        }
    }

    const int taps = kernel_d * kernel_h * kernel_w;
    float *const to = partial + (long long)blockIdx.y * taps * all_n * group_out;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int m = m0 + m_warp + (WIDE_M == 1 ? 16 * i + g + 8 * half : 32 * (i / 2) + 4 * g + 2 * (i % 2) + half);
            if (m >= all_m) continue;
            const int group = m / slots, slot = m - group * slots, co = slot % group_out;
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++) {
                const int at = mw0 + tap < count_w ? tap_of(slot, mw0 + tap) : -1;
                if (at < 0) continue;
#pragma unroll
                for (int j = 0; j < NT; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int n = n0 + n_warp + 8 * (j / WIDE_N * WIDE_N) + WIDE_N * (2 * t + e) + j % WIDE_N;
                        if (n < all_n && n / group_in == group) to[((long long)at * all_n + n) * group_out + co] = sum[tap][i][j][2 * half + e];
                    }
            }
        }
}
