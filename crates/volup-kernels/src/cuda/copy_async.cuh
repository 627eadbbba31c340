// Copies from memory to shared memory that nobody waits for.

#pragma once

/// So many bytes (4, 8 or 16), or zeros. With `KEPT` 16 bytes stay in the first-level cache as well, as fewer do anyway.
template <int BYTES, bool KEPT = false> __device__ __forceinline__ void copy_async(unsigned to, const void *from, bool there) {
    const int bytes = there ? BYTES : 0;
    if (BYTES == 16 && !KEPT)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(bytes), "n"(BYTES) : "memory");
}

/// Ends a group of this thread's copies.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most so many of this thread's last groups are under way.
template <int PENDING> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/// Waits for all copies of this thread, whether their group is ended or not.
__device__ __forceinline__ void await_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Arrives at a barrier, which expects this thread, once its copies so far are there.
__device__ __forceinline__ void arrive_with_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
