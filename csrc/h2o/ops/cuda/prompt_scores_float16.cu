#include "h2o/kernels/cuda/prompt_scores.cuh"

namespace h2o::cuda {

template bool has_prompt_scores<c10::Half>(const Sizes&, int64_t);
template cudaError_t launch_prompt_statistics<c10::Half>(const ChunkAttention<c10::Half>&,
                                                         cudaStream_t);
template cudaError_t launch_prompt_scores<c10::Half>(const ChunkAttention<c10::Half>&,
                                                     cudaStream_t);

}  // namespace h2o::cuda
