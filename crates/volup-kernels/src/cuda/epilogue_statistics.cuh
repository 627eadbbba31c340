// Statistics of what `gather_gemm` and `halo_gemm` write, for a group norm: `group_merge` merges them.
//
// Of each channel, or of some of a group together, what a warpgroup writes of a tile has a mean and a sum of squared deviations from it.
// They come from the sums of a warp's values and of their squares. Where a mean is so much larger than the deviations from it that the difference would
// have lost more than six bits, they are taken anew: of the values as y holds them, in two passes over registers. What is apart is
// merged as by Chan, Golub and LeVeque, 1979, in a fixed order.

#pragma once

#include "halo_epilogue.cuh"

/// A number of values, their mean, and the sum of squared deviations from it.
struct Moments {
    float count, mean, m2;

    __device__ __forceinline__ void add(const Moments &other) {
        const float both = count + other.count, share = other.count * __frcp_rn(fmaxf(both, 1.0f)), apart = other.mean - mean;
        mean += apart * share;
        m2 += other.m2 + apart * apart * (count * share);
        count = both;
    }

    /// Adds those of so many neighbouring lanes.
    __device__ __forceinline__ void join(int joined) {
#pragma unroll 1
        for (int lanes = 1; lanes < joined; lanes *= 2) {
            const auto other = [&](float of) { return __shfl_xor_sync(0xffffffffu, of, lanes); };
            add({other(count), other(mean), other(m2)});
        }
    }
};

/// Where they go: `parts` (mean, squared deviations) of [sample][chunk][phase][column], `counts` of [sample][chunk][phase]. A
/// sample's chunks are the warpgroups of the tiles that hold any of its `rows`; a column is `joined` channels of one group, a power of
/// two up to 32, of which the first is a multiple of it.
struct Statistics {
    float2 *parts;
    float *counts;
    int chunks, phases, columns, joined, rows;

    /// The partial of a warpgroup of a tile of some phase, as [sample][chunk][phase].
    __device__ __forceinline__ long long at(int sample, int tile, int warpgroup, int phase) const {
        const int chunk = (tile - sample * rows / BM) * WGS + warpgroup;
        return ((long long)sample * chunks + chunk) * phases + phase;
    }
    /// Writes a partial's column, that of a channel.
    __device__ __forceinline__ void put(long long at, int channel, const Moments &of) const {
        const int column = channel / joined;
        parts[at * columns + column] = make_float2(of.mean, of.m2);
        // Of all columns the same.
        if (column == 0) counts[at] = of.count;
    }
};

/// Eights of channels that change places in a warp's staging area at once, and bytes from one to the next there, such that no two
/// lanes that read or write at once meet in a bank.
constexpr int EIGHTS = 2 * MI, EIGHT_PITCH = 576;
/// What neighbouring columns' outputs are of: one place, or the two residues along width of one channel, which are not there alike.
#ifdef RW
constexpr int PLACES = 1;
#else
constexpr int PLACES = 2;
#endif
static_assert(CHANNELS % 32 == 0 && CHANNELS <= 128);
static_assert(EIGHTS * EIGHT_PITCH <= 4 * STAGING && 2 * CHANNELS + PLACES <= STAGING);
/// The share of the sum of squares that is left of it at least.
constexpr float LEFT = 0.015625f;

/// What this warp's lanes have in their registers: of `LINES` lines, of which `there` says what is an output: of row
/// `8*i + lane/4`, a line, a residue and a neighbour's place bit `((i*LINES + line)*RESIDUES + residue)*PLACES + place`.
template <int LINES> struct Outputs {
    float (&sum)[LINES][MI][REGISTERS];
    unsigned there;

    /// Goes through this lane's values of a channel: that of an eight, and of two neighbours.
    template <typename Of> __device__ __forceinline__ void each(int eight, int which, Of of) const {
#pragma unroll
        for (int i = 0; i < 2 * MI; i++)
#pragma unroll
            for (int line = 0; line < LINES; line++)
#pragma unroll
                for (int residue = 0; residue < RESIDUES; residue++) {
                    const int tap = TAP_COLUMNS - RESIDUES + (residue + TAP_COLUMNS) % RESIDUES;
                    of(sum[line][i % MI][tap * CHANNELS / 2 + 4 * eight + i / MI * 2 + which],
                       ((i * LINES + line) * RESIDUES + residue) * PLACES + which % PLACES);
                }
    }
    /// The same values, of which the compiler does not know that they are: what is made of them is made when it is asked for.
    __device__ __forceinline__ void hide(int eight, int which) const {
        each(eight, which, [](float &v, int) { asm volatile("" : "+f"(v)); });
    }
    __device__ __forceinline__ bool has(int bit) const { return there >> bit & 1; }

    /// The sums of values and of their squares over the warp, from an eight on: of the channel that this lane has in the end, of
    /// eight `lane/8`, of neighbours `lane%4`, the one `lane/4%2`.
    template <bool WHOLE> __device__ __forceinline__ float2 sums(int eights) const {
        float2 total[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            hide(eights + k / 2, k % 2);
            total[k] = make_float2(0.0f, 0.0f);
            each(eights + k / 2, k % 2, [&](float &v, int bit) {
                const float counted = WHOLE || has(bit) ? v : 0.0f;
                total[k] = make_float2(total[k].x + counted, fmaf(counted, counted, total[k].y));
            });
        }
        // Of lanes that have the same channels each keeps half of them, then a quarter, then one.
#pragma unroll
        for (int half = 4, lanes = 16; half; half /= 2, lanes /= 2) {
            const bool upper = threadIdx.x & lanes;
#pragma unroll
            for (int k = 0; k < half; k++) {
                const float2 kept = upper ? total[k + half] : total[k], other = upper ? total[k] : total[k + half];
                total[k] = make_float2(kept.x + __shfl_xor_sync(0xffffffffu, other.x, lanes), kept.y + __shfl_xor_sync(0xffffffffu, other.y, lanes));
            }
        }
        return total[0];
    }

    /// The mean, and the sum of squared deviations from it, of values as y holds them. `by`: one by their number.
    __device__ __forceinline__ float2 moments(int eight, int which, float by) const {
        each(eight, which, [](float &v, int) {
            Element x;
            narrow(v, &x);
            v = widen(x);
        });
        // From the first on, so that the mean of equal values is theirs.
        float near = 0.0f, off = 0.0f, m2 = 0.0f;
        each(eight, which, [&](float &v, int bit) { near = bit < PLACES && has(bit) ? v : near; });
        each(eight, which, [&](float &v, int bit) { off += has(bit) ? v - near : 0.0f; });
        off *= by;
        hide(eight, which);
        each(eight, which, [&](float &v, int bit) {
            const float apart = v - near - off;
            m2 += has(bit) ? apart * apart : 0.0f;
        });
        return make_float2(near + off, m2);
    }

    /// Two numbers of each lane's channels, of some eights, to shared memory, where a lane has those of one channel, a row of lanes
    /// after the other.
    template <typename Of> __device__ __forceinline__ void exchange(char *staged, int group, Of of) const {
        const int lane = threadIdx.x % 32;
        __syncwarp();
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
#pragma unroll
            for (int which = 0; which < 2; which++) {
                hide(group * EIGHTS + eight, which);
                ((float2 *)(staged + eight * EIGHT_PITCH + lane * 16))[which] = of(group * EIGHTS + eight, which);
            }
        }
        __syncwarp();
    }
    __device__ __forceinline__ static const float2 *exchanged(const char *staged) {
        const int lane = threadIdx.x % 32;
        return (const float2 *)(staged + lane / 8 % EIGHTS * EIGHT_PITCH) + lane % 8;
    }
};

/// Whether all of a warp's values are outputs.
template <bool IS> struct Whole {
    static constexpr bool value = IS;
};

/// Counts a warpgroup's outputs of one sample, of `channels` channels from `channel0` on; of two places they are columns. `own` are the
/// bits of this lane's row (`lane % ROWS`), of its lines, residues and places; `staged` is the warp's, and of no use before and after. All
/// threads of the warpgroup come here.
template <int LINES>
__device__ __forceinline__ void count_outputs(float (&sum)[LINES][MI][REGISTERS], unsigned own, float *staged, int channel0, int channels,
                                              const Statistics &to, long long at, int warpgroup) {
    constexpr int OF_ROW = LINES * RESIDUES * PLACES, OF_LANE = 2 * MI * OF_ROW;
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    Outputs<LINES> outputs = {sum, 0};
#pragma unroll
    for (int i = 0; i < 2 * MI; i++) outputs.there |= __shfl_sync(0xffffffffu, own, 8 * i + lane / 4) << (i * OF_ROW);
    // How many of a place this lane has, and the warp.
    int seen[PLACES], count[PLACES];
#pragma unroll
    for (int place = 0; place < PLACES; place++) {
        seen[place] = __popc(outputs.there & (PLACES == 1 ? ~0u : 0x55555555u << place));
        count[place] = seen[place];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) count[place] += __shfl_xor_sync(0xffffffffu, count[place], lanes);
    }
    __syncwarp();
    const auto of_sums = [&](auto whole) {
#pragma unroll
        for (int eights = 0; eights < CHANNELS / 8; eights += 4)
            ((float2 *)staged)[(eights + lane / 8) * 8 + lane % 4 * 2 + lane / 4 % 2] = outputs.template sums<decltype(whole)::value>(eights);
    };
    if (__all_sync(0xffffffffu, outputs.there == (1u << OF_LANE) - 1))
        of_sums(Whole<true>{});
    else
        of_sums(Whole<false>{});
    const auto leave_counts = [&] {
#pragma unroll
        for (int place = 0; place < PLACES; place++)
            if (lane == 0) staged[2 * CHANNELS + place] = (float)count[place];
        asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
    };
    leave_counts();
    // What the warps have of a channel, each by a thread.
    const auto over_warps = [&](auto add) {
        const float *const of_first = staged - thread / 32 * STAGING;
#pragma unroll
        for (int warp = 0; warp < 4; warp++) {
            const float *const of_warp = of_first + warp * STAGING;
            add(of_warp[2 * CHANNELS + thread % PLACES], ((const float2 *)of_warp)[thread]);
        }
    };
    Moments all = {0.0f, 0.0f, 0.0f};
    int bad = 0;
    float2 total = make_float2(0.0f, 0.0f);
    if (thread < channels)
        over_warps([&](float count, float2 of) {
            all.count += count;
            total = make_float2(total.x + of.x, total.y + of.y);
        });
    // Channels that are joined have one sum.
#pragma unroll 1
    for (int lanes = 1; lanes < to.joined; lanes *= 2) {
        const auto other = [&](float of) { return of + __shfl_xor_sync(0xffffffffu, of, lanes); };
        all.count = other(all.count), total = make_float2(other(total.x), other(total.y));
    }
    if (thread < channels) {
        all.mean = __fdividef(total.x, fmaxf(all.count, 1.0f));
        all.m2 = fmaxf(total.y - total.x * all.mean, 0.0f);
        bad = all.m2 < LEFT * total.y;
    }
    asm volatile("{\n.reg .pred is;\nsetp.ne.s32 is, %0, 0;\nbar.red.or.pred is, %1, 128, is;\nselp.s32 %0, 1, 0, is;\n}"
                 : "+r"(bad)
                 : "r"(warpgroup + 1)
                 : "memory");
    // Of all threads the same, which the compiler has to know.
    if (__any_sync(0xffffffffu, bad)) {
        float by[PLACES];
#pragma unroll
        for (int place = 0; place < PLACES; place++) by[place] = __frcp_rn((float)max(seen[place], 1));
        float2 own_moments[CHANNELS / (8 * EIGHTS)];
#pragma unroll
        for (int group = 0; group < CHANNELS / (8 * EIGHTS); group++) {
            outputs.exchange((char *)staged, group, [&](int eight, int which) { return outputs.moments(eight, which, by[which % PLACES]); });
            Moments of_warp = {0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int row = 0; row < 8; row++) {
                const float2 of = outputs.exchanged((char *)staged)[8 * row];
                int of_row = __shfl_sync(0xffffffffu, seen[0], 4 * row);
                if (PLACES == 2) {
                    const int other = __shfl_sync(0xffffffffu, seen[PLACES - 1], 4 * row);
                    of_row = lane % 2 ? other : of_row;
                }
                of_warp.add({(float)of_row, of.x, of.y});
            }
            own_moments[group] = make_float2(of_warp.mean, of_warp.m2);
        }
        __syncwarp();
#pragma unroll
        for (int group = 0; group < CHANNELS / (8 * EIGHTS); group++)
            if (lane < 8 * EIGHTS) ((float2 *)staged)[group * 8 * EIGHTS + lane] = own_moments[group];
        leave_counts();
        all = {0.0f, 0.0f, 0.0f};
        if (thread < channels) over_warps([&](float count, float2 of) { all.add({count, of.x, of.y}); });
        asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
        all.join(to.joined);
    }
    if (thread < channels && thread % to.joined == 0) to.put(at, channel0 + thread, all);
}
