// Kernels of one tap and few channels, NCDHW: every input voxel times a matrix, in float32, which is exact enough for
// `ieee` and `tf32`. Where there is a stride, what lies between is written as well: a channel's bias through the
// activation.
//
// A warp computes `ROWS` output channels of a group at 32 * `VOXELS` voxels that are neighbours in a sample, a lane `UNIT`
// neighbours at a time, which it reads at once. Weights stay in shared memory, as float32, in the order in which they are
// multiplied. Inputs come `stage` channels at a time to one of two places of the warp's in shared memory, while those of
// the other are multiplied, also from one item to the next: each lane copies what it multiplies, and nobody waits for
// others. An item has all row blocks of a group, one after the other, where a stage has all of its channels, or one.
//
// A sector of 32 bytes that is written in part is read from memory by the cache. Where channels start within one, items
// overlap by a sector, and each writes whole ones.
//
// With `STRIDED` a voxel stands for the outputs from its own to the next voxel's, in the order in which they lie in a
// plane: the voxels of an item for a run of them, in as many planes as a stride along depth has. Sums are laid down in
// shared memory, and lanes write 16 bytes at a time.
//
// Parameters: `x`, `weight`, `bias`, `y`; i32: `channels` of a group, `out_channels` of a group, `groups`, `row_blocks`
// (of `ROWS` in a group), `row_blocks_of_item` (all or one), `stage` (channels, even; all of them where an item has all row
// blocks), `volume` (voxels of a sample, a multiple of `UNIT`), `blocks` (of voxels of a sample), `step` (from one to the
// next: 32 * `VOXELS`, or less by a sector where channels start within one; with `STRIDED` not less), `items` (samples
// times blocks times groups times row blocks by those of an item), `volume_out`; `plane`, `width` of the input, `d_stride`,
// `h_stride`, `w_stride`, `depth_out`, `height_out`, `width_out`, which are read where there is a stride; `x_n`, `y_n`
// (i64, elements from a sample to the next); `has_bias`, `activation`, `slope` (f64).
//
// Threads: 256. Grid: any number of blocks along the first axis. Shared memory: of output channels, rounded up to row
// blocks, each two float32, and one for each channel of a group, rounded up to an even number; then for each warp two
// stages of its voxels, and with `STRIDED` a float32 for each sum.

#include "activation.cuh"
#include "copy_async.cuh"
#include "divisor.cuh"
#include "element.cuh"

#if !defined(STRIDED) || !defined(ROWS) || !defined(VOXELS) || !defined(UNIT) || !defined(CTAS)
#error "STRIDED (whether there is a stride), ROWS of a warp, VOXELS of a lane, UNIT of them neighbours, CTAS of a multiprocessor"
#endif

namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS;
/// Channels that are copied and multiplied in a row.
constexpr int CHUNK = 2;
/// Bytes of a copy, and how many a lane makes of each channel; voxels of an item.
constexpr int BYTES = UNIT * sizeof(Element), COPIES = VOXELS / UNIT, SPAN = 32 * VOXELS;
/// Weights that are read at a time; elements that are written at a time, and of 32 bytes.
constexpr int READ = 4, VECTOR = 16 / sizeof(Element), SECTOR = 32 / sizeof(Element);

struct alignas(4 * READ) Weights {
    float of[READ];
};
struct alignas(BYTES) Copied {
    Element of[UNIT];
};

/// What a channel's sums become: its bias is added, then comes the activation.
struct Finish {
    int activation;
    float slope;

    template <int COUNT> __device__ __forceinline__ void operator()(float (&v)[COUNT], float bias) const {
#pragma unroll
        for (int j = 0; j < COUNT; j++) v[j] = straighten(v[j] + bias, activation, slope);
        if (activation > 2) curve(v, activation);
    }
};

/// How items are numbered, and where their inputs are.
struct Items {
    int parts, of_group, blocks, step;

    struct At {
        int sample, start, group, part;
    };
    __device__ __forceinline__ At at(int item) const {
        const int block = item / parts, part = item - block * parts, sample = block / blocks, group = part / of_group;
        return {sample, (block - sample * blocks) * step, group, part - group * of_group};
    }
};

/// Adds a channel's products; `here` is what the lane has of it.
__device__ __forceinline__ void multiply(const Element *here, const float *weights, float (&sums)[ROWS][VOXELS]) {
    float v[VOXELS];
#pragma unroll
    for (int j = 0; j < COPIES; j++) {
        const Copied copied = *(const Copied *)(here + 32 * UNIT * j);
#pragma unroll
        for (int i = 0; i < UNIT; i++) v[UNIT * j + i] = widen(copied.of[i]);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r += READ) {
        const Weights w = *(const Weights *)(weights + r);
#pragma unroll
        for (int i = 0; i < READ; i++)
#pragma unroll
            for (int j = 0; j < VOXELS; j++) sums[r + i][j] = fmaf(v[j], w.of[i], sums[r + i][j]);
    }
}

/// Elements from the last address that is a multiple of so many bytes.
__device__ __forceinline__ int past(const Element *at, int bytes) {
    return (int)((unsigned long long)at % bytes) / (int)sizeof(Element);
}

#if !STRIDED
/// Writes sums of the voxels from `start` on where they lie in the first row's channel and those after it.
__device__ __forceinline__ void write(
    const float (&sums)[ROWS][VOXELS], Element *to, int rows, int start, int step, int volume, int lane) {
    const int begun = step == SPAN ? 0 : past(to + start, 32), on = step == SPAN ? 0 : volume % SECTOR;
    int begins = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++, begins += volume)
        if (r < rows) {
            // Else the compiler would keep where all rows begin in registers.
            asm volatile("" : "+r"(begins));
            // Where items overlap, from the first sector that begins here.
            const int own = start + (unsigned)(-begun - r * on) % SECTOR, end = min(own + step, volume);
#pragma unroll
            for (int j = 0; j < COPIES; j++) {
                Copied v;
#pragma unroll
                for (int i = 0; i < UNIT; i++) narrow(sums[r][UNIT * j + i], &v.of[i]);
                const int at = start + UNIT * lane + 32 * UNIT * j;
                if ((at >= own || start == 0) && at < end) *(Copied *)(to + (begins + at)) = v;
            }
        }
}

#else
/// Outputs with a stride between those that have sums.
struct Spread {
    int plane, width, d_stride, depth_out, plane_out, width_out;
    Divisor by_line, by_stride;
    /// Channels that are so many apart begin as far past 16 bytes.
    int alike;

    __device__ __forceinline__ Spread(
        int plane, int width, int d_stride, int h_stride, int w_stride, int depth_out, int height_out, int width_out)
        : plane(plane), width(width), d_stride(d_stride), depth_out(depth_out), plane_out(height_out * width_out),
          width_out(width_out), by_line(h_stride * width_out), by_stride(w_stride) {
        const int volume = depth_out * plane_out;
        alike = VECTOR / min(VECTOR, volume & -volume);
    }

    /// Where in a plane the output of a voxel of the input's plane lies.
    __device__ __forceinline__ int run(int voxel) const {
        const int h = voxel / width;
        return h * by_line.by + (voxel - h * width) * by_stride.by;
    }

    /// Writes a warp's sums, which lie in shared memory by rows, of the voxels from `start` to `end`, and what is `between`
    /// in each row.
    __device__ __forceinline__ void write(
        const float *sums, const float *between, Element *to, int rows, int start, int end, int lane) const {
        for (int first = start; first < end;) {
            // In a plane of the input the voxels from `first` on, and in one of the output the run that they stand for.
            const int d = first / plane, before = d * plane, last = min(end, before + plane);
            const int a = run(first - before), b = last == before + plane ? plane_out : run(last - before);
            for (int on_d = 0; on_d < d_stride && d * d_stride + on_d < depth_out; on_d++)
                for (int r = 0; r < min(alike, rows); r++)
                    write_run(
                        sums + before - start, between, to + (d * d_stride + on_d) * (long long)plane_out, r, rows, a, b,
                        on_d == 0, lane);
            first = last;
        }
    }

    /// Writes the outputs from `a` to `b` of a plane, in the rows from `first` on that begin alike.
    __device__ __forceinline__ void write_run(
        const float *sums, const float *between, Element *to, int first, int rows, int a, int b, bool has_sums, int lane) const {
        const int volume = depth_out * plane_out, start = a - past(to + (first * volume + a), 16);
        for (int e = start + VECTOR * lane; e < b; e += 32 * VECTOR) {
            // Of each output the voxel whose sum it is.
            int voxel[VECTOR];
#pragma unroll
            for (int k = 0; k < VECTOR; k++) voxel[k] = -1;
            if (has_sums)
#pragma unroll
                for (int k = 0; k < VECTOR; k++) {
                    const int output = max(e + k, a), h = by_line.divide(output), on_line = output - h * by_line.by;
                    const int w = by_stride.divide(on_line);
                    if (on_line < width_out && w * by_stride.by == on_line && output < b) voxel[k] = h * width + w;
                }
            for (int r = first; r < rows; r += alike) {
                const float none = between[r], *of_row = sums + r * SPAN;
                Element *at = to + (r * volume + e);
                alignas(16) Element v[VECTOR];
#pragma unroll
                for (int k = 0; k < VECTOR; k++) narrow(voxel[k] < 0 ? none : of_row[voxel[k]], &v[k]);
                if (e >= a && e + VECTOR <= b)
                    *(uint4 *)at = *(const uint4 *)v;
                else
#pragma unroll
                    for (int k = 0; k < VECTOR; k++)
                        if (e + k >= a && e + k < b) at[k] = v[k];
            }
        }
    }
};
#endif

} // namespace

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) pointwise(
    const Element *x, const Element *weight, const Element *bias, Element *y,
    int channels, int out_channels, int groups, int row_blocks, int row_blocks_of_item, int stage, int volume, int blocks,
    int step, int items, int volume_out,
    int plane, int width, int d_stride, int h_stride, int w_stride, int depth_out, int height_out, int width_out,
    long long x_n, long long y_n, int has_bias, int activation, double slope) {
    extern __shared__ float4 dynamic[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_item = blockIdx.x * WARPS + warp;
    const int items_on = gridDim.x * WARPS, sets = groups * row_blocks, of_group = row_blocks / row_blocks_of_item;
    const int padded = (channels + CHUNK - 1) / CHUNK * CHUNK;
    float *weights = (float *)dynamic, *biases = weights + sets * padded * ROWS, *between = biases + sets * ROWS;
    // After a whole number of 16 bytes: rows are a multiple of 4.
    Element *inputs = (Element *)(between + sets * ROWS) + warp * (2 * stage * SPAN);
    const Finish finish = {activation, (float)slope};
    const Items all = {groups * of_group, of_group, blocks, step};

    // What is copied next: so many channels of an item, from here on, to this place.
    int ahead = first_item, channels_ahead = 0, left_ahead = 0, place = 0;
    const Element *from = x;
    const auto bring = [&]() {
        if (channels_ahead <= 0 && ahead < items) {
            const Items::At at = all.at(ahead);
            const int first = at.start + UNIT * lane;
            from = x + at.sample * x_n + (long long)(at.group * channels) * volume + first;
            left_ahead = volume - first, channels_ahead = channels;
            ahead += items_on;
        }
        unsigned to = (unsigned)__cvta_generic_to_shared(inputs + place * (stage * SPAN) + UNIT * lane);
        for (int k = 0; k < stage; k += CHUNK)
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
#pragma unroll
                for (int j = 0; j < COPIES; j++) {
                    const bool there = k + i < channels_ahead && 32 * UNIT * j < left_ahead;
                    copy_async<BYTES, true>(to + 32 * BYTES * j, from + 32 * UNIT * j, there);
                }
                from += volume, to += (int)sizeof(Element) * SPAN;
            }
        channels_ahead -= stage;
        place ^= 1;
        end_copies();
    };
    bring();
    bring();

    // Weights that no channel has are zero.
    for (int at = threadIdx.x; at < sets * padded * ROWS; at += THREADS) {
        const int line = at / ROWS, set = line / padded, channel = line - set * padded, group = set / row_blocks;
        const int row = (set - group * row_blocks) * ROWS + at % ROWS;
        const bool there = channel < channels && row < out_channels;
        weights[at] = there ? widen(weight[(group * channels + channel) * out_channels + row]) : 0.0f;
    }
    for (int at = threadIdx.x; at < sets * ROWS; at += THREADS) {
        const int set = at / ROWS, group = set / row_blocks, row = (set - group * row_blocks) * ROWS + at % ROWS;
        float value[1] = {0.0f};
        biases[at] = has_bias && row < out_channels ? widen(bias[group * out_channels + row]) : 0.0f;
        finish(value, biases[at]);
        between[at] = value[0];
    }
    __syncthreads();
#if STRIDED
    const Spread spread(plane, width, d_stride, h_stride, w_stride, depth_out, height_out, width_out);
    float *laid = (float *)(inputs + (WARPS - warp) * (2 * stage * SPAN)) + warp * (ROWS * SPAN);
#endif

    int now = 0;
    float sums[ROWS][VOXELS] = {};
    for (int item = first_item; item < items; item += items_on) {
        const Items::At at = all.at(item);
        for (int begun = 0; begun < channels; begun += stage, now ^= 1) {
            await_copies<1>();
            const Element *const of_stage = inputs + now * (stage * SPAN) + UNIT * lane;
            const int count = min(padded - begun, stage);
            for (int turn = 0; turn < row_blocks_of_item; turn++) {
                const int row_block = at.part * row_blocks_of_item + turn, set = at.group * row_blocks + row_block;
                const float *of_set = weights + (set * padded + begun) * ROWS;
                for (int k = 0; k < count; k += CHUNK)
#pragma unroll
                    for (int i = 0; i < CHUNK; i++) multiply(of_stage + (k + i) * SPAN, of_set + (k + i) * ROWS, sums);
                if (begun + stage < channels) continue;

                const int row = row_block * ROWS, rows = min(out_channels - row, ROWS);
                Element *const to = y + at.sample * y_n + (at.group * out_channels + row) * (long long)volume_out;
#pragma unroll
                for (int r = 0; r < ROWS; r++) finish(sums[r], biases[set * ROWS + r]);
#if STRIDED
                __syncwarp();
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int j = 0; j < VOXELS; j++)
                        laid[r * SPAN + 32 * UNIT * (j / UNIT) + UNIT * lane + j % UNIT] = sums[r][j];
                __syncwarp();
                spread.write(laid, between + set * ROWS, to, rows, at.start, min(at.start + SPAN, volume), lane);
#else
                write(sums, to, rows, at.start, step, volume, lane);
#endif
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int j = 0; j < VOXELS; j++) sums[r][j] = 0.0f;
            }
            bring();
        }
    }
    await_copies<0>();
}
