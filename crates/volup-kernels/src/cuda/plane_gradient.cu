// The gradients of a convolution with respect to its input and its weight, in one launch, where the input has few channels.
//
// `dx[n, ci, i] = sum over taps and co: dy[n, co, i*s - p + t*d] * w[ci, co, t]`,
// `dw[ci, co, t] = sum over n and i: x[n, ci, i] * dy[n, co, i*s - p + t*d]`.
//
// With few channels the input is small beside `dy`, the gradient of the convolution's output, and there are few products. What takes time
// is to read what `dy` follows from (`dy = (rstd*gamma*dv + q + r*h) * f` of `gradient_sums` and `gradient_vectors`), or `dy` itself. Here
// that is done once, and `dy` is nowhere written.
//
// # How
//
// An item is `lines` whole lines of a segment of the input's planes in a sample. A block goes through its planes in turn. In shared memory
// it has a ring of the planes of `dy` that the taps of one of them read, `slots` = (k - 1)*d + 1 along depth, with all lines and columns that
// taps reach, zeros where there is no output; from one plane to the next it makes those that are new. A voxel of `dy` has its CHANNELS
// side by side, of 16 bits; columns of the same residue of the stride are neighbours, so that the input's neighbours read neighbours.
//
// What `dy` follows from each warp has copied to memory of its own, a task ahead (`plane_tasks.cuh`), in which order of planes and items that
// may be. For dx a warp has 16 voxels at a time and multiplies all taps; for dw it has taps of its own and multiplies all voxels, and its sums
// stay in registers until the last item.
//
// # Numbers
//
// `KIND` 0, f16 or bf16, `dy` rounded as it. `KIND` 5, float32 as one fp16: `dy` is scaled by the power of two that `row_exponent` makes of
// its channel's bound, the weight by the inverse and then each channel of the input by its largest, and so is x of a plane's voxels; what is
// written is scaled back. A plane of which something is no number, or past what it is multiplied as, is added up by the definition, of `dy`
// as it is multiplied.
//
// # What it takes
//
// One group, at most 8 channels of the input, CHANNELS of the output, TAPS taps; lines of a plane of y lie one after the other, and
// neighbours are voxels (`y_w` is 1) or all channels of one, which are read faster if they are a multiple of 8. Threads: 256. Grid: at most
// the items: of samples, segments, tiles of lines, the last the fastest. Elements of a sample of x and y are below 2^31; `dz` and `y`
// are multiples of 16 bytes. Bytes of dynamic shared memory, `own` to the next multiple of 16 and 8 * 2 * 1152 for each of `dz` and `y`; with
// `columns` = (input_w - 1)*stride_w + (kernel_w - 1)*dilation_w + 1 and `rows` = (lines - 1)*stride_h + (kernel_h - 1)*dilation_h + 1 `own` is
// `slots * rows * stride_w * ceil(columns / stride_w) * 2*CHANNELS + 2*taps*in_channels*CHANNELS + SIZE*in_channels*(16*ceil(lines*input_w /
// 16) + 8)`.
//
// Parameters: `x` (null without `partial`), `w` (null without `dx`), `dz`, `y` (null: nothing follows the convolution), `dx` (null: not
// wanted), `partial` (as `direct_weight_gradient` has it, a share a block; null: not wanted), for KIND 5 `bounds` (of each channel what no
// gradient is past); `mean`, `rstd`, `terms` (null: no normalization), `gamma`, `beta` (null: 1 and 0); i32: `in_channels`, `out_channels`,
// `group_channels` of the normalization; of depth, then height, then width: `input`, `output`, `kernel`, `stride`, `padding`, `dilation`;
// `lines`, `planes` (of a segment), `items`, `activation`, `post`; f64: `slope`, `post_slope`; i64: strides of x and dx, then of y and dz: n,
// c, d, h, w.

#include "mma.cuh"
#include "operand.cuh"
#include "plane_tasks.cuh"
#include "slope.cuh"
#if SCALED
#include "row_exponent.cuh"
#endif

#include <type_traits>

#if !defined(CHANNELS) || !defined(TAPS) || !defined(CTAS)
#error "CHANNELS: of the output, a multiple of 16; TAPS: the most; CTAS: blocks of a multiprocessor"
#endif

constexpr int MOST_IN = 8;
/// Sixteens of channels, eights of them, taps that a warp has of dw, and bytes of a position of the ring.
constexpr int BLOCKS = CHANNELS / 16, UNITS = CHANNELS / VECTOR, OF_WARP = TAPS / WARPS, OF_POSITION = 2 * CHANNELS;
/// Channels that are computed at once; taps that are multiplied at once for dx; steps that are multiplied at once for dw, as many as there are
/// registers for; elements of x that a thread asks for early.
constexpr int AT_ONCE = 2, AHEAD = 3, STEPS = SCALED ? 1 : 2, HELD = 2;
/// What `dy` is multiplied as.
using Stored = std::conditional_t<SCALED, Half, Element>;

/// How a channel's gradients follow, with what is normalized as its difference from the mean: `v = slope*(a - mean) + beta`, `dy = (factor*dv + q
/// + r*(a - mean)) * f`.
struct __align__(16) Channel {
    float mean, slope, beta, factor, q, r, unused[2];
};

template <int VALUE> struct Number {
    static constexpr int value = VALUE;
};

/// Adds NaN to a pair of sums where one of a pair is no number, else nothing.
__device__ __forceinline__ void watch(unsigned &sums, unsigned pair) {
#if KIND == 0 && !defined(TYPE_F16)
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sums) : "r"(pair), "r"(0u));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sums) : "r"(pair), "r"(0u));
#endif
}

/// Whether a number is one.
__device__ __forceinline__ bool is_number(float x) { return fabsf(x) <= 3.402823466e38f; }

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) plane_gradient(
    const Element *x, const Element *w, const Element *dz, const Element *y, Element *dx, float *partial,
#if SCALED
    const float *bounds,
#endif
    const float *mean, const float *rstd, const float *terms, const Element *gamma, const Element *beta, int in_channels, int out_channels,
    int group_channels, int input_d, int output_d, int kernel_d, int stride_d, int padding_d, int dilation_d, int input_h, int output_h,
    int kernel_h, int stride_h, int padding_h, int dilation_h, int input_w, int output_w, int kernel_w, int stride_w, int padding_w,
    int dilation_w, int lines, int planes, int items, int activation, int post, double slope, double post_slope, long long x_n,
    long long x_c, long long x_d, long long x_h, long long x_w, long long y_n, long long y_c, long long y_d, long long y_h, long long y_w) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Channel of_channel[CHANNELS];
    /// Of a plane of taps, where it lies in the ring; nowhere if there is no output.
    __shared__ int plane_at[TAPS];
    /// Of a tap where it reads in a plane of the ring, and which plane.
    __shared__ int2 tap_at[TAPS];
    [[maybe_unused]] __shared__ unsigned of_weight[MOST_IN], of_x[2][MOST_IN];
    const Axis d = {input_d, output_d, kernel_d, stride_d, padding_d, dilation_d}, h = {input_h, output_h, kernel_h, stride_h, padding_h, dilation_h},
               wide = {input_w, output_w, kernel_w, stride_w, padding_w, dilation_w};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    __shared__ Sizes size;
    if (threadIdx.x == 0) {
        size.columns = (wide.input - 1) * wide.stride + wide.reach();
        size.rows = (lines - 1) * h.stride + h.reach();
        size.slots = d.reach();
        size.of_residue = (size.columns + wide.stride - 1) / wide.stride * OF_POSITION;
        size.of_line = wide.stride * size.of_residue;
        size.of_plane = size.rows * size.of_line;
        size.steps = (lines * wide.input + STEP - 1) / STEP;
        size.units = (out_channels + VECTOR - 1) / VECTOR;
        size.segments = (d.input + planes - 1) / planes;
        size.tiles = (h.input + lines - 1) / lines;
    }
    __syncthreads();
    // Each by a thread of its own: they take long.
    if (threadIdx.x % 32 == 0) {
        const int bases[] = {wide.output, wide.stride, wide.input, size.steps * STEP, size.units, size.slots, size.tiles, size.segments};
        int base = 1;
#pragma unroll
        for (int which = 0; which < WARPS; which++)
            if (threadIdx.x / 32 == which) base = bases[which];
        (&size.by_output)[threadIdx.x / 32] = Divisor(base);
    }
    __syncthreads();
    const int taps = d.kernel * h.kernel * wide.kernel, voxels = lines * wide.input;
    const unsigned ring = (unsigned)__cvta_generic_to_shared(memory);
    Stored *const of_taps = (Stored *)(memory + size.slots * size.of_plane);
    Element *const of_voxels = (Element *)(of_taps + taps * in_channels * CHANNELS);
    // Where this warp has its tasks' copies.
    const int of_task = (y ? 2 : 1) * OF_TENSOR;
    const int staged = ((int)((char *)(of_voxels + in_channels * (size.steps * STEP + APART)) - memory) + 15 & ~15) + warp * SLOTS * of_task;
    // Where a vector of a position lies, both in bytes: neighbouring positions meet no bank twice.
    const auto at = [](int position, int unit) { return position + (((position >> 3) ^ unit) & 16 * (UNITS - 1)); };
    const auto scale_of = [&]([[maybe_unused]] int channel) {
#if SCALED
        return power(row_exponent(bounds[channel]));
#else
        return 1.0f;
#endif
    };

    // What is not written to is zero.
    for (int i = threadIdx.x; i < size.slots * size.of_plane / 16; i += THREADS) ((uint4 *)memory)[i] = make_uint4(0, 0, 0, 0);
    for (int tap = threadIdx.x; tap < taps; tap += THREADS) {
        const int of_height = tap / wide.kernel, tw = tap - of_height * wide.kernel, td = of_height / h.kernel, th = of_height - td * h.kernel;
        const int column = tw * wide.dilation;
        tap_at[tap] = make_int2(th * h.dilation * size.of_line + column % wide.stride * size.of_residue + column / wide.stride * OF_POSITION, td);
    }
    // The weight: of each tap the input's channels, of these the output's.
    bool bad_weight = false;
    // Channels that a lane multiplies at once are neighbours: of 16 an even one and its next, and the same of the other eight.
    const auto weight_at = [&](int tap, int ci, int co) { return (tap * in_channels + ci) * CHANNELS + co / 16 * 16 + co % 8 / 2 * 4 + co % 16 / 8 * 2 + co % 2; };
    const auto for_weight = [&](auto f) {
        if (dx)
            for (int i = threadIdx.x; i < in_channels * out_channels * taps; i += THREADS) {
                const int pair = i / taps, tap = i - pair * taps, ci = pair / out_channels, co = pair - ci * out_channels;
                f(ci, co, tap, widen(w[i]));
            }
    };
    for (int i = threadIdx.x; i < taps * in_channels * CHANNELS; i += THREADS) of_taps[i] = Stored{};
#if SCALED
    if (threadIdx.x < MOST_IN) of_weight[threadIdx.x] = of_x[0][threadIdx.x] = of_x[1][threadIdx.x] = 0;
    __syncthreads();
    for_weight([&](int ci, int co, int, float v) {
        const unsigned most = magnitude(v * (1.0f / scale_of(co)));
        if (most < 0x7f800000u) atomicMax(&of_weight[ci], most);
    });
#endif
    __syncthreads();
    for_weight([&](int ci, int co, int tap, float v) {
#if SCALED
        v *= 1.0f / scale_of(co) * power(exponent(of_weight[ci]));
#endif
        Stored &to = of_taps[weight_at(tap, ci, co)];
        narrow(v, &to);
        bad_weight |= !is_number(widen(to));
    });

    const Element *const past = dz + size.by_segments.divide(size.by_tiles.divide(items)) * y_n;
    const Tasks tasks = {size, d, h, lines, planes, items, wide.output, out_channels, dz, y, past, y_n, (int)y_c, (int)y_d, (int)y_h, (int)y_w};
    Task ahead = {(int)blockIdx.x};
    ahead.at = warp;
    tasks.begin(ahead);
    tasks.settle(ahead);
    tasks.fetch(ahead, ring + staged);
    int slot = 0;

    float sum[OF_WARP][BLOCKS][4] = {};
    int known = -1, turn = 0;
#pragma unroll 1
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Item of_item = tasks.item(item);
        const int n = of_item.n, h0 = of_item.h0, first = of_item.first, last = of_item.last;
        // Lines that are not there.
        const int above = tasks.first_line(h0) - (h0 * h.stride - h.padding), there = tasks.lines_there(h0), none = size.rows - there;
        for (int line = warp; line < none * size.slots; line += WARPS) {
            const int of_slot = size.by_slots.divide(line), at = line - of_slot * size.slots, in_plane = of_slot < above ? of_slot : of_slot + there;
            for (int byte = lane * 16; byte < size.of_line; byte += 512) *(uint4 *)(memory + at * size.of_plane + in_plane * size.of_line + byte) = make_uint4(0, 0, 0, 0);
        }
        if (n != known) {
            known = n;
            __syncthreads();
            for (int at = threadIdx.x; at < CHANNELS; at += THREADS) {
                // Past the last channel the last one is read, and not written.
                const int c = min(at, out_channels - 1);
                const float scale = scale_of(c);
                const Norm norm = norm_of(n, c, out_channels, group_channels, mean, rstd, gamma, beta);
                Channel of = {norm.mean, norm.rstd * norm.gamma, norm.beta, scale};
                if (mean) {
                    const int group = n * (out_channels / group_channels) + c / group_channels;
                    of.factor = scale * of.slope;
                    of.q = scale * terms[2 * group];
                    of.r = scale * terms[2 * group + 1] * norm.rstd;
                }
                of_channel[at] = of;
            }
            __syncthreads();
        }
        // The last plane so far that something is no number of.
        int last_bad = -(1 << 30);
#pragma unroll 1
        for (int id = first; id < last; id++, turn ^= 1) {
            const int low = id * d.stride - d.padding;
            unsigned watched = 0;
            // The voxels of x, zeros past the last.
            bool bad = bad_weight;
            const auto read_x = [&](int i) {
                const int ci = size.by_voxels.divide(i), v = i - ci * (size.steps * STEP), ih = size.by_input.divide(v), iw = v - ih * wide.input;
                const bool is = ci < in_channels && v < voxels && h0 + ih < h.input;
                return is ? x[n * x_n + (ci * (int)x_c + id * (int)x_d + (h0 + ih) * (int)x_h + iw * (int)x_w)] : Element{};
            };
            const auto put_x = [&](int i, Element value) {
                const int ci = size.by_voxels.divide(i), v = i - ci * (size.steps * STEP);
                if (ci >= in_channels) return;
                of_voxels[ci * (size.steps * STEP + APART) + v] = value;
                const bool number = is_number(widen(value));
                bad |= !number;
#if SCALED
                if (number) atomicMax(&of_x[turn][ci], magnitude(value));
#endif
            };
            Element held[HELD];
            if (partial)
#pragma unroll
                for (int k = 0; k < HELD; k++) held[k] = read_x(threadIdx.x + k * THREADS);
            if (threadIdx.x < d.kernel) {
                const int od = low + (int)threadIdx.x * d.dilation;
                plane_at[threadIdx.x] = (unsigned)od < (unsigned)d.output ? (od - size.by_slots.divide(od) * size.slots) * size.of_plane : -1;
            }
            // What is new of `dy`.
            const auto fill = [&](auto follows, auto known_of) {
                constexpr bool FOLLOWS = follows.value;
                const Activation<known_of.first> before(activation, slope);
                const Activation<known_of.second> after(post, post_slope);
                // Of some channels from one on, of each its positions.
                const auto compute = [&](float (&dy)[AT_ONCE * OWN], float (&v)[AT_ONCE * OWN], int channel) {
                    Channel of[AT_ONCE];
#pragma unroll
                    for (int e = 0; e < AT_ONCE; e++) of[e] = of_channel[channel + e];
                    if (FOLLOWS) {
                        float a[AT_ONCE * OWN], f[AT_ONCE * OWN], apart[AT_ONCE * OWN], unused[AT_ONCE * OWN];
                        before.of(v, a, f);
#pragma unroll
                        for (int i = 0; i < AT_ONCE * OWN; i++) {
                            apart[i] = a[i] - of[i / OWN].mean;
                            v[i] = of[i / OWN].slope * apart[i] + of[i / OWN].beta;
                        }
                        after.of(v, unused, a);
                        after.back(dy, a);
                        if (mean) {
#pragma unroll
                            for (int i = 0; i < AT_ONCE * OWN; i++) dy[i] = of[i / OWN].factor * dy[i] + (of[i / OWN].q + of[i / OWN].r * apart[i]);
                        } else if (SCALED) {
#pragma unroll
                            for (int i = 0; i < AT_ONCE * OWN; i++) dy[i] *= of[i / OWN].factor;
                        }
                        before.back(dy, f);
                    } else if (SCALED) {
#pragma unroll
                        for (int i = 0; i < AT_ONCE * OWN; i++) dy[i] *= of[i / OWN].factor;
                    }
                };
#pragma unroll 1
                while (ahead.item == item && ahead.id == id) {
                    const int chunk = size.by_units.divide(ahead.at), unit = ahead.at - chunk * size.units, od = ahead.od;
                    // Where in 16 bytes the positions of the next channel start, in elements.
                    int start = (int)((size_t)(ahead.dz + (od * (int)y_d + ahead.start + chunk * CHUNK)) / SIZE) + unit * VECTOR * (int)y_c;
                    ahead.at += WARPS;
                    tasks.settle(ahead);
                    tasks.fetch(ahead, ring + staged + (slot ^ 1) * of_task);
                    await_copies<1>();
                    __syncwarp();
                    const char *const own = memory + staged + slot * of_task + lane * (y_w == 1 ? SIZE : 16);
                    unsigned words[OWN][VECTOR / 2];
#pragma unroll
                    for (int e0 = 0; e0 < VECTOR; e0 += AT_ONCE) {
                        float dy[AT_ONCE * OWN], v[AT_ONCE * OWN];
                        const auto load = [&](const char *from, int e, auto step) {
#pragma unroll
                            for (int k = 0; k < OWN; k++) {
                                dy[e * OWN + k] = widen(*(const Element *)(from + 32 * k * step.value));
                                if (FOLLOWS) v[e * OWN + k] = widen(*(const Element *)(from + OF_TENSOR + 32 * k * step.value));
                            }
                        };
#pragma unroll
                        for (int e = 0; e < AT_ONCE; e++, start += (int)y_c) {
                            const int c = e0 + e;
                            if (y_w == 1)
                                load(own + c * (RUN * 16) + (start & PER - 1) * SIZE, e, Number<SIZE>());
                            else
                                load(own + c / PER * (CHUNK * 16) + c % PER * SIZE, e, Number<16>());
                        }
                        compute(dy, v, unit * VECTOR + e0);
#pragma unroll
                        for (int k = 0; k < OWN; k++) words[k][e0 / 2] = narrow_both(dy[k], dy[k + OWN], Stored{});
                    }
                    const int left = out_channels - unit * VECTOR, in_ring = (od - size.by_slots.divide(od) * size.slots) * size.of_plane + above * size.of_line;
#pragma unroll
                    for (int k = 0; k < OWN; k++) {
                        const int position = chunk * CHUNK + 32 * k + lane, line = size.by_output.divide(position);
                        const int column = position - line * wide.output + wide.padding, in_residue = size.by_stride.divide(column);
                        if (line >= there || column >= size.columns) continue;
#pragma unroll
                        for (int word = 0; word < VECTOR / 2; word++) {
                            if (left < VECTOR) words[k][word] &= 2 * word + 1 < left ? 0xffffffffu : 2 * word < left ? 0xffffu : 0u;
                            watch(watched, words[k][word]);
                        }
                        const int to = in_ring + line * size.of_line + (column - in_residue * wide.stride) * size.of_residue + in_residue * OF_POSITION;
                        *(uint4 *)(memory + at(to, 16 * unit)) = make_uint4(words[k][0], words[k][1], words[k][2], words[k][3]);
                    }
                    __syncwarp();
                    slot ^= 1;
                }
            };
            if (y)
                by_known(activation, post, [&](auto known_of) { fill(Number<1>(), known_of); });
            else
                fill(Number<0>(), Both<NONE, NONE>());
            if (partial) {
#pragma unroll
                for (int k = 0; k < HELD; k++) put_x(threadIdx.x + k * THREADS, held[k]);
#pragma unroll 1
                for (int i = threadIdx.x + HELD * THREADS; i < in_channels * size.steps * STEP; i += THREADS) put_x(i, read_x(i));
            }
            if (__syncthreads_or(watched & 0x7fff7fffu)) last_bad = low + size.slots - 1;
            const bool by_definition = __syncthreads_or(bad) || last_bad >= low;

            const auto element = [&](int position, int co) {
                return widen(*(const Stored *)(memory + at(position, co / VECTOR * 16) + co % VECTOR * 2));
            };
            // The gradient of the input, a step at a time.
            if (dx)
#pragma unroll 1
                for (int step = warp; step < size.steps; step += WARPS) {
                    // Sums that need not wait for one another.
                    float of_step[AHEAD][4] = {};
                    const int own = min(step * STEP + lane % 16, voxels - 1), own_h = size.by_input.divide(own);
                    const int position = own_h * h.stride * size.of_line + (own - own_h * wide.input) * OF_POSITION;
                    if (!by_definition) {
                        const int of_height = h.kernel * wide.kernel;
#pragma unroll 1
                        for (int td = 0; td < d.kernel; td++) {
                            const int plane = plane_at[td];
                            if (plane < 0) continue;
#pragma unroll 1
                            for (int tap0 = td * of_height; tap0 < (td + 1) * of_height; tap0 += AHEAD)
#pragma unroll
                                for (int block = 0; block < BLOCKS; block++) {
                                    unsigned a[AHEAD][4];
                                    uint2 b[AHEAD];
#pragma unroll
                                    for (int k = 0; k < AHEAD; k++) {
                                        // Past the last tap that one once more, times nothing.
                                        const int tap = min(tap0 + k, (td + 1) * of_height - 1);
                                        load_matrices(a[k], ring + at(position + plane + tap_at[tap].x, 32 * block + lane / 16 * 16));
                                        b[k] = make_uint2(0, 0);
                                        if (g < in_channels && tap == tap0 + k) b[k] = *(const uint2 *)(of_taps + weight_at(tap, g, 16 * block + 2 * t));
                                    }
#pragma unroll
                                    for (int k = 0; k < AHEAD; k++) multiply(of_step[k], make_uint4(a[k][0], a[k][1], a[k][2], a[k][3]), b[k].x, b[k].y);
                                }
                        }
                    }
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int v = step * STEP + g + e / 2 * 8, ih = size.by_input.divide(v), iw = v - ih * wide.input, ci = 2 * t + e % 2;
                        if (v >= voxels || h0 + ih >= h.input || ci >= in_channels) continue;
                        float value = of_step[0][e];
#pragma unroll
                        for (int k = 1; k < AHEAD; k++) value += of_step[k][e];
#if SCALED
                        value *= power(-exponent(of_weight[ci]));
#endif
                        if (by_definition) {
                            value = 0;
#pragma unroll 1
                            for (int tap = 0; tap < taps; tap++) {
                                const int of_height = tap / wide.kernel, tw = tap - of_height * wide.kernel, th = of_height % h.kernel;
                                const int2 reads = tap_at[tap];
                                if (plane_at[reads.y] < 0 || !h.reads(h0 + ih, th) || !wide.reads(iw, tw)) continue;
                                const int position = ih * h.stride * size.of_line + iw * OF_POSITION + plane_at[reads.y] + reads.x;
#pragma unroll 1
                                for (int co = 0; co < out_channels; co++)
                                    value = fmaf(element(position, co) * (1.0f / scale_of(co)), widen(w[(ci * out_channels + co) * taps + tap]), value);
                            }
                        }
                        narrow(value, dx + n * x_n + (ci * (int)x_c + id * (int)x_d + (h0 + ih) * (int)x_h + iw * (int)x_w));
                    }
                }
            // That of the weight, a tap at a time.
            if (partial) {
                // What there is no tap for reads anything, and is written nowhere.
                int reads[OF_WARP];
                bool all = true;
#pragma unroll
                for (int j = 0; j < OF_WARP; j++) {
                    const int tap = warp + j * WARPS;
                    reads[j] = tap < taps ? plane_at[tap_at[tap].y] : 0;
                    if (reads[j] >= 0 && tap < taps) reads[j] += tap_at[tap].x;
                    all &= reads[j] >= 0;
                }
#if SCALED
                float scale = 0, unscale[2] = {};
                if (g < in_channels) scale = power(exponent(of_x[turn][g]));
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (2 * t + e < in_channels) unscale[e] = power(-exponent(of_x[turn][2 * t + e]));
                float product[OF_WARP][BLOCKS][4] = {};
#else
                auto &product = sum;
#endif
                const auto multiply_steps = [&](auto whole) {
#pragma unroll STEPS
                    for (int step = 0; step < size.steps; step++) {
                        unsigned b[2] = {};
                        if (g < in_channels) {
                            const Element *const from = of_voxels + g * (size.steps * STEP + APART) + step * STEP + 2 * t;
#if SCALED
                            const float2 one = *(const float2 *)from, two = *(const float2 *)(from + 8);
                            b[0] = narrow_both(one.x * scale, one.y * scale, Half{});
                            b[1] = narrow_both(two.x * scale, two.y * scale, Half{});
#else
                            b[0] = *(const unsigned *)from;
                            b[1] = *(const unsigned *)(from + 8);
#endif
                        }
                        const int v = min(step * STEP + lane % 8 + lane / 16 * 8, voxels - 1), ih = size.by_input.divide(v);
                        const int position = ih * h.stride * size.of_line + (v - ih * wide.input) * OF_POSITION;
#pragma unroll
                        for (int j = 0; j < OF_WARP; j++)
#pragma unroll
                            for (int block = 0; block < BLOCKS; block++)
                                if (whole.value || reads[j] >= 0) {
                                    unsigned a[4];
                                    load_transposed(a, ring + at(position + reads[j], 32 * block + lane / 8 % 2 * 16));
                                    multiply(product[j][block], make_uint4(a[0], a[1], a[2], a[3]), b[0], b[1]);
                                }
                    }
                };
                if (!by_definition && all) {
                    multiply_steps(Number<1>());
                } else if (!by_definition) {
                    multiply_steps(Number<0>());
                } else {
#pragma unroll
                    for (int j = 0; j < OF_WARP; j++)
#pragma unroll
                        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
                            for (int e = 0; e < 4; e++) {
                                const int co = 16 * block + g + e / 2 * 8, ci = 2 * t + e % 2, tap = warp + j * WARPS;
                                if (reads[j] < 0 || co >= out_channels || ci >= in_channels) continue;
                                float value = 0;
#pragma unroll 1
                                for (int v = 0; v < voxels; v++) {
                                    const int ih = size.by_input.divide(v), iw = v - ih * wide.input;
                                    if (h0 + ih >= h.input || !h.reads(h0 + ih, tap / wide.kernel % h.kernel) || !wide.reads(iw, tap % wide.kernel)) continue;
                                    value = fmaf(widen(of_voxels[ci * (size.steps * STEP + APART) + v]), element(ih * h.stride * size.of_line + iw * OF_POSITION + reads[j], co), value);
                                }
                                sum[j][block][e] += value;
                            }
                }
#if SCALED
#pragma unroll
                for (int j = 0; j < OF_WARP; j++)
#pragma unroll
                    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
                        for (int e = 0; e < 4; e++) sum[j][block][e] = fmaf(product[j][block][e], unscale[e % 2], sum[j][block][e]);
                if (threadIdx.x < MOST_IN) of_x[turn ^ 1][threadIdx.x] = 0;
#endif
            }
            __syncthreads();
        }
    }
    if (!partial) return;
    float *const to = partial + (long long)blockIdx.x * taps * in_channels * out_channels;
#pragma unroll
    for (int j = 0; j < OF_WARP; j++)
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int co = 16 * block + g + e / 2 * 8, ci = 2 * t + e % 2, tap = warp + j * WARPS;
                if (tap >= taps || co >= out_channels || ci >= in_channels) continue;
                to[(tap * in_channels + ci) * out_channels + co] = sum[j][block][e] * (1.0f / scale_of(co));
            }
}
