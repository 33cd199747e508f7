#include <c10/util/Half.h>

#include "h2o/kernels/cuda/chunk_attention.cuh"

namespace h2o::cuda {

template cudaError_t launch_chunk_attention<c10::Half>(const ChunkAttention<c10::Half>&,
                                                       cudaStream_t);
template cudaError_t launch_chunk_scores<c10::Half>(const ChunkAttention<c10::Half>&, cudaStream_t);

}  // namespace h2o::cuda
