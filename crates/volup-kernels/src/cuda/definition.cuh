// Outputs by their definition, as `direct` has it, where what another kernel computes of packed operands cannot stand.

#pragma once

#include "activation.cuh"
#include "digits.cuh"
#include "element.cuh"

/// What the definition takes: the parameters of `direct`, in order.
#define DEFINITION_PARAMETERS \
    const Element *of_x, const Element *of_w, const Element *of_bias, Element *of_y, const unsigned *of_control, \
    int of_has_bias, int guarded, int small_limit, int of_n, int of_groups, int of_cin, int of_cout, \
    int of_in_d, int of_out_d, int of_k_d, int of_s_d, int of_p_d, int of_d_d, \
    int of_in_h, int of_out_h, int of_k_h, int of_s_h, int of_p_h, int of_d_h, \
    int of_in_w, int of_out_w, int of_k_w, int of_s_w, int of_p_w, int of_d_w, \
    long long of_x_n, long long of_x_c, long long of_x_d, long long of_x_h, long long of_x_w, \
    long long of_y_n, long long of_y_c, long long of_y_d, long long of_y_h, long long of_y_w, \
    int of_activation, double of_slope, int of_post, double of_post_slope
#define DEFINITION_OF_PARAMETERS \
    {of_x, of_w, of_bias, of_y, of_control, of_has_bias, small_limit, of_n, of_groups, of_cin, of_cout, \
     {of_in_d, of_out_d, of_k_d, of_s_d, of_p_d, of_d_d}, {of_in_h, of_out_h, of_k_h, of_s_h, of_p_h, of_d_h}, \
     {of_in_w, of_out_w, of_k_w, of_s_w, of_p_w, of_d_w}, of_x_n, of_x_c, of_x_d, of_x_h, of_x_w, of_y_n, of_y_c, of_y_d, of_y_h, of_y_w, \
     of_activation, of_slope, of_post, of_post_slope}

/// One axis of outputs.
struct OutputAxis {
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

struct Definition {
    const Element *x, *w, *bias;
    Element *y;
    const unsigned *control;
    int has_bias, small_limit, n, groups, cin, cout;
    OutputAxis d, h, wide;
    long long x_n, x_c, x_d, x_h, x_w, y_n, y_c, y_d, y_h, y_w;
    int activation;
    double slope;
    int post;
    double post_slope;

    /// Whether control words, which have to be there, ask for it.
    __device__ __forceinline__ bool needed() const {
        bool needed = false;
        // One after the other: where this is asked registers are scarce.
#pragma unroll 1
        for (int word = 0; word < 4; word++) needed |= control[word] >= (word < 2 ? 0x7f800000u : (unsigned)small_limit + 1);
        return needed;
    }

    static __device__ __forceinline__ float activated(float x, int code, double slope) {
        return code > 2 ? curve(x, code) : straighten(x, code, (float)slope);
    }

    /// Computes each so manieth piece of the outputs: one position in so many channels. Neighbours have one residue.
    template <int CHANNELS> __device__ __forceinline__ void compute(long long first_piece, long long apart) const {
        const int channel_blocks = (cout + CHANNELS - 1) / CHANNELS;
        const long long taps = (long long)d.kernel * h.kernel * wide.kernel;
        const long long positions = (long long)d.positions() * h.positions() * wide.positions();
        const long long residues = (long long)d.residues() * h.residues() * wide.residues();
        const long long all = (long long)n * groups * channel_blocks * residues * positions;
#pragma unroll 1
        for (long long at = first_piece; at < all; at += apart) {
            Digits<long long> digits = {at};
            const int qw = digits.next(wide.positions()), qh = digits.next(h.positions()), qd = digits.next(d.positions());
            const int ow = qw * wide.residues() + digits.next(wide.residues()), oh = qh * h.residues() + digits.next(h.residues());
            const int od = qd * d.residues() + digits.next(d.residues());
            const int first = digits.next(channel_blocks) * CHANNELS, group = digits.next(groups), sample = (int)digits.rest;
            if (od >= d.output || oh >= h.output || ow >= wide.output) continue;
            const int channels = min(cout - first, CHANNELS);
            float sums[CHANNELS] = {};
#pragma unroll 1
            for (int td = 0; td < d.kernel; td++) {
                const int id = d.reads(od, td);
                if (id < 0) continue;
#pragma unroll 1
                for (int th = 0; th < h.kernel; th++) {
                    const int ih = h.reads(oh, th);
                    if (ih < 0) continue;
#pragma unroll 1
                    for (int tw = 0; tw < wide.kernel; tw++) {
                        const int iw = wide.reads(ow, tw);
                        if (iw < 0) continue;
                        const Element *input = x + sample * x_n + group * (long long)cin * x_c + id * x_d + ih * x_h + iw * x_w;
                        const Element *weight = w + (group * (long long)cin * cout + first) * taps + ((long long)td * h.kernel + th) * wide.kernel + tw;
#pragma unroll 1
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
};
