// The gradient of the weight by its definition: `dw[ci, co, t]` is the sum over samples and the input's voxels of `x[n, ci, i]
// * dy[n, co, i*s - p + t*d]`. A tap that reads outside adds nothing, even where the input is infinite or NaN.
//
// A block has 16 by 16 pairs of channels of one tap, and of the input's voxels every `splits`-th piece of 1024; a piece's sum
// is one of sums of 32 products.
//
// For KIND 5 sums are of rows as they are, scaled, and of the input scaled by the exponent that follows from `control`. For KIND 2 rows
// are float32, and what is scaled of them and of the input is scaled here, each channel by its own exponent.
//
// Parameters: `x` (the input), `rows` (of `gradient_rows`), `partial` (`partial[((split*taps + t)*groups*group_in + ci)*group_out + co]`),
// `control` (null, or words after which the result of another kernel may stand; then nothing is done), for KIND 2 `bounds` and `largest` (as
// `weight_gradient_sum` has them); i32: `n`, `groups`,
// `group_in`, `group_out`, `slots`, `splits`; of depth, height, width what `gradient_taps.cuh` says; i64: strides of `x`: n, c, d, h,
// w, and `row` and `panel` of the rows. Threads: 256. Grid: any number of blocks. The voxels of all samples, and the tasks, are fewer than 2^30.

#include "digits.cuh"
#include "gradient_taps.cuh"
#include "row_layout.cuh"
#if KIND == 2
#include "half_parts.cuh"
#endif

constexpr int TILE = 16, PIECE = 32, PIECES = 32;

extern "C" __global__ void __launch_bounds__(TILE *TILE, KIND == 4 ? 2 : 4)
    direct_weight_gradient(const Element *x, const Row *rows, Sum *partial, const unsigned *control,
#if KIND == 2
                           const float *bounds, const unsigned *largest,
#endif
                           int n, int groups, int group_in,
                           int group_out, int slots, int splits, TAP_AXIS(d), TAP_AXIS(h), TAP_AXIS(w), long long x_n, long long x_c,
                           long long x_d, long long x_h, long long x_w, long long row, long long panel) {
    if (stands(control)) return;
#if KIND == 5
    const Sum all = power(input_exponent(control));
    const auto scale_x = [&](int) { return all; };
    const auto scale_y = [](int) { return 1.0f; };
#elif KIND == 2
    const auto scale_x = [&](int channel) { return power(channel_exponent(largest[channel])); };
    const auto scale_y = [&](int channel) { return power(row_exponent(bounds[channel])); };
#else
    const auto scale_x = [](int) { return (Sum)1; };
    const auto scale_y = [](int) { return (Sum)1; };
#endif
    const RowLayout layout = {row, panel};
    const TapAxis d = TAP_AXIS_OF(d), h = TAP_AXIS_OF(h), w = TAP_AXIS_OF(w);
    // Of one row each: channels of the input and of the output; of a row that adds nothing none is read.
    __shared__ Sum of_x[PIECE][TILE + 1], of_y[PIECE][TILE + 1];
    __shared__ long long x_at[PIECE], y_at[PIECE];
    const int taps = d.kernel * h.kernel * w.kernel, in_tiles = (group_in + TILE - 1) / TILE, out_tiles = (group_out + TILE - 1) / TILE;
    const int voxels_w = w.input, voxels_h = h.input * voxels_w, voxels_d = d.input * voxels_h;
    const int voxels = n * voxels_d, tasks = taps * groups * in_tiles * out_tiles * splits;
    const int own_in = threadIdx.x / TILE, own_out = threadIdx.x % TILE;
    for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
        Digits<int> digits = {task};
        const int split = digits.next(splits), c_out = digits.next(out_tiles) * TILE, c_in = digits.next(in_tiles) * TILE, group = digits.next(groups);
        const int t = digits.rest;
        const int tw = t % w.kernel, th = t / w.kernel % h.kernel, td = t / w.kernel / h.kernel;
        const int j = (td % d.step * h.classes + th % h.step) * w.classes + tw % w.step;
        Sum sum = 0;
        for (int round = split; round < (voxels + PIECE * PIECES - 1) / (PIECE * PIECES); round += splits) {
            const int start = round * (PIECE * PIECES);
            Sum of_pieces = 0;
            for (int piece = 0; piece < PIECES; piece++) {
                __syncthreads();
                if (threadIdx.x < PIECE) {
                    const int voxel = start + piece * PIECE + threadIdx.x, sample = voxel / voxels_d, in_sample = voxel - sample * voxels_d;
                    const int id = in_sample / voxels_h, ih = in_sample / voxels_w % h.input, iw = in_sample % voxels_w;
                    const bool here = voxel < voxels && d.reads(id, td) && h.reads(ih, th) && w.reads(iw, tw);
                    const int qd = id + td / d.step * d.apart, qh = ih + th / h.step * h.apart, qw = iw + tw / w.step * w.apart;
                    x_at[threadIdx.x] = here ? sample * x_n + id * x_d + ih * x_h + iw * x_w + (group * group_in + c_in) * x_c : -1;
                    y_at[threadIdx.x] = ((((long long)sample * d.rows + qd) * h.rows + qh) * w.rows + qw) * layout.row;
                }
                __syncthreads();
                for (int i = threadIdx.x; i < PIECE * TILE; i += TILE * TILE) {
                    const int row = i / TILE, c = i % TILE;
                    const bool here = x_at[row] >= 0;
                    const int ci = group * group_in + c_in + c, co = c_out + c;
                    of_x[row][c] = here && c_in + c < group_in ? scale_x(ci) * widen(x[x_at[row] + c * x_c]) : 0;
                    of_y[row][c] = here && co < group_out ? scale_y(group * group_out + co) * widen(rows[y_at[row] + layout.slot(group * slots + j * group_out + co)]) : 0;
                }
                __syncthreads();
                Sum of_piece = 0;
                for (int row = 0; row < PIECE; row++) of_piece = fma(of_x[row][own_in], of_y[row][own_out], of_piece);
                of_pieces += of_piece;
            }
            sum += of_pieces;
        }
        const int ci = group * group_in + c_in + own_in, co = c_out + own_out;
        if (c_in + own_in < group_in && co < group_out)
            partial[(((long long)split * taps + t) * groups * group_in + ci) * group_out + co] = sum;
    }
}
