#include "h2o/kernels/cuda/decode_step.cuh"

namespace h2o::cuda {

template int64_t decode_step_shared_bytes<float>(const DecodeStep<float>&);
template cudaError_t launch_decode_step<float>(const DecodeStep<float>&, cudaStream_t);

}  // namespace h2o::cuda
