#include "h2o/kernels/cuda/chunk_attention.cuh"

namespace h2o::cuda {

template cudaError_t launch_chunk_attention<float>(const ChunkAttention<float>&, cudaStream_t);
template cudaError_t launch_chunk_scores<float>(const ChunkAttention<float>&, cudaStream_t);

}  // namespace h2o::cuda
