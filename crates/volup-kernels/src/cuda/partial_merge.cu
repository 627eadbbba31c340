// Merges partial statistics of groups, each group's of a sample by a block, in double precision and a fixed order: the sums of what all of
// them are off from one of their means, and of the squares of that. As `norm_merge`, but it starts while the kernel still runs whose
// partials these are, and lets what is normalized by them start meanwhile.
//
// The `chunks*repeats*columns` partials of a sample's group are at
// `sample*sample_step + group*group_step + chunk*chunk_step + repeat*repeat_step + column`: means, sums of squared deviations from them,
// and counts; some may be of nothing.
//
// Parameters: `part_mean`, `part_m2`, `part_count`, `mean`, `rstd` (of each sample and group); i32: `samples`, `groups`, `chunks`,
// `repeats`, `columns`; i64: `sample_step`, `group_step`, `chunk_step`, `repeat_step`; f64: `eps`.
// Threads: 256. Grid: any number of blocks along the first axis.

#include "launch.cuh"
#include "moment_sums.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) partial_merge(
    const float *part_mean, const float *part_m2, const float *part_count, float *mean, float *rstd, int samples, int groups, int chunks,
    int repeats, int columns, long long sample_step, long long group_step, long long chunk_step, long long repeat_step, double eps) {
    let_next_start();
    await_previous();
    const int many = chunks * repeats * columns;
#pragma unroll 1
    for (int task = blockIdx.x; task < samples * groups; task += gridDim.x) {
        const int sample = task / groups, group = task - sample * groups;
        const long long first = sample * sample_step + group * group_step;
        const auto place = [&](int index) {
            const int line = index / columns, chunk = line / repeats;
            return first + chunk * chunk_step + (line - chunk * repeats) * repeat_step + (index - line * columns);
        };
        int some = 0;
        while (some + 1 < many && part_count[place(some)] == 0.0f) some++;
        const double near = part_mean[place(some)];
        MomentSums all = {0.0, 0.0, 0.0};
        all.add_parts<THREADS>(many, near, [&](int index, bool there, float &count, float2 &part) {
            const long long from = there ? place(index) : first;
            count = there ? part_count[from] : 0.0f;
            part = there ? make_float2(part_mean[from], part_m2[from]) : make_float2(0.0f, 0.0f);
        });
        all.over_block<THREADS>([&] {
            const float2 merged = all.normalization(near, eps);
            mean[task] = merged.x, rstd[task] = merged.y;
        });
        __syncthreads();
    }
}
