#include "h2o/kernels/cuda/prompt_scores.cuh"

namespace h2o::cuda {

template bool has_prompt_scores<c10::BFloat16>(const Sizes&, int64_t);
template cudaError_t launch_prompt_statistics<c10::BFloat16>(const ChunkAttention<c10::BFloat16>&,
                                                             cudaStream_t);
template cudaError_t launch_prompt_scores<c10::BFloat16>(const ChunkAttention<c10::BFloat16>&,
                                                         cudaStream_t);

}  // namespace h2o::cuda
