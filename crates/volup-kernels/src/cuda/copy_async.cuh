// Copies from memory to shared memory that nobody waits for.

#pragma once

/// So many bytes (4, 8 or 16), or zeros.
template <int BYTES> __device__ __forceinline__ void copy_async(unsigned to, const void *from, bool there) {
    const int bytes = there ? BYTES : 0;
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(bytes), "n"(BYTES) : "memory");
}
