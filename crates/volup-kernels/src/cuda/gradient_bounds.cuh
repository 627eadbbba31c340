// Of a channel of a sample what `gradient_sums` finds: sums, then for gradients that become fp16 largest magnitudes.

#pragma once

#include "element.cuh"

constexpr int ADDED = 5, SUMS = KIND == 5 ? ADDED + 2 : ADDED;

/// The larger of a magnitude and that of a number, unless this is an infinity or NaN: such are what they are in fp16, too, and what
/// others are scaled by is not theirs to say.
template <typename T> __device__ __forceinline__ T larger_finite(T most, T x) {
    const T size = fabs(x);
    return size <= (T)3.402823466e38 ? max(most, size) : most;
}

/// What two parts of a channel have together.
template <typename T> __device__ __forceinline__ T joined(int which, T one, T other) {
    return which < ADDED ? one + other : max(one, other);
}
