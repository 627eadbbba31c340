// Hopper's barriers, bulk copies and matrix instructions.

#pragma once

#include "element.cuh"

#ifndef BN
#error "BN, the columns of a matrix instruction"
#endif

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

__device__ __forceinline__ void matrix_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void matrix_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void matrix_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define N8(j) "+f"(d[4 * (j)]), "+f"(d[4 * (j) + 1]), "+f"(d[4 * (j) + 2]), "+f"(d[4 * (j) + 3])
#if BN == 16
#define SUMS N8(0), N8(1)
#define SUM_NAMES "%0,%1,%2,%3,%4,%5,%6,%7"
#define OPERAND_NAMES "%8,%9"
#define KEEP_NAME "%10"
#elif BN == 24
#define SUMS N8(0), N8(1), N8(2)
#define SUM_NAMES "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
#define OPERAND_NAMES "%12,%13"
#define KEEP_NAME "%14"
#elif BN == 32
#define SUMS N8(0), N8(1), N8(2), N8(3)
#define SUM_NAMES "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define OPERAND_NAMES "%16,%17"
#define KEEP_NAME "%18"
#elif BN == 48
#define SUMS N8(0), N8(1), N8(2), N8(3), N8(4), N8(5)
#define SUM_NAMES "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define OPERAND_NAMES "%24,%25"
#define KEEP_NAME "%26"
#elif BN == 64
#define SUMS N8(0), N8(1), N8(2), N8(3), N8(4), N8(5), N8(6), N8(7)
#define SUM_NAMES                                                                                                                \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define OPERAND_NAMES "%32,%33"
#define KEEP_NAME "%34"
#elif BN == 96
#define SUMS N8(0), N8(1), N8(2), N8(3), N8(4), N8(5), N8(6), N8(7), N8(8), N8(9), N8(10), N8(11)
#define SUM_NAMES                                                                                                                \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"     \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define OPERAND_NAMES "%48,%49"
#define KEEP_NAME "%50"
#elif BN == 128
#define SUMS                                                                                                                     \
    N8(0), N8(1), N8(2), N8(3), N8(4), N8(5), N8(6), N8(7), N8(8), N8(9), N8(10), N8(11), N8(12), N8(13), N8(14), N8(15)
#define SUM_NAMES                                                                                                                \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"     \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,"   \
    "%62,%63"
#define OPERAND_NAMES "%64,%65"
#define KEEP_NAME "%66"
#endif
#if KIND == 1 || KIND == 3
#define DEPTH "8"
#define MODIFIERS "p, 1, 1"
#else
#define DEPTH "16"
#define MODIFIERS "p, 1, 1, 0, 0"
#endif

/// Registers of a thread for 64 rows.
constexpr int REGISTERS = BN / 2;

/// Adds 64 rows by BN columns of one step of 32 bytes of K; without `keep`, to nothing.
__device__ __forceinline__ void multiply(float (&d)[REGISTERS], unsigned long long a, unsigned long long b, int keep) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " KEEP_NAME ", 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n" TEXT(BN) "k" DEPTH ".f32." OPERAND "." OPERAND " {" SUM_NAMES "}, " OPERAND_NAMES
                 ", " MODIFIERS ";\n}"
                 : SUMS
                 : "l"(a), "l"(b), "r"(keep));
}
