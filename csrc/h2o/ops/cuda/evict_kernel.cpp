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

at::Tensor evict(const EvictCall& call) {
  const c10::cuda::OptionalCUDAGuard guard(call.cache.k_cache.device());
  const KVCache& cache = call.cache;
  const auto readable = [&](const at::Tensor& tensor) {
    return readable_input(tensor,
                          {&cache.k_cache, &cache.v_cache, &cache.scores, &cache.positions});
  };
  const int64_t batch = cache.batch(), num_kv_heads = cache.num_kv_heads(),
                capacity = cache.capacity();
  const int64_t num_new = call.k_new.size(2), width = capacity + num_new;
  check_candidates("h2o_evict", "capacity + num_new", width);
  const at::Tensor k_new = readable(call.k_new), v_new = readable(call.v_new),
                   scores_new = readable(call.scores_new),
                   position_new = readable(call.position_new);
  std::optional<at::Tensor> row_budget;
  if (call.row_budget) row_budget = readable(*call.row_budget);
  at::Tensor evicted = at::empty({batch, num_kv_heads, width}, cache.positions.options());
  if (batch == 0) return evicted;

  const at::Tensor work = workspace(
      cache.positions, batch * num_kv_heads * selection_work(capacity, num_new), at::kInt);
  DeviceLimits limits;
  C10_CUDA_CHECK(device_limits(&limits));
  const auto stream = c10::cuda::getCurrentCUDAStream();
  with_storage_type(cache.k_cache.scalar_type(), [&]<typename T>(T) {
    using A = Accumulator<T>;
    Selection<T> selection = {};
    selection.sizes.batch = batch;
    selection.sizes.num_kv_heads = num_kv_heads;
    selection.sizes.head_dim = static_cast<int32_t>(cache.head_dim());
    selection.sizes.num_new = static_cast<int32_t>(num_new);
    selection.cache = cache_view<T>(cache);
    selection.k_new = read<T>(k_new);
    selection.v_new = read<T>(v_new);
    selection.new_scores = read<A>(scores_new);
    selection.position_new = indices(position_new);
    selection.chunk = {0, selection.sizes.num_new};
    selection.budget = budgets(call.budget, row_budget);
    selection.scoring = {call.scoring};
    selection.to_budget = true;
    selection.one_for_one = call.one_for_one;
    selection.work = work.mutable_data_ptr<int32_t>();
    selection.evicted = evicted.mutable_data_ptr<int32_t>();
    selection.evicted_width = width;
    at::Tensor sorted;
    if (selection_shared_bytes<A>(width) > limits.shared_bytes) {
      sorted = workspace(cache.scores,
                         batch * num_kv_heads * sorted_candidates(width) *
                             static_cast<int64_t>(sizeof(Candidate<A>)),
                         at::kByte);
      selection.sorted = static_cast<Candidate<A>*>(sorted.mutable_data_ptr());
    }
    C10_CUDA_CHECK(launch_selection(selection, stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return evicted;
}

}  // namespace cuda

static const Registration registration(c10::DispatchKey::CUDA, [](torch::Library& m) {
  m.impl("h2o_evict", &evict_entry<cuda::evict>);
});

}  // namespace h2o
