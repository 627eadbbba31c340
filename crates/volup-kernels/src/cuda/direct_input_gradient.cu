// The gradient of the input by its definition: `dx[n, ci, i]` is the sum over the taps and the channels of the group of `dy[n,
// co, i*s - p + t*d] * w[ci, co, t]`. A tap that reads outside adds nothing, even where the weight is infinite or NaN.
//
// Parameters: `rows` (of `gradient_rows`), for KIND 5 `bounds` (that its channels are scaled by), `w`, `dx`, `control` (null, or words after which the result of another kernel may
// stand; then nothing is done); i32: `n`, `groups`, `group_in`, `group_out`, `slots`; of depth, height, width what
// `gradient_taps.cuh` says; i64: strides of `dx`: n, c, d, h, w, and `row` and `panel` of the rows. Threads: 256. Grid: any
// number of blocks.

#include "digits.cuh"
#include "gradient_taps.cuh"
#include "row_layout.cuh"

extern "C" __global__ void __launch_bounds__(256) direct_input_gradient(const Row *rows,
#if KIND == 5
                                                                        const float *bounds,
#endif
                                                                        const Element *w, Element *dx, const unsigned *control,
                                                                        int n, int groups, int group_in, int group_out, int slots, TAP_AXIS(d),
                                                                        TAP_AXIS(h), TAP_AXIS(w), long long x_n, long long x_c, long long x_d,
                                                                        long long x_h, long long x_w, long long row, long long panel) {
    if (stands(control)) return;
    const TapAxis d = TAP_AXIS_OF(d), h = TAP_AXIS_OF(h), wide = TAP_AXIS_OF(w);
    const RowLayout layout = {row, panel};
    const int channels = groups * group_in;
    const long long all = (long long)n * channels * d.input * h.input * wide.input;
    for (long long at = blockIdx.x * 256ll + threadIdx.x; at < all; at += gridDim.x * 256ll) {
        Digits<long long> digits = {at};
        const int channel = digits.next(channels), iw = digits.next(wide.input), ih = digits.next(h.input);
        const int id = digits.next(d.input), sample = (int)digits.rest;
        const int group = channel / group_in;
        Sum sum = 0;
        for (int td = 0; td < d.kernel; td++) {
            if (!d.reads(id, td)) continue;
            for (int th = 0; th < h.kernel; th++) {
                if (!h.reads(ih, th)) continue;
                for (int tw = 0; tw < wide.kernel; tw++) {
                    if (!wide.reads(iw, tw)) continue;
                    const long long qd = id + td / d.step * d.apart, qh = ih + th / h.step * h.apart, qw = iw + tw / wide.step * wide.apart;
                    const int j = (td % d.step * h.classes + th % h.step) * wide.classes + tw % wide.step;
                    const Row *const from = rows + (((sample * (long long)d.rows + qd) * h.rows + qh) * wide.rows + qw) * row;
                    const int slot = group * slots + j * group_out;
                    const long long taps = (long long)d.kernel * h.kernel * wide.kernel;
                    const Element *weight = w + (channel * group_out * taps + (td * h.kernel + th) * wide.kernel + tw);
                    for (int c = 0; c < group_out; c++, weight += taps) {
                        Sum of_row = widen(from[layout.slot(slot + c)]);
#if KIND == 5
                        of_row *= power(-row_exponent(bounds[group * group_out + c]));
#endif
                        sum = fma(of_row, widen(*weight), sum);
                    }
                }
            }
        }
        narrow(sum, &dx[sample * x_n + channel * x_c + id * x_d + ih * x_h + iw * x_w]);
    }
}
