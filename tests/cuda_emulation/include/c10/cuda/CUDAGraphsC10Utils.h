// Stands in for torch's header of this name where kernels run on the CPU.
#pragma once

#include <c10/cuda/CUDAStream.h>

namespace c10::cuda {

enum class CaptureStatus : int { None = 0, Active = 1, Invalidated = 2 };

// There are no graphs to capture.
inline CaptureStatus currentStreamCaptureStatusMayInitCtx() { return CaptureStatus::None; }

}  // namespace c10::cuda
