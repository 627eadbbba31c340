// Sets the control words that a plan starts with to what they were when its weight was packed. The launch behind it may start meanwhile; behind
// a copy by the driver it may not.
//
// Parameters: `control`, `packed`; i32: `words`.
// Threads: 256. Grid: any number of blocks along the first axis.

#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(256) set_words(unsigned *control, const unsigned *packed, int words) {
    let_next_start();
    for (int i = blockIdx.x * 256 + threadIdx.x; i < words; i += gridDim.x * 256) control[i] = packed[i];
}
