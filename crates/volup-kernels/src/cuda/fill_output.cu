// Writes what an output is that no tap reaches, its channel's bias through the activation, everywhere.
//
// Where stride and dilation have a common divisor, only outputs on a lattice have taps; the product then computes those
// alone, over what this has written. It may be launched so that it starts while the packs still run: what comes after it
// finds both done.
//
// Parameters: `bias`, `y` (a multiple of 16 bytes); i32: `channels`, `inner` (elements from a channel to the next: 1 of
// NDHWC, else a volume); `count` (i64, of all elements), `has_bias`, `activation`, `slope` (f64); i32: `leaves` (1: what the product
// writes is left out, of NDHWC whose channels are whole vectors and `count` below 2^31; else what follows is not looked at), `d_out`, `h_out`,
// `w_out`, and of each axis the first output on the lattice and how far apart they are: `d_first`, `d_step`, `h_first`, `h_step`, `w_first`,
// `w_step`. Threads: 256. Grid: any number of blocks along the first axis.

#include "activation.cuh"
#include "divisor.cuh"
#include "element.cuh"
#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(256) fill_output(
    const Element *bias, Element *y,
    int channels, int inner, long long count, int has_bias, int activation, double slope, int leaves, int d_out, int h_out, int w_out,
    int d_first, int d_step, int h_first, int h_step, int w_first, int w_step) {
    constexpr int VECTOR = 16 / sizeof(Element);
    let_next_start();
    const auto value = [&](int channel) {
        float v = has_bias ? widen(bias[channel]) : 0.0f;
        v = activation > 2 ? curve(v, activation) : straighten(v, activation, (float)slope);
        Element e;
        narrow(v, &e);
        return e;
    };
    const long long step = (long long)gridDim.x * 256 * VECTOR, start = ((long long)blockIdx.x * 256 + threadIdx.x) * VECTOR;
    // Of the first element of a thread's vector its channel and what lies before it in that channel; of a step likewise.
    int channel = (int)(start / inner % channels), before = (int)(start % inner);
    const int channels_on = (int)(step / inner % channels), on = (int)(step % inner);
    const Element alike = value(0);
    const Divisor by_channels(leaves ? channels : 1), by_width(leaves ? w_out : 1), by_height(leaves ? h_out : 1), by_depth(leaves ? d_out : 1);
    const Divisor by_d(leaves ? d_step : 1), by_h(leaves ? h_step : 1), by_w(leaves ? w_step : 1);
    const auto is_on = [](int out, int first, const Divisor &step) {
        const int past = out - first;
        return past >= 0 && step.divide(past) * step.by == past;
    };
    const auto is_left = [&](int at) {
        const int voxel = by_channels.divide(at), line = by_width.divide(voxel), plane = by_height.divide(line), sample = by_depth.divide(plane);
        return is_on(voxel - line * w_out, w_first, by_w) && is_on(line - plane * h_out, h_first, by_h) && is_on(plane - sample * d_out, d_first, by_d);
    };
    for (long long at = start; at < count; at += step) {
        alignas(16) Element v[VECTOR];
        if (!has_bias) {
#pragma unroll
            for (int k = 0; k < VECTOR; k++) v[k] = alike;
        } else {
            int c = channel, left = inner - before;
            Element here = value(c);
#pragma unroll
            for (int k = 0; k < VECTOR; k++) {
                v[k] = here;
                if (--left == 0) {
                    left = inner;
                    c = c + 1 == channels ? 0 : c + 1;
                    here = value(c);
                }
            }
        }
        if (leaves && is_left((int)at)) {
            // All of the vector is the product's.
        } else if (at + VECTOR <= count)
            *(uint4 *)(y + at) = *(const uint4 *)v;
        else
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                if (at + k < count) y[at + k] = v[k];
        before += on;
        channel += channels_on + (before >= inner);
        if (before >= inner) before -= inner;
        if (channel >= channels) channel -= channels;
    }
    await_previous();
}
