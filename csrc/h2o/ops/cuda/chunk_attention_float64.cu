#include "h2o/kernels/cuda/chunk_attention.cuh"

namespace h2o::cuda {

template cudaError_t launch_chunk_attention<double>(const ChunkAttention<double>&, cudaStream_t);
template cudaError_t launch_chunk_scores<double>(const ChunkAttention<double>&, cudaStream_t);

}  // namespace h2o::cuda
