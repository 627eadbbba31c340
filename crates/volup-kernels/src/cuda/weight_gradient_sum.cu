// Adds up partial gradients of the weight, in a fixed order, and puts them where they belong. Those of KIND 5 and 2 are of operands that
// were scaled, the gradient's channels of each part of the batch by what `row_exponent` makes of bounds of their own.
//
// Parameters: `partial` (as `direct_weight_gradient` has it), `dw` (`[ci][co][t]`), for KIND 5 and 2 `bounds`, `control` (the words that the
// input's exponent is of; for KIND 2 the largest magnitudes of its channels) and i32 `group_in`, `part_splits` (of a part of the batch), `part_bounds` (from a part's bounds to the next's; 0
// if all have the same); i32: `splits`, `taps`, `in_channels`, `group_out`. Threads: 256. Grid: ceil(taps * in_channels * group_out / 256).

#if KIND == 5 || KIND == 2
#include "half_parts.cuh"
#else
#include "element.cuh"
#endif

extern "C" __global__ void __launch_bounds__(256) weight_gradient_sum(const Sum *partial, Element *dw,
#if SCALED
                                                                      const float *bounds, const unsigned *control, int group_in,
                                                                      int part_splits, int part_bounds,
#endif
                                                                      int splits, int taps, int in_channels, int group_out) {
    const long long pairs = (long long)in_channels * group_out, all = taps * pairs, at = blockIdx.x * 256ll + threadIdx.x;
    if (at >= all) return;
    // Most are below 2^31, where dividing takes less.
    const long long t = all >> 31 ? at / pairs : (unsigned)at / (unsigned)pairs, pair = at - t * pairs;
    double sum = 0;
    // Adds up so many shares, several of which are under way at once.
    const auto add = [&](double &to, int from, int end) {
        constexpr int AT_ONCE = 8;
        for (; from + AT_ONCE <= end; from += AT_ONCE) {
            Sum v[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) v[k] = partial[(from + k) * all + at];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) to += v[k];
        }
        for (; from < end; from++) to += partial[from * all + at];
    };
#if SCALED
    const int ci = (int)(pair / group_out), channel = ci / group_in * group_out + (int)(pair - (long long)ci * group_out);
    for (int part = 0; part * part_splits < splits; part++) {
        double of_part = 0;
        add(of_part, part * part_splits, (part + 1) * part_splits);
        sum += of_part * scalbn(1.0, -row_exponent(bounds[part * part_bounds + channel]));
    }
#if KIND == 2
    const int of_input = channel_exponent(control[ci]);
#else
    const int of_input = input_exponent(control);
#endif
    sum *= scalbn(1.0, -of_input);
#else
    add(sum, 0, splits);
#endif
    narrow((Sum)sum, &dw[pair * taps + t]);
}
