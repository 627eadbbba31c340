// Sums that means and variances are merged by, in double precision: of what values are off from one of them, and of the squares of that.

#pragma once

/// A number of values, the sum of what they are off from some number, and of the squares of that.
struct MomentSums {
    double count, off, squared;

    __device__ __forceinline__ void add(const MomentSums &other) {
        count += other.count;
        off += other.off;
        squared += other.squared;
    }

    /// Adds so many values, of which mean and squared deviations from it are known, as they are off from `near`.
    __device__ __forceinline__ void add_part(float of, float2 part, double near) {
        const double apart = of > 0.0f ? part.x - near : 0.0;
        add({of, of * apart, part.y + of * apart * apart});
    }

    /// Adds parts of a block's threads in turn, of so many: `read` gives the count of one that is there or not, and its mean and squared
    /// deviations. Some of a thread are read at once.
    template <int THREADS, typename Read> __device__ __forceinline__ void add_parts(int many, double near, const Read &read) {
        constexpr int AT_ONCE = 4;
#pragma unroll 1
        for (int at = threadIdx.x; at < many; at += THREADS * AT_ONCE) {
            float2 part[AT_ONCE];
            float count[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                read(at + k * THREADS, at + k * THREADS < many, count[k], part[k]);
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) add_part(count[k], part[k], near);
        }
    }

    /// Over a warp's lanes, always in the same order: all of them have it then.
    __device__ __forceinline__ void over_lanes() {
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2)
            add({__shfl_xor_sync(0xffffffffu, count, lanes), __shfl_xor_sync(0xffffffffu, off, lanes),
                 __shfl_xor_sync(0xffffffffu, squared, lanes)});
    }

    /// Over a block's threads, always in the same order: the first one has it, and does what comes then.
    template <int THREADS, typename Then> __device__ __forceinline__ void over_block(const Then &then) {
        __shared__ MomentSums of_warp[THREADS / 32];
        over_lanes();
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = *this;
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll 1
            for (int warp = 1; warp < THREADS / 32; warp++) add(of_warp[warp]);
            then();
        }
    }

    /// The mean, and 1/sigma; what is infinite or NaN makes that NaN.
    __device__ __forceinline__ float2 normalization(double near, double eps) const {
        const double by_count = off / count, variance = squared / count - by_count * by_count;
        return make_float2((float)(near + by_count), (float)(1.0 / sqrt((variance < 0.0 ? 0.0 : variance) + eps)));
    }
};
