// Stands in for torch's header of this name where kernels run on the CPU.
#pragma once

#include <c10/util/Exception.h>
#include <cuda_runtime.h>

#define C10_CUDA_CHECK(...)                                          \
  do {                                                               \
    const cudaError_t emulated_error = (__VA_ARGS__);                \
    TORCH_CHECK(emulated_error == cudaSuccess,                       \
                "CUDA error: ", cudaGetErrorString(emulated_error)); \
  } while (false)

#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())
