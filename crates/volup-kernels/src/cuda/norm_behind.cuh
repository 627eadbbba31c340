// A group norm of what is written already, beside the products that are left: by some of the warps that do not multiply, and by the warps
// of a block whose products are done. What a block has written one of the former tells all others (`Teller`).
//
// Of each sample, when all of its outputs are there and the partial statistics of them (`epilogue_statistics.cuh`), each group's are
// merged, in double precision and a fixed order: segments of them side by side, and what these come to by whoever merges the last one.
// When that is done outputs are scaled where they lie, soon enough that some of them are still in the second-level cache. Segments and
// pieces of outputs are claimed one by one, and only of what is there: no warp ever waits for what another block has yet to do, whichever
// blocks run. A block that finds nothing to claim when it has done its own waits for a while, and then leaves what may come to those that
// run longer.

#pragma once

#include "activation.cuh"
#include "copy_async.cuh"
#include "epilogue_statistics.cuh"
#include "launch.cuh"
#include "moment_sums.cuh"
#include "stored.cuh"
#include "warp_meet.cuh"

/// What a segment of a group's partial statistics comes to, as it is off from `near`.
struct alignas(16) Segment {
    MomentSums sums;
    double near;
};

/// What else there is to know of a group norm, and of y in NCDHW.
struct NormBehind {
    Element *y;
    const float2 *parts;
    const float *counts;
    /// Zeros at first: the first sample of which pieces are left to claim, that of which statistics are, two more; of each sample tiles of
    /// warpgroups that are written, segments that are claimed and that are merged, and one more for all of them, pieces that are claimed. Null
    /// if there is no norm.
    unsigned *words;
    /// What each sample's and group's segments come to, and of each sample and group mean and 1/sigma.
    Segment *sums;
    float2 *merged;
    const Element *gamma, *beta;
    /// `voxels` of a channel; `segments` that a group's partials are merged in; `chunks`, `phases`, `columns` and `rows` as in `Statistics`;
    /// column blocks of a row, of all slices.
    int samples, channels, groups, segments, voxels, chunks, phases, columns, rows, blocks, activation;
    double slope, eps;

    enum Found { NOTHING, SOME, ALL };
    /// Where a warp is: of which samples it claims statistics and pieces next, and whether those of the latter are known to be merged.
    struct At {
        int merges, scales;
        bool merged;
        /// Whether it is worth to look for statistics to merge.
        bool may_merge;
        /// A piece that is claimed already, negative if none is.
        int piece;
    };

    /// What a warp scales by: shared memory, which copies fill some rounds ahead, or registers, of which one that multiplied has more.
    enum Means { BY_RING, BY_FEW_REGISTERS, BY_REGISTERS };
    /// Elements of a vector, of a piece; bytes of a round and of all.
    static constexpr int V = 16 / sizeof(Element), PIECE = 16384 / sizeof(Element);
    static constexpr int ROUND = 2048, ROUNDS = 8, RING = ROUND * ROUNDS, OF_ROUND = ROUND / 512;
    /// Pieces that are claimed at once.
    template <Means MEANS> static constexpr int CLAIMED = MEANS == BY_RING ? 2 : 1;
    /// How often a block that has nothing to do looks for something.
    static constexpr int PATIENCE = 1024;

    /// Says, as a lane, that a warpgroup's outputs of a tile are written, of rows of samples from one to another.
    __device__ __forceinline__ void written(int first, int last) const {
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
#pragma unroll 1
        for (int sample = first; sample <= last; sample++) atomicAdd(of(sample), 1);
    }

    /// Does what there is to do, until there can be nothing more, or this warp, whose block's products are `over`, has waited for long.
    template <Means MEANS, typename Over> __device__ __forceinline__ void work(char *ring, const Over &over) const {
        At at = {0, (int)seen(words), false, true, -1};
        int patience = PATIENCE;
#pragma unroll 1
        while (patience > 0) {
            const bool is_over = over();
            // What follows from these would be held in registers from one thing that is done to the next.
            NormBehind anew = *this;
            asm volatile("" : "+r"(anew.voxels), "+r"(anew.channels), "+r"(anew.groups), "+r"(anew.columns), "+r"(anew.rows), "+r"(anew.samples),
                         "+r"(anew.chunks), "+r"(anew.phases), "+r"(anew.blocks), "+r"(anew.segments), "+l"(anew.sums), "+d"(anew.slope), "+d"(anew.eps), "+l"(anew.words));
            const Found found = anew.step<MEANS>(at, ring);
            if (found == ALL && is_over) return;
            if (found == SOME) {
                patience = PATIENCE;
            } else {
                patience -= is_over;
                at.may_merge = true;
                __nanosleep(500);
            }
        }
    }

private:
    /// Claims something and does it, if there is anything.
    template <Means MEANS> __device__ __forceinline__ Found step(At &at, char *ring) const {
        if (at.may_merge && at.merges < samples) {
            unsigned *const own = of(at.merges);
            if (seen(own) == needed(at.merges)) {
                const int segment = claim(own + 1, 1);
                if (segment < groups * segments)
                    merge<MEANS>(at.merges, segment / segments, segment % segments);
                else
                    at.merges = passed(words + 1, at.merges);
                return SOME;
            }
        }
        if (at.scales == samples) return ALL;
        unsigned *const own = of(at.scales);
        at.merged = at.merged || seen(own + 2) == (unsigned)(groups * segments + (segments > 1));
        if (!at.merged) return NOTHING;
        constexpr int CLAIMS = CLAIMED<MEANS>;
        if (at.piece < 0) at.piece = claim(own + 3, CLAIMS);
        const int of_channel = (voxels + PIECE - 1) / PIECE, past = min(at.piece + CLAIMS, channels * of_channel);
        if (at.piece >= past) {
            at.scales = passed(words, at.scales);
            at.merged = false;
            at.piece = -1;
            return SOME;
        }
        // What comes next is asked for before, and heard after.
        int next = 0, tiles_written = 0;
        if (threadIdx.x % 32 == 0) {
            next = (int)atomicAdd(own + 3, CLAIMS);
            tiles_written = at.merges < samples ? *(const volatile unsigned *)of(at.merges) : 0;
        }
        for (int piece = at.piece; piece < past;) {
            const int channel = piece / of_channel, first = piece - channel * of_channel, count = min(past - piece, of_channel - first);
            scale<MEANS>(at.scales, channel, first, count, of_channel, ring);
            piece += count;
        }
        at.piece = __shfl_sync(0xffffffffu, next, 0);
        at.may_merge = at.merges < samples && __shfl_sync(0xffffffffu, tiles_written, 0) == (int)needed(at.merges);
        return SOME;
    }

    /// The first sample that is not known to be all claimed, after one that is.
    __device__ __forceinline__ static int passed(unsigned *first, int sample) {
        int other = 0;
        if (threadIdx.x % 32 == 0) other = atomicMax((int *)first, sample + 1);
        return max(__shfl_sync(0xffffffffu, other, 0), sample + 1);
    }

    __device__ __forceinline__ unsigned *of(int sample) const { return words + 4 + 4 * sample; }
    /// Tiles with rows of a sample.
    __device__ __forceinline__ int tiles(int sample) const {
        return ((sample + 1) * rows - 1) / BM - sample * rows / BM + 1;
    }

    /// Tiles of warpgroups that write outputs of a sample.
    __device__ __forceinline__ unsigned needed(int sample) const { return tiles(sample) * WGS * phases * blocks; }

    /// A word, which all lanes are told; what whoever wrote it had done before can be read.
    __device__ __forceinline__ static unsigned seen(const unsigned *word) {
        unsigned value = 0;
        if (threadIdx.x % 32 == 0) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
        value = __shfl_sync(0xffffffffu, value, 0);
        __syncwarp();
        return value;
    }
    __device__ __forceinline__ static int claim(unsigned *word, int many) {
        int value = 0;
        if (threadIdx.x % 32 == 0) value = (int)atomicAdd(word, many);
        return __shfl_sync(0xffffffffu, value, 0);
    }
    /// Says of a sample that what this warp has merged can be read; how many had said so before.
    __device__ __forceinline__ int tell(int sample) const {
        int before = 0;
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            before = (int)atomicAdd(of(sample) + 2, 1);
        }
        return __shfl_sync(0xffffffffu, before, 0);
    }

    /// Merges a segment of a group's partial statistics; who is the last to do so those of all groups.
    template <Means MEANS> __device__ __forceinline__ void merge(int sample, int group, int segment) const {
        // A column of a partial after the other.
        const int of_group = columns / groups, all = tiles(sample) * WGS * phases, lane = threadIdx.x % 32;
        const int of_segment = (all + segments - 1) / segments, start = segment * of_segment, past = min(start + of_segment, all);
        // Partials of all columns are less than 2^31 bytes.
        const int first = sample * chunks * phases + start + lane;
        Segment own = {{0.0, 0.0, 0.0}, 0.0};
        bool knows_near = false;
        // What a lane reads is at addresses that are added to.
        const long long apart = 32ll * columns;
        constexpr int AT_ONCE = MEANS == BY_REGISTERS ? 4 : MEANS == BY_FEW_REGISTERS ? 3 : 2;
#pragma unroll 1
        for (int column = 0; column < of_group; column++) {
            const float2 *from = parts + first * columns + group * of_group + column;
            const float *from_counts = counts + first;
#pragma unroll 1
            for (int at = start; at < past; at += 32 * AT_ONCE) {
                float2 part[AT_ONCE];
                float of[AT_ONCE];
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++, from += apart, from_counts += 32) {
                    const bool there = at + 32 * k + lane < past;
                    part[k] = there ? __ldcg(from) : make_float2(0.0f, 0.0f);
                    of[k] = there ? __ldcg(from_counts) : 0.0f;
                }
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    if (!knows_near) {
                        // The mean of any that has values.
                        const unsigned has = __ballot_sync(0xffffffffu, of[k] > 0.0f);
                        knows_near = has != 0;
                        own.near = __shfl_sync(0xffffffffu, part[k].x, 31 - __clz(has & -has) & 31);
                    }
                    own.sums.add_part(of[k], part[k], own.near);
                }
            }
        }
        own.sums.over_lanes();
        if (lane == 0) {
            if (segments > 1)
                sums[(long long)(sample * groups + group) * segments + segment] = own;
            else
                merged[sample * groups + group] = own.sums.normalization(own.near, eps);
        }
        if (tell(sample) == groups * segments - 1 && segments > 1) {
            __threadfence();
            __syncwarp();
#pragma unroll 1
            for (int one = lane; one < groups; one += 32) merged[sample * groups + one] = of_segments(sample, one);
            tell(sample);
        }
    }

    /// Mean and 1/sigma of a group, whose segments are merged.
    __device__ __forceinline__ float2 of_segments(int sample, int group) const {
        const double2 *from = (const double2 *)(sums + (long long)(sample * groups + group) * segments);
        Segment all = {{0.0, 0.0, 0.0}, 0.0};
#pragma unroll 1
        for (int segment = 0; segment < segments; segment++, from += 2) {
            const double2 counted = __ldcg(from), rest = __ldcg(from + 1);
            if (all.sums.count == 0.0) all.near = rest.y;
            const double apart = counted.x > 0.0 ? rest.y - all.near : 0.0;
            all.sums.add({counted.x, counted.y + counted.x * apart, rest.x + apart * (2.0 * counted.y + counted.x * apart)});
        }
        return all.sums.normalization(all.near, eps);
    }

    /// How a channel's outputs are scaled.
    struct Scaling {
        float mean, factor, addend, slope;
        int activation;

        __device__ __forceinline__ uint4 operator()(const uint4 &v) const {
            float x[V];
#pragma unroll
            for (int e = 0; e < V; e++) x[e] = (widen(((const Element *)&v)[e]) - mean) * factor + addend;
            if (activation == 1) {
#pragma unroll
                for (int e = 0; e < V; e++) x[e] = straighten(x[e], 1, 0.0f);
            } else if (activation == 2) {
#pragma unroll
                for (int e = 0; e < V; e++) x[e] = straighten(x[e], 2, slope);
            }
            return vector_of(x);
        }
    };
    /// Scales so many of a channel's pieces.
    template <Means MEANS> __device__ __forceinline__ void scale(int sample, int channel, int piece, int many, int pieces, char *ring) const {
        const float2 norm = __ldcg(merged + sample * groups + channel / (channels / groups));
        Scaling scaling = {norm.x, norm.y * (gamma ? widen(gamma[channel]) : 1.0f), beta ? widen(beta[channel]) : 0.0f, (float)slope, activation};
        asm volatile("" : "+f"(scaling.slope));
        // In vectors, of which a lane has each 32nd.
        const int vectors = voxels / V, of_piece = (vectors + pieces - 1) / pieces, lane = kept(threadIdx.x % 32);
        const int count = min(vectors - piece * of_piece, many * of_piece) - lane;
        uint4 *const own = (uint4 *)(y + ((long long)sample * channels + channel) * voxels) + piece * of_piece + lane;
        if constexpr (MEANS == BY_RING) {
            constexpr int OF_ALL = OF_ROUND * 32;
            const unsigned slots = shared(ring) + lane * 16;
            // One address for a round's copies, and one for its stores: each would wait until the one before it has read its own.
            const uint4 *from = own;
            uint4 *to = own;
            int to_load = count, then = 0, now = 0;
            const auto load = [&] {
                asm volatile("" : "+l"(from));
#pragma unroll
                for (int k = 0; k < OF_ROUND; k++)
                    if (k * 32 < to_load) copy_async<16>(slots + then + k * 512, from + k * 32, true);
                end_copies();
                from += OF_ALL, to_load -= OF_ALL;
                then = then + ROUND == RING ? 0 : then + ROUND;
            };
#pragma unroll 1
            for (int round = 0; round < ROUNDS - 1; round++) load();
#pragma unroll 1
            for (int left = count; left > 0; left -= OF_ALL) {
                load();
                await_copies<ROUNDS - 1>();
                // What is read past the end is not written.
                uint4 v[OF_ROUND];
#pragma unroll
                for (int k = 0; k < OF_ROUND; k++) v[k] = *(const uint4 *)(ring + now + lane * 16 + k * 512);
                asm volatile("" : "+l"(to));
#pragma unroll
                for (int k = 0; k < OF_ROUND; k++) v[k] = scaling(v[k]);
#pragma unroll
                for (int k = 0; k < OF_ROUND; k++)
                    if (k * 32 < left) to[k * 32] = v[k];
                to += OF_ALL;
                now = now + ROUND == RING ? 0 : now + ROUND;
            }
        } else {
            constexpr int HELD = MEANS == BY_FEW_REGISTERS ? 4 : 8;
#pragma unroll 1
            for (int at = 0; at < count; at += HELD * 32) {
                uint4 v[HELD];
#pragma unroll
                for (int k = 0; k < HELD; k++)
                    if (at + k * 32 < count) v[k] = __ldcg(own + at + k * 32);
#pragma unroll
                for (int k = 0; k < HELD; k++)
                    if (at + k * 32 < count) own[at + k * 32] = scaling(v[k]);
            }
        }
    }
};

/// Who tells all blocks of tiles that are written, beside what else it does: the second warp that does not multiply. Tiles are in the order
/// of rows; `by` has what those are divided by, all columns' tiles and phases, a line, a plane and a sample of rows.
template <typename Divisors> struct Teller {
    const NormBehind &norm;
    const Divisors &by;
    /// Of each warpgroup tiles that are written, counted by warps; of each tiles that have been told of.
    int *finished;
    int tiles, rows;

    __device__ __forceinline__ static bool is_it() { return threadIdx.x / 32 == CONSUMERS / 32 + 1; }
    __device__ __forceinline__ bool are_all(int of_block) const { return of_block * grid_blocks() + (int)blockIdx.x >= tiles; }
    __device__ __forceinline__ int written(int warpgroup) const {
        const int warps = *(const volatile int *)(finished + warpgroup);
        __threadfence_block();
        return warps / 4;
    }
    __device__ __forceinline__ bool all_written() const {
        bool all = true;
        for (int warpgroup = 0; warpgroup < WGS; warpgroup++) all &= are_all(written(warpgroup));
        return all;
    }

    __device__ __forceinline__ int sample_of(int row) const { return by.depth.divide(by.height.divide(by.line.divide(row))); }

    /// Says, as a consumer's warp, that it has written its part of a tile.
    __device__ __forceinline__ static void finish(int *finished, int warpgroup) {
        meet();
        if (threadIdx.x % 32 == 0) {
            __threadfence_block();
            atomicAdd(finished + warpgroup, 1);
        }
    }

    /// Tells of tiles that are written since, if it is this warp that does.
    __device__ __forceinline__ void meanwhile() const { told_all(); }
    __device__ __forceinline__ bool told_all() const {
        if (!is_it()) return true;
        bool all = true;
#pragma unroll 1
        for (int warpgroup = 0; warpgroup < WGS; warpgroup++) {
            int told = finished[WGS + warpgroup];
            const int now = written(warpgroup);
#pragma unroll 1
            for (; told < now; told++) {
                const int row0 = by.phases.divide(by.all.divide(told * grid_blocks() + blockIdx.x)) * BM;
                if (threadIdx.x % 32 == 0) norm.written(sample_of(row0), sample_of(min(row0 + BM, rows) - 1));
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) finished[WGS + warpgroup] = now;
            __syncwarp();
            all &= are_all(now);
        }
        return all;
    }
};
