// The largest magnitude of each channel of a tensor, as bits of float32; an infinity is larger than all others, NaN than that.
//
// Parameters: `x`, `largest` (a word of each channel, cleared), `control` and `asked` (words of the largest of all: for whoever computes
// by the definition, and for whoever is asked before); i32: `volume` (voxels), `channels`, `chunks` (of a sample's voxels), `last` (1:
// channels lie together, 0: voxels do). Threads: 256. Grid: chunks, the first fastest, * (last ?
// ceil(channels / 256) : channels) * samples.

#include "half_parts.cuh"

constexpr int THREADS = 256, AT_ONCE = 4;

extern "C" __global__ void __launch_bounds__(THREADS) channel_largest(const float *x, unsigned *largest, unsigned *control, unsigned *asked, int volume,
                                                                      int channels, int chunks, int last) {
    const int channel_blocks = last ? (channels + THREADS - 1) / THREADS : channels, rest = blockIdx.x / chunks, chunk = blockIdx.x - rest * chunks;
    const int lane = threadIdx.x % 32, n = rest / channel_blocks, of_channels = rest - n * channel_blocks;
    const int each = ((volume + chunks - 1) / chunks + 3) / 4 * 4, first = min(chunk * each, volume), end = min(first + each, volume);
    const float *const sample = x + (long long)n * volume * channels;
    unsigned most = 0;
    if (last) {
        // A thread keeps to its channel.
        const int c0 = of_channels * THREADS, across = min(channels - c0, THREADS), high = THREADS / across;
        const int c = threadIdx.x % across, own = threadIdx.x / across;
        if (own < high) {
            const float *const from = sample + c0 + c;
#pragma unroll AT_ONCE
            for (int voxel = first + own; voxel < end; voxel += high) most = max(most, magnitude(from[(long long)voxel * channels]));
            if (most > *(volatile unsigned *)&largest[c0 + c]) atomicMax(&largest[c0 + c], most);
        }
    } else {
        const float *const from = sample + (long long)of_channels * volume;
        const bool vectors = volume % 4 == 0 && (unsigned long long)x % 16 == 0;
        if (vectors) {
#pragma unroll AT_ONCE
            for (int voxel = first + 4 * threadIdx.x; voxel < end; voxel += 4 * THREADS) {
                const uint4 v = *(const uint4 *)(from + voxel);
                most = max(max(most, max(v.x & 0x7fffffffu, v.y & 0x7fffffffu)), max(v.z & 0x7fffffffu, v.w & 0x7fffffffu));
            }
        } else {
#pragma unroll AT_ONCE
            for (int voxel = first + threadIdx.x; voxel < end; voxel += THREADS) most = max(most, magnitude(from[voxel]));
        }
        raise(&largest[of_channels], most);
    }
    __shared__ unsigned of_warp[THREADS / 32];
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane == 0) of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < THREADS / 32; warp++) most = max(most, of_warp[warp]);
    if (most > *(volatile unsigned *)control) atomicMax(control, most);
    if (most > *(volatile unsigned *)asked) atomicMax(asked, most);
}
