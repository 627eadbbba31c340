// Outputs by their definition, where another kernel's cannot stand that packs its input itself and so knows too late. It is launched
// so that it starts while that one still runs, and nearly always ends with it: `direct` would start after it, for nothing.
//
// Parameters: those of `direct`, in order; `guarded` is 1. Threads: 256. Grid: any number of blocks along the first axis.

#include "definition.cuh"
#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(256, 3) direct_output(DEFINITION_PARAMETERS) {
    let_next_start();
    await_previous();
    const Definition definition = DEFINITION_OF_PARAMETERS;
    if (definition.needed()) definition.compute<4>(blockIdx.x * 256ll + threadIdx.x, gridDim.x * 256ll);
}
