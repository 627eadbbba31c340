// Hopper's barriers, bulk copies and matrix instructions.

#pragma once

#include "element.cuh"

/// A number in a register: the compiler would fetch parameters of a kernel anew each time, and wait for them.
__device__ __forceinline__ int kept(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ unsigned shared(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(unsigned barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra reached;\n"
        "bra again;\n"
        "reached:\n"
        "}" ::"r"(barrier), "r"(parity)
        : "memory");
}

/// Whether the phase of that parity is over.
__device__ __forceinline__ bool barrier_test(unsigned barrier, int parity) {
    unsigned is;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(is)
        : "r"(barrier), "r"(parity)
        : "memory");
    return is;
}

/// Copies whole 16-byte rows from global to shared memory; the barrier counts the bytes.
__device__ __forceinline__ void copy(unsigned to, const void *from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

/// An operand of the tensor core: rows 16 bytes apart, eights of rows STRIDE eights apart, `panel` bytes from one
/// piece of K to the next. No swizzle, hence any row may be the first.
template <int STRIDE> __device__ __forceinline__ unsigned long long descriptor(unsigned address, unsigned panel) {
    return ((unsigned long long)(address & 0x3ffff) >> 4) | ((unsigned long long)(panel >> 4) << 16) | (8ull * STRIDE << 32);
}

/// The operand B whose columns lie side by side: panels of columns, in which what is added up follows row by row.
__device__ __forceinline__ unsigned long long across(unsigned address, unsigned panel) {
    return ((unsigned long long)(address & 0x3ffff) >> 4) | (8ull << 16) | ((unsigned long long)(panel >> 4) << 32);
}

/// The same in two steps, of which the first does for all places that are whole pieces of 16 bytes apart: these are added to it.
__device__ __forceinline__ unsigned place(unsigned address, unsigned panel) {
#ifdef SPLIT
    // Addresses of a cluster's blocks say whose memory they are of.
    address &= 0x3ffff;
#endif
    return address >> 4 | panel >> 4 << 16;
}
template <int STRIDE> __device__ __forceinline__ unsigned long long operand_at(unsigned place) { return 8ull * STRIDE << 32 | place; }

__device__ __forceinline__ void matrix_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void matrix_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void matrix_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define N8(j) "+f"(d[4 * (j)]), "+f"(d[4 * (j) + 1]), "+f"(d[4 * (j) + 2]), "+f"(d[4 * (j) + 3])
#define N16(j) N8(j), N8(j + 1)
#define N32(j) N16(j), N16(j + 2)
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NAMES_24 NAMES_16 ",%8,%9,%10,%11"
#define NAMES_32 NAMES_24 ",%12,%13,%14,%15"
#define NAMES_48 NAMES_32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define NAMES_64 NAMES_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_96 NAMES_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_128 NAMES_96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#if KIND == 1 || KIND == 3
#define DEPTH "8"
#define ORDERS(of_b) ""
#else
#define DEPTH "16"
#define ORDERS(of_b) ", 0, " of_b
#endif

/// Adds 64 rows by so many columns of one step of 32 bytes of K, half as many registers of a thread; without `keep`, to
/// nothing. TRANSPOSED: of B, of 16 bits, columns lie side by side instead of what is added up.
#define MULTIPLY(n, a_name, b_name, keep_name, order, ...)                                                                        \
    template <int TRANSPOSED = 0>                                                                                                \
    __device__ __forceinline__ void multiply(float (&d)[n / 2], unsigned long long a, unsigned long long b, int keep) {          \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " keep_name ", 0;\n"                                                     \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k" DEPTH ".f32." OPERAND "." OPERAND " {" NAMES_##n "}, " a_name     \
                     "," b_name ", p, 1, 1" ORDERS(order) ";\n}"                                                                 \
                     : __VA_ARGS__                                                                                               \
                     : "l"(a), "l"(b), "r"(keep), "n"(TRANSPOSED));                                                              \
    }
MULTIPLY(16, "%8", "%9", "%10", "%11", N16(0))
MULTIPLY(24, "%12", "%13", "%14", "%15", N16(0), N8(2))
MULTIPLY(32, "%16", "%17", "%18", "%19", N32(0))
MULTIPLY(48, "%24", "%25", "%26", "%27", N32(0), N16(4))
MULTIPLY(64, "%32", "%33", "%34", "%35", N32(0), N32(4))
MULTIPLY(96, "%48", "%49", "%50", "%51", N32(0), N32(4), N32(8))
MULTIPLY(128, "%64", "%65", "%66", "%67", N32(0), N32(4), N32(8), N32(12))
