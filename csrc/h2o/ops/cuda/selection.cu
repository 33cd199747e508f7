#include "h2o/kernels/cuda/selection.cuh"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace h2o::cuda {
namespace {

// One block per row. Real columns keep their order.
__global__ void __launch_bounds__(kMaxThreads)
    list_tokens(const __grid_constant__ IndexView position_new,
                const __grid_constant__ TokenList tokens) {
  auto& scratch = dynamic_shared<BlockScratch>();
  const int64_t row = blockIdx.x;
  const int32_t count = list_row(position_new, row, tokens.num_new, tokens.columns(row),
                                 tokens.positions(row), scratch);
  if (threadIdx.x == 0) *tokens.count(row) = count;
}

}  // namespace

cudaError_t launch_list_tokens(const IndexView& position_new, int64_t batch,
                               const TokenList& tokens, cudaStream_t stream) {
  return launch(list_tokens, batch, threads_for(tokens.num_new), sizeof(BlockScratch), stream,
                position_new, tokens);
}

template int64_t selection_shared_bytes<double>(int64_t);
template int64_t selection_shared_bytes<float>(int64_t);
template cudaError_t launch_selection<double>(const Selection<double>&, cudaStream_t);
template cudaError_t launch_selection<float>(const Selection<float>&, cudaStream_t);
template cudaError_t launch_selection<c10::Half>(const Selection<c10::Half>&, cudaStream_t);
template cudaError_t launch_selection<c10::BFloat16>(const Selection<c10::BFloat16>&, cudaStream_t);
template cudaError_t launch_score_pool<double>(const ScorePool<double>&, cudaStream_t);
template cudaError_t launch_score_pool<float>(const ScorePool<float>&, cudaStream_t);
template cudaError_t launch_prompt_selection<double>(const PromptSelection<double>&, cudaStream_t);
template cudaError_t launch_prompt_selection<float>(const PromptSelection<float>&, cudaStream_t);

}  // namespace h2o::cuda
