// Must not compile: see __shared__ in include/cuda_runtime.h.
#include <cuda_runtime.h>

__global__ void kernel() {
  __shared__ float array[32];
  array[threadIdx.x] = 0;
}
