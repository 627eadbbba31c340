// Launches that overlap.

#pragma once

/// The kernel after this one may start, and waits for this one where it has to; a kernel that is launched so waits for
/// the one before it.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
