// Merges the statistics that `gather_gemm` takes of what it writes (`epilogue_statistics.cuh`), those of a group and sample by a
// block, in double precision and a fixed order: the sums of what all of them are off from one of their means, and of the squares
// of that.
//
// Where the product does not stand and the definition has written y anew, they are taken of that instead.
//
// Parameters: `y`, `parts`, `counts`, `control`, `mean`, `rstd` (of each sample and group); i32: `groups`, `group_channels`,
// `joined`, `chunks`, `phases`, `rows` (of a sample), `tile_rows` and `warpgroups` (of a tile), `voxels` (of a sample of y), `last` (y is
// NDHWC), `relus` (they are of the ReLU of y); f64: `eps`.
// Threads: 1024. Grid: samples*groups along the first axis.

#include "element.cuh"
#include "moment_sums.cuh"
#include "product_stands.cuh"

constexpr int THREADS = 1024;

extern "C" __global__ void __launch_bounds__(THREADS) group_merge(const Element *y, const float *parts, const float *counts, const unsigned *control,
                                                                  float *mean, float *rstd, int groups, int group_channels, int joined, int chunks, int phases,
                                                                  int rows, int tile_rows, int warpgroups, int voxels, int last, int relus, double eps) {
    const int sample = blockIdx.x / groups, group = blockIdx.x - sample * groups, channels = groups * group_channels;
    const bool stands = product_stands(control);
    MomentSums all = {0.0, 0.0, 0.0};
    double near;
    if (stands) {
        const int tiles = ((sample + 1) * rows - 1) / tile_rows - sample * rows / tile_rows + 1, columns = group_channels / joined,
                  many = tiles * warpgroups * phases * columns;
        const float *const own_counts = counts + (long long)sample * chunks * phases;
        const float2 *const own_parts = (const float2 *)parts + ((long long)sample * chunks * phases * groups + group) * columns;
        // One in the middle, which is there unless the sample has few rows.
        int some = tiles * warpgroups / 2 * phases;
        near = own_parts[(long long)some * groups * columns].x;
        if (own_counts[some] == 0.0f) {
            some = 0;
            while (own_counts[some] == 0.0f) some++;
            near = own_parts[(long long)some * groups * columns].x;
        }
        all.add_parts<THREADS>(many, near, [&](int index, bool there, float &count, float2 &part) {
            const int chunk = index / columns;
            count = there ? own_counts[chunk] : 0.0f;
            part = there ? own_parts[(long long)chunk * groups * columns + index - chunk * columns] : make_float2(0.0f, 0.0f);
        });
    } else {
        const long long many = (long long)voxels * group_channels;
        const Element *const from = y + ((long long)sample * channels * voxels + (long long)group * group_channels * (last ? 1 : voxels));
        const auto value = [&](long long at) {
            const float v = widen(from[at]);
            return relus && v < 0.0f ? 0.0f : v;
        };
        near = value(0);
#pragma unroll 1
        for (long long at = threadIdx.x; at < many; at += THREADS) {
            const long long voxel = at / group_channels;
            const double off = value(last ? voxel * channels + at - voxel * group_channels : at) - near;
            all.add({1.0, off, off * off});
        }
    }
    all.over_block<THREADS>([&] {
        const float2 merged = all.normalization(near, eps);
        mean[blockIdx.x] = merged.x, rstd[blockIdx.x] = merged.y;
    });
}
