// The matrix instructions of a warp, and loads of what they take: of 16 bits 16 rows by 8 columns by 16 of K, else by 8.

#pragma once

#include "element.cuh"

__device__ __forceinline__ void load_matrices(unsigned (&v)[4], unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
}

__device__ __forceinline__ void load_transposed(unsigned (&v)[4], unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
}

__device__ __forceinline__ void multiply(float (&sum)[4], const uint4 &a, unsigned b0, unsigned b1) {
#if KIND == 0 || SCALED
    asm("mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32." OPERAND "." OPERAND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

/// The same of sums that start with one number.
__device__ __forceinline__ void multiply_onto(float (&sum)[4], float start, const uint4 &a, unsigned b0, unsigned b1) {
#if KIND == 0 || SCALED
    asm("mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32." OPERAND "." OPERAND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
#endif
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(start));
}

/// Adds one step's products of two operands to sums: `add(to, part of a, part of b)` multiplies. Those of two parts, of which the
/// product of both low ones is too small to count, are summed first.
template <typename Add> __device__ __forceinline__ void add_products(float (&sum)[4], const Add &add) {
#if KIND == 3 || KIND == 2
    float product[4] = {};
    add(product, 1, 0);
    add(product, 0, 1);
    add(product, 0, 0);
#pragma unroll
    for (int e = 0; e < 4; e++) sum[e] += product[e];
#else
    add(sum, 0, 0);
#endif
}
