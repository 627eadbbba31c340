// Numbers taken apart.

#pragma once

/// A number's digits, the lowest first, each of a base of its own.
template <typename T> struct Digits {
    T rest;

    __device__ __forceinline__ int next(int by) {
        const T digit = rest % (T)by;
        rest /= (T)by;
        return (int)digit;
    }
};
