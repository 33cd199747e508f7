#include "h2o/ops/attention_decode.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <string>

#include "h2o/ops/calls.h"
#include "h2o/ops/registration.h"

namespace h2o {
namespace {

DecodeOutputs decode_meta(const DecodeCall& call) {
  const c10::SymInt batch = call.k_new.sym_size(0), heads = call.k_new.sym_size(1),
                    num_new = call.k_new.sym_size(2);
  return {empty_output(call.query),
          at::empty_symint({batch, heads, num_new}, call.cache.positions.options())};
}

}  // namespace

DecodeResult attention_decode(const at::Tensor& query, const KVCache& cache,
                              const at::Tensor& k_new, const at::Tensor& v_new,
                              const at::Tensor& position_new, const EvictionPolicy& policy,
                              const DecodeOptions& options) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("h2o::h2o_attention_decode", "")
                             .typed<decltype(decode_entry<decode_meta>)>();
  const Budget budget = policy.budget();
  const Scoring& scoring = policy.scoring();
  auto [output, evicted] = op.call(
      query, cache.k_cache, cache.v_cache, cache.scores, cache.positions, k_new, v_new,
      position_new, budget.num_sink, budget.num_heavy, budget.num_recent,
      to_string(policy.gqa_reduce()), options.scale, options.chunk, options.alibi_slopes,
      options.row_budget, options.k_evicted, options.v_evicted, options.rope_cos, options.rope_sin,
      to_string(scoring.rule), scoring.decay, options.score_seed.value_or(scoring.seed),
      scoring.num_queries, scoring.pool, options.score_new, scoring.pattern_stride,
      scoring.pattern_columns, policy.reading().slots, policy.reading().page);
  return {std::move(output), std::move(evicted)};
}

static const Registration registration(c10::DispatchKey::Meta, [](torch::Library& m) {
  m.impl("h2o_attention_decode", &decode_entry<decode_meta>);
});

}  // namespace h2o
