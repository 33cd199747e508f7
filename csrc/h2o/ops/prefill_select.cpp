#include "h2o/ops/prefill_select.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include "h2o/ops/calls.h"
#include "h2o/ops/checks.h"
#include "h2o/ops/registration.h"

namespace h2o {
namespace {

SelectOutputs select_meta(const SelectCall& call) {
  const auto options = call.query.options();
  const c10::SymInt batch = call.key.sym_size(0), heads = call.key.sym_size(1),
                    budget = call.budget.total();
  return {at::empty_symint({batch, heads, budget}, options.dtype(at::kLong)),
          at::empty_symint({batch, heads, budget},
                           options.dtype(score_dtype(call.query.scalar_type())))};
}

}  // namespace

PrefillSelection prefill_select(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& position, const EvictionPolicy& policy,
                                const PrefillOptions& options) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("h2o::h2o_prefill_select", "")
                             .typed<decltype(select_entry<select_meta>)>();
  const Budget budget = policy.budget();
  auto [selected, scores] = op.call(query, key, position, budget.num_sink, budget.num_heavy,
                                    budget.num_recent, to_string(policy.gqa_reduce()),
                                    options.scale, options.alibi_slopes, options.row_budget);
  return {std::move(selected), std::move(scores)};
}

static const Registration registration(c10::DispatchKey::Meta, [](torch::Library& m) {
  m.impl("h2o_prefill_select", &select_entry<select_meta>);
});

}  // namespace h2o
