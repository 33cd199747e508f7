// Stands in for torch's header of this name where kernels run on the CPU.
#pragma once

#include <c10/core/Device.h>

#include <optional>

namespace c10::cuda {

struct CUDAGuard {
  explicit CUDAGuard(DeviceIndex) {}
  explicit CUDAGuard(Device) {}
};

struct OptionalCUDAGuard {
  OptionalCUDAGuard() {}
  explicit OptionalCUDAGuard(std::optional<Device>) {}
};

}  // namespace c10::cuda
