// Hopper's matrix instructions whose first operand lies in registers.

#pragma once

#include "hopper.cuh"

#if KIND == 1 || KIND == 3
#define ORDER ""
#else
#define ORDER ", 0"
#endif

/// Adds 64 rows by 64 or 128 columns of one step of 32 bytes of K; without `keep`, to nothing. Of A a thread has what `mma.sync`
/// would have of its warp's 16 rows. A stays as it is until the step is done.
#define MULTIPLY_REGISTERS(n, a_names, b_name, keep_name, ...)                                                                \
    __device__ __forceinline__ void multiply(float (&d)[n / 2], const unsigned (&a)[4], unsigned long long b, int keep) {     \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " keep_name ", 0;\n"                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k" DEPTH ".f32." OPERAND "." OPERAND " {" NAMES_##n "}, {" a_names \
                     "}, " b_name ", p, 1, 1" ORDER ";\n}"                                                                    \
                     : __VA_ARGS__                                                                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                                        \
    }
MULTIPLY_REGISTERS(64, "%32,%33,%34,%35", "%36", "%37", N32(0), N32(4))
MULTIPLY_REGISTERS(128, "%64,%65,%66,%67", "%68", "%69", N32(0), N32(4), N32(8), N32(12))
