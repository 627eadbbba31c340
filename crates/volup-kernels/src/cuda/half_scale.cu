// What float32 operands are scaled by, by powers of two, that become fp16, one or two (`operand.cuh`): each output channel's weights by
// their largest magnitude, the input by the largest of some of its magnitudes. To look at all of them would take as long as
// packing them; whoever packs them finds those that this has missed.
//
// Parameters: `x`, `w`, `scale` (2^-ew of each of so many columns of each slice), `control` (words as in `pack`: 1, the largest |w|;
// 4, the largest |x| of those looked at); i64: `count` (elements of x); i32: `samples` (pieces of 16 bytes that are looked at, spread
// over x, as far as there are so many), `columns` (of a slice), `inner` and `channels_first` as `pack_weight_scale` has them,
// `slice_out`, `in_per_group`, `out_per_group`, `taps`, `out_channels`.
// Threads: 256. Grid: a block for each output channel, then any number of them for the input. It may be launched so that it starts while
// `set_words` still runs.

#include "divisor.cuh"
#include "launch.cuh"
#include "operand.cuh"

/// How many loads of a thread are under way at once: of x, and of a channel's weights, whose blocks are few.
constexpr int THREADS = 256, AT_ONCE = 4, OF_CHANNEL = 16;

/// The largest magnitude of x that some of the blocks look at.
__device__ __forceinline__ unsigned some_of(const float *x, long long count, int samples, int block, int blocks) {
    const long long pieces = (count + 3) / 4, apart = (pieces + samples - 1) / samples, all = (pieces + apart - 1) / apart;
    unsigned most = 0;
#pragma unroll 1
    for (long long first = block * THREADS + threadIdx.x; first < all; first += (long long)blocks * THREADS * AT_ONCE) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const long long index = first + (long long)k * blocks * THREADS;
            // Anywhere within its share: lines and planes of x are often as far apart as shares are.
            const long long at = index * apart + (unsigned)index * 2654435761u % (unsigned)apart;
            v[k] = make_uint4(0, 0, 0, 0);
            if (index < all && 4 * at + 4 <= count) v[k] = *((const uint4 *)x + at);
            if (index < all && 4 * at + 4 > count)
                for (long long e = 4 * at; e < count; e++) most = max(most, magnitude(x[e]));
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            most = max(max(most, max(v[k].x & 0x7fffffffu, v[k].y & 0x7fffffffu)), max(v[k].z & 0x7fffffffu, v[k].w & 0x7fffffffu));
    }
    return most;
}

extern "C" __global__ void __launch_bounds__(THREADS) half_scale(const float *x, const float *w, float *scale, unsigned *control, long long count,
                                                                 int samples, int columns, int inner, int channels_first, int slice_out,
                                                                 int in_per_group, int out_per_group, int taps, int out_channels) {
    let_next_start();
    if ((int)blockIdx.x >= out_channels) {
        const unsigned most = some_of(x, count, samples, blockIdx.x - out_channels, gridDim.x - out_channels);
        await_previous();
        raise(&control[4], most);
        return;
    }
    const int channel = blockIdx.x, group = channel / out_per_group, length = in_per_group * taps;
    const float *const first = w + ((long long)group * in_per_group * out_per_group + channel - group * out_per_group) * taps;
    const Divisor by(taps);
    const int between = (out_per_group - 1) * taps;
    unsigned most = 0;
#pragma unroll 1
    for (int start = threadIdx.x; start < length; start += THREADS * OF_CHANNEL) {
        unsigned v[OF_CHANNEL];
#pragma unroll
        for (int k = 0; k < OF_CHANNEL; k++) {
            const int at = start + k * THREADS;
            v[k] = at < length ? magnitude(first[at + (long long)by.divide(at) * between]) : 0;
        }
#pragma unroll
        for (int k = 0; k < OF_CHANNEL; k++) most = max(most, v[k]);
    }
    await_previous();
    raise(&control[1], most);
    __shared__ unsigned largest_of[THREADS / 32];
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) most = max(most, largest_of[warp]);
    // The channel's columns; the last one's also those that no channel has.
    const int slice = channel / slice_out, of_slice = channel - slice * slice_out;
    const Divisor together(inner);
    for (int column = threadIdx.x; column < columns; column += THREADS) {
        const int outer = together.divide(column), of = channels_first ? outer : column - outer * inner;
        if (min(of, slice_out - 1) == of_slice) scale[slice * columns + column] = power(-exponent(most));
    }
}
