// Where lanes of a warp wait for one another.

#pragma once

/// What all lanes did before, any of them may pass on after. The mask is one that the compiler does not know: it would leave
/// out the instruction where it finds the lanes together, and tools that follow who waits for whom would miss it.
__device__ __forceinline__ void meet() {
    unsigned all;
    asm volatile("mov.b32 %0, 0xffffffff;" : "=r"(all));
    __syncwarp(all);
}
