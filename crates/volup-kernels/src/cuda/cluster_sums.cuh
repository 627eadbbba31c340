// Who does a product's tiles: blocks or, with SPLIT, clusters of as many blocks, which do each tile in parts; and their sums.

#pragma once

#include "halo_epilogue.cuh"
#include "hopper.cuh"
#include "launch.cuh"

/// Teams that tiles are dealt out to, and this block's.
#ifdef SPLIT
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
__device__ __forceinline__ int teams() { return grid_blocks() / SPLIT; }
__device__ __forceinline__ int team() { return blockIdx.x / SPLIT; }
/// Whether a block ends rows of whole warpgroups.
constexpr bool WHOLE_GROUPS = WGS % SPLIT == 0;
#else
#define CLUSTER
__device__ __forceinline__ int teams() { return grid_blocks(); }
__device__ __forceinline__ int team() { return blockIdx.x; }
constexpr bool WHOLE_GROUPS = true;
#endif

/// This block's number in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/// Waits until all threads of the cluster that have not ended come here.
__device__ __forceinline__ void await_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Sums of BLOCKS blocks of WARPS warps each, VECTORS float4 of each thread. Warps' rows are shared out: each block ends the rows of OWN
/// of its warps, whose others' sums are brought to its shared memory, and added in the order of blocks, so that results keep their bits.
template <int BLOCKS, int WARPS, int VECTORS> struct ClusterSums {
    static constexpr int OWN = WARPS / BLOCKS, OF_WARP = VECTORS * 512;
    /// Bytes of shared memory of the others' sums, and of barriers: of warps that end rows, and of all whose sums have been read.
    static constexpr int BYTES = (BLOCKS - 1) * OWN * OF_WARP, BARRIERS = 8 * (OWN + WARPS);
    static_assert(WARPS % BLOCKS == 0);

    unsigned sums, barriers;

    __device__ __forceinline__ unsigned brought(int own) const { return barriers + 8 * own; }
    __device__ __forceinline__ unsigned was_read(int warp) const { return barriers + 8 * (OWN + warp); }

    /// By OWN + WARPS threads by number, before the cluster meets.
    __device__ __forceinline__ void begin(int thread) const { barrier_init(barriers + 8 * thread, thread < OWN ? 32 * (BLOCKS - 1) : 32); }

    /// Of a warp's sums of the tile of a round, which `of_vector` points to, all blocks', where it ends their rows: true. Else they are
    /// brought to the warp that does. Everyone comes here for each tile; who ends rows says in the end that their sums have been read.
    template <typename Of> __device__ __forceinline__ bool are_all(const Of &of_vector, int warp, int round) const {
        const int lane = threadIdx.x % 32, rank = cluster_rank(), owner = warp / OWN, own = warp % OWN, parity = round & 1;
        if (owner != rank) {
            barrier_wait(was_read(warp), parity ^ 1);
            const int slot = rank - (rank > owner);
            const unsigned to = of_block(sums + (slot * OWN + own) * OF_WARP + lane * 16, owner);
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                const float *const v = of_vector(k);
                asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + k * 512), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                             : "memory");
            }
            // Each lane for what it has brought, which is what racecheck follows.
            arrive_at(of_block(brought(own), owner));
            return false;
        }
        await_brought(brought(own), parity);
#pragma unroll 1
        for (int slot = 0; slot < BLOCKS - 1; slot++) {
            const unsigned from = sums + (slot * OWN + own) * OF_WARP + lane * 16;
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                float v[4];
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from + k * 512));
#pragma unroll
                for (int e = 0; e < 4; e++) of_vector(k)[e] += v[e];
            }
        }
        return true;
    }

    /// When what is made of the sums is written: an arrival may overtake loads that are under way.
    __device__ __forceinline__ void have_been_read(int warp) const {
        const int rank = cluster_rank();
#pragma unroll 1
        for (int other = 0; other < BLOCKS; other++)
            if (other != rank) arrive_at(of_block(was_read(warp), other));
    }

private:
    /// Where another block has in its shared memory what is at an address here.
    __device__ __forceinline__ static unsigned of_block(unsigned address, unsigned rank) {
        unsigned there;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
        return there;
    }
    __device__ __forceinline__ static void arrive_at(unsigned barrier) {
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
    }
    __device__ __forceinline__ static void await_brought(unsigned barrier, int parity) {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "again:\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
            "@done bra reached;\n"
            "bra again;\n"
            "reached:\n"
            "}" ::"r"(barrier), "r"(parity)
            : "memory");
    }
};
