#include "h2o/ops/registration.h"

// Every operator of torch.ops.h2o, the whole dispatcher API on one screen. Shapes and semantics are
// documented in ops/<operator>.h and in h2o_kv.ops. Kernels are registered in ops/, ops/cpu and
// ops/cuda.
static const h2o::Registration registration(std::nullopt, [](torch::Library& m) {
  // Attend, score, evict and store, for each new token in turn (or `chunk` at a time).
  m.def(
      "h2o_attention_decode(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) "
      "scores, "
      "Tensor(d!) positions, Tensor k_new, Tensor v_new, Tensor position_new, int num_sink, int "
      "num_heavy, "
      "int num_recent, *, str gqa_reduce=\"sum\", float? scale=None, int chunk=1, Tensor? "
      "alibi_slopes=None, "
      "Tensor? row_budget=None, Tensor(e!)? k_evicted=None, Tensor(f!)? v_evicted=None, Tensor? "
      "rope_cos=None, Tensor? rope_sin=None, str score_rule=\"sum\", float score_decay=1.0, int "
      "score_seed=0, int score_queries=0, int score_pool=1, Tensor? score_new=None, int "
      "pattern_stride=0, int pattern_columns=0, int read_slots=0, int read_page=1) -> (Tensor "
      "output, Tensor evicted)");

  // Store tokens that have a score already and evict until the budget holds.
  m.def(
      "h2o_evict(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) scores, Tensor(d!) positions, "
      "Tensor k_new, Tensor v_new, Tensor scores_new, Tensor position_new, int num_sink, int "
      "num_heavy, "
      "int num_recent, *, Tensor? row_budget=None, str score_rule=\"sum\", int pattern_stride=0, "
      "int pattern_columns=0) -> Tensor evicted");

  // Which tokens of a prompt stay after one-shot prefill, and their scores.
  m.def(
      "h2o_prefill_select(Tensor query, Tensor key, Tensor position, int num_sink, int num_heavy, "
      "int num_recent, *, str gqa_reduce=\"sum\", float? scale=None, Tensor? alibi_slopes=None, "
      "Tensor? row_budget=None) -> (Tensor selected, Tensor scores)");

  // Rotary position embeddings by angles that are looked up.
  m.def("h2o_rotate(Tensor input, Tensor index, Tensor cos, Tensor sin) -> Tensor");
});
