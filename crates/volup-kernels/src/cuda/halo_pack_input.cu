// Packs the input for `halo_gemm`, whose file says how A lies.
//
// Parameters: `x`, `out`, `control`; i32: `a_rows`, `lead`, `pd`, `ph`, `pw`, `block`, `n`, `depth`,
// `height`, `width`, `slices`, `slice_in`, `panels` (of a slice: chunks*chunk_panels), `channel_panels`,
// `x_n`, `x_c`, `x_d`, `x_h`, `x_w`, `lanes`; for two tf32 `unless` (null, or words after which the result of another kernel may stand;
// then nothing is done); for two fp16 `again` (1: nothing is done unless the sample of the input, which they are scaled by, has turned
// out too small, or coarse positions are counted once more); last, for one and two fp16, `awaits` (1: the launch before this one is
// `half_scale`; 0: it is one that has waited for that). Threads: 256; `lanes` of them (a power of two, at most 32) share a row.
// `x_c` = 1 is read by vectors of channels, `x_w` = 1 by vectors of a row's positions, where sizes and addresses
// allow. Grid: any number of blocks along the first axis. Dynamic shared memory: 32 KB where channels of 16 bits or tf32 lie together and
// a row is one thread's, else none. Control words as in `pack`, null if nobody asks; one and two fp16 read word 4, which `half_scale` has
// filled, and of two word 0 is the largest magnitude when it is done. It may be launched so that it starts while `halo_pack_weight` or
// `set_words` still runs, and does not end before that.

#include "divisor.cuh"
#include "gradient_taps.cuh"
#include "launch.cuh"
#include "operand.cuh"

/// Neighbours that are read at once.
template <int COUNT> struct alignas(COUNT * sizeof(Element)) Neighbours {
    Element x[COUNT];
};

// Reads that may come before the writes ahead of them: nobody writes the input meanwhile.

template <int BYTES> struct Bits;
template <> struct Bits<2> { using Type = unsigned short; };
template <> struct Bits<4> { using Type = unsigned; };
template <> struct Bits<8> { using Type = uint2; };
template <> struct Bits<16> { using Type = uint4; };
template <int COUNT> __device__ __forceinline__ Neighbours<COUNT> read(const Element *from) {
    using Type = typename Bits<COUNT * sizeof(Element)>::Type;
    const Type bits = __ldg((const Type *)from);
    return *(const Neighbours<COUNT> *)&bits;
}

/// Panels that a thread reads before it writes them; of two fp16 more blocks side by side do better.
constexpr int AHEAD = KIND == 2 ? 1 : 16 / E;

/// A thread's share of a row: where it reads and writes, and what of that it has.
struct Share {
    const Element *x;
    uint4 *out;
    int a_rows, lane, lanes, slices, slice_in, panels, channel_panels, x_c;
    float scale;

    /// Of COUNT positions, `from` the first of them on, `parity` that one's in its row, those that are `here`; raises the
    /// largest magnitude of each. WHOLE: there is one slice, whose channels fill its panels, so that every thread may read,
    /// whatever it makes of it, and several panels before it writes them.
    template <int COUNT, bool WHOLE> __device__ __forceinline__ void pack(long long from, int row, int parity, bool here, unsigned (&most)[COUNT]) const {
        int slice = lane / channel_panels, cp = lane - slice * channel_panels;
        uint4 *to = out + (long long)(slice * panels + parity * channel_panels + cp) * a_rows + row;
        const Element *first = x + (here ? from : 0) + (long long)(slice * slice_in + cp * E) * x_c;
#pragma unroll(WHOLE && COUNT == 1 ? AHEAD : 1)
        for (int p = lane; p < slices * channel_panels; p += lanes) {
            alignas(16) Element v[COUNT][E];
#pragma unroll
            for (int e = 0; e < E; e++) {
                Neighbours<COUNT> some{};
                if (WHOLE || (here && cp * E + e < slice_in)) some = read<COUNT>(first + (long long)e * x_c);
#pragma unroll
                for (int k = 0; k < COUNT; k++) v[k][e] = !WHOLE || here ? some.x[k] : Element{};
            }
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                most[k] = largest_so_far(most[k], v[k]);
                write(v[k], to + (long long)k * channel_panels * a_rows);
            }
            cp += lanes;
            to += (long long)lanes * a_rows;
            first += (long long)lanes * E * x_c;
            // The next slice's panels follow those that fill this one's chunks, its channels this one's.
            while (!WHOLE && cp >= channel_panels && slice + 1 < slices) {
                cp -= channel_panels;
                slice++;
                to += (long long)(panels - channel_panels) * a_rows;
                first += (long long)(slice_in - channel_panels * E) * x_c;
            }
        }
    }

    /// Of one position whose channels lie together, in whole 16 bytes.
    __device__ __forceinline__ unsigned pack_channels(long long from, int row, int parity, bool here, unsigned most) const {
#pragma unroll(PARTS == 1 ? 16 / E : 1)
        for (int p = lane; p < slices * channel_panels; p += lanes) {
            const int slice = p / channel_panels, cp = p - slice * channel_panels;
            alignas(16) Element v[E];
            const uint4 *const first = (const uint4 *)(x + from + slice * slice_in + cp * E);
#pragma unroll
            for (int i = 0; i < (int)(E * sizeof(Element) / 16); i++)
                *(uint4 *)&v[i * 16 / sizeof(Element)] =
                    here && cp * E + i * 16 / (int)sizeof(Element) < slice_in ? __ldg(first + i) : make_uint4(0, 0, 0, 0);
            most = largest_so_far(most, v);
            write(v, out + (long long)(slice * panels + parity * channel_panels + cp) * a_rows + row);
        }
        return most;
    }

    /// The same of a warp's 32 rows, where a position's channels fill their panels: neighbouring lanes read neighbours of a
    /// position and write neighbouring rows of a panel, which change places in between.
    __device__ __forceinline__ unsigned pack_together(long long from, int row, int parity, bool here, unsigned most, uint4 *staged) const {
        const int thread = threadIdx.x % 32, count = slices * channel_panels;
        const unsigned of_warp = __ballot_sync(0xffffffffu, here);
        uint4 *to = out + (long long)parity * channel_panels * a_rows + row;
        int cp = 0;
#pragma unroll 1
        for (int base = 0; base < count; base += 8) {
            // Eight pieces of each row at a time: a lane reads one of every fourth row.
            uint4 v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int of_row = 4 * i + thread / 8;
                const uint4 *const at = (const uint4 *)(x + __shfl_sync(0xffffffffu, from, of_row)) + base + thread % 8;
                v[i] = of_warp >> of_row & 1 && base + thread % 8 < count ? __ldg(at) : make_uint4(0, 0, 0, 0);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int of_row = 4 * i + thread / 8;
                staged[of_row * 8 + (thread ^ of_row) % 8] = v[i];
            }
            __syncwarp();
#pragma unroll
            for (int p = 0; p < 8; p++) {
                if (base + p >= count) break;
                alignas(16) Element piece[E];
                *(uint4 *)piece = staged[thread * 8 + (p ^ thread % 8)];
                most = largest_so_far(most, piece);
                if (row < a_rows) write(piece, to);
                to += a_rows;
                if (++cp == channel_panels) cp = 0, to += (long long)(panels - channel_panels) * a_rows;
            }
        }
        return most;
    }

    __device__ __forceinline__ void write(const Element (&v)[E], uint4 *to) const {
        uint4 low;
        *to = operand(v, scale, &low);
        if (PARTS == 2) to[(long long)slices * panels * a_rows] = low;
    }
};

extern "C" __global__ void __launch_bounds__(256, 4) halo_pack_input(
    const Element *x, uint4 *out, unsigned *control, int a_rows, int lead, int pd, int ph, int pw, int block, int n, int depth, int height,
    int width, int slices, int slice_in, int panels, int channel_panels, int x_n, int x_c, int x_d, int x_h, int x_w, int lanes
#if KIND == 2
    , int again
#elif KIND == 3
    , const unsigned *unless
#endif
#if SCALED
    , int awaits
#endif
) {
    let_next_start();
#if KIND == 2
    if (again) {
        await_previous();
        if (!is_beyond_sample(control)) return;
    }
#elif KIND == 3
    if (stands(unless)) {
        await_previous();
        return;
    }
#endif
    __shared__ Divisor by[3];
    if (threadIdx.x < 3) by[threadIdx.x] = Divisor(threadIdx.x == 0 ? pw : threadIdx.x == 1 ? ph : pd);
    const int block_rows = 256 / lanes;
    // Neighbouring threads read neighbours: channels or rows.
    const bool dense = x_c == 1;
    const int lane = dense ? threadIdx.x % lanes : threadIdx.x / block_rows;
    const int local = dense ? threadIdx.x / lanes : threadIdx.x % block_rows;
    float scale = 1.0f;
#if SCALED
    if (awaits) await_previous();
#endif
#if KIND == 2
    scale = power(again ? input_exponent(control) : sample_exponent(control));
#elif SCALED
    scale = power(input_exponent(control));
#endif
    const Share share = {x, out, a_rows, lane, lanes, slices, slice_in, panels, channel_panels, x_c, scale};
    // By vectors of channels, or of the row's positions.
    const bool channels = dense && ((unsigned long long)x | (x_n | x_d | x_h | x_w | slice_in) * sizeof(Element)) % 16 == 0;
    // Found each time: there are no registers to keep them in.
    const auto positions = [&] { return x_w == 1 && width % block == 0 && (unsigned long long)x % (block * sizeof(Element)) == 0; };
    const auto whole = [&] { return slices == 1 && slice_in % E == 0; };
    // Of few pieces half of the lanes would read nothing.
    const bool together = !SCALED && channels && lanes == 1 && slice_in % E == 0 && slices * channel_panels > 4;
    [[maybe_unused]] extern __shared__ uint4 staged[];
    // What is scaled has largest magnitudes of positions.
    [[maybe_unused]] __shared__ unsigned largest_of[SCALED ? 256 : 1];
    unsigned most = 0;
    [[maybe_unused]] unsigned coarse_ones = 0;
    // Tells of a position's largest magnitude, of those that lanes have found.
    const auto tell = [&](unsigned of_position) {
        most = max(most, as_float32(Element{}, largest(Element{}, of_position)));
#if SCALED
        if (lanes > 1) {
            largest_of[local * lanes + lane] = of_position;
            __syncthreads();
            of_position = largest_of[threadIdx.x];
            for (int apart = 1; apart < lanes; apart *= 2) of_position = max(of_position, __shfl_xor_sync(0xffffffffu, of_position, apart));
            __syncthreads();
        }
        coarse_ones += threadIdx.x % lanes == 0 && is_coarse(of_position, scale);
#endif
    };
    __syncthreads();
#pragma unroll 1
    for (int first = blockIdx.x * block_rows; first < a_rows; first += gridDim.x * (256 / lanes)) {
        const int row = first + local, position = max(row - lead, 0);
        const int line = by[0].divide(position), iw = (position - line * pw) * block, plane = by[1].divide(line), ih = line - plane * ph;
        const int sample = by[2].divide(plane), id = plane - sample * pd;
        const bool here = row >= lead && sample < n && id < depth && ih < height;
        const long long from = here ? (long long)sample * x_n + id * x_d + ih * x_h + iw * x_w : 0;
        const auto pack = [&](auto &of_positions, int parity) {
            const bool at = here && iw + parity < width;
            if (row < a_rows) {
                if (whole())
                    share.pack<sizeof(of_positions) / 4, true>(from + parity * x_w, row, parity, at, of_positions);
                else
                    share.pack<sizeof(of_positions) / 4, false>(from + parity * x_w, row, parity, at, of_positions);
            }
#pragma unroll
            for (unsigned of_position : of_positions) tell(of_position);
        };
        if (!SCALED && positions() && block == 4) {
            unsigned of_positions[4] = {};
            pack(of_positions, 0);
        } else if (positions() && block % 2 == 0) {
#pragma unroll 1
            for (int parity = 0; parity < block; parity += 2) {
                unsigned of_positions[2] = {};
                pack(of_positions, parity);
            }
        } else {
#pragma unroll 1
            for (int parity = 0; parity < block; parity++) {
                const bool at = here && iw + parity < width;
                if (together) {
                    tell(share.pack_together(from + parity * x_w, row, parity, at, 0, staged + threadIdx.x / 32 * 256));
                } else if (channels) {
                    tell(row < a_rows ? share.pack_channels(from + parity * x_w, row, parity, at, 0) : 0);
                } else {
                    unsigned of_positions[1] = {};
                    pack(of_positions, parity);
                }
            }
        }
        // Panels that only fill a chunk.
        const int count = block * channel_panels;
        if (row < a_rows)
            for (int p = lane; p < slices * (panels - count); p += lanes) {
                const int slice = p / (panels - count), panel = count + p % (panels - count);
                for (int part = 0; part < PARTS; part++)
                    out[((long long)(part * slices + slice) * panels + panel) * a_rows + row] = make_uint4(0, 0, 0, 0);
            }
    }
    // The weight's pack: whoever waits for this one waits for both. With a weight that was packed before, the control words.
    await_previous();
#if SCALED
    // There is seldom one.
    if (coarse_ones) atomicAdd(&control[2], coarse_ones);
#endif
#if KIND != 5
    if (control) raise(&control[0], most);
#endif
}
