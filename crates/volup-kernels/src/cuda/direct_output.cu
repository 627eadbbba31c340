// Outputs by their definition, as `direct` has it, where another kernel's cannot stand. It is launched so that it starts while that
// one still runs, and nearly always ends with it: `direct` itself would start after it, for nothing.
//
// Parameters: those of `direct`, by the same names; `guarded` is 1. Threads: 256. Grid: any number of blocks along the first axis;
// threads that are neighbours compute outputs of one residue, each `CHANNELS` of a group.

#include "activation.cuh"
#include "digits.cuh"
#include "element.cuh"
#include "launch.cuh"

constexpr int CHANNELS = 4;

/// One axis.
struct Axis {
    int input, output, kernel, stride, padding, dilation;

    /// Residues that outputs have, and outputs of one.
    __device__ int residues() const { return min(stride, output); }
    __device__ int positions() const { return (output + residues() - 1) / residues(); }
    /// The input that a tap reads for an output; or -1.
    __device__ int reads(int out, int tap) const {
        const long long far = (long long)out + padding - (long long)tap * dilation;
        return far >= 0 && far % stride == 0 && far / stride < input ? (int)(far / stride) : -1;
    }
};

__device__ __forceinline__ float activated(float x, int code, double slope) {
    return code > 2 ? curve(x, code) : straighten(x, code, (float)slope);
}

extern "C" __global__ void __launch_bounds__(256, 3) direct_output(
    const Element *x, const Element *w, const Element *bias, Element *y, const unsigned *control,
    int has_bias, int guarded, int small_limit, int n, int groups, int cin, int cout,
    int in_d, int out_d, int k_d, int s_d, int p_d, int d_d, int in_h, int out_h, int k_h, int s_h, int p_h, int d_h,
    int in_w, int out_w, int k_w, int s_w, int p_w, int d_w,
    long long x_n, long long x_c, long long x_d, long long x_h, long long x_w,
    long long y_n, long long y_c, long long y_d, long long y_h, long long y_w,
    int activation, double slope, int post, double post_slope) {
    let_next_start();
    await_previous();
    const bool stands = max(control[0], control[1]) < 0x7f800000u && max(control[2], control[3]) <= (unsigned)small_limit;
    if (guarded && stands) return;

    const Axis d = {in_d, out_d, k_d, s_d, p_d, d_d}, h = {in_h, out_h, k_h, s_h, p_h, d_h}, wide = {in_w, out_w, k_w, s_w, p_w, d_w};
    const int channel_blocks = (cout + CHANNELS - 1) / CHANNELS;
    const long long taps = (long long)k_d * k_h * k_w;
    const long long positions = (long long)d.positions() * h.positions() * wide.positions();
    const long long residues = (long long)d.residues() * h.residues() * wide.residues();
    const long long all = (long long)n * groups * channel_blocks * residues * positions;
    for (long long at = blockIdx.x * 256ll + threadIdx.x; at < all; at += gridDim.x * 256ll) {
        Digits<long long> digits = {at};
        const int qw = digits.next(wide.positions()), qh = digits.next(h.positions()), qd = digits.next(d.positions());
        const int ow = qw * wide.residues() + digits.next(wide.residues()), oh = qh * h.residues() + digits.next(h.residues());
        const int od = qd * d.residues() + digits.next(d.residues());
        const int first = digits.next(channel_blocks) * CHANNELS, group = digits.next(groups), sample = (int)digits.rest;
        if (od >= out_d || oh >= out_h || ow >= out_w) continue;
        const int channels = min(cout - first, CHANNELS);
        float sums[CHANNELS] = {};
        for (int td = 0; td < k_d; td++) {
            const int id = d.reads(od, td);
            if (id < 0) continue;
            for (int th = 0; th < k_h; th++) {
                const int ih = h.reads(oh, th);
                if (ih < 0) continue;
                for (int tw = 0; tw < k_w; tw++) {
                    const int iw = wide.reads(ow, tw);
                    if (iw < 0) continue;
                    const Element *input = x + sample * x_n + group * (long long)cin * x_c + id * x_d + ih * x_h + iw * x_w;
                    const Element *weight = w + (group * (long long)cin * cout + first) * taps + ((long long)td * k_h + th) * k_w + tw;
                    for (int c = 0; c < cin; c++, input += x_c, weight += cout * taps) {
                        const float v = widen(*input);
#pragma unroll
                        for (int k = 0; k < CHANNELS; k++)
                            if (k < channels) sums[k] = fmaf(v, widen(weight[k * taps]), sums[k]);
                    }
                }
            }
        }
#pragma unroll
        for (int k = 0; k < CHANNELS; k++)
            if (k < channels) {
                const int channel = group * cout + first + k;
                const float sum = has_bias ? sums[k] + widen(bias[channel]) : sums[k];
                const float value = activated(activated(sum, activation, slope), post, post_slope);
                narrow(value, &y[sample * y_n + channel * y_c + od * y_d + oh * y_h + ow * y_w]);
            }
    }
}
