// Whether what a product has made of packed operands stands.

#pragma once

/// As those who packed have left control words: no operand that is not finite, and none that is too coarse. Else the definition
/// (`definition.cuh`) writes the output.
__device__ __forceinline__ bool product_stands(const unsigned *control) {
    return max(control[0], control[1]) <= 0x7f7fffffu && control[2] == 0;
}
