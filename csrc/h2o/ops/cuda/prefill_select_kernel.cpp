#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "h2o/kernels/cuda/kernels.h"
#include "h2o/ops/checks.h"
#include "h2o/ops/cuda/backend.h"
#include "h2o/ops/cuda/tensors.h"
#include "h2o/ops/registration.h"

namespace h2o {
namespace cuda {

namespace {

template <typename T>
void score_prompt(const ChunkAttention<T>& attention, const DeviceLimits& limits,
                  cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (has_prompt_scores<T>(attention.sizes, limits.shared_bytes)) {
      C10_CUDA_CHECK(launch_prompt_statistics(attention, stream));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      C10_CUDA_CHECK(launch_prompt_scores(attention, stream));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      return;
    }
  }
  C10_CUDA_CHECK(launch_chunk_attention(attention, stream));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  C10_CUDA_CHECK(launch_chunk_scores(attention, stream));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

SelectOutputs prefill_select(const SelectCall& call) {
  constexpr const char* kOp = "h2o_prefill_select";
  const c10::cuda::OptionalCUDAGuard guard(call.query.device());
  const at::Tensor query = readable_input(call.query, {}), key = readable_input(call.key, {}),
                   position = readable_input(call.position, {});
  Sizes sizes = {};
  sizes.batch = key.size(0);
  sizes.num_kv_heads = key.size(1);
  check_candidates(kOp, "seq_len * group_size", key.size(2) * (query.size(1) / key.size(1)));
  sizes.group_size = static_cast<int32_t>(query.size(1) / key.size(1));
  sizes.head_dim = static_cast<int32_t>(key.size(3));
  sizes.num_new = static_cast<int32_t>(key.size(2));
  const int64_t heads = sizes.batch * sizes.num_kv_heads, seq_len = sizes.num_new,
                width = call.budget.total();
  const at::ScalarType score_type = score_dtype(key.scalar_type());
  const at::TensorOptions score_options = key.options().dtype(score_type);
  at::Tensor selected =
      at::empty({sizes.batch, sizes.num_kv_heads, width}, key.options().dtype(at::kLong));
  at::Tensor selected_scores = at::empty({sizes.batch, sizes.num_kv_heads, width}, score_options);
  if (sizes.batch == 0) return {selected, selected_scores};

  // All of it grows with seq_len, none with its square.
  const at::Tensor listed = token_list(position);
  const at::Tensor statistics = workspace(key, 2 * heads * seq_len * sizes.group_size, score_type);
  const at::Tensor scores = workspace(key, heads * seq_len, score_type);
  const at::Tensor fate = workspace(key, heads * seq_len, at::kInt);
  DeviceLimits limits;
  C10_CUDA_CHECK(device_limits(&limits));
  const auto stream = c10::cuda::getCurrentCUDAStream();
  with_storage_type(key.scalar_type(), [&]<typename T>(T) {
    using A = Accumulator<T>;
    ChunkAttention<T> attention = {};
    attention.sizes = sizes;
    attention.query = read<T>(query);
    attention.k_new = read<T>(key);
    attention.tokens = {listed.mutable_data_ptr<int32_t>(), sizes.num_new};
    attention.chunk = {0, sizes.num_new};
    attention.gqa_reduce = call.gqa_reduce;
    attention.aligned = is_aligned(query) && is_aligned(key);
    attention.terms = logit_terms<A>(call.scale, call.alibi_slopes);
    attention.maximum = statistics.mutable_data_ptr<A>();
    attention.sum = attention.maximum + statistics.numel() / 2;
    attention.new_scores = scores.mutable_data_ptr<A>();

    PromptSelection<A> selection = {};
    selection.sizes = sizes;
    selection.scores = attention.new_scores;
    selection.tokens = attention.tokens;
    selection.budget = budgets(call.budget, call.row_budget);
    selection.fate = fate.mutable_data_ptr<int32_t>();
    selection.width = width;
    selection.selected = selected.mutable_data_ptr<int64_t>();
    selection.selected_scores = selected_scores.mutable_data_ptr<A>();
    at::Tensor sorted;
    if (selection_shared_bytes<A>(seq_len) > limits.shared_bytes) {
      sorted = workspace(
          key, heads * sorted_candidates(seq_len) * static_cast<int64_t>(sizeof(Candidate<A>)),
          at::kByte);
      selection.sorted = static_cast<Candidate<A>*>(sorted.mutable_data_ptr());
    }

    C10_CUDA_CHECK(launch_list_tokens(indices(position), sizes.batch, attention.tokens, stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    score_prompt(attention, limits, stream);
    C10_CUDA_CHECK(launch_prompt_selection(selection, stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {selected, selected_scores};
}

}  // namespace cuda

static const Registration registration(c10::DispatchKey::CUDA, [](torch::Library& m) {
  m.impl("h2o_prefill_select", &select_entry<cuda::prefill_select>);
});

}  // namespace h2o
