// Rows of `box_gemm`'s weight matrix, and the offsets at which they have taps.

#pragma once

#include "operand.cuh"

/// One axis: of the convolution, of its positions, of the offsets that any tap is at: multiples of `apart` below
/// `offsets` of them.
struct Axis {
    int input, output, kernel, stride, padding, dilation, first, count, offsets, apart, box;

    /// The tap of a residue at an offset, `kernel` if there is none: t*dilation = stride*m + r.
    __device__ __forceinline__ int tap(int residue, int offset) const {
        const int far = offset * apart * stride + residue, t = far / dilation;
        return t * dilation == far ? min(t, kernel) : kernel;
    }
};

/// What a row of a row block is: a channel of the block, and residues along the axes.
struct Row {
    int channel, d, h, w;
    bool here;

    /// `type`: which classes, pairs of residues along depth and height, the block has. Rows past the last, and of
    /// classes past the last, are not here.
    __device__ __forceinline__ Row(int row, int type, int channels, int classes, int d_stride, int h_stride, int residues,
                                   unsigned long long residue_list) {
        const int of_class = row / channels, local = of_class / residues, of = type * classes + local;
        channel = row - of_class * channels;
        d = of / h_stride;
        h = of - d * h_stride;
        w = (int)(residue_list >> 4 * (of_class - local * residues)) & 15;
        here = local < classes && d < d_stride;
    }
};
