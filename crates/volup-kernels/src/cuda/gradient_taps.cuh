// How the kernels that read the rows of `gradient_rows` see the taps.

#pragma once

/// One axis: the input's size, the output's, stride, padding, dilation, taps; rows of the input and its gaps; classes of
/// taps, taps from one of a class to its next, rows from what one reads to what the next one does.
struct TapAxis {
    int input, output, stride, padding, dilation, kernel, rows, classes, step, apart;

    /// Whether a tap reads an output's voxel for one of the input's.
    __device__ __forceinline__ bool reads(int i, int t) const { return (unsigned)(i * stride - padding + t * dilation) < (unsigned)output; }
};

#define TAP_AXIS(a) int a##_input, int a##_output, int a##_stride, int a##_padding, int a##_dilation, int a##_kernel, int a##_rows, int a##_classes, int a##_step, int a##_apart
#define TAP_AXIS_OF(a) {a##_input, a##_output, a##_stride, a##_padding, a##_dilation, a##_kernel, a##_rows, a##_classes, a##_step, a##_apart}

/// Whether another kernel's result stands: `control` is null for one that nobody computed, else it holds the largest
/// magnitudes of both operands as bits of float32, neither of which may be an infinity or NaN, or become one when it is
/// rounded to tf32.
__device__ __forceinline__ bool stands(const unsigned *control) { return control && max(control[0], control[1]) < 0x7f7ff000u; }
