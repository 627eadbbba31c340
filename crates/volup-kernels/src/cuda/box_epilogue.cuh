// What `box_gemm` does with a warp's sums: bias, activation, and the way to y.

#pragma once

#include "box_rows.cuh"
#include "activation.cuh"
#include "divisor.cuh"
#include "element.cuh"

/// Positions that a warp stages at a time.
constexpr int PIECE = 32;
/// Outputs that a thread has in hand at once; fewer where registers are scarce.
constexpr int LINES = WARPS * CTAS > 16 ? 4 : 8;
/// Where no output is.
constexpr int NOWHERE = 1 << 29;

/// Floats from a staged line of NCDHW to the next, for strides that are known when this is compiled.
template <int STRIDE> constexpr int LINE_PITCH = PIECE * STRIDE + (STRIDE == 1 ? 8 : 17);

/// A line of staged outputs, or of NDHWC a column: where it lies from a position's first output, and its bias.
struct __align__(8) Line {
    int at;
    float bias;
};

/// Bias and straight activations.
struct Finish {
    int activation;
    float slope;

    __device__ __forceinline__ float operator()(float v, float bias) const { return straighten(v + bias, activation, slope); }
};

/// What the definition takes: the sample's first channel of x, the whole weight, the bias of the row block's first
/// channel or nothing, strides of x, which channel that is.
struct Definition {
    const Axis &depth, &height, &width;
    const Element *x, *w, *bias;
    int x_c, x_d, x_h, x_w, channel0, in_per_group, out_per_group;
};

__device__ __forceinline__ void put(Element *to, float v) {
    Element e;
    narrow(v, &e);
    *to = e;
}

/// A row block's outputs in a box.
struct Outputs {
    /// The output of the box's first position and the row block's first channel, all residues 0, and which one it is.
    Element *y;
    int od, oh, ow;
    /// The first class and how many there are, channels of the row block and those that there are.
    int class0, classes, channels, here;
    int d_stride, h_stride, w_stride, d_output, h_output, w_output;
    int y_c, y_d, y_h, y_w;
    Finish finish;

    __device__ __forceinline__ bool inside(const int4 &p, int rd, int rh, int rw) const {
        return (unsigned)(od + p.y + rd) < (unsigned)d_output && (unsigned)(oh + p.z + rh) < (unsigned)h_output &&
               (unsigned)(ow + p.w + rw) < (unsigned)w_output;
    }
    /// Whether a position's outputs of all residues along depth and height are there.
    __device__ __forceinline__ bool within(const int4 &p) const {
        return od + p.y >= 0 && od + p.y + d_stride <= d_output && oh + p.z >= 0 && oh + p.z + h_stride <= h_output;
    }
    __device__ __forceinline__ void class_of(int local, const Divisor &by_h, int &rd, int &rh) const {
        const int of = class0 + local;
        rd = by_h.divide(of);
        rh = of - rd * h_stride;
    }

    /// Classes that there are, of the row block's.
    __device__ __forceinline__ int real_classes() const { return min(classes, d_stride * h_stride - class0); }

    /// The table of lines: of NCDHW one for each channel of each class, of NDHWC one for each residue along width too.
    /// `bias`: that of the first channel, or nothing.
    __device__ __forceinline__ void describe(Line *lines, const Divisor &by_channels, const Divisor &by_stride, const Divisor &by_h,
                                             const Element *bias, bool last) const {
        const int residues = last ? w_stride : 1;
        for (int i = threadIdx.x % 32; i < classes * residues * channels; i += 32) {
            const int rest = by_channels.divide(i), channel = i - rest * channels;
            const int local = last ? by_stride.divide(rest) : rest, rw = last ? rest - local * w_stride : 0;
            int rd, rh;
            class_of(local, by_h, rd, rh);
            const int c = min(channel, here - 1);
            lines[i] = {channel * y_c + rd * y_d + rh * y_h + rw * y_w, bias ? widen(bias[c]) : 0.0f};
        }
    }

    /// Bias and curved activations of what is staged, in place: one copy of their code.
    __device__ __forceinline__ void bend(float *staged, const Line *lines, int count, int length, int pitch, bool last) const {
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < length; i += 32)
#pragma unroll 1
            for (int line = 0; line < count; line += LINES) {
                float *const from = &staged[line * pitch + i];
                float v[LINES];
#pragma unroll
                for (int k = 0; k < LINES; k++) v[k] = line + k < count ? from[k * pitch] + lines[last ? i : line + k].bias : 0.0f;
                curve(v, finish.activation);
#pragma unroll
                for (int k = 0; k < LINES; k++)
                    if (line + k < count) from[k * pitch] = v[k];
            }
        __syncwarp();
    }

    template <int COUNT>
    __device__ __forceinline__ void put_lines(Element *to, const float *v, int pitch, const Line *lines, bool plain) const {
        if (plain) {
#pragma unroll
            for (int k = 0; k < COUNT; k++) put(to + lines[k].at, v[k * pitch]);
        } else {
#pragma unroll
            for (int k = 0; k < COUNT; k++) put(to + lines[k].at, finish(v[k * pitch], lines[k].bias));
        }
    }

    /// NCDHW: neighbouring lanes write neighbours, residues along width, then positions. STRIDE: that along width, 0 for
    /// any. `plain`: sums as they are.
    template <int STRIDE>
    __device__ __forceinline__ void first(const float *staged, const int4 *positions, const Line *lines, const Divisor &by_stride,
                                          const Divisor &by_h, int any_pitch, bool plain) const {
        const int stride = STRIDE ? STRIDE : w_stride, pitch = STRIDE ? LINE_PITCH<STRIDE> : any_pitch, lane = threadIdx.x % 32;
        const int all = real_classes();
#pragma unroll 1
        for (int f = lane; f < PIECE * stride; f += 32) {
            const int j = STRIDE ? f / stride : by_stride.divide(f), rw = f - j * stride;
            const int4 p = positions[j];
            const bool there = (unsigned)(ow + p.w + rw) < (unsigned)w_output;
            Element *const to = y + (p.x + rw * y_w);
            const float *from = staged + f;
            // All lines alike, or class by class.
            const bool whole = here == channels && __all_sync(0xffffffffu, !there || within(p));
            const int groups = whole ? 1 : all, count = whole ? all * channels : here;
#pragma unroll 1
            for (int local = 0; local < groups; local++) {
                int rd, rh;
                class_of(local, by_h, rd, rh);
                const Line *line = lines + local * channels;
                const float *v = from + local * channels * pitch;
                if (!there || !whole && !inside(p, rd, rh, rw)) continue;
                int c = 0;
#pragma unroll 1
                for (; c + LINES <= count; c += LINES, v += LINES * pitch, line += LINES)
                    put_lines<LINES>(to, v, pitch, line, plain);
#pragma unroll 1
                for (; c < count; c++, v += pitch, line++) put_lines<1>(to, v, pitch, line, plain);
            }
        }
    }

    /// NDHWC: neighbouring lanes write neighbours, channels, then residues along width.
    __device__ __forceinline__ void last(const float *staged, const int4 *positions, const Line *lines, const Divisor &by_class,
                                         const Divisor &by_channels, const Divisor &by_h, int pitch, bool plain) const {
        const int lane = threadIdx.x % 32;
        const int4 own = positions[lane];
        const bool whole = __all_sync(0xffffffffu, within(own) && ow + own.w >= 0 && ow + own.w + w_stride <= w_output);
#pragma unroll 1
        for (int f = lane; f < real_classes() * w_stride * channels; f += 32) {
            const int local = by_class.divide(f), in_class = f - local * w_stride * channels, rw = by_channels.divide(in_class);
            int rd, rh;
            class_of(local, by_h, rd, rh);
            if (in_class - rw * channels >= here) continue;
            const Line line = lines[f];
            Element *const to = y + line.at;
            const float *const from = staged + f;
            if (whole) {
                if (plain) {
#pragma unroll LINES
                    for (int j = 0; j < PIECE; j++) put(to + positions[j].x, from[j * pitch]);
                } else {
#pragma unroll LINES
                    for (int j = 0; j < PIECE; j++) put(to + positions[j].x, finish(from[j * pitch], line.bias));
                }
            } else {
#pragma unroll 2
                for (int j = 0; j < PIECE; j++) {
                    const int4 p = positions[j];
                    if (inside(p, rd, rh, rw)) put(to + p.x, plain ? from[j * pitch] : finish(from[j * pitch], line.bias));
                }
            }
        }
    }

    /// So many positions by the definition.
    __device__ __forceinline__ void define(const int4 *positions, int count, const Definition &of) const {
        const Axis &depth = of.depth, &height = of.height, &width = of.width;
        const int taps = depth.kernel * height.kernel * width.kernel;
#pragma unroll 1
        for (int f = threadIdx.x % 32; f < real_classes() * w_stride * channels * count; f += 32) {
            const int row = f / count, of_class = row / channels, channel = row - of_class * channels;
            const int local = of_class / w_stride, rw = of_class - local * w_stride;
            const int rd = (class0 + local) / h_stride, rh = class0 + local - rd * h_stride;
            const int4 p = positions[f - row * count];
            if (channel >= here || !inside(p, rd, rh, rw)) continue;
            const int group = (of.channel0 + channel) / of.out_per_group, of_group = of.channel0 + channel - group * of.out_per_group;
            float v = 0.0f;
#pragma unroll 1
            for (int tap = 0; tap < taps; tap++) {
                const int tw = tap % width.kernel, rest = tap / width.kernel, th = rest % height.kernel, td = rest / height.kernel;
                const int ud = od + p.y + rd + depth.padding - td * depth.dilation;
                const int uh = oh + p.z + rh + height.padding - th * height.dilation;
                const int uw = ow + p.w + rw + width.padding - tw * width.dilation;
                if (ud < 0 || uh < 0 || uw < 0 || ud % d_stride || uh % h_stride || uw % w_stride) continue;
                const int id = ud / d_stride, ih = uh / h_stride, iw = uw / w_stride;
                if (id >= depth.input || ih >= height.input || iw >= width.input) continue;
                const long long w_c = (long long)of.out_per_group * taps;
                const Element *from = of.x + (long long)group * of.in_per_group * of.x_c + (id * of.x_d + ih * of.x_h + iw * of.x_w);
                const Element *by = of.w + group * of.in_per_group * w_c + (of_group * taps + tap);
#pragma unroll 1
                for (int c = 0; c < of.in_per_group; c++, from += of.x_c, by += w_c) v = fmaf(widen(*from), widen(*by), v);
            }
            const float add = of.bias ? widen(of.bias[channel]) : 0.0f;
            v = finish.activation > 2 ? curve(v + add, finish.activation) : finish(v, add);
            put(y + (p.x + rd * y_d + rh * y_h + rw * y_w) + (long long)channel * y_c, v);
        }
    }
};
