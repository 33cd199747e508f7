#include <c10/util/Half.h>

#include "h2o/kernels/cuda/decode_step.cuh"

namespace h2o::cuda {

template int64_t decode_step_shared_bytes<c10::Half>(const DecodeStep<c10::Half>&);
template cudaError_t launch_decode_step<c10::Half>(const DecodeStep<c10::Half>&, cudaStream_t);

}  // namespace h2o::cuda
