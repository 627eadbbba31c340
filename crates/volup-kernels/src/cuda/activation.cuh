// Activations.

#pragma once

/// A value through an activation that is a comparison: 1, ReLU, which lets NaN through; 2, leaky ReLU.
__device__ __forceinline__ float straighten(float x, int code, float slope) {
    if (code == 1)
        asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
    else if (code == 2)
        x = x > 0.0f ? x : x * slope;
    return x;
}

/// 1 / (1 + exp(-x)) by two approximations of the hardware, within 2^-21 of itself where |x| is at most 8.
__device__ __forceinline__ float sigmoid(float x) {
    float v = x * -1.44269504f;
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(v));
    v += 1.0f;
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(v));
    return v;
}

/// Values through one of the curved activations, as in `epilogue`: several at once, since each waits long for its parts.
template <int COUNT> __device__ __forceinline__ void curve(float (&v)[COUNT], int code) {
    const auto each = [&](auto of) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) v[k] = of(v[k]);
    };
    switch (code) {
    case 3: each([](float x) { return x * sigmoid(x); }); break;
    case 4: each([](float x) { return 0.5f * x * erfcf(-0.70710678f * x); }); break;
    case 5: each([](float x) { return x * sigmoid(x * (1.59576912f + 0.0713548163f * x * x)); }); break;
    case 6: each([](float x) { return x * (fminf(fmaxf(x + 3.0f, 0.0f), 6.0f) * 0.166666667f); }); break;
    case 7: each([](float x) { return sigmoid(x); }); break;
    default: each([](float x) { return tanhf(x); });
    }
}
__device__ __forceinline__ float curve(float x, int code) {
    float v[1] = {x};
    curve(v, code);
    return v[0];
}
