// A tensor by rows, as the gradients of a convolution's factors read it: channels together, the taps' residues beside one
// another, zeros where there is nothing.
//
// Row `((n*qd + id)*qh + ih)*qw + iw` has for each group of the convolution `slots` elements: of class `j = (jd*uh + jh)*uw +
// jw` and the group's channel `c` at `j*group_in + c` the tensor's element at `o = s*i - p + j*d` along each axis. So what a
// tap `j + m*step` reads for the input's voxel `i` is of class `j`, `m` times a constant number of rows further on. The
// input itself is one class, `s` = 1 and `p` = 0. Rows that no voxel has are zeros. Slots past the last class are not written.
//
// Slot `s` of all groups' (`group*slots + j*group_in + c`) of row `r` is element `s / VECTOR * panel + r * row + s % VECTOR` of
// `out`, with VECTOR elements in 16 bytes: rows one after the other (`row` = groups * slots, `panel` = VECTOR), or 16 bytes of
// all rows side by side (`row` = VECTOR, `panel` = VECTOR * rows).
//
// With `y` the elements are not those of `x` but the gradient of the convolution's output that follows from it: `dy =
// (rstd*gamma*dv + q + r*h) * f` of `gradient_sums` and `gradient_vectors`.
//
// `KIND` 5 has float32 and writes fp16, each channel scaled by the power of two that `row_exponent` makes of its bound. `KIND` 2 writes
// two fp16, the low parts `low` elements after the high ones; `group_in` is a multiple of VECTOR. Where the channels of a vector are not
// all zero and `is_too_coarse`, the word becomes an infinity.
//
// Parameters: `x`, `out` (a multiple of 16 bytes, of an element where `group_in` is none of VECTOR), for KIND 5 and 2 `bounds` (of each channel what no magnitude is past), for KIND 1
// `unless` (null, or words after which the result of another kernel may stand; then nothing is done), `control` (the word
// of the largest magnitude of what is written, as bits of float32), `y` (null: no epilogue), `mean`, `rstd`, `terms` (null: no
// normalization), `gamma`, `beta` (null: 1 and 0);
// i32: `channels`, `group_channels` of the normalization; `activation`, `post`; f64: `slope`, `post_slope`; i32: `round` (1: to tf32, for kernels that multiply such), `groups`,
// `group_in`, `slots`; of depth, then height, then width: size of the tensor, rows' size, classes, stride, padding,
// dilation; i64: strides of the tensor: n, c, d, h, w; `row`, `panel`, for KIND 2 `low`. Threads: 256. Grid: n * ceil(qd*ud*qh*uh*qw*uw / (4096 /
// CHANNELS)) * ceil(channels / CHANNELS).

#include "divisor.cuh"
#if KIND == 4
#include "element.cuh"
#else
#include "gradient_taps.cuh"
#include "half_parts.cuh"
#endif
#include "slope.cuh"

#include <type_traits>

/// One axis.
struct Axis {
    int size, rows, classes, stride, padding, dilation;
};

#ifndef CHANNELS
#error "CHANNELS: of a block"
#endif

/// What is written.
using Stored = std::conditional_t<SCALED, Half, Element>;
constexpr bool NARROW = sizeof(Stored) == 2;
constexpr int VECTOR = 16 / sizeof(Stored), THREADS = 256, POSITIONS = 4096 / CHANNELS;
/// Vectors of a position, and from one to the next in shared memory: threads that write neighbours read different banks.
constexpr int UNITS = CHANNELS / VECTOR, PITCH = POSITIONS + (UNITS < 8 ? 8 / UNITS : 1);
/// Positions of which a thread has a vector at once, and how often; channels of them that it computes at once.
constexpr int OWN = 2, TURNS = POSITIONS * UNITS / THREADS / OWN;
constexpr int AT_ONCE = 2, PIECE = 16 / sizeof(Element);
static_assert(TURNS * OWN * THREADS == POSITIONS * UNITS && VECTOR % AT_ONCE == 0, "vectors are dealt out evenly");

template <bool VALUE> struct Whether {
    static constexpr bool value = VALUE;
};

/// Elements that become 16 bytes.
struct __align__(16) Vector {
    Element of[VECTOR];
};

/// How a channel's gradients follow: `dy = (factor*dv + q + r*h) * f`.
struct __align__(16) Channel {
    Norm norm;
    Sum factor, q, r, unused;
};

/// Those of a vector; 16 bytes further than the next in other banks.
struct Channels {
    Channel of[VECTOR];
    uint4 apart;
};

/// Where a channel of a sample begins. From shared memory, so that an element's address is one instruction away: of an address
/// that it knows more about, the compiler makes three.
struct __align__(16) Starts {
    const Element *x, *y;
};

#define NARROWED (KIND == 0 || SCALED)
#if NARROWED
/// Two neighbours as a word of a vector's 16 bytes; of two parts also of its low one, and the larger of them counts.
__device__ __forceinline__ void put(uint4 (&result)[PARTS][OWN], unsigned (&largest)[OWN], int k, int word, Sum x, Sum y) {
#if KIND == 2
    largest[k] = max(largest[k], max(magnitude(x), magnitude(y)));
    (&result[0][k].x)[word] = half_parts(x, y, LOW, (&result[1][k].x)[word]);
#else
    (&result[0][k].x)[word] = narrow_both(x, y, Stored{});
#endif
}
#endif

template <typename Offset> __device__ __forceinline__ Element load(const Element *start, Offset offset) {
    const Element *const at = start + offset;
    __builtin_assume(__isGlobal(at));
    return *at;
}

extern "C" __global__ void __launch_bounds__(THREADS, KIND == 4 ? 2 : 4) gradient_rows(
    const Element *x, Stored *out,
#if SCALED
    const float *bounds,
#elif KIND == 1
    const unsigned *unless,
#endif
    unsigned *control, const Element *y, const Sum *mean, const Sum *rstd, const Sum *terms,
    const Element *gamma, const Element *beta, int channels, int group_channels, int activation, int post, double slope, double post_slope,
    int round, int groups, int group_in, int slots, int size_d, int rows_d, int classes_d, int stride_d, int padding_d, int dilation_d, int size_h,
    int rows_h, int classes_h, int stride_h, int padding_h, int dilation_h, int size_w, int rows_w, int classes_w, int stride_w,
    int padding_w, int dilation_w, long long x_n, long long x_c, long long x_d, long long x_h, long long x_w, long long row,
    long long panel
#if KIND == 2
    , long long low
#endif
) {
#if KIND == 1
    if (stands(unless)) return;
#endif
    const Axis d = {size_d, rows_d, classes_d, stride_d, padding_d, dilation_d}, h = {size_h, rows_h, classes_h, stride_h, padding_h, dilation_h},
               w = {size_w, rows_w, classes_w, stride_w, padding_w, dilation_w};
    __shared__ uint4 staged[PARTS][UNITS * PITCH];
    // Where each position reads, from the sample's start, and writes; the slot of its class in every group.
    __shared__ long long from[POSITIONS], to[POSITIONS];
    __shared__ int class_slot[POSITIONS];
    __shared__ Channels of_channels[UNITS];
    __shared__ Starts starts[CHANNELS];
    __shared__ Divisor divisors[5];
    [[maybe_unused]] __shared__ unsigned of_warp[THREADS / 32];
    const int channel_blocks = (channels + CHANNELS - 1) / CHANNELS, c0 = blockIdx.x % channel_blocks * CHANNELS;
    const unsigned positions = d.rows * d.classes * h.rows * h.classes * w.rows * w.classes, tiles = (positions + POSITIONS - 1) / POSITIONS;
    const int tile = blockIdx.x / channel_blocks, n = tile / tiles;
    const bool vectors = group_in % VECTOR == 0, panels = row == VECTOR;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x < 5) {
        const int bases[] = {w.classes, w.rows, h.classes, h.rows, d.classes};
        int by = 1;
#pragma unroll
        for (int digit = 0; digit < 5; digit++)
            if (threadIdx.x == digit) by = bases[digit];
        divisors[threadIdx.x] = Divisor(by);
    }
    if (threadIdx.x >= THREADS - CHANNELS) {
        // Past the last channel the last one is read, and written nowhere.
        const int at = THREADS - 1 - threadIdx.x, c = min(c0 + at, channels - 1);
        const long long start = n * x_n + c * x_c;
        starts[at] = {x + start, y + start};
        if (y || SCALED) {
            Sum scale = 1;
#if SCALED
            scale = power(row_exponent(bounds[c]));
#endif
            Channel of = {norm_of(n, c, channels, group_channels, mean, rstd, gamma, beta), scale, 0, 0};
            if (mean) {
                const int group = n * (channels / group_channels) + c / group_channels;
                of.factor = scale * of.norm.rstd * of.norm.gamma;
                of.q = scale * terms[2 * group];
                of.r = scale * terms[2 * group + 1];
            }
            of_channels[at / VECTOR].of[at % VECTOR] = of;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < POSITIONS; i += THREADS) {
        int rest = (tile - n * tiles) * POSITIONS + i;
        const bool real = (unsigned)rest < positions;
        const auto digit = [&](int which) {
            const Divisor base = divisors[which];
            const int above = base.divide(rest), digit = rest - above * base.by;
            rest = above;
            return digit;
        };
        // Neighbours in the tensor are neighbours here.
        const int jw = digit(0), iw = digit(1), jh = digit(2), ih = digit(3), jd = digit(4), id = rest;
        const int od = d.stride * id - d.padding + jd * d.dilation, oh = h.stride * ih - h.padding + jh * h.dilation;
        const int ow = w.stride * iw - w.padding + jw * w.dilation;
        const bool here = real && (unsigned)od < (unsigned)d.size && (unsigned)oh < (unsigned)h.size && (unsigned)ow < (unsigned)w.size;
        from[i] = here ? (unsigned)od * x_d + (unsigned)oh * x_h + (unsigned)ow * x_w : -1;
        const unsigned slot = ((jd * h.classes + jh) * w.classes + jw) * group_in;
        const long long start = (unsigned)(((n * d.rows + id) * h.rows + ih) * w.rows + iw) * row;
        to[i] = !real ? -1 : vectors ? start + slot / VECTOR * panel : start;
        class_slot[i] = slot;
    }
    __syncthreads();
    // Vector `unit` of a position, of which a thread has several: neighbouring threads have neighbouring positions, or vectors.
    const auto unit_of = [&](bool across, int turn) -> int { return across ? threadIdx.x % UNITS : (warp * TURNS + turn) * OWN / (POSITIONS / 32); };
    const auto position_of = [&](bool across, int turn, int k) -> int {
        if (across) return threadIdx.x / UNITS + THREADS / UNITS * (turn * OWN + k);
        return lane + 32 * ((warp * TURNS + turn) * OWN % (POSITIONS / 32) + k);
    };
    // Where a channel's slot of the first class is. Of one group that takes no division, of which each thread would have several.
    const auto slot_of = [&](int c) { return groups == 1 ? c : c / group_in * (slots - group_in) + c; };
    // Channels of a vector are of one group and one class.
    const auto write = [&](int unit, int position, const uint4 &v, int part) {
        const int c = c0 + unit * VECTOR, start = slot_of(c);
        Stored *at = out + to[position] + start / VECTOR * panel;
#if KIND == 2
        if (part) at += low;
#endif
        if (c < channels && to[position] >= 0) *(uint4 *)at = v;
    };
    const bool at_once = vectors && (UNITS == 1 || panels == (x_c != 1));
    [[maybe_unused]] unsigned most = 0;
    const auto read = [&](auto order, auto follows, auto known) {
        constexpr bool LAST = order.value, FOLLOWS = follows.value;
        // Channels that are loaded before one of them is computed: of narrow ones as many as there are registers for, of which SiLU and
        // hardswish take most.
        constexpr bool ROOMY = (KIND == 0 || KIND == 5) && UNITS > 1 && known.second != HARDSWISH;
        constexpr int LOADED = VECTOR <= 4 ? VECTOR : ROOMY ? 4 : AT_ONCE;
        const Activation<known.first> first(activation, slope);
        const Activation<known.second> after(post, post_slope);
        const Element *const x_sample = x + n * x_n, *const y_sample = y + n * x_n;
        const bool whole = LAST && channels % VECTOR == 0 && (x_n | x_d | x_h | x_w) % VECTOR == 0 && ((size_t)x | (size_t)y) % 16 == 0;
#pragma unroll 1
        for (int turn = 0; turn < TURNS; turn++) {
            const int unit = unit_of(LAST, turn), c = c0 + unit * VECTOR;
            if (c >= channels) continue;
            // Of voxels of a channel alone 32 bits are enough.
            using Offset = std::conditional_t<LAST, long long, unsigned>;
            Offset at[OWN];
            unsigned here = 0;
#pragma unroll
            for (int k = 0; k < OWN; k++) {
                const long long start = from[position_of(LAST, turn, k)];
                here |= (start >= 0) << k;
                // What is not there reads the sample's first.
                at[k] = start >= 0 ? (Offset)start : 0;
            }
            uint4 result[PARTS][OWN] = {};
            // Of KIND 2 the largest of a vector.
            [[maybe_unused]] unsigned largest[OWN] = {};
            if (LAST || __any_sync(0xffffffffu, here)) {
                Vector of_x[OWN], of_y[OWN];
                const auto load_channels = [&](int e0, int count) {
#pragma unroll
                    for (int e = e0; e < e0 + count; e++) {
                        const Starts start = starts[unit * VECTOR + e];
#pragma unroll
                        for (int k = 0; k < OWN; k++) {
                            of_x[k].of[e] = load(start.x, at[k]);
                            if (FOLLOWS) of_y[k].of[e] = load(start.y, at[k]);
                        }
                    }
                };
                const auto load_whole = [&](int e0) {
#pragma unroll
                    for (int k = 0; k < OWN; k++) {
                        *(uint4 *)&of_x[k].of[e0] = *(const uint4 *)(x_sample + at[k] + c + e0);
                        if (FOLLOWS) *(uint4 *)&of_y[k].of[e0] = *(const uint4 *)(y_sample + at[k] + c + e0);
                    }
                };
                if (LAST && whole) {
#pragma unroll
                    for (int e0 = 0; e0 < (FOLLOWS ? PIECE : VECTOR); e0 += PIECE) load_whole(e0);
                } else if (!FOLLOWS) {
                    load_channels(0, VECTOR);
                }
                if (FOLLOWS) {
#pragma unroll
                    for (int e0 = 0; e0 < VECTOR; e0 += AT_ONCE) {
                        if (LAST && whole) {
                            if (e0 > 0 && e0 % PIECE == 0) load_whole(e0);
                        } else if (e0 % LOADED == 0) {
                            load_channels(e0, LOADED);
                        }
                        // Of each channel its positions.
                        Sum v[AT_ONCE * OWN], a[AT_ONCE * OWN], f[AT_ONCE * OWN], h[AT_ONCE * OWN], unused[AT_ONCE * OWN], dy[AT_ONCE * OWN];
                        Channel of[AT_ONCE];
#pragma unroll
                        for (int i = 0; i < AT_ONCE * OWN; i++) v[i] = widen(of_y[i % OWN].of[e0 + i / OWN]);
                        first.of(v, a, f);
#pragma unroll
                        for (int e = 0; e < AT_ONCE; e++) of[e] = of_channels[unit].of[e0 + e];
#pragma unroll
                        for (int i = 0; i < AT_ONCE * OWN; i++) {
                            h[i] = of[i / OWN].norm.normalized(a[i]);
                            v[i] = of[i / OWN].norm.scaled(h[i]);
                        }
                        after.of(v, unused, a);
#pragma unroll
                        for (int i = 0; i < AT_ONCE * OWN; i++) dy[i] = widen(of_x[i % OWN].of[e0 + i / OWN]);
                        after.back(dy, a);
                        if (mean) {
#pragma unroll
                            for (int i = 0; i < AT_ONCE * OWN; i++) dy[i] = of[i / OWN].factor * dy[i] + (of[i / OWN].q + of[i / OWN].r * h[i]);
                        } else if (SCALED) {
#pragma unroll
                            for (int i = 0; i < AT_ONCE * OWN; i++) dy[i] *= of[i / OWN].factor;
                        }
                        first.back(dy, f);
#pragma unroll
                        for (int i = 0; i < AT_ONCE * OWN; i++) {
#if NARROWED
                            if (i / OWN % 2 == 0) put(result, largest, i % OWN, (e0 + i / OWN) / 2, dy[i], dy[i + OWN]);
#else
                            narrow(dy[i], &of_x[i % OWN].of[e0 + i / OWN]);
#endif
                        }
                    }
                }
#if SCALED
                if (!FOLLOWS) {
#pragma unroll
                    for (int e = 0; e < VECTOR; e += 2) {
                        const Sum scale = of_channels[unit].of[e].factor, next = of_channels[unit].of[e + 1].factor;
#pragma unroll
                        for (int k = 0; k < OWN; k++) put(result, largest, k, e / 2, of_x[k].of[e] * scale, of_x[k].of[e + 1] * next);
                    }
                }
#else
                if (!NARROW || !FOLLOWS) {
#pragma unroll
                    for (int k = 0; k < OWN; k++) result[0][k] = *(const uint4 *)&of_x[k];
                }
#endif
#pragma unroll
                for (int k = 0; k < OWN; k++) {
#pragma unroll
                    for (int word = 0; word < 4 * PARTS; word++) {
                        unsigned &of = (&result[word / 4][k].x)[word % 4];
                        of = here >> k & 1 ? of : 0;
#if KIND == 0 || KIND == 5
                        most = __vmaxu2(most, of & 0x7fff7fffu);
#elif KIND == 1
                        most = max(most, of & 0x7fffffffu);
#endif
                    }
#if KIND == 2
                    if (here >> k & 1 && is_too_coarse(largest[k])) most = 0x7f800000u;
#endif
                }
            }
#if KIND == 1
            if (round) {
#pragma unroll
                for (int k = 0; k < OWN; k++) {
                    unsigned(&words)[4] = *(unsigned(*)[4])&result[0][k];
#pragma unroll
                    for (int word = 0; word < 4; word++) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(words[word]) : "f"(__uint_as_float(words[word])));
                }
            }
#endif
#pragma unroll
            for (int k = 0; k < OWN; k++) {
                const int position = position_of(LAST, turn, k);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    if (at_once)
                        write(unit, position, result[part][k], part);
                    else
                        staged[part][unit * PITCH + position] = result[part][k];
            }
        }
    };
    const auto read_by_order = [&](auto follows, auto known) {
        if (x_c == 1)
            read(Whether<true>(), follows, known);
        else
            read(Whether<false>(), follows, known);
    };
    if (y)
        by_known<KIND != 0 || UNITS != 1>(activation, post, [&](auto known) { read_by_order(Whether<true>(), known); });
    else
        read_by_order(Whether<false>(), Both<NONE, NONE>());
    if (!at_once) __syncthreads();
    if (!at_once && vectors) {
#pragma unroll
        for (int k = 0; k < OWN * TURNS; k++) {
            const int unit = unit_of(!panels, k / OWN), position = position_of(!panels, k / OWN, k % OWN);
#pragma unroll
            for (int part = 0; part < PARTS; part++) write(unit, position, staged[part][unit * PITCH + position], part);
        }
    } else if (!at_once) {
        const int at = threadIdx.x % CHANNELS, c = c0 + at, start = slot_of(c);
#pragma unroll 4
        for (int position = threadIdx.x / CHANNELS; position < POSITIONS; position += THREADS / CHANNELS) {
            if (c >= channels || to[position] < 0) continue;
            const int slot = start + class_slot[position];
            out[to[position] + slot / VECTOR * panel + slot % VECTOR] = ((const Stored *)&staged[0][at / VECTOR * PITCH + position])[at % VECTOR];
        }
    }
#if KIND != 4
    // One thread looks whether there has been one as large, where it last saw it: many would wait for each other.
    if (NARROW && KIND != 2) most = max(most & 0xffffu, most >> 16);
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane == 0) of_warp[warp] = most;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int other = 1; other < THREADS / 32; other++) most = max(most, of_warp[other]);
        if (KIND != 2) most = as_float32(Stored{}, most);
        if (most > *control) atomicMax(control, most);
    }
#endif
}
