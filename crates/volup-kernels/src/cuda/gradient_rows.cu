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
// Parameters: `x`, `out` (a multiple of 16 bytes), `control` (the word of the largest magnitude, as bits of float32), `y` (null: no epilogue), `mean`, `rstd`, `terms` (null: no normalization), `gamma`, `beta` (null: 1 and 0);
// i32: `channels`, `group_channels` of the normalization; `activation`, `post`; f64: `slope`, `post_slope`; i32: `round` (1: to tf32, for kernels that multiply such), `groups`,
// `group_in`, `slots`; of depth, then height, then width: size of the tensor, rows' size, classes, stride, padding,
// dilation; i64: strides of the tensor: n, c, d, h, w; `row`, `panel`. Threads: 256. Grid: n * ceil(qd*ud*qh*uh*qw*uw / (4096 /
// CHANNELS)) * ceil(channels / CHANNELS).

#include "digits.cuh"
#if KIND == 4
#include "element.cuh"
#else
#include "operand.cuh"
#endif
#include "slope.cuh"

/// One axis.
struct Axis {
    int size, rows, classes, stride, padding, dilation;
};

#ifndef CHANNELS
#error "CHANNELS: of a block"
#endif

constexpr int VECTOR = 16 / sizeof(Element), THREADS = 256, POSITIONS = 4096 / CHANNELS, GROUPS = 4, OWN = 4;
/// Groups of elements of a channel that one thread has.
constexpr int SHARED_BY = 32 / CHANNELS;
static_assert(CHANNELS == 8 || CHANNELS == 16 || CHANNELS == 32, "groups of elements are dealt out for these");

template <bool VALUE> struct Whether {
    static constexpr bool value = VALUE;
};

/// How a channel's gradients follow: `dy = (factor*dv + q + r*h) * f`.
struct Channel {
    Norm norm;
    Sum factor, q, r;
};

extern "C" __global__ void __launch_bounds__(THREADS, KIND == 4 ? 2 : 4) gradient_rows(
    const Element *x, Element *out, unsigned *control, const Element *y, const Sum *mean, const Sum *rstd, const Sum *terms,
    const Element *gamma, const Element *beta, int channels, int group_channels, int activation, int post, double slope, double post_slope,
    int round, int groups, int group_in, int slots, int size_d, int rows_d, int classes_d, int stride_d, int padding_d, int dilation_d, int size_h,
    int rows_h, int classes_h, int stride_h, int padding_h, int dilation_h, int size_w, int rows_w, int classes_w, int stride_w,
    int padding_w, int dilation_w, long long x_n, long long x_c, long long x_d, long long x_h, long long x_w, long long row,
    long long panel) {
    const Axis d = {size_d, rows_d, classes_d, stride_d, padding_d, dilation_d}, h = {size_h, rows_h, classes_h, stride_h, padding_h, dilation_h},
               w = {size_w, rows_w, classes_w, stride_w, padding_w, dilation_w};
    __shared__ Element staged[POSITIONS][CHANNELS + 8 / sizeof(Element) + 1];
    // Where each position reads, from the sample's start, its row's start, and the slot of its class in every group.
    __shared__ long long from[POSITIONS], to[POSITIONS];
    __shared__ int slot[POSITIONS];
    __shared__ Channel of_channel[CHANNELS];
    [[maybe_unused]] __shared__ unsigned of_warp[THREADS / 32];
    const int channel_blocks = (channels + CHANNELS - 1) / CHANNELS, c0 = blockIdx.x % channel_blocks * CHANNELS;
    const unsigned positions = d.rows * d.classes * h.rows * h.classes * w.rows * w.classes, tiles = (positions + POSITIONS - 1) / POSITIONS;
    const int tile = blockIdx.x / channel_blocks, n = tile / tiles;
    if (y && threadIdx.x >= THREADS - CHANNELS) {
        const int at = THREADS - 1 - threadIdx.x, c = c0 + at;
        if (c < channels) {
            Channel of = {norm_of(n, c, channels, group_channels, mean, rstd, gamma, beta), 1, 0, 0};
            if (mean) {
                const int group = n * (channels / group_channels) + c / group_channels;
                of.factor = of.norm.rstd * of.norm.gamma;
                of.q = terms[2 * group];
                of.r = terms[2 * group + 1];
            }
            of_channel[at] = of;
        }
    }
    for (int i = threadIdx.x; i < POSITIONS; i += THREADS) {
        Digits<unsigned> digits = {(tile - n * tiles) * POSITIONS + i};
        const bool real = digits.rest < positions;
        // Neighbours in the tensor are neighbours here.
        const int jw = digits.next(w.classes), iw = digits.next(w.rows), jh = digits.next(h.classes), ih = digits.next(h.rows);
        const int jd = digits.next(d.classes), id = (int)digits.rest;
        const int od = d.stride * id - d.padding + jd * d.dilation, oh = h.stride * ih - h.padding + jh * h.dilation;
        const int ow = w.stride * iw - w.padding + jw * w.dilation;
        const bool here = real && (unsigned)od < (unsigned)d.size && (unsigned)oh < (unsigned)h.size && (unsigned)ow < (unsigned)w.size;
        from[i] = here ? n * x_n + od * x_d + oh * x_h + ow * x_w : -1;
        to[i] = ((((long long)n * d.rows + id) * h.rows + ih) * w.rows + iw) * row;
        slot[i] = real ? ((jd * h.classes + jh) * w.classes + jw) * group_in : -1;
    }
    __syncthreads();
    [[maybe_unused]] unsigned most = 0;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Neighbouring threads read neighbours: positions, or channels. Elements that a thread has at once are of one channel.
    const auto read = [&](auto order, auto known) {
        constexpr bool LAST = order.value;
        const Activation<known.first> first(activation, slope);
        const Activation<known.second> after(post, post_slope);
#pragma unroll(GROUPS / 2)
        for (int group = 0; group < GROUPS; group++) {
            const int channel = LAST ? lane % CHANNELS : warp * (CHANNELS / 8) + group / SHARED_BY;
            const auto position = [&](int k) -> int {
                if (LAST) return threadIdx.x / CHANNELS + THREADS / CHANNELS * (group * OWN + k);
                return lane + 32 * (group % SHARED_BY * OWN + k);
            };
            const bool there = c0 + channel < channels;
            const long long start = (c0 + channel) * x_c;
            Element of_x[OWN], of_y[OWN];
            bool here[OWN];
#pragma unroll
            for (int k = 0; k < OWN; k++) {
                const long long at = from[position(k)];
                here[k] = at >= 0 && there;
                of_x[k] = here[k] ? x[at + start] : Element{};
                of_y[k] = here[k] && y ? y[at + start] : Element{};
            }
            if (y) {
                const Channel of = of_channel[channel];
                Sum v[OWN], a[OWN], f[OWN], h[OWN], unused[OWN], post_f[OWN];
#pragma unroll
                for (int k = 0; k < OWN; k++) v[k] = widen(of_y[k]);
                first.of(v, a, f);
#pragma unroll
                for (int k = 0; k < OWN; k++) {
                    h[k] = of.norm.normalized(a[k]);
                    v[k] = of.norm.scaled(h[k]);
                }
                after.of(v, unused, post_f);
#pragma unroll
                for (int k = 0; k < OWN; k++) {
                    Sum dy = after.back(widen(of_x[k]), post_f[k]);
                    if (mean) dy = of.factor * dy + (of.q + of.r * h[k]);
                    dy = first.back(dy, f[k]);
                    if (here[k]) narrow(dy, &of_x[k]);
                }
            }
#pragma unroll
            for (int k = 0; k < OWN; k++) {
#if KIND != 4
                most = max(most, magnitude(of_x[k]));
#endif
#if KIND == 1
                if (round) {
                    unsigned bits;
                    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(of_x[k]));
                    of_x[k] = __uint_as_float(bits);
                }
#endif
                staged[position(k)][channel] = of_x[k];
            }
        }
    };
    by_known(activation, post, [&](auto known) {
        if (x_c == 1)
            read(Whether<true>(), known);
        else
            read(Whether<false>(), known);
    });
    __syncthreads();
    if (group_in % VECTOR == 0) {
        // Neighbouring channels at once: they are of one group, and of one class.
        constexpr int PER = CHANNELS / VECTOR;
        const int c = c0 + threadIdx.x % PER * VECTOR, start = c / group_in * (slots - group_in) + c;
#pragma unroll
        for (int k = 0; k < GROUPS * OWN / VECTOR; k++) {
            const int position = threadIdx.x / PER + k * (THREADS / PER);
            if (c >= channels || slot[position] < 0) continue;
            __align__(16) Element v[VECTOR];
#pragma unroll
            for (int e = 0; e < VECTOR; e++) v[e] = staged[position][c - c0 + e];
            *(uint4 *)(out + to[position] + (start + slot[position]) / VECTOR * panel) = *(const uint4 *)v;
        }
    } else {
        const int c = c0 + threadIdx.x % CHANNELS, start = c / group_in * (slots - group_in) + c;
#pragma unroll 4
        for (int k = 0; k < GROUPS * OWN; k++) {
            const int position = threadIdx.x / CHANNELS + k * (THREADS / CHANNELS);
            if (c >= channels || slot[position] < 0) continue;
            const int at = start + slot[position];
            out[to[position] + at / VECTOR * panel + at % VECTOR] = staged[position][threadIdx.x % CHANNELS];
        }
    }
#if KIND != 4
    // One thread looks whether there has been one as large, where it last saw it: many would wait for each other.
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane == 0) of_warp[warp] = most;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int other = 1; other < THREADS / 32; other++) most = max(most, of_warp[other]);
        most = as_float32(Element{}, most);
        if (most > *control) atomicMax(control, most);
    }
#endif
}
