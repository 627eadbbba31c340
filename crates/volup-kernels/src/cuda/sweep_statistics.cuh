// Statistics of what `halo_sweep` writes, for a group norm: `group_merge` merges them.
//
// A warp's rows are the same in all planes of a piece. Of each plane it adds up how far a channel's outputs are from the mean of those of
// the first one, and the squares of that: whatever share `f` of the values a plane is, the mean of all is no further from its own than the
// deviation by sqrt(1/f), so the squares lose log2(1 + 1/f) bits at most. Lanes keep what they have of a channel in registers until a piece is
// done, unless the warp has rows of two samples. Then warps are merged as by Chan, Golub and LeVeque, 1979.

#pragma once

#include "epilogue_statistics.cuh"
#include "warp_meet.cuh"

/// Samples that a piece may have rows of; values that a lane has of a row, and channels whose sums it has in the end.
constexpr int SAMPLES = 2, VALUES = BN / 4, OWN = BN / 32;
static_assert(BN % 32 == 0 && RESIDUES == 1);
/// Bytes of shared memory of a warp.
constexpr int MEANS_BYTES = SAMPLES * BN * 4;
/// Whether there are registers for what lanes keep, and for outputs of a plane that are counted while the next one's products are under way.
constexpr bool HAS_ROOM = KIND != 2;

/// A warp's sums of the planes of a piece so far.
struct SweepStatistics {
    /// Of each sample a byte of which of this lane's rows are its outputs (bit `i` of row `8*i + lane/4`), and one of how many the warp's are.
    unsigned there, rows;
    int planes;
    /// Deviations and their squares: of each sample of this lane's channels; of the only sample of this lane's values.
    float2 sums[SAMPLES][OWN], kept[VALUES];

    /// `own`: of which of the samples this lane's row (`lane % ROWS`) is an output, negative if of none.
    __device__ __forceinline__ SweepStatistics(int own) : there(0), rows(0), planes(0) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int sample = 0; sample < SAMPLES; sample++) {
            const unsigned all = __ballot_sync(0xffffffffu, own == sample) & (unsigned)((1ull << ROWS) - 1);
            rows |= __popc(all) << 8 * sample;
#pragma unroll
            for (int i = 0; i < 2 * MI; i++) there |= (all >> (8 * i + lane / 4) & 1) << (8 * sample + i);
#pragma unroll
            for (int k = 0; k < OWN; k++) sums[sample][k] = make_float2(0.0f, 0.0f);
        }
#pragma unroll
        for (int k = 0; k < VALUES; k++) kept[k] = make_float2(0.0f, 0.0f);
    }
    __device__ __forceinline__ int rows_of(int sample) const { return rows >> 8 * sample & 255; }
    /// Whether lanes keep what they have.
    __device__ __forceinline__ bool keeps() const { return HAS_ROOM && (rows < 256 || rows % 256 == 0); }

    /// The first of this lane's channels; they are an eight apart.
    __device__ __forceinline__ static int channel() { return threadIdx.x / 8 % 4 * 8 * OWN + threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2; }

    /// Adds what `of` makes of this lane's values.
    template <typename Of> __device__ __forceinline__ static void each(const float (&sum)[MI][REGISTERS], const Of &of, float2 (&total)[VALUES]) {
#pragma unroll
        for (int k = 0; k < VALUES; k++)
#pragma unroll
            for (int i = 0; i < 2 * MI; i++) {
                const float2 made = of(sum[i % MI][k / 2 * 4 + i / MI * 2 + k % 2], i, k);
                total[k] = make_float2(total[k].x + made.x, total[k].y + made.y);
            }
    }

    /// The sums over the warp, of this lane's channels.
    __device__ __forceinline__ static void over_warp(float2 (&total)[VALUES], float2 (&own)[OWN]) {
        // Of lanes that have the same channels each keeps half of them, then a quarter, then an eighth: last of all one of two neighbours.
#pragma unroll
        for (int lanes = 16, half = VALUES / 2; lanes >= 4; lanes /= 2, half /= 2) {
            const bool upper = threadIdx.x & lanes;
            const int apart = lanes == 4 ? 1 : half;
#pragma unroll
            for (int n = 0; n < half; n++) {
                const int k = lanes == 4 ? 2 * n : n;
                const float2 kept = upper ? total[k + apart] : total[k], other = upper ? total[k] : total[k + apart];
                total[n] = make_float2(kept.x + __shfl_xor_sync(0xffffffffu, other.x, lanes), kept.y + __shfl_xor_sync(0xffffffffu, other.y, lanes));
            }
        }
#pragma unroll
        for (int k = 0; k < OWN; k++) own[k] = total[k];
    }

    /// Adds sums of this lane's channels to those of a sample.
    __device__ __forceinline__ void add_own(int sample, const float2 (&own)[OWN]) {
#pragma unroll
        for (int k = 0; k < OWN; k++) {
            float2 &first = sums[0][k], &second = sums[1][k];
            const float2 now = sample ? second : first, then = make_float2(now.x + own[k].x, now.y + own[k].y);
            first = sample ? first : then, second = sample ? then : second;
        }
    }

    /// Adds a plane. `around`: of each sample and channel the mean that deviations are from.
    __device__ __forceinline__ void add(const float (&sum)[MI][REGISTERS], float *around) {
#pragma unroll 1
        for (int sample = 0; sample < SAMPLES; sample++) {
            const int count = rows_of(sample);
            if (count == 0) continue;
            const unsigned bits = there >> 8 * sample;
            float *const means = around + sample * BN;
            float2 own[OWN];
            if (planes == 0) {
                float2 total[VALUES] = {};
                each(sum, [&](float v, int i, int) { return make_float2(bits >> i & 1 ? v : 0.0f, 0.0f); }, total);
                over_warp(total, own);
#pragma unroll
                for (int k = 0; k < OWN; k++) means[channel() + 8 * k] = __fdividef(own[k].x, (float)count);
                meet();
            }
            const float *const of_lane = means + threadIdx.x % 4 * 2;
            const auto deviation = [&](float v, bool is_there, int k) {
                const float apart = is_there ? v - of_lane[k / 2 * 8 + k % 2] : 0.0f;
                return make_float2(apart, apart * apart);
            };
            if (keeps()) {
                if (count == ROWS)
                    each(sum, [&](float v, int, int k) { return deviation(v, true, k); }, kept);
                else
                    each(sum, [&](float v, int i, int k) { return deviation(v, bits >> i & 1, k); }, kept);
            } else {
                float2 total[VALUES] = {};
                each(sum, [&](float v, int i, int k) { return deviation(v, bits >> i & 1, k); }, total);
                over_warp(total, own);
                add_own(sample, own);
            }
        }
        planes++;
    }

    /// Writes what a warpgroup has of a piece, as one of its `shares` phases: the first one also that there are no others. `first` is the first
    /// sample that the piece has rows of and `last` the last one. `staged` is the warp's, and of no use before and after. All threads of the
    /// warpgroup come here.
    __device__ __forceinline__ void write(const Statistics &to, const float *around, float *staged, int first, int last, int piece, int share, int shares,
                                          int warpgroup, int channel0, int channels) {
        const int thread = threadIdx.x % 128;
        if (keeps()) {
            float2 own[OWN];
            over_warp(kept, own);
            add_own(rows >= 256, own);
        }
#pragma unroll 1
        for (int sample = 0; sample <= last - first; sample++) {
            const float count = (float)(rows_of(sample) * planes);
            asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
#pragma unroll
            for (int k = 0; k < OWN; k++) {
                const int c = channel() + 8 * k;
                const float2 of = sample ? sums[1][k] : sums[0][k];
                const float off = __fdividef(of.x, fmaxf(count, 1.0f));
                ((float2 *)staged)[c] = make_float2(around[sample * BN + c] + off, fmaxf(of.y - of.x * off, 0.0f));
            }
            if (thread % 32 == 0) staged[2 * BN] = count;
            asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
            Moments all = {0.0f, 0.0f, 0.0f};
            if (thread < channels) {
                const float *const of_first = staged - thread / 32 * STAGING;
#pragma unroll
                for (int warp = 0; warp < 4; warp++) {
                    const float *const of_warp = of_first + warp * STAGING;
                    if (of_warp[2 * BN] > 0.0f) {
                        const float2 of = ((const float2 *)of_warp)[thread];
                        all.add({of_warp[2 * BN], of.x, of.y});
                    }
                }
            }
            all.join(to.joined);
            if (thread < channels && thread % to.joined == 0) {
                const auto put = [&](int phase, const Moments &of) { to.put(to.at(first + sample, piece, warpgroup, phase), channel0 + thread, of); };
                put(share, all);
                if (share == 0)
#pragma unroll 1
                    for (int none = shares; none < to.phases; none++) put(none, {0.0f, 0.0f, 0.0f});
            }
        }
        // What is staged next.
        asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
    }
};
