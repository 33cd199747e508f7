#include <c10/cuda/CUDAGuard.h>

#include "h2o/ops/cuda/backend.h"
#include "h2o/ops/registration.h"
#include "h2o/ops/rolling.h"

namespace h2o {

at::Tensor cuda::rotate(const RotateCall& call) {
  const c10::cuda::OptionalCUDAGuard guard(call.input.device());
  return rotate_by_gathering(call);
}

static const Registration registration(c10::DispatchKey::CUDA, [](torch::Library& m) {
  m.impl("h2o_rotate", &rotate_entry<cuda::rotate>);
});

}  // namespace h2o
