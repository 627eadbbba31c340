// What rows of a gradient are scaled by that become one fp16.

#pragma once

#include "operand.cuh"

/// The exponent of a channel, from a bound of its magnitudes: these go below 2^15. What weights are scaled by in turn is left room for.
__device__ __forceinline__ int row_exponent(float bound) { return min(exponent(__float_as_uint(bound)), 100); }
