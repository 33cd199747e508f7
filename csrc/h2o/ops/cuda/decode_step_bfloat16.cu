#include <c10/util/BFloat16.h>

#include "h2o/kernels/cuda/decode_step.cuh"

namespace h2o::cuda {

template int64_t decode_step_shared_bytes<c10::BFloat16>(const DecodeStep<c10::BFloat16>&);
template cudaError_t launch_decode_step<c10::BFloat16>(const DecodeStep<c10::BFloat16>&,
                                                       cudaStream_t);

}  // namespace h2o::cuda
