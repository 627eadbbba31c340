// A group norm of what `direct_output` has written, where a product that would have normalized what it writes (`norm_behind.cuh`)
// cannot stand. It is launched so that it starts while that one still runs, and nearly always ends with it. A block has the outputs
// of a sample's group, NCDHW.
//
// Parameters: `y`, `control`, `gamma`, `beta` (null: 1 and 0); i32: `groups`, `group_channels`, `voxels` (of a sample of y),
// `activation`; f64: `slope`, `eps`.
// Threads: 512. Grid: samples*groups along the first axis.

#include "activation.cuh"
#include "element.cuh"
#include "launch.cuh"
#include "moment_sums.cuh"
#include "product_stands.cuh"

constexpr int THREADS = 512;

extern "C" __global__ void __launch_bounds__(THREADS, 2) direct_norm(Element *y, const unsigned *control, const Element *gamma, const Element *beta,
                                                                  int groups, int group_channels, int voxels, int activation, double slope, double eps) {
    let_next_start();
    await_previous();
    if (product_stands(control)) return;
    const int sample = blockIdx.x / groups, first = (blockIdx.x - sample * groups) * group_channels;
    const long long many = (long long)voxels * group_channels;
    Element *const own = y + ((long long)sample * groups * group_channels + first) * voxels;
    const double near = widen(own[0]);
    MomentSums all = {0.0, 0.0, 0.0};
#pragma unroll 1
    for (long long at = threadIdx.x; at < many; at += THREADS) {
        const double off = widen(own[at]) - near;
        all.add({1.0, off, off * off});
    }
    __shared__ float2 merged;
    all.over_block<THREADS>([&] { merged = all.normalization(near, eps); });
    __syncthreads();
    const float2 norm = merged;
#pragma unroll 1
    for (int c = 0; c < group_channels; c++) {
        const float factor = norm.y * (gamma ? widen(gamma[first + c]) : 1.0f), addend = beta ? widen(beta[first + c]) : 0.0f;
#pragma unroll 1
        for (int at = threadIdx.x; at < voxels; at += THREADS) {
            Element *const of = own + (long long)c * voxels + at;
            const float x = (widen(*of) - norm.x) * factor + addend;
            narrow(activation > 2 ? curve(x, activation) : straighten(x, activation, (float)slope), of);
        }
    }
}
