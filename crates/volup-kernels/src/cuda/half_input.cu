// The input as one fp16 (`operand.cuh`), where it lies: scaled by the exponent of its control words. What is past fp16 becomes an
// infinity, which whoever multiplies it finds.
//
// Parameters: `x`, `out` (a multiple of 16 bytes), `control` (words as `half_scale` leaves them); i64: `count` (elements).
// Threads: 256. Grid: any number of blocks.

#include "operand.cuh"

constexpr int VECTOR = 4, AT_ONCE = 4;

extern "C" __global__ void __launch_bounds__(256) half_input(const float *x, Half *out, const unsigned *control, long long count) {
    const float scale = power(input_exponent(control));
    const long long step = gridDim.x * 256ll, whole = count / VECTOR;
#pragma unroll 1
    for (long long first = blockIdx.x * 256ll + threadIdx.x; first < whole; first += step * AT_ONCE) {
        float4 v[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (first + k * step < whole) v[k] = ((const float4 *)x)[first + k * step];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (first + k * step < whole)
                ((uint2 *)out)[first + k * step] = make_uint2(narrow_both(v[k].x * scale, v[k].y * scale, Half{}), narrow_both(v[k].z * scale, v[k].w * scale, Half{}));
    }
    const long long last = whole * VECTOR + blockIdx.x * 256ll + threadIdx.x;
    if (last < count) narrow(x[last] * scale, &out[last]);
}
