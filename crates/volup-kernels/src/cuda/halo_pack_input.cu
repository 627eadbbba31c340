// Packs the input for `halo_gemm`, whose file says how A lies.
//
// Parameters: `x`, `out`, `control`; i32: `a_rows`, `lead`, `pd`, `ph`, `pw`, `block`, `n`, `depth`,
// `height`, `width`, `slices`, `slice_in`, `panels` (of a slice: chunks*chunk_panels), `channel_panels`,
// `x_n`, `x_c`, `x_d`, `x_h`, `x_w`, `lanes`. Threads: 256; `lanes` of them (1, 2, 4 or 8) share a row.
// `x_c` = 1 is read by vectors where channels and addresses allow. Grid: (ceil(a_rows / (256/lanes)), block).
// Control words as in `pack`; the split reads word 0, which `pack_largest` has filled.

#include "operand.cuh"

extern "C" __global__ void __launch_bounds__(256) halo_pack_input(
    const Element *x, uint4 *out, unsigned *control, int a_rows, int lead, int pd, int ph, int pw, int block, int n, int depth, int height,
    int width, int slices, int slice_in, int panels, int channel_panels, int x_n, int x_c, int x_d, int x_h, int x_w, int lanes) {
    let_next_start();
    const int block_rows = 256 / lanes;
    // Neighbouring threads read neighbours: channels or rows.
    const bool dense = x_c == 1;
    const int lane = dense ? threadIdx.x % lanes : threadIdx.x / block_rows;
    const int local = dense ? threadIdx.x / lanes : threadIdx.x % block_rows;
    const int row = blockIdx.x * block_rows + local, parity = blockIdx.y;
    const int position = row - lead;
    const int line = position / pw, iw = (position - line * pw) * block + parity, plane = line / ph, ih = line - plane * ph;
    const int sample = plane / pd, id = plane - sample * pd;
    const bool here = position >= 0 && row < a_rows && sample < n && id < depth && ih < height && iw < width;
    const Element *from = x + (here ? (long long)sample * x_n + id * x_d + ih * x_h + iw * x_w : 0);
    const bool vectors = dense && ((unsigned long long)x | (x_n | x_d | x_h | x_w | slice_in) * sizeof(Element)) % 16 == 0;
    const int all = slices * panels;
    unsigned most = 0;
    float scale = 1.0f;
#if KIND == 2
    const unsigned largest = control[0];
    scale = power(exponent(largest));
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) control[4] = __float_as_uint(power(-exponent(largest)));
#endif
    const int count = block * channel_panels;
    int slice = lane / channel_panels, cp = lane - slice * channel_panels;
    uint4 *to = out + (long long)(slice * panels + parity * channel_panels + cp) * a_rows + row;
#pragma unroll (16 / E)
    for (int p = lane; p < slices * channel_panels; p += lanes) {
        const int c = cp * E;
        alignas(16) Element v[E];
        if (vectors && here) {
#pragma unroll
            for (int i = 0; i < (int)(E * sizeof(Element) / 16); i++)
                *(uint4 *)&v[i * 16 / sizeof(Element)] =
                    c + i * 16 / (int)sizeof(Element) < slice_in ? ((const uint4 *)(from + slice * slice_in + c))[i] : make_uint4(0, 0, 0, 0);
        } else {
            const Element *const first = from + (long long)(slice * slice_in + c) * x_c;
#pragma unroll
            for (int e = 0; e < E; e++) v[e] = here && c + e < slice_in ? first[(long long)e * x_c] : Element{};
        }
#pragma unroll
        for (int e = 0; e < E; e++) most = max(most, magnitude(v[e]));
        if (row < a_rows) {
            uint4 low;
            *to = operand(v, scale, &low);
#if KIND == 2
            to[(long long)all * a_rows] = low;
#endif
        }
        cp += lanes;
        to += (long long)lanes * a_rows;
        while (cp >= channel_panels) cp -= channel_panels, slice++, to += (long long)(panels - channel_panels) * a_rows;
    }
    // Panels that only fill a chunk.
    if (parity == 0 && row < a_rows)
        for (int p = lane; p < slices * (panels - count); p += lanes) {
            const int slice = p / (panels - count), panel = count + p % (panels - count);
            for (int part = 0; part < PARTS; part++)
                out[((long long)part * all + slice * panels + panel) * a_rows + row] = make_uint4(0, 0, 0, 0);
        }
#if KIND == 2
    // A voxel is coarse if all its channels lie below 2^-26 of the largest, but not all at zero.
    __shared__ unsigned largest_of[256];
    largest_of[threadIdx.x] = most;
    __syncthreads();
    bool coarse = false;
    if (lane == 0) {
        for (int l = 1; l < lanes; l++) most = max(most, largest_of[dense ? local * lanes + l : l * block_rows + local]);
        coarse = most > 0 && __uint_as_float(most) * scale < 0.000244140625f;
    }
    const int coarse_ones = __syncthreads_count(coarse);
    if (threadIdx.x == 0 && coarse_ones) atomicAdd(&control[2], (unsigned)coarse_ones);
#else
    raise(&control[0], as_float32(Element{}, most));
#endif
    // The weight's pack: whoever waits for this one waits for both.
    await_previous();
}
