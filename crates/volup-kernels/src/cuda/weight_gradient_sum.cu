// Adds up partial gradients of the weight, in a fixed order, and puts them where they belong. Those of KIND 5 and 2 are of operands that
// were scaled, the gradient's channels of each part of the batch by what `row_exponent` makes of bounds of their own.
//
// Parameters: `partial` (as `direct_weight_gradient` has it), `dw` (`[ci][co][t]`), for KIND 5 and 2 `bounds`, `control` (the words that the
// input's exponent is of; for KIND 2 the largest magnitudes of its channels) and i32 `group_in`, `part_splits` (of a part of the batch), `part_bounds` (from a part's bounds to the next's; 0
// if all have the same); i32: `splits`, `taps`, `in_channels`, `group_out`, `together` (threads of an element, a power of two: each has every so-manieth share). Threads: 256.
// Grid: ceil(taps * in_channels * group_out * together / 256).

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
                                                                      int splits, int taps, int in_channels, int group_out, int together) {
    __shared__ double of_thread[256];
    const int elements = 256 / together, own = threadIdx.x / elements, element = threadIdx.x % elements;
    // Past the last element the last one again.
    const long long pairs = (long long)in_channels * group_out, all = taps * pairs, at = min(blockIdx.x * (long long)elements + element, all - 1);
    const long long t = at / pairs, pair = at - t * pairs;
    double sum = 0;
#if SCALED
    const int ci = (int)(pair / group_out), channel = ci / group_in * group_out + (int)(pair - (long long)ci * group_out);
    for (int first = 0, part = 0; first < splits; first += part_splits, part++) {
        double of_part = 0;
        for (int split = first + own; split < first + part_splits; split += together) of_part += partial[split * all + at];
        sum += of_part * scalbn(1.0, -row_exponent(bounds[part * part_bounds + channel]));
    }
#if KIND == 2
    const int of_input = channel_exponent(control[ci]);
#else
    const int of_input = input_exponent(control);
#endif
    sum *= scalbn(1.0, -of_input);
#else
    for (int split = own; split < splits; split += together) sum += partial[split * all + at];
#endif
    of_thread[threadIdx.x] = sum;
    __syncthreads();
    if (own > 0 || blockIdx.x * (long long)elements + element >= all) return;
    for (int other = 1; other < together; other++) sum += of_thread[other * elements + element];
    narrow((Sum)sum, &dw[pair * taps + t]);
}
