// Brings together the chunks of `gradient_sums`, in a fixed order: a warp for each channel of each sample.
//
// Parameters: `sums`, `merged` (double, SUMS of each row); i32: `rows` (samples * channels), `chunks`. Threads: 256. Grid:
// ceil(rows / 8).

#include "gradient_bounds.cuh"

extern "C" __global__ void __launch_bounds__(256) gradient_merge(const Sum *sums, double *merged, int rows, int chunks) {
    const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    double total[SUMS] = {};
    for (int chunk = lane; chunk < chunks; chunk += 32)
#pragma unroll
        for (int which = 0; which < SUMS; which++) total[which] = joined(which, total[which], (double)sums[((long long)row * chunks + chunk) * SUMS + which]);
#pragma unroll
    for (int which = 0; which < SUMS; which++) {
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) total[which] = joined(which, total[which], __shfl_xor_sync(0xffffffffu, total[which], lanes));
        if (lane == 0) merged[(long long)row * SUMS + which] = total[which];
    }
}
