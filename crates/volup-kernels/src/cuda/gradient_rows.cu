// A tensor by rows, as the gradients of a convolution's factors read it: channels together, the taps' residues beside one
// another, zeros where there is nothing.
//
// Row `((n*qd + id)*qh + ih)*qw + iw` has for each group of the convolution `slots` elements: of class `j = (jd*uh + jh)*uw +
// jw` and the group's channel `c` at `j*group_in + c` the tensor's element at `o = s*i - p + j*d` along each axis. So what a
// tap `j + m*step` reads for the input's voxel `i` is of class `j`, `m` times a constant number of rows further on. The
// input itself is one class, `s` = 1 and `p` = 0. Rows that no voxel has are zeros.
//
// With `y` the elements are not those of `x` but the gradient of the convolution's output that follows from it: `dy =
// (rstd*gamma*dv + q + r*h) * f` of `gradient_sums` and `gradient_vectors`.
//
// Parameters: `x`, `out` (a multiple of 16 bytes), `control` (the word of the largest magnitude, as bits of float32; null:
// nobody asks), `y` (null: no epilogue), `mean`, `rstd`, `terms` (null: no normalization), `gamma`, `beta` (null: 1 and 0);
// i32: `channels`, `group_channels` of the normalization; `activation`, `post`; f64: `slope`, `post_slope`; i32: `groups`,
// `group_in`, `slots`; of depth, then height, then width: size of the tensor, rows' size, classes, stride, padding,
// dilation; i64: strides of the tensor: n, c, d, h, w. Threads: 256. Grid: n * ceil(qd*ud*qh*uh*qw*uw / 64) *
// ceil(channels / 32).

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

constexpr int CHANNELS = 32, POSITIONS = 64, THREADS = 256, OWN = POSITIONS * CHANNELS / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS) gradient_rows(
    const Element *x, Element *out, unsigned *control, const Element *y, const Sum *mean, const Sum *rstd, const Sum *terms,
    const Element *gamma, const Element *beta, int channels, int group_channels, int activation, int post, double slope, double post_slope,
    int groups, int group_in, int slots, int size_d, int rows_d, int classes_d, int stride_d, int padding_d, int dilation_d, int size_h,
    int rows_h, int classes_h, int stride_h, int padding_h, int dilation_h, int size_w, int rows_w, int classes_w, int stride_w,
    int padding_w, int dilation_w, long long x_n, long long x_c, long long x_d, long long x_h, long long x_w) {
    const Axis d = {size_d, rows_d, classes_d, stride_d, padding_d, dilation_d}, h = {size_h, rows_h, classes_h, stride_h, padding_h, dilation_h},
               w = {size_w, rows_w, classes_w, stride_w, padding_w, dilation_w};
    __shared__ Element staged[POSITIONS][CHANNELS + 8 / sizeof(Element) + 1];
    // Where each position reads, from the sample's start, and writes.
    __shared__ long long from[POSITIONS], to[POSITIONS];
    const int channel_blocks = (channels + CHANNELS - 1) / CHANNELS, c0 = blockIdx.x % channel_blocks * CHANNELS;
    const int positions = d.rows * d.classes * h.rows * h.classes * w.rows * w.classes, tiles = (positions + POSITIONS - 1) / POSITIONS;
    const int tile = blockIdx.x / channel_blocks, n = tile / tiles;
    if (threadIdx.x < POSITIONS) {
        int p = (tile - n * tiles) * POSITIONS + threadIdx.x;
        const bool real = p < positions;
        const auto next = [&p](int by) {
            const int digit = p % by;
            p /= by;
            return digit;
        };
        // Neighbours in the tensor are neighbours here.
        const int jw = next(w.classes), iw = next(w.rows), jh = next(h.classes), ih = next(h.rows), jd = next(d.classes), id = p;
        const int od = d.stride * id - d.padding + jd * d.dilation, oh = h.stride * ih - h.padding + jh * h.dilation;
        const int ow = w.stride * iw - w.padding + jw * w.dilation;
        const bool here = real && (unsigned)od < (unsigned)d.size && (unsigned)oh < (unsigned)h.size && (unsigned)ow < (unsigned)w.size;
        from[threadIdx.x] = here ? n * x_n + od * x_d + oh * x_h + ow * x_w : -1;
        const long long row = (((long long)n * d.rows + id) * h.rows + ih) * w.rows + iw;
        to[threadIdx.x] = real ? row * groups * slots + ((jd * h.classes + jh) * w.classes + jw) * group_in : -1;
    }
    __syncthreads();
    // Neighbouring threads read neighbours: positions, or channels.
    const bool last = x_c == 1;
    unsigned most = 0;
    Element of_x[OWN], of_y[OWN];
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        const int at = threadIdx.x + k * THREADS, c = c0 + (last ? at % CHANNELS : at / POSITIONS);
        const long long start = from[last ? at / CHANNELS : at % POSITIONS];
        const bool here = start >= 0 && c < channels;
        of_x[k] = here ? x[start + c * x_c] : Element{};
        if (y) of_y[k] = here ? y[start + c * x_c] : Element{};
    }
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        const int at = threadIdx.x + k * THREADS, c = c0 + (last ? at % CHANNELS : at / POSITIONS);
        const int position = last ? at / CHANNELS : at % POSITIONS;
        if (y && from[position] >= 0 && c < channels) {
            const Epilogue by = epilogue_of(n, c, channels, group_channels, mean, rstd, gamma, beta, activation, slope, post, post_slope);
            const Sum value = widen(of_y[k]), normalized = by.normalized(value);
            Sum gradient = by.before_post(widen(of_x[k]), normalized);
            if (mean) {
                const int group = n * (channels / group_channels) + c / group_channels;
                gradient = by.rstd * by.gamma * gradient + terms[2 * group] + terms[2 * group + 1] * normalized;
            }
            narrow(back_through(gradient, value, activation, (Sum)slope), &of_x[k]);
        }
        staged[position][last ? at % CHANNELS : at / POSITIONS] = of_x[k];
#if KIND != 4
        most = max(most, magnitude(of_x[k]));
#endif
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        const int at = threadIdx.x + k * THREADS, position = at / CHANNELS, c = c0 + at % CHANNELS, group = c / group_in;
        if (c < channels && to[position] >= 0) out[to[position] + group * (slots - group_in) + c] = staged[position][at % CHANNELS];
    }
#if KIND != 4
    if (control) raise(control, as_float32(Element{}, most));
#endif
}
