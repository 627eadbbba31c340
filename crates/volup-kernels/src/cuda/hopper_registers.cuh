// Hopper's matrix instructions whose first operand lies in registers.

#pragma once

#include "hopper.cuh"

/// Adds 64 rows by 64 columns of one step of 32 bytes of K; without `keep`, to nothing. Of A a thread has what `mma.sync`
/// would have of its warp's 16 rows. A stays as it is until the step is done.
__device__ __forceinline__ void multiply(float (&d)[32], const unsigned (&a)[4], unsigned long long b, int keep) {
#if KIND == 1 || KIND == 3
#define ORDER ""
#else
#define ORDER ", 0"
#endif
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k" DEPTH ".f32." OPERAND "." OPERAND " {" NAMES_64 "}, {%32,%33,%34,%35}, %36, p, 1, 1" ORDER ";\n}"
                 : N32(0), N32(4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
#undef ORDER
}
