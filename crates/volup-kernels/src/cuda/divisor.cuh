// Division by numbers that are known when a kernel starts.

#pragma once

/// Division of numbers below 2^31 (Granlund and Montgomery, 1994).
struct Divisor {
    int by;
    unsigned factor, shift;

    Divisor() = default;
    __device__ explicit Divisor(int by) : by(by), shift(by > 1 ? 32 - __clz(by - 1) : 0) {
        factor = (unsigned)(((1ull << 32) * ((1ull << shift) - by)) / by + 1);
    }
    __device__ __forceinline__ int divide(int x) const { return (__umulhi(factor, x) + x) >> shift; }
};
