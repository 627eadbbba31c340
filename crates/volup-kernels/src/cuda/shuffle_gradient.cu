// The gradients of a convolution whose kernel is its stride, with respect to its input and its weight, in one launch.
//
// Each output has one tap, so that the gradient `dy` of the output is a matrix G of rows, a channel of y and a tap in the
// weight's order, `row = co*taps + tap`, by positions of the input. With it
//
// `dX[ci, position] = sum over rows: W[ci, row] * G[row, position]`,
// `dW[ci, row] = sum over positions of all samples: X[ci, position] * G[row, position]`.
//
// Both read all of G. Here a block reads a tile of it once, from where `dy` lies in NCDHW or, with `y`, from what it follows
// from (`dy = (rstd*gamma*dv + q + r*h) * f` of `gradient_sums` and `gradient_vectors`), and makes both products of it. `dy`
// is nowhere written.
//
// # How
//
// A block takes every so-manieth tile of POS positions of a sample; all rows and all channels are its own. Each thread has
// vectors of 16 bytes of y and of its gradient copied to shared memory, and asks for those of the next tile as soon as it
// has read them: nobody else reads them. What follows from them it writes to G, in which residues along width, of which
// there are two, are rows. The sums of dW stay in registers until the last tile; dX is written after each.
// `shuffle_warpgroups.cuh`, `shuffle_halves.cuh` and `shuffle_warps.cuh` say how the products are made.
//
// # Numbers
//
// `KIND` 0, f16 or bf16; 1, float32 rounded to tf32; 3, float32 as two tf32 with three products, whose sums over 8 are added
// to float32 registers. What is an infinity or NaN goes through the products, as it does by the definition: every product
// here is one of its. Of two parts that is not so: a tile that holds one is multiplied in float32.
//
// `KIND` 2, float32 as two fp16 (`half_parts.cuh`). `dy` is scaled by the power of two that `row_exponent` makes of its channel's bound, the
// weight by the inverse and then each channel of the input by its largest; x of a tile, too. What is written is scaled back. Where a
// position's gradients are not all zero and `is_too_coarse`, or bounds `are_apart`, or x or the weight is past what can be scaled, the word
// becomes an infinity, and all that is written is for others to write anew.
//
// # What it takes
//
// Kernel and stride are the same, 2 along width; taps*out_channels at most ROWS, in_channels at most 64. Threads: 512. Grid:
// at most the tiles. Bytes of dynamic shared memory, with POS = 32768 / (SIZE*ROWS), 65536 + 20*ROWS and, of KIND 0, `POS/8 *
// (32*(ROWS + 1) + 2080) + 128*ROWS`; of KIND 1 `POS/4 * (16*(ROWS + 1) + 2080) + 32768 + 256*ROWS`; of KIND 2
// `POS*(8*ROWS + 658) + 320*ROWS - 7680`; of KIND 3 `4*((ROWS + 128)*(POS + 8) + 64*(ROWS + 4))`. `x`, `dz`, `y` and `dx` are multiples of 16 bytes. A sample
// of y has fewer than 2^31 elements, tiles and grid are below 2^31. `y_whole`: lines of y are whole vectors of
// 16 bytes; `x_whole`: the channels of x are.
//
// Parameters: `x` (null without `partial`), `w` (null without `dx`), `dz`, `y` (null: nothing follows the convolution), `dx` (null: not wanted), `partial` (as
// `direct_weight_gradient` has it, of KIND 3 `shares` a block, else 256/ROWS; null: not wanted), for KIND 2 `bounds` (of each channel what no
// gradient is past) and `control` (the word), for KIND 3 `unless` (null, or words after which the result of another kernel may stand; then
// nothing is done) and i32 `shares` (those past the first are zeros); `mean`, `rstd`, `terms` (null: no normalization),
// `gamma`, `beta` (null: 1 and 0); i32: `in_channels`, `out_channels`, `group_channels` of the normalization, `volume`,
// `plane`, `width` (positions of a sample, a plane, a line), `d_stride`, `h_stride`, `tiles` (of a sample), `items` (of all),
// `y_whole`, `x_whole`, `activation`, `post`; f64: `slope`, `post_slope`.

#include "copy_async.cuh"
#include "divisor.cuh"
#include "slope.cuh"
#if KIND == 3
#include "gradient_taps.cuh"
#include "shuffle_warps.cuh"
#elif KIND == 2
#include "shuffle_halves.cuh"
#else
#include "shuffle_warpgroups.cuh"
#endif

/// Of a line of a tile, two elements a position, the vectors; lines that a thread has a vector of.
constexpr int PER = 2 * POS / VECTOR, APART = THREADS / PER, TURNS = ROWS / 2 / APART;
static_assert(TURNS * THREADS * 16 == TILE, "whole turns");
/// Vectors of x that a thread has.
constexpr int OF_X = CI * POS / VECTOR / THREADS;

/// How a channel's gradients follow: `dy = (factor*dv + q + r*h) * f`.
struct __align__(32) Channel {
    Norm norm;
    float factor, q, r;
};

/// Where a line begins in y, from a tile's first voxel on, and its channel.
struct __align__(8) Line {
    int start, channel;
};

/// float32 rounded to tf32, whose other bits the instructions cut off, as they do all of what would become an infinity.
__device__ __forceinline__ Element rounded(Element x) {
#if KIND == 1
    const unsigned bits = __float_as_uint(x);
    return __uint_as_float((bits & 0x7fffffffu) < 0x7f7ff000u ? bits + 0x1000u : bits);
#else
    return x;
#endif
}

#if KIND == 2
/// The first line of so many threads: of a warp that has two lines these are two apart, where two fp16 then meet no bank twice.
__device__ __forceinline__ int line_of(int at) { return PER < 32 ? at & ~3 | (at & 1) << 1 | at >> 1 & 1 : at; }

/// The larger of two magnitudes; NaN is larger than all others.
__device__ __forceinline__ float larger_or_nan(float one, float other) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(one), "f"(other));
    return most;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) shuffle_gradient(
    const Element *x, const Element *w, const Element *dz, const Element *y, Element *dx, float *partial,
#if KIND == 2
    const float *bounds, unsigned *control,
#elif KIND == 3
    const unsigned *unless, int shares,
#endif
    const float *mean, const float *rstd, const float *terms, const Element *gamma, const Element *beta, int in_channels, int out_channels, int group_channels, int volume, int plane,
    int width, int d_stride, int h_stride, int tiles, int items, int y_whole, int x_whole, int activation, int post, double slope,
    double post_slope) {
#if KIND == 3
    if (stands(unless)) return;
#elif KIND == 2
    if (dx && blockIdx.x == 0 && threadIdx.x < 32 && are_apart(bounds, out_channels)) raise(control, 0x7f800000u);
#endif
    extern __shared__ __align__(128) char memory[];
    Element *const raw = (Element *)memory;
#if KIND == 3
    Products products(memory + 2 * TILE, {dx, in_channels, volume, x_whole}, 2 * d_stride * h_stride * out_channels);
#else
    Products products(memory + 2 * TILE, {dx, in_channels, volume, x_whole});
#endif
    Channel *const of_channel = (Channel *)(memory + 2 * TILE + Products::BYTES);
    const int lines = d_stride * h_stride, taps = 2 * lines, rows = out_channels * taps;
    const int y_h = 2 * width, y_d = h_stride * (plane / width) * y_h;
    const int y_c = taps * volume;
    const long long y_n = (long long)out_channels * y_c;
    const Divisor by_plane(plane), by_width(width), by_tiles(tiles);

    // A thread's vectors are of the same positions of several lines.
    const int own = threadIdx.x % PER;
#if KIND == 2
    const int line0 = kept(line_of(threadIdx.x / PER)), place0 = kept(products.place(2 * line0, own * 2));
#else
    const int line0 = threadIdx.x / PER;
#endif
    const auto place = [&](int p) {
        const int d = by_plane.divide(p), in_plane = p - d * plane, h = by_width.divide(in_plane);
        return d * d_stride * y_d + h * h_stride * y_h + 2 * (in_plane - h * width);
    };
    Line *const of_line = (Line *)(of_channel + ROWS / 2);
    for (int line = threadIdx.x; line < ROWS / 2; line += THREADS) {
        const int co = line / lines, in_kernel = line - co * lines, td = in_kernel / h_stride;
        of_line[line] = {min(co, out_channels - 1) * y_c + td * y_d + (in_kernel - td * h_stride) * y_h, min(co, out_channels - 1)};
    }
    __syncthreads();
    // The vectors of a tensor of a tile that are this thread's: slot `k`, of the line `k` turns on.
    const auto slot = [&](int tensor, int k) { return raw + ((tensor * TURNS + k) * THREADS + threadIdx.x) * VECTOR; };
    const auto fetch = [&](int item, int k, int start, long long at, bool there) {
        there &= 2 * (line0 + k * APART) < rows;
        if (y_whole) {
            // What is not there has a place all the same, which is not read.
            copy_async<16>(address(slot(0, k)), dz + at + start, there);
            if (y) copy_async<16>(address(slot(1, k)), y + at + start, there);
        } else {
            const int n = by_tiles.divide(item), first = (item - n * tiles) * POS + own * (VECTOR / 2);
#pragma unroll 1
            for (int e = 0; e < VECTOR; e++) {
                const int p = first + e / 2;
                const bool here = there && p < volume;
                const long long from = here ? n * y_n + place(p) + e % 2 + start : 0;
                slot(0, k)[e] = here ? dz[from] : Element{};
                if (y) slot(1, k)[e] = here ? y[from] : Element{};
            }
        }
    };
    // Where the thread's positions of a tile lie in y.
    const auto begin = [&](int item, bool &there) {
        const int n = by_tiles.divide(item), p = (item - n * tiles) * POS + own * (VECTOR / 2);
        there = item < items && p < volume;
        return there ? n * y_n + place(p) : 0;
    };
    // A thread's vectors of x: of channel and position.
    const auto for_x = [&](auto f) {
#pragma unroll
        for (int k = 0; k < OF_X; k++) f((threadIdx.x + k * THREADS) / (POS / VECTOR), threadIdx.x % (POS / VECTOR) * VECTOR);
    };
    const auto fetch_x = [&](int item, int turn) {
        if (item >= items || !partial) return;
        const int n = by_tiles.divide(item), first = (item - n * tiles) * POS;
        for_x([&](int c, int p) {
            const Element *const from = x + ((long long)n * in_channels + c) * volume + first + p;
            Element *const at = products.x_at(turn, c, p);
            const int left = c < in_channels ? volume - first - p : 0;
            if (x_whole) {
                copy_async<16>(address(at), left > 0 ? from : x, left > 0);
            } else {
#pragma unroll 1
                for (int e = 0; e < VECTOR; e++) at[e] = e < left ? from[e] : Element{};
            }
        });
    };

    // The weight, whose rows past the last are zeros.
    [[maybe_unused]] bool bad_weight = false;
#if KIND == 2
    if (dx)
        bad_weight = products.put_weight([&](int c, int row) {
            return c < in_channels && row < rows ? w[(long long)c * rows + row] * power(-row_exponent(bounds[row / taps])) : 0.0f;
        });
#else
    for (int i = threadIdx.x; i < CI * ROWS; i += THREADS) {
        const int c = i / ROWS, row = i % ROWS;
        Element v = {};
        if (dx && c < in_channels && row < rows) v = w[(long long)c * rows + row];
#if KIND == 3
        bad_weight |= magnitude(v) >= 0x7f7ff000u;
#endif
        *products.w_at(c, row) = rounded(v);
    }
#endif
#if KIND == 3
    bad_weight = __syncthreads_or(bad_weight);
#endif
    {
        bool there;
        const long long at = begin(blockIdx.x, there);
#pragma unroll
        for (int k = 0; k < TURNS; k++) {
            fetch(blockIdx.x, k, of_line[line0 + k * APART].start, at, there);
            end_copies();
        }
        fetch_x(blockIdx.x, 0);
        end_copies();
    }

    [[maybe_unused]] bool bad = bad_weight;
    int known = -1, turn = 0;
#pragma unroll 1
    for (int item = blockIdx.x; item < items; item += gridDim.x, turn++) {
        const int n = by_tiles.divide(item), first = (item - n * tiles) * POS;
        if ((y || KIND == 2) && n != known) {
            known = n;
            for (int c = threadIdx.x; c < out_channels; c += THREADS) {
                float scale = 1;
#if KIND == 2
                scale = power(row_exponent(bounds[c]));
#endif
                Channel of = {norm_of(n, c, out_channels, group_channels, mean, rstd, gamma, beta), scale, 0, 0};
                if (mean) {
                    const int group = n * (out_channels / group_channels) + c / group_channels;
                    of.factor = scale * of.norm.rstd * of.norm.gamma;
                    of.q = scale * terms[2 * group];
                    of.r = scale * terms[2 * group + 1];
                }
                of_channel[c] = of;
            }
            __syncthreads();
        }
        if (KIND == 3) bad = bad_weight;
        // Of two fp16 the largest gradients of both positions.
        [[maybe_unused]] float most[2] = {};
        const bool here = first + own * (VECTOR / 2) < volume;
        bool there;
        const long long next = begin(item + gridDim.x, there);
        by_known<KIND != 0>(activation, post, [&](auto known) {
            const Activation<known.first> before(activation, slope);
            const Activation<known.second> after(post, post_slope);
#pragma unroll 1
            for (int k = 0; k < TURNS; k++) {
                const int line = line0 + k * APART;
                __align__(16) Element of_z[VECTOR], of_y[VECTOR];
                const Line place_of = of_line[line];
                // Copies are waited for one group after the other: those of each turn of a tile, then those of x.
                await_copies<TURNS>();
                *(uint4 *)of_z = *(const uint4 *)slot(0, k);
                if (y) *(uint4 *)of_y = *(const uint4 *)slot(1, k);
                fetch(item + gridDim.x, k, place_of.start, next, there);
                end_copies();
                const Channel of = of_channel[place_of.channel];
                const bool real = here && 2 * line < rows;
                [[maybe_unused]] uint2 words[2];
#pragma unroll
                for (int part = 0; part < VECTOR; part += 4) {
                    float dy[4];
#pragma unroll
                    for (int e = 0; e < 4; e++) dy[e] = widen(of_z[part + e]);
                    if (y) {
                        // Curved activations take more registers.
                        constexpr int AT_ONCE = known.first == ANY ? 2 : 4;
#pragma unroll
                        for (int at = 0; at < 4; at += AT_ONCE) {
                            float v[AT_ONCE], a[AT_ONCE], f[AT_ONCE], h[AT_ONCE], unused[AT_ONCE], post_f[AT_ONCE];
#pragma unroll
                            for (int e = 0; e < AT_ONCE; e++) v[e] = widen(of_y[part + at + e]);
                            before.of(v, a, f);
#pragma unroll
                            for (int e = 0; e < AT_ONCE; e++) {
                                h[e] = of.norm.normalized(a[e]);
                                v[e] = of.norm.scaled(h[e]);
                            }
                            after.of(v, unused, post_f);
#pragma unroll
                            for (int e = 0; e < AT_ONCE; e++) {
                                float &g = dy[at + e];
                                g = after.back(g, post_f[e]);
                                // Of two fp16 an infinity that becomes NaN is left to others in any case.
                                if (mean || KIND == 2) g = of.factor * g + (of.q + of.r * h[e]);
                                g = before.back(g, f[e]);
                            }
                        }
                        // What is past the end is zero, whatever follows from zeros there.
                        if (!real || !y_whole)
#pragma unroll
                            for (int e = 0; e < 4; e++)
                                if (!real || first + own * (VECTOR / 2) + (part + e) / 2 >= volume) dy[e] = 0.0f;
                    } else if (KIND == 2) {
#pragma unroll
                        for (int e = 0; e < 4; e++) dy[e] *= of.factor;
                    }
#if KIND == 2
                    unsigned high[2], low[2];
#pragma unroll
                    for (int tw = 0; tw < 2; tw++) {
                        high[tw] = half_parts(dy[tw], dy[tw + 2], LOW, low[tw]);
#pragma unroll
                        for (int e = 0; e < 2; e++) most[e] = larger_or_nan(most[e], fabsf(dy[2 * e + tw]));
                    }
                    products.put(turn, place0 + k * APART * 2 * 16, high, low);
#else
#pragma unroll
                    for (int tw = 0; tw < 2; tw++) {
#if KIND == 0
                        const unsigned both = narrow_both(dy[tw], dy[tw + 2], Element{});
                        if (part == 0)
                            words[tw].x = both;
                        else
                            words[tw].y = both;
#else
                        words[tw] = make_uint2(__float_as_uint(rounded(dy[tw])), __float_as_uint(rounded(dy[tw + 2])));
#endif
#if KIND == 3
                        bad |= max(magnitude(dy[tw]), magnitude(dy[tw + 2])) >= 0x7f7ff000u;
#endif
                    }
#endif
                }
#if KIND != 2
                products.put(turn, 2 * line, own * (VECTOR / 2), words);
#endif
            }
        });
        // Of float32 the thread that copied a vector rounds it.
        await_copies<TURNS>();
#if KIND == 2
        // The products that read the last tile of x are done.
        __syncthreads();
        products.put_largest(own * 2, most[0], most[1]);
        if (partial) for_x([&](int c, int p) { bad |= products.put_x(c, p); });
#endif
#if KIND == 1 || KIND == 3
        if (partial)
            for_x([&](int c, int p) {
                float4 &v = *(float4 *)products.x_at(turn, c, p);
                if (KIND == 1) v = make_float4(rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w));
                if (KIND == 3) bad |= max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w))) >= 0x7f7ff000u;
            });
#endif
#if KIND == 3
        const bool by_definition = __syncthreads_or(bad);
#else
        products.publish();
        __syncthreads();
#endif
        // The products that read the other tile of x are done.
        fetch_x(item + gridDim.x, turn + 1);
        end_copies();
#if KIND == 3
        products.start(turn, n, first, partial, by_definition);
#elif KIND == 2
        bad |= products.start(turn, n, first, partial);
#else
        products.start(turn, n, first, partial);
#endif
    }
#if KIND != 3
    products.finish();
#endif
#if KIND == 2
    raise(control, bad ? 0x7f800000u : 0u);
#endif
    if (!partial) return;
    const long long all = (long long)taps * in_channels * out_channels;
#if KIND == 3
    float *const others = partial + ((long long)blockIdx.x * shares + 1) * all;
#pragma unroll 1
    for (long long at = threadIdx.x; at < (shares - 1) * all; at += THREADS) others[at] = 0;
#else
    constexpr int shares = Products::SHARES;
#endif
    products.sums([&](int row, int c, int share, float sum) {
        const int co = row / taps, tap = row - co * taps;
        const long long start = ((long long)blockIdx.x * shares + share) * all;
        if (row >= rows || c >= in_channels) return;
        float *const at = partial + start + ((long long)tap * in_channels + c) * out_channels + co;
#if KIND == 2
        *at = sum * power(-row_exponent(bounds[co]));
#else
        *at = sum;
#endif
    });
}
