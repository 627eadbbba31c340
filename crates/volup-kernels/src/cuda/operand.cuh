// How elements become operands of the matrix instructions.

#pragma once

#include "element.cuh"

/// float32 rounded to tf32, to nearest, ties away from zero; past the largest it stays finite. So do infinities and
/// NaN: where there is one, the definition computes anew.
__device__ __forceinline__ unsigned round_tf32(float x) {
    const unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    return (bits ^ size) | (min(size + 0x1000u, 0x7f7fe000u) & 0xffffe000u);
}

/// A float32's two parts in registers: the high one, rounded to nearest, and the rest, of which the instructions cut off what
/// they do not hold: half of its last bit is added before.
__device__ __forceinline__ void part_tf32(unsigned &high, unsigned &low) {
    const float x = __uint_as_float(high);
    high = (high + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high)) + 0x1000u;
}

/// The exponent that brings a magnitude, given as bits, to [2^14, 2^15), within what float32 can scale by.
__device__ __forceinline__ int exponent(unsigned bits) { return min(141 - (int)(bits >> 23), 120); }

/// The exponent that the input is scaled by as long as nobody has seen all of it: the largest of some of its magnitudes, control word 4,
/// which `half_scale` has found, goes to [2^10, 2^11), and all may be 32 times as large. One fp16 has as many bits as tf32, but not its
/// range. Of two fp16 it goes to [2^13, 2^14).
__device__ __forceinline__ int sample_exponent(const unsigned *control) {
    const unsigned some = control[4];
    return some ? min((KIND == 2 ? 140 : 137) - (int)(some >> 23), 120) : 0;
}

/// Whether two fp16 of that exponent end before the largest magnitude of all, control word 0, or the sample is of zeros: the input is
/// scaled by that largest then.
__device__ __forceinline__ bool is_beyond_sample(const unsigned *control) {
    const unsigned some = control[4], all = control[0];
    return all > 0 && all < 0x7f800000u && (some == 0 || (all >> 23) > (some >> 23) + 1);
}

/// The exponent that the input is scaled by, from its control words, when it is packed. One that somebody else has packed is not.
__device__ __forceinline__ int input_exponent(const unsigned *control) {
    return KIND == 2 && is_beyond_sample(control) ? exponent(control[0]) : sample_exponent(control);
}

__device__ __forceinline__ float power(int e) { return __uint_as_float((unsigned)(e + 127) << 23); }

/// Whether a position of the input, of its channels' largest magnitude, is left to the definition. Two fp16 are too coarse for what
/// lies below 2^-26 of the largest of all, but is not zero; one is for less than its least normal number, and ends at 65520.
__device__ __forceinline__ bool is_coarse(unsigned most, float scale) {
    const float scaled = __uint_as_float(most) * scale;
    return most > 0 && (KIND == 2 ? scaled < 0.000244140625f : !(scaled >= 0.00006103515625f && scaled < 65520.0f));
}

/// The largest of a warp's magnitudes, into a control word.
__device__ __forceinline__ void raise(unsigned *word, unsigned most) {
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0 && most > *(volatile unsigned *)word) atomicMax(word, most);
}

/// Bits of |x|, and of float32 that are as large.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
template <typename T> __device__ __forceinline__ unsigned magnitude(T x) { return x.bits & 0x7fffu; }
__device__ __forceinline__ unsigned as_float32(float, unsigned most) { return most; }
template <typename T> __device__ __forceinline__ unsigned as_float32(T, unsigned most) {
    return __float_as_uint(widen(T{(unsigned short)most}));
}

/// The largest magnitude of some elements so far; of narrow ones two, of every other one each.
__device__ __forceinline__ unsigned larger(unsigned most, const float (&v)[E]) {
#pragma unroll
    for (int e = 0; e < E; e++) most = max(most, magnitude(v[e]));
    return most;
}
template <typename T> __device__ __forceinline__ unsigned larger(unsigned most, const T (&v)[E]) {
#pragma unroll
    for (int e = 0; e < E; e += 2) most = __vmaxu2(most, (v[e].bits | (unsigned)v[e + 1].bits << 16) & 0x7fff7fffu);
    return most;
}
__device__ __forceinline__ unsigned largest(float, unsigned most) { return most; }
template <typename T> __device__ __forceinline__ unsigned largest(T, unsigned most) { return max(most & 0xffff, most >> 16); }

/// Elements as an operand's 16 bytes; the split's low part in `low`.
__device__ __forceinline__ uint4 operand(const Element (&v)[E], float scale, uint4 *low) {
#if KIND == 0
    return *(const uint4 *)v;
#elif KIND == 1
    return make_uint4(round_tf32(v[0]), round_tf32(v[1]), round_tf32(v[2]), round_tf32(v[3]));
#elif KIND == 5
    return make_uint4(narrow_both(v[0] * scale, v[1] * scale, Half{}), narrow_both(v[2] * scale, v[3] * scale, Half{}),
                      narrow_both(v[4] * scale, v[5] * scale, Half{}), narrow_both(v[6] * scale, v[7] * scale, Half{}));
#elif KIND == 3
    const uint4 high = make_uint4(round_tf32(v[0]), round_tf32(v[1]), round_tf32(v[2]), round_tf32(v[3]));
    *low = make_uint4(round_tf32(v[0] - __uint_as_float(high.x)), round_tf32(v[1] - __uint_as_float(high.y)),
                      round_tf32(v[2] - __uint_as_float(high.z)), round_tf32(v[3] - __uint_as_float(high.w)));
    return high;
#else
    unsigned hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Half h[2], l[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float x = v[2 * i + e] * scale;
            narrow(x, &h[e]);
            narrow((x - widen(h[e])) * 2048.0f, &l[e]);
        }
        hi[i] = h[0].bits | (unsigned)h[1].bits << 16;
        lo[i] = l[0].bits | (unsigned)l[1].bits << 16;
    }
    *low = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    return make_uint4(hi[0], hi[1], hi[2], hi[3]);
#endif
}

/// A largest magnitude, as bits of float32. Of two tf32 parts the low one has not bits enough below 2^-113: where a vector
/// holds nothing larger, it counts as an infinity, and the definition computes.
__device__ __forceinline__ unsigned within_parts(unsigned most) { return KIND == 3 && most - 1 < 0x07000000u - 1 ? 0x7f800000u : most; }

/// The largest magnitude so far.
__device__ __forceinline__ unsigned largest_so_far(unsigned most, const Element (&v)[E]) {
#if KIND == 3
    return max(most, within_parts(larger(0u, v)));
#else
    return larger(most, v);
#endif
}

/// Whether what has such a largest magnitude is left to the definition.
__device__ __forceinline__ bool undefined(unsigned most) {
    return as_float32(Element{}, largest(Element{}, most)) >= 0x7f800000u;
}
