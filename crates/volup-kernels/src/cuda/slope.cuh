// Activations and their slopes for the passes of training, in float or double.

#pragma once

/// A value through an activation, codes as in `epilogue`.
template <typename S> __device__ __forceinline__ S through(S x, int code, S slope) {
    switch (code) {
    case 0: return x;
    case 1: return x <= 0 ? (S)0 : x;
    case 2: return x > 0 ? x : x * slope;
    case 3: return x / ((S)1 + exp(-x));
    case 4: return (S)0.5 * x * erfc((S)-0.70710678118654752440 * x);
    case 5: return x / ((S)1 + exp((S)-1.5957691216057307118 * x * ((S)1 + (S)0.044715 * x * x)));
    case 6: return x * (fmin(fmax(x + (S)3, (S)0), (S)6) / (S)6);
    case 7: return (S)1 / ((S)1 + exp(-x));
    default: return tanh(x);
    }
}

/// A gradient through an activation, by its slope at `x`. At kinks it is PyTorch's: 0 at 0 for ReLU, the slope at 0 for
/// leaky ReLU, 0 at -3 and 1 at 3 for hardswish. Where ReLU's is 0 the gradient does not matter, be it infinite.
template <typename S> __device__ __forceinline__ S back_through(S gradient, S x, int code, S slope) {
    switch (code) {
    case 0: return gradient;
    case 1: return x <= 0 ? (S)0 : gradient;
    case 2: return x > 0 ? gradient : gradient * slope;
    case 3: {
        const S s = (S)1 / ((S)1 + exp(-x));
        return gradient * (s * ((S)1 + x * ((S)1 - s)));
    }
    case 4: return gradient * ((S)0.5 * erfc((S)-0.70710678118654752440 * x) + x * (S)0.39894228040143267794 * exp((S)-0.5 * x * x));
    case 5: {
        const S t = tanh((S)0.79788456080286535588 * (x + (S)0.044715 * x * x * x));
        const S inner = (S)0.79788456080286535588 * ((S)1 + (S)0.134145 * x * x);
        return gradient * ((S)0.5 * ((S)1 + t) + (S)0.5 * x * ((S)1 - t * t) * inner);
    }
    case 6: return x <= -3 ? (S)0 : x >= 3 ? gradient : gradient * (x / (S)3 + (S)0.5);
    case 7: {
        const S s = (S)1 / ((S)1 + exp(-x));
        return gradient * (s * ((S)1 - s));
    }
    default: {
        const S t = tanh(x);
        return gradient * ((S)1 - t * t);
    }
    }
}

/// What follows the convolution, at one channel of one sample: `z = post(gamma*h + beta)`, `h = (act(y) - mean)*rstd`.
/// Without a normalization mean and beta are 0, rstd and gamma 1.
struct Epilogue {
    int activation, post;
    Sum slope, post_slope, mean, rstd, gamma, beta;
    bool normalizes;

    /// The output.
    __device__ __forceinline__ Sum output(Sum y) const {
        const Sum a = through(y, activation, slope);
        return through(normalizes ? (a - mean) * rstd * gamma + beta : a, post, post_slope);
    }

    /// The normalized value.
    __device__ __forceinline__ Sum normalized(Sum y) const {
        const Sum a = through(y, activation, slope);
        return normalizes ? (a - mean) * rstd : a;
    }

    /// The gradient of what goes into the last activation, from that of what comes out, at a normalized value.
    __device__ __forceinline__ Sum before_post(Sum gradient, Sum h) const {
        return back_through(gradient, normalizes ? h * gamma + beta : h, post, post_slope);
    }
};

/// The epilogue of a channel of a sample.
__device__ __forceinline__ Epilogue epilogue_of(int sample, int channel, int channels, int group_channels, const Sum *mean, const Sum *rstd,
                                                const Element *gamma, const Element *beta, int activation, double slope, int post,
                                                double post_slope) {
    Epilogue of = {activation, post, (Sum)slope, (Sum)post_slope, 0, 1, 1, 0, mean != nullptr};
    if (of.normalizes) {
        const int group = sample * (channels / group_channels) + channel / group_channels;
        of.mean = mean[group];
        of.rstd = rstd[group];
        if (gamma) {
            of.gamma = widen(gamma[channel]);
            of.beta = widen(beta[channel]);
        }
    }
    return of;
}
