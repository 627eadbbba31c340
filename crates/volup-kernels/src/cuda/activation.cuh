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

/// A value through one of the curved activations, as in `epilogue`.
__device__ __forceinline__ float curve(float x, int code) {
    switch (code) {
    case 3: return __fdividef(x, 1.0f + expf(-x));
    case 4: return 0.5f * x * erfcf(-0.70710678f * x);
    case 5: return __fdividef(x, 1.0f + expf(-x * (1.59576912f + 0.0713548163f * x * x)));
    case 6: return x * (fminf(fmaxf(x + 3.0f, 0.0f), 6.0f) * 0.166666667f);
    case 7: return __fdividef(1.0f, 1.0f + expf(-x));
    default: return tanhf(x);
    }
}
