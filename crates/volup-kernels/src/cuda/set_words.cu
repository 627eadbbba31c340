// Sets the control words that a plan starts with: to zeros, or to what they were when a weight was packed. The launch behind it may start
// meanwhile; behind memory that the driver sets it may not.
//
// Parameters: `control`, `packed` (the words that a packed weight starts with; null: zeros); i32: `words`.
// Threads: 256. Grid: any number of blocks along the first axis.

#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(256) set_words(unsigned *control, const unsigned *packed, int words) {
    let_next_start();
    for (int i = blockIdx.x * 256 + threadIdx.x; i < words; i += gridDim.x * 256) control[i] = packed ? packed[i] : 0;
}
