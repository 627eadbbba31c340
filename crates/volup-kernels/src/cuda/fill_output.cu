// Writes what an output is that no tap reaches, its channel's bias through the activation: everywhere, or where
// the product does not write.
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
    const Element alike = value(0);
    if (leaves) {
        // A warp takes a line of y after the other, a lane its vectors.
        const int vectors = channels / VECTOR, line_vectors = w_out * vectors, lines = (int)(count / channels) / w_out;
        const Divisor by_vectors(vectors), by_w(w_step);
        for (int line = (blockIdx.x * 256 + threadIdx.x) / 32; line < lines; line += gridDim.x * 8) {
            const int plane = line / h_out, h = line - plane * h_out - h_first, d = plane % d_out - d_first;
            const bool has = h >= 0 && h % h_step == 0 && d >= 0 && d % d_step == 0;
            uint4 *const to = (uint4 *)y + (long long)line * line_vectors;
#pragma unroll 4
            for (int i = threadIdx.x % 32; i < line_vectors; i += 32) {
                const int w = by_vectors.divide(i), past = w - w_first;
                if (has && past >= 0 && by_w.divide(past) * w_step == past) continue;
                alignas(16) Element v[VECTOR];
#pragma unroll
                for (int k = 0; k < VECTOR; k++) v[k] = has_bias ? value((i - w * vectors) * VECTOR + k) : alike;
                to[i] = *(const uint4 *)v;
            }
        }
        await_previous();
        return;
    }
    const long long step = (long long)gridDim.x * 256 * VECTOR, start = ((long long)blockIdx.x * 256 + threadIdx.x) * VECTOR;
    // Of the first element of a thread's vector its channel and what lies before it in that channel; of a step likewise.
    int channel = (int)(start / inner % channels), before = (int)(start % inner);
    const int channels_on = (int)(step / inner % channels), on = (int)(step % inner);
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
        if (at + VECTOR <= count)
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
