#include "h2o/ops/evict.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include "h2o/ops/calls.h"
#include "h2o/ops/registration.h"

namespace h2o {
namespace {

at::Tensor evict_meta(const EvictCall& call) {
  return at::empty_symint({call.k_new.sym_size(0), call.k_new.sym_size(1),
                           call.cache.k_cache.sym_size(2) + call.k_new.sym_size(2)},
                          call.cache.positions.options());
}

}  // namespace

at::Tensor evict(const KVCache& cache, const at::Tensor& k_new, const at::Tensor& v_new,
                 const at::Tensor& scores_new, const at::Tensor& position_new,
                 const EvictionPolicy& policy, const std::optional<at::Tensor>& row_budget) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("h2o::h2o_evict", "")
                             .typed<decltype(evict_entry<evict_meta>)>();
  const Budget budget = policy.budget();
  return op.call(cache.k_cache, cache.v_cache, cache.scores, cache.positions, k_new, v_new,
                 scores_new, position_new, budget.num_sink, budget.num_heavy, budget.num_recent,
                 row_budget, to_string(policy.scoring().rule), policy.scoring().pattern_stride,
                 policy.scoring().pattern_columns);
}

static const Registration registration(c10::DispatchKey::Meta, [](torch::Library& m) {
  m.impl("h2o_evict", &evict_entry<evict_meta>);
});

}  // namespace h2o
