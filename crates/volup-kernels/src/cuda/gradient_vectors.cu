// The gradients of the parameters that are vectors, from the sums of `gradient_merge`, and what the gradient of the
// convolution's output takes from its group.
//
// With the sums S of a channel of a sample, in `gradient_sums`' order: `dbeta = sum S0`, `dgamma = sum S1` over samples; of a
// group of `m` values `q = -rstd * sum(gamma*S0) / m`, `r = -rstd * sum(gamma*S1) / m` over its channels; `dbias = sum
// (rstd*gamma*S2 + q*S3 + r*S4)` over samples. Without a normalization `dbias = sum S2`. For KIND 5 no `|dy|` of a channel is larger
// than, of any sample, `|rstd*gamma|*S5 + |q|*steepest + |r|*S6`, or `S5`.
//
// Parameters: `merged` (double), `rstd` (null: no normalization), `gamma` (null: 1), `terms` (`q`, `r` of sample*groups +
// group), `dbias`, `dgamma`, `dbeta` (null: not wanted), for KIND 5 `bounds` (of each channel; null: not wanted)
// and f64 `steepest` (what no slope of the first activation is past); i32: `samples`, `channels`, `group_channels`; f64: `by` (1/m).
// Threads: 256. Grid: the groups.

#include "gradient_bounds.cuh"

constexpr int WARPS = 8;

/// A sum over so many neighbouring lanes, a power of two.
__device__ __forceinline__ double over_warp(double v, int width = 32) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2)
        if (lanes < width) v += __shfl_xor_sync(0xffffffffu, v, lanes);
    return v;
}

extern "C" __global__ void __launch_bounds__(256) gradient_vectors(const double *merged, const Sum *rstd, const Element *gamma, Sum *terms,
                                                                   Element *dbias, Element *dgamma, Element *dbeta,
#if KIND == 5
                                                                   float *bounds, double steepest,
#endif
                                                                   int samples, int channels, int group_channels, double by) {
    const int group = blockIdx.x, groups = gridDim.x, first = group * group_channels, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto sum_of = [&](int sample, int channel, int which) { return merged[((long long)sample * channels + channel) * SUMS + which]; };
    const auto gamma_of = [&](int channel) { return gamma ? (double)widen(gamma[channel]) : 1.0; };
    if (rstd) {
        // Of few channels a warp has several samples at once, so many lanes each.
        const int width = group_channels < 32 ? 1 << (32 - __clz(group_channels - 1)) : 32, at_once = 32 / width;
        for (int first_sample = warp * at_once; first_sample < samples; first_sample += WARPS * at_once) {
            const int sample = first_sample + lane / width;
            double q = 0, r = 0;
            if (sample < samples)
                for (int c = lane % width; c < group_channels; c += width) {
                    const double scale = gamma_of(first + c);
                    q += scale * sum_of(sample, first + c, 0);
                    r += scale * sum_of(sample, first + c, 1);
                }
            q = over_warp(q, width);
            r = over_warp(r, width);
            const int at = sample * groups + group;
            if (sample < samples && lane % width == 0) {
                terms[2 * at] = (Sum)(-(double)rstd[at] * q * by);
                terms[2 * at + 1] = (Sum)(-(double)rstd[at] * r * by);
            }
        }
        __syncthreads();
    }
    for (int c = warp; c < group_channels; c += WARPS) {
        const int channel = first + c;
        const double scale = gamma_of(channel);
        double of_bias = 0, of_gamma = 0, of_beta = 0;
        [[maybe_unused]] double bound = 0;
        for (int sample = lane; sample < samples; sample += 32) {
            if (rstd) {
                const int at = sample * groups + group;
                const double q = terms[2 * at], r = terms[2 * at + 1];
                of_bias += rstd[at] * scale * sum_of(sample, channel, 2) + q * sum_of(sample, channel, 3) + r * sum_of(sample, channel, 4);
#if KIND == 5
                bound = larger_finite(bound, fabs(rstd[at] * scale) * sum_of(sample, channel, ADDED) +
                                                 fabs(q) * steepest + fabs(r) * sum_of(sample, channel, ADDED + 1));
#endif
            } else {
                of_bias += sum_of(sample, channel, 2);
#if KIND == 5
                bound = larger_finite(bound, sum_of(sample, channel, ADDED));
#endif
            }
            of_gamma += sum_of(sample, channel, 1);
            of_beta += sum_of(sample, channel, 0);
        }
        of_bias = over_warp(of_bias);
        of_gamma = over_warp(of_gamma);
        of_beta = over_warp(of_beta);
#if KIND == 5
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) bound = max(bound, __shfl_xor_sync(0xffffffffu, bound, lanes));
        if (lane == 0 && bounds) bounds[channel] = (float)bound;
#endif
        if (lane == 0) {
            if (dbias) narrow((Sum)of_bias, &dbias[channel]);
            if (dgamma) narrow((Sum)of_gamma, &dgamma[channel]);
            if (dbeta) narrow((Sum)of_beta, &dbeta[channel]);
        }
    }
}
