// Adds up partial gradients of the weight, in a fixed order, and puts them where they belong.
//
// Parameters: `partial` (as `direct_weight_gradient` has it), `dw` (`[ci][co][t]`); i32: `splits`, `taps`, `in_channels`,
// `group_out`. Threads: 256. Grid: ceil(taps * in_channels * group_out / 256).

#include "element.cuh"

extern "C" __global__ void __launch_bounds__(256) weight_gradient_sum(const Sum *partial, Element *dw, int splits, int taps, int in_channels,
                                                                      int group_out) {
    const long long pairs = (long long)in_channels * group_out, all = taps * pairs, at = blockIdx.x * 256ll + threadIdx.x;
    if (at >= all) return;
    double sum = 0;
    for (int split = 0; split < splits; split++) sum += partial[split * all + at];
    const long long t = at / pairs, pair = at - t * pairs;
    narrow((Sum)sum, &dw[pair * taps + t]);
}
