#include "h2o/kernels/cuda/decode_step.cuh"

namespace h2o::cuda {

template int64_t decode_step_shared_bytes<double>(const DecodeStep<double>&);
template cudaError_t launch_decode_step<double>(const DecodeStep<double>&, cudaStream_t);

}  // namespace h2o::cuda
