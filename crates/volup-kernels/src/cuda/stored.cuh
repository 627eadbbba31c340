// Values as tensors hold them.

#pragma once

#include "element.cuh"

/// Rounds values as a tensor's type does.
template <int COUNT> __device__ __forceinline__ void as_stored([[maybe_unused]] float (&v)[COUNT]) {
#if KIND == 0
#pragma unroll
    for (int k = 0; k < COUNT; k += 2) {
        const unsigned both = narrow_both(v[k], v[k + 1], Element{});
        v[k] = widen(Element{(unsigned short)both});
        v[k + 1] = widen(Element{(unsigned short)(both >> 16)});
    }
#endif
}

/// Values as 16 bytes of a tensor of 16 bits or float32.
#if KIND != 4
__device__ __forceinline__ uint4 vector_of(const float (&v)[16 / sizeof(Element)]) {
    uint4 words;
#pragma unroll
    for (int i = 0; i < 4; i++)
#if KIND == 0
        (&words.x)[i] = narrow_both(v[2 * i], v[2 * i + 1], Element{});
#else
        (&words.x)[i] = __float_as_uint(v[i]);
#endif
    return words;
}
#endif
