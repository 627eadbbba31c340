// Sums of tiles that are multiplied in parts, each by a unit of work of its own.

#pragma once

/// Leaves a warpgroup's sums of a part of a tile, VECTORS float4 of each thread, which `of_vector` points to. Of the part that comes last it
/// makes all parts' sums, added in their order, and returns true: nobody waits for another. `index` is the unit's, `word` one of shared
/// memory that is the warpgroup's; all its threads come here.
///
/// `partials` has WGS warpgroups' sums of each unit, `arrived` as many words, zeros at first.
template <int VECTORS, typename Of>
__device__ __forceinline__ bool are_all_sums(const Of &of_vector, float *partials, unsigned *arrived, int index, int part, int parts, int *word, int warpgroup) {
    const int thread = threadIdx.x % 128, first_index = index - part;
    float4 *const first_part = (float4 *)partials + ((long long)first_index * WGS + warpgroup) * VECTORS * 128 + thread;
    const auto part_at = [&](int part) { return first_part + (long long)part * WGS * VECTORS * 128; };
    float4 *const own = part_at(part);
#pragma unroll
    for (int k = 0; k < VECTORS; k++) __stcg(own + k * 128, make_float4(of_vector(k)[0], of_vector(k)[1], of_vector(k)[2], of_vector(k)[3]));
    __threadfence();
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
    if (thread == 0) *word = (int)atomicAdd(arrived + first_index * WGS + warpgroup, 1);
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
    // The same for all lanes, which the compiler has to know.
    const int came_before = __shfl_sync(0xffffffffu, *word, 0);
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
    if (came_before != parts - 1) return false;
    __threadfence();
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const float4 v = __ldcg(first_part + k * 128);
        of_vector(k)[0] = v.x, of_vector(k)[1] = v.y, of_vector(k)[2] = v.z, of_vector(k)[3] = v.w;
    }
#pragma unroll 1
    for (int other = 1; other < parts; other++) {
        const float4 *const from = part_at(other);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const float4 v = __ldcg(from + k * 128);
            of_vector(k)[0] += v.x, of_vector(k)[1] += v.y, of_vector(k)[2] += v.z, of_vector(k)[3] += v.w;
        }
    }
    return true;
}
