// Launches that overlap, and how many blocks one has.

#pragma once

/// The kernel after this one may start, and waits for this one where it has to; a kernel that is launched so waits for
/// the one before it.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// Blocks of the grid, asked for each time: a register that held them would be spilled.
__device__ __forceinline__ int grid_blocks() {
    int blocks;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
    return blocks;
}
