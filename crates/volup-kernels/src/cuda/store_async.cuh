// Stores from shared memory by the copy engine, that nobody waits for.

#pragma once

#include "element.cuh"

/// Stores whole vectors of shared memory; ends a group of this thread's stores; waits until all have been read.
__device__ __forceinline__ void store(Element *to, unsigned from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void stored() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void stored_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
