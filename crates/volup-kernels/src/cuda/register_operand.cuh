// Hopper's matrix instructions whose operand A is in registers.

#pragma once

#include "hopper.cuh"

#if KIND == 1 || KIND == 3
#define ORDER_OF_B(of_b) ""
#else
#define ORDER_OF_B(of_b) ", " of_b
#endif

/// Adds 64 rows by so many columns of one step of 32 bytes of K to half as many registers of a thread. A is what a warp's own
/// instructions take of its 16 rows. TRANSPOSED: of B, of 16 bits, columns lie side by side instead of what is added up.
#define MULTIPLY_REGISTERS(n, a_names, b_name, keep_name, order, ...)                                                             \
    template <int TRANSPOSED = 0>                                                                                                \
    __device__ __forceinline__ void multiply(float (&d)[n / 2], const unsigned (&a)[4], unsigned long long b, int keep) {        \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " keep_name ", 0;\n"                                                     \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k" DEPTH ".f32." OPERAND "." OPERAND " {" NAMES_##n "}, {" a_names   \
                     "}, " b_name ", p, 1, 1" ORDER_OF_B(order) ";\n}"                                                           \
                     : __VA_ARGS__                                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(TRANSPOSED));                          \
    }
MULTIPLY_REGISTERS(16, "%8,%9,%10,%11", "%12", "%13", "%14", N16(0))
MULTIPLY_REGISTERS(32, "%16,%17,%18,%19", "%20", "%21", "%22", N32(0))
MULTIPLY_REGISTERS(64, "%32,%33,%34,%35", "%36", "%37", "%38", N32(0), N32(4))
MULTIPLY_REGISTERS(128, "%64,%65,%66,%67", "%68", "%69", "%70", N32(0), N32(4), N32(8), N32(12))
