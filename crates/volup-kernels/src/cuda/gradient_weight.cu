// The weight as that of the convolution that takes the rows of `gradient_rows` to the gradient of the input.
//
// `out[g*slots + j*group_out + co][ci][m']` is `w[g*group_in + ci][co][t]` with `t = j + (count - 1 - m')*step` along each
// axis, `j` the class and `count` the taps of the class that has most: a convolution of stride 1 whose channels are the
// slots. Zero where there is no such tap, and in slots past the last class. For KIND 5 and 2 a channel's are scaled by what its rows are
// the inverse of.
//
// Parameters: `w`, `out`, for KIND 5 and 2 `bounds` (of each channel of the gradient, as `gradient_rows` has them), `control` (the word of
// the largest magnitude, as bits of float32; of KIND 2 with and without the scale, and an infinity where bounds of a group `are_apart`); i32: `groups`, `group_in`,
// `group_out`, `slots`; of depth, height, width: kernel, classes, step, count. Threads: 256. Grid: any number of blocks.

#include "digits.cuh"
#include "half_parts.cuh"

extern "C" __global__ void __launch_bounds__(256) gradient_weight(const Element *w, Element *out,
#if SCALED
                                                                  const float *bounds,
#endif
                                                                  unsigned *control, int groups, int group_in,
                                                                  int group_out, int slots, int kernel_d, int classes_d, int step_d, int count_d,
                                                                  int kernel_h, int classes_h, int step_h, int count_h, int kernel_w,
                                                                  int classes_w, int step_w, int count_w) {
    const long long all = (long long)groups * slots * group_in * count_d * count_h * count_w;
    unsigned most = 0;
    for (long long first = blockIdx.x * 256ll; first < all; first += gridDim.x * 256ll) {
        Digits<long long> digits = {first + threadIdx.x};
        if (digits.rest >= all) continue;
        const int mw = digits.next(count_w), mh = digits.next(count_h), md = digits.next(count_d), ci = digits.next(group_in);
        const int slot = digits.next(slots), group = (int)digits.rest;
        int j = slot / group_out;
        const int co = slot - j * group_out, jw = j % classes_w;
        j /= classes_w;
        const int jh = j % classes_h, jd = j / classes_h;
        const int td = jd + (count_d - 1 - md) * step_d, th = jh + (count_h - 1 - mh) * step_h, tw = jw + (count_w - 1 - mw) * step_w;
        Element v{};
        if (jd < classes_d && td < kernel_d && th < kernel_h && tw < kernel_w)
            v = w[((((long long)(group * group_in + ci) * group_out + co) * kernel_d + td) * kernel_h + th) * kernel_w + tw];
#if KIND == 2
        most = max(most, magnitude(v));
#endif
#if SCALED
        v *= power(-row_exponent(bounds[group * group_out + co]));
#endif
        out[first + threadIdx.x] = v;
        most = max(most, magnitude(v));
    }
#if KIND == 2
    if (blockIdx.x == 0 && threadIdx.x < 32)
        for (int group = 0; group < groups; group++)
            if (are_apart(bounds + group * group_out, group_out)) most = 0x7f800000u;
#endif
    raise(control, as_float32(Element{}, most));
}
