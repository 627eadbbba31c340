// What `halo_gemm` does with a warp's sums: scale, bias, activation, and the way to y.

#pragma once

#include "activation.cuh"
#include "hopper.cuh"

#if !defined(BN) || !defined(MI) || !defined(CTAS) || !defined(WGS)
#error "BN: columns of a tile; MI and WGS: its 64*MI*WGS rows; CTAS: blocks of a multiprocessor"
#endif

/// Registers of a thread for 64 rows.
constexpr int REGISTERS = BN / 2;
/// Taps along width that are columns, and residues that these are of.
#ifdef TAPS
constexpr int TAP_COLUMNS = TAPS, RESIDUES = W_STRIDE;
#else
constexpr int TAP_COLUMNS = 1, RESIDUES = 1;
#endif
/// Columns of a tap; the columns that become outputs; registers before their sums, which are those of the last taps.
constexpr int CHANNELS = BN / TAP_COLUMNS, COLUMNS = CHANNELS * RESIDUES, FIRST_SUM = (TAP_COLUMNS - RESIDUES) * CHANNELS / 2;
static_assert(RESIDUES == 1 || RESIDUES == 2);

/// Rows of a warpgroup and of a tile.
constexpr int M = 64 * MI, BM = WGS * M;
/// Alone on its multiprocessor, a block's producer is a warpgroup that leaves its registers to the consumers.
constexpr bool ALONE = CTAS == 1;
constexpr int CONSUMERS = 128 * WGS, THREADS = CONSUMERS + (ALONE ? 128 : 32);
/// The producer packs as well, which takes more than copying does; `gather_gemm`'s consumers hold two fragments of
/// all their rows.
#ifdef RW
constexpr bool GATHERS = MI == 2;
#else
constexpr bool GATHERS = false;
#endif
constexpr int CONSUMER_REGISTERS = WGS == 4 ? (KIND == 2 ? 96 : 104) : WGS == 3 ? (KIND == 3 ? 152 : 144) : GATHERS ? 224 : 208;
constexpr int PRODUCER_REGISTERS = WGS == 4 ? (KIND == 2 ? 96 : 64) : WGS == 3 ? (KIND == 3 ? 56 : 80) : GATHERS ? 56 : 88;
/// Rows of a warp: neighbours. Columns that it stages at a time, and floats from one to the next, such that no two
/// lanes that write meet in a bank.
constexpr int ROWS = 16 * MI, PIECE = 16, COLUMN_PITCH = ROWS + 4, STAGING = PIECE * COLUMN_PITCH;
/// What no column or row is at, so that no sum of two is an output.
constexpr int NOWHERE = 1 << 29;

/// Straight activations, in registers; what is not there costs nothing.
__device__ __forceinline__ void straighten(float (&sum)[MI][REGISTERS], int activation, double slope) {
    const auto through = [&](int code) {
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
            for (int j = FIRST_SUM; j < REGISTERS; j++) sum[i][j] = straighten(sum[i][j], code, (float)slope);
    };
    if (activation == 1) through(1);
    if (activation == 2) through(2);
}

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
        // Residues of a channel beside one another, which are in the sums one after the other.
        float *const to = staged + lane % 4 * 2 * RESIDUES * COLUMN_PITCH + lane / 4;
        __syncwarp();
#pragma unroll
        for (int p = 0; p < COLUMNS; p += PIECE)
            if (p == piece)
#pragma unroll
                for (int j = 0; j < PIECE / 8; j++)
#pragma unroll
                    for (int i = 0; i < MI; i++) {
                        if (p + 8 * j >= COLUMNS) continue;
                        // The last taps are of residues in turn, and the first of them is `TAP_COLUMNS - RESIDUES`.
                        const int last = TAP_COLUMNS - RESIDUES + (j + TAP_COLUMNS) % RESIDUES, channel = p / RESIDUES + j / RESIDUES * 8;
                        const float *v = &sum[i][(last * CHANNELS + channel) / 2];
                        float *const at = to + (j / RESIDUES * 8 * RESIDUES + j % RESIDUES) * COLUMN_PITCH + 8 * i;
                        at[0] = v[0];
                        at[RESIDUES * COLUMN_PITCH] = v[1];
                        at[8 * MI] = v[2];
                        at[RESIDUES * COLUMN_PITCH + 8 * MI] = v[3];
                    }
        __syncwarp();
    }

    /// Curved activations, in place: one copy of their code.
    __device__ __forceinline__ void bend() const {
        const int lane = threadIdx.x % 32;
        constexpr int AT_ONCE = 4;
#pragma unroll 1
        for (int base = lane; base < PIECE * ROWS; base += 32 * AT_ONCE) {
            const auto at = [&](int k) { return (base + 32 * k) / ROWS * COLUMN_PITCH + (base + 32 * k) % ROWS; };
            float v[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) v[k] = staged[at(k)];
            curve(v, curved);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) staged[at(k)] = v[k];
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
                    const int c = piece + c0 + k, in = min(c, COLUMNS - 1);
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

    /// The same from registers, by a warpgroup at once, of which neighbouring threads write all rows of a column: few sectors of y are
    /// written in part. A thread writes 16 bytes or, where rows lie in eights, 8. `place` says where a row of the warpgroup is from `y` on,
    /// negative if nowhere.
    template <typename V, typename T = Element, typename Place>
    __device__ __forceinline__ void dense(const float (&sum)[MI][REGISTERS], int warpgroup, const Place &place) const {
        constexpr int SIZE = sizeof(T), PITCH = SIZE * M + 16, VECTOR = sizeof(V) / SIZE, LANES = M / VECTOR, AT_ONCE = 128 / LANES;
        constexpr int STEP = COLUMNS * PITCH <= 16 * STAGING ? COLUMNS : PIECE;
        static_assert(STEP * PITCH <= 16 * STAGING && PIECE % AT_ONCE == 0);
        const int thread = threadIdx.x % 128, lane = thread % 32, r = thread % LANES * VECTOR, at = place(r);
        const bool here = at >= 0;
        Element *to = y + at + channel0 + (long long)(thread / LANES) * y_c;
        char *const lines = (char *)(staged - thread / 32 * STAGING);
        char *const line = lines + thread / 32 * ROWS * SIZE + (SIZE == 2 ? lane % 8 * PITCH + lane / 8 % (2 * MI) * 16 : lane % 4 * 2 * PITCH + lane / 4 * SIZE);
#pragma unroll
        for (int piece = 0; piece < COLUMNS; piece += STEP) {
            asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
#pragma unroll
            for (int j = 0; j < STEP && piece + j < COLUMNS; j += 8) {
                if constexpr (SIZE == 2)
                    transpose<T>(sum, piece + j, shared(line + j * PITCH));
                else
#pragma unroll
                    for (int i = 0; i < 2 * MI; i++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            *(T *)(line + (j + e) * PITCH + 8 * i * SIZE) = sum[i % MI][FIRST_SUM + (piece + j) / 2 + i / MI * 2 + e];
            }
            asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
#pragma unroll
            for (int c = 0; c < STEP; c += AT_ONCE) {
                const int column = c + thread / LANES;
                store(to, *(const V *)(lines + column * PITCH + SIZE * r), here && piece + column < columns);
                to += (long long)AT_ONCE * y_c;
            }
        }
    }

    /// Eight columns of 16 bits to shared memory, a column after the other.
    template <typename T> __device__ __forceinline__ void transpose(const float (&sum)[MI][REGISTERS], int column, unsigned to) const {
        unsigned v[2 * MI];
#pragma unroll
        for (int i = 0; i < 2 * MI; i++) {
            const float *of = &sum[i % MI][FIRST_SUM + column / 2 + i / MI * 2];
            v[i] = narrow_both(of[0], of[1], T{});
        }
        if constexpr (MI == 2)
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]),
                         "r"(v[2 * MI - 2]), "r"(v[2 * MI - 1])
                         : "memory");
        else
            asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(v[0]), "r"(v[1]) : "memory");
    }

    /// NCDHW, two neighbours in line of each row and channel: both residues along width, or both positions of a row. Such rows
    /// lie one after the other in whole vectors.
    template <int OUTPUTS> __device__ __forceinline__ void pairs(const float (&sum)[MI][REGISTERS]) const {
        static_assert(RESIDUES * OUTPUTS == 2);
        constexpr int BYTES = 2 * sizeof(Element), AT_ONCE = OUTPUTS == 2 ? 8 : 64 / BYTES, VECTORS = ROWS * BYTES / 16, CHANNELS_AT_ONCE = 32 / VECTORS;
        // No two lanes that write at once meet in a bank.
        constexpr int PITCH = ROWS * BYTES + 16 * OUTPUTS;
        static_assert(AT_ONCE * PITCH <= 4 * STAGING);
        const int lane = threadIdx.x % 32, r = lane % VECTORS * (16 / BYTES);
        const int at = __shfl_sync(0xffffffffu, row_at, r), here = __shfl_sync(0xffffffffu, row_ow, r) != NOWHERE;
        Element *to = y + at + channel0 + (long long)(lane / VECTORS) * y_c;
        char *const lines = (char *)staged, *const line = lines + lane % 4 * (RESIDUES * PITCH) + lane / 4 * BYTES;
        constexpr int FIRST = TAP_COLUMNS - RESIDUES + TAP_COLUMNS % RESIDUES, SECOND = TAP_COLUMNS - RESIDUES + (1 + TAP_COLUMNS) % RESIDUES;
#pragma unroll
        for (int channel = 0; channel < COLUMNS / 2; channel += AT_ONCE) {
            __syncwarp();
#pragma unroll
            for (int c = 0; c < AT_ONCE && channel + c < COLUMNS / 2; c += 4 * RESIDUES)
#pragma unroll
                for (int i = 0; i < 2 * MI; i++) {
                    // Of rows 8*i and further on: of two residues two channels of each, else a channel's two positions.
                    char *const to_row = line + c * PITCH + 8 * i * BYTES;
                    if constexpr (RESIDUES == 2) {
                        const float *first = &sum[i % MI][(FIRST * CHANNELS + channel + c) / 2 + i / MI * 2];
                        const float *second = &sum[i % MI][(SECOND * CHANNELS + channel + c) / 2 + i / MI * 2];
                        put(to_row, first[0], second[0], Element{});
                        put(to_row + PITCH, first[1], second[1], Element{});
                    } else {
                        const float *both = &sum[i % MI][channel + c + i / MI * 2];
                        put(to_row, both[0], both[1], Element{});
                    }
                }
            __syncwarp();
#pragma unroll
            for (int c = 0; c < AT_ONCE; c += CHANNELS_AT_ONCE) {
                const int of = c + lane / VECTORS;
                store(to, *(const uint4 *)(lines + of * PITCH + r * BYTES), here && 2 * (channel + of) < columns);
                to += (long long)CHANNELS_AT_ONCE * y_c;
            }
        }
    }

    /// Two neighbours to shared memory.
    __device__ __forceinline__ static void put(char *to, float v, float w, float) { *(float2 *)to = make_float2(v, w); }
    template <typename T> __device__ __forceinline__ static void put(char *to, float v, float w, T) {
        *(unsigned *)to = narrow_both(v, w, T{});
    }

    /// NDHWC: neighbouring lanes write neighbouring columns, four of them each; at once with `vectors`.
    __device__ __forceinline__ void last(int piece, bool vectors) const {
        const int lane = threadIdx.x % 32, quarter = lane % 4 * 4, column = piece + quarter;
        const int4 rr = *(const int4 *)&column_rr[min(column, COLUMNS - 4)], to = *(const int4 *)&column_at[min(column, COLUMNS - 4)];
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

    /// The same without single elements: 64 bytes of a row at a time, 16 of each lane, of whole vectors of channels.
    template <typename T = Element> __device__ __forceinline__ void rows(const float (&sum)[MI][REGISTERS]) const {
        constexpr int VECTOR = 16 / sizeof(T), AT_ONCE = 4 * VECTOR;
        static_assert(64 * ROWS <= 4 * STAGING);
        const int lane = threadIdx.x % 32;
        char *const lines = (char *)staged;
        // Pieces of a row in another order in each pair of rows, so that no two lanes that write at once meet in a bank.
        const auto turn = [](int row) { return (row & 2 | row >> 2 & 1) * 16; };
#pragma unroll
        for (int piece = 0; piece < COLUMNS; piece += AT_ONCE) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2 * MI; i++) {
                const float *of = &sum[i % MI][FIRST_SUM + piece / 2 + i / MI * 2];
                if constexpr (sizeof(T) == 2) {
                    unsigned v[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) v[j] = piece + 8 * j < COLUMNS ? narrow_both(of[4 * j], of[4 * j + 1], T{}) : 0;
                    const int row = lane % 8;
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                                     shared(lines) + (8 * i + row) * 64 + (lane / 8 * 16 ^ turn(row))),
                                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                                 : "memory");
                } else {
                    const int row = lane / 4;
#pragma unroll
                    for (int j = 0; j < 2 && piece + 8 * j < COLUMNS; j++)
                        put(lines + (8 * i + row) * 64 + ((32 * j + lane % 4 * 8) ^ turn(row)), of[4 * j], of[4 * j + 1], T{});
                }
            }
            __syncwarp();
            const int column = piece + lane % 4 * VECTOR, in = min(column, COLUMNS - VECTOR);
            const int rr = column_rr[in];
            Element *const to = y + column_at[in];
#pragma unroll
            for (int i = 0; i < ROWS / 8; i++) {
                const int row = lane / 4 + 8 * i;
                const int ow = __shfl_sync(0xffffffffu, row_ow, row), at = __shfl_sync(0xffffffffu, row_at, row);
                store(to + at, *(const uint4 *)(lines + row * 64 + (lane % 4 * 16 ^ turn(row % 8))),
                      column < columns && (unsigned)(ow + rr) < (unsigned)w_out);
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
    /// 16 bytes of neighbours at once.
    __device__ __forceinline__ static void store(Element *to, uint4 v, bool here) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.b32 [%0], {%1, %2, %3, %4};}" ::"l"(to), "r"(v.x), "r"(v.y),
                     "r"(v.z), "r"(v.w), "r"((int)here)
                     : "memory");
    }
    /// 8 bytes.
    __device__ __forceinline__ static void store(Element *to, uint2 v, bool here) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p st.global.v2.b32 [%0], {%1, %2};}" ::"l"(to), "r"(v.x), "r"(v.y), "r"((int)here)
                     : "memory");
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
