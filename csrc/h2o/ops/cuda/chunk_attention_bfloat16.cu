#include <c10/util/BFloat16.h>

#include "h2o/kernels/cuda/chunk_attention.cuh"

namespace h2o::cuda {

template cudaError_t launch_chunk_attention<c10::BFloat16>(const ChunkAttention<c10::BFloat16>&,
                                                           cudaStream_t);
template cudaError_t launch_chunk_scores<c10::BFloat16>(const ChunkAttention<c10::BFloat16>&,
                                                        cudaStream_t);

}  // namespace h2o::cuda
