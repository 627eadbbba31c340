// The input as fp16 (`operand.cuh`), where it lies. What is past fp16 becomes an infinity, which whoever multiplies it finds.
//
// `KIND` 5: one fp16, scaled by the exponent of its control words. `KIND` 2: two, each channel scaled by the exponent of its largest
// magnitude; the low parts, which nothing is multiplied by (`half_parts.cuh`), follow `low` elements after the high ones.
//
// Parameters: `x`, `out` (a multiple of 16 bytes), `control` (words as `half_scale` leaves them) or for KIND 2 `largest` (of each channel, as
// `channel_largest` has it); i64: `count` (elements); for KIND 2 `low`, i32 `inner` (elements of a channel that lie together),
// `channels`, elements being fewer than 2^31. Threads: 256. Grid: any number of blocks.

#include "divisor.cuh"
#include "half_parts.cuh"

constexpr int VECTOR = 4, AT_ONCE = 4;

#if KIND == 5
extern "C" __global__ void __launch_bounds__(256) half_input(const float *x, Half *out, const unsigned *control, long long count) {
    const float scale = power(input_exponent(control));
    const auto put = [&](long long vector, const float4 &v) {
        ((uint2 *)out)[vector] = make_uint2(narrow_both(v.x * scale, v.y * scale, Half{}), narrow_both(v.z * scale, v.w * scale, Half{}));
    };
    const auto put_one = [&](long long at) { narrow(x[at] * scale, &out[at]); };
#else
extern "C" __global__ void __launch_bounds__(256) half_input(const float *x, Half *out, const unsigned *largest, long long count, long long low,
                                                             int inner, int channels) {
    __shared__ Divisor by[2];
    if (threadIdx.x < 2) by[threadIdx.x] = Divisor(threadIdx.x ? channels : inner);
    __syncthreads();
    const auto scale_of = [&](int at) {
        const int outer = by[0].divide(at);
        return power(channel_exponent(largest[outer - by[1].divide(outer) * channels]));
    };
    const auto put = [&](long long vector, const float4 &v) {
        const int at = (int)(vector * VECTOR);
        float scale[VECTOR];
#pragma unroll
        for (int e = 0; e < VECTOR; e++) scale[e] = e > 0 && inner % VECTOR == 0 ? scale[0] : scale_of(at + e);
        uint2 high, of_low;
        high.x = half_parts(v.x * scale[0], v.y * scale[1], 1.0f, of_low.x);
        high.y = half_parts(v.z * scale[2], v.w * scale[3], 1.0f, of_low.y);
        ((uint2 *)out)[vector] = high;
        ((uint2 *)(out + low))[vector] = of_low;
    };
    const auto put_one = [&](long long at) {
        unsigned of_low;
        const unsigned high = half_parts(x[at] * scale_of((int)at), 0.0f, 1.0f, of_low);
        out[at].bits = (unsigned short)high;
        out[low + at].bits = (unsigned short)of_low;
    };
#endif
    const long long step = gridDim.x * 256ll, whole = count / VECTOR;
#pragma unroll 1
    for (long long first = blockIdx.x * 256ll + threadIdx.x; first < whole; first += step * AT_ONCE) {
        float4 v[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (first + k * step < whole) v[k] = ((const float4 *)x)[first + k * step];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (first + k * step < whole) put(first + k * step, v[k]);
    }
    const long long last = whole * VECTOR + blockIdx.x * 256ll + threadIdx.x;
    if (last < count) put_one(last);
}
