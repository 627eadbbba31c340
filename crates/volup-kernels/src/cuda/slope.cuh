// Activations and their slopes for the passes of training, in float or double.

#pragma once

#include "activation.cuh"
#include "element.cuh"

__device__ __forceinline__ double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

/// What is known of an activation when a kernel is compiled: that there is none, that it is ReLU, that it is a comparison or
/// none, that it is SiLU or hardswish, or nothing.
enum Known { NONE, RELU, STRAIGHT, SILU, HARDSWISH, ANY };

/// An activation, codes as in `epilogue`.
template <Known KNOWN> struct Activation {
    int code;
    Sum slope;

    __device__ __forceinline__ Activation(int code, double slope)
        : code(KNOWN == NONE ? 0 : KNOWN == RELU ? 1 : KNOWN == SILU ? 3 : KNOWN == HARDSWISH ? 6 : code),
          slope(this->code == 0 ? 1 : this->code == 1 ? 0 : (Sum)slope) {}

    /// Of some values the activation and its slope. At kinks that is PyTorch's: 0 at 0 for ReLU, the slope at 0 for leaky
    /// ReLU, 0 at -3 and 1 at 3 for hardswish.
    template <int COUNT> __device__ __forceinline__ void of(const Sum (&x)[COUNT], Sum (&a)[COUNT], Sum (&f)[COUNT]) const {
        const auto each = [&](auto one) {
#pragma unroll
            for (int k = 0; k < COUNT; k++) one(x[k], a[k], f[k]);
        };
        if (KNOWN == NONE) {
            each([](Sum x, Sum &a, Sum &f) { a = x, f = 1; });
            return;
        }
        if (KNOWN <= STRAIGHT || code <= 2) {
            // NaN is not negative, and where ReLU is 0 the value does not matter, be it infinite.
            each([this](Sum x, Sum &a, Sum &f) {
                f = x <= 0 ? slope : (Sum)1;
                a = x <= 0 ? (slope == 0 ? (Sum)0 : x * slope) : x;
            });
            return;
        }
        switch (code) {
        case 3:
            each([](Sum x, Sum &a, Sum &f) {
                const Sum s = sigmoid(x);
                a = x * s;
                f = s * (1 + x * (1 - s));
            });
            break;
        case 4:
            each([](Sum x, Sum &a, Sum &f) {
                const Sum cdf = (Sum)0.5 * erfc((Sum)-0.70710678118654752440 * x);
                a = x * cdf;
                f = cdf + x * (Sum)0.39894228040143267794 * exp((Sum)-0.5 * x * x);
            });
            break;
        case 5:
            // tanh(u) is 2*sigmoid(2u) - 1.
            each([](Sum x, Sum &a, Sum &f) {
                const Sum s = sigmoid((Sum)1.5957691216057307118 * (x + (Sum)0.044715 * x * x * x));
                a = x * s;
                f = s + x * (s * (1 - s) * (Sum)1.5957691216057307118 * (1 + (Sum)0.134145 * x * x));
            });
            break;
        case 6:
            each([](Sum x, Sum &a, Sum &f) {
                a = x * (fmin(fmax(x + (Sum)3, (Sum)0), (Sum)6) * (Sum)(1.0 / 6));
                f = x <= -3 ? (Sum)0 : x >= 3 ? (Sum)1 : x * (Sum)(1.0 / 3) + (Sum)0.5;
            });
            break;
        case 7:
            each([](Sum x, Sum &a, Sum &f) {
                a = sigmoid(x);
                f = a * (1 - a);
            });
            break;
        default:
            each([](Sum x, Sum &a, Sum &f) {
                a = tanh(x);
                f = 1 - a * a;
            });
        }
    }

    /// A gradient by the slope: where ReLU's is 0 the gradient does not matter, be it infinite. Without an activation the slope
    /// is 1.
    __device__ __forceinline__ Sum back(Sum gradient, Sum f) const {
        if (KNOWN == NONE) return gradient;
        if (KNOWN == RELU) return f == 0 ? (Sum)0 : gradient;
        return code == 1 && f == 0 ? (Sum)0 : gradient * f;
    }
    /// Some gradients, where they are.
    template <int COUNT> __device__ __forceinline__ void back(Sum (&gradient)[COUNT], const Sum (&f)[COUNT]) const {
        if (KNOWN > STRAIGHT && code != 1) {
#pragma unroll
            for (int k = 0; k < COUNT; k++) gradient[k] *= f[k];
        } else {
#pragma unroll
            for (int k = 0; k < COUNT; k++) gradient[k] = back(gradient[k], f[k]);
        }
    }
};

/// How a channel of a sample is normalized: `v = gamma*h + beta`, `h = (a - mean)*rstd`. Without a normalization mean and beta
/// are 0, rstd and gamma 1.
struct Norm {
    Sum mean, rstd, gamma, beta;

    __device__ __forceinline__ Sum normalized(Sum a) const { return (a - mean) * rstd; }
    __device__ __forceinline__ Sum scaled(Sum h) const { return h * gamma + beta; }
};

/// That of a channel; `mean` is null without a normalization, `gamma` without parameters.
__device__ __forceinline__ Norm norm_of(int sample, int channel, int channels, int group_channels, const Sum *mean, const Sum *rstd,
                                        const Element *gamma, const Element *beta) {
    Norm norm = {0, 1, 1, 0};
    if (mean) {
        const int group = sample * (channels / group_channels) + channel / group_channels;
        norm.mean = mean[group];
        norm.rstd = rstd[group];
        if (gamma) {
            norm.gamma = widen(gamma[channel]);
            norm.beta = widen(beta[channel]);
        }
    }
    return norm;
}

/// What is known of both activations of a block.
template <Known FIRST, Known SECOND> struct Both {
    static constexpr Known first = FIRST, second = SECOND;
};

/// Calls `f` with what is known of both activations. Going through a list of all of them for every few values takes a third of
/// the time of a pass over 16-bit elements; SiLU is what decoders have most where it is not ReLU. Without `CURVES` that is left
/// out, for the registers.
template <bool CURVES = true, typename F> __device__ __forceinline__ void by_known(int activation, int post, F f) {
    const auto is = [=](int first, int second) { return activation == first && post == second; };
    if (is(0, 0))
        f(Both<NONE, NONE>());
    else if (is(1, 0))
        f(Both<RELU, NONE>());
    else if (activation <= 2 && post <= 2)
        f(Both<STRAIGHT, STRAIGHT>());
    else if (!CURVES || !(is(0, 3) || is(3, 0) || is(3, 6)))
        f(Both<ANY, ANY>());
    else if (is(3, 6))
        f(Both<SILU, HARDSWISH>());
    else if (is(0, 3))
        f(Both<NONE, SILU>());
    else
        f(Both<SILU, NONE>());
}
