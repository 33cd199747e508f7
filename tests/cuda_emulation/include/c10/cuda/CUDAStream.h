// Stands in for torch's header of this name where kernels run on the CPU.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <cuda_runtime.h>

namespace c10::cuda {

// The default stream of device 0, the only one there is.
class CUDAStream {
 public:
  StreamId id() const { return 0; }
  DeviceIndex device_index() const { return 0; }
  cudaStream_t stream() const { return nullptr; }
  operator cudaStream_t() const { return stream(); }
};

inline CUDAStream getCurrentCUDAStream(DeviceIndex = -1) { return {}; }

}  // namespace c10::cuda
