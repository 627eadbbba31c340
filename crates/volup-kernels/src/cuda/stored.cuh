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
