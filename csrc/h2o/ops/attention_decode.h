#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "h2o/eviction_policy.h"
#include "h2o/export.h"
#include "h2o/kv_cache.h"

namespace h2o {

struct DecodeOptions {
  std::optional<double> scale = std::nullopt;  // factor on q . k; head_dim ** -0.5 if not given
  int64_t chunk = 1;  // tokens that join together before eviction; 1 is the paper's decode
  std::optional<at::Tensor> alibi_slopes = std::nullopt;  // [num_q_heads]
  // [batch, 3] integers: num_sink, num_heavy, num_recent of each row, instead of the policy's.
  std::optional<at::Tensor> row_budget = std::nullopt;
  // [batch, num_kv_heads, num_new, head_dim], both or neither, written in place: column by column
  // the key and the value of the token that `evicted` names there, as its slot held them. A column
  // is left as it is where nobody left, or where the token that left had joined with this very
  // chunk and so never was in a slot.
  std::optional<at::Tensor> k_evicted = std::nullopt, v_evicted = std::nullopt;
  // [num_ranks, pairs], both or neither: position rolling. query, k_new and the cache's keys are
  // not rotated then; in the step each is, as rotate() does it, by the row of its rank: that of a
  // cached token among those that its KV head keeps, those of new ones after them. float32
  // (float64 for a float64 cache).
  std::optional<at::Tensor> rope_cos = std::nullopt, rope_sin = std::nullopt;
  // [batch, num_kv_heads, num_new], dtype of the scores: added to a new token's first score.
  std::optional<at::Tensor> score_new = std::nullopt;
  // Instead of the policy's, so that layers do not draw the same numbers.
  std::optional<int64_t> score_seed = std::nullopt;
};

struct DecodeResult {
  at::Tensor output;   // as query
  at::Tensor evicted;  // [batch, num_kv_heads, num_new], int32: the position that left at each
                       // token, -1 = none
};

// One step of H2O (arXiv 2306.14048, Algorithm 1) for every new token: attend over the cache and
// the token, add the weights to the scores, evict the lowest score outside sinks and recent window
// if the budget is exceeded, store the token in an empty slot or in the victim's. The cache is
// written in place. The policy must have counts, not ratios. Goes through the dispatcher:
// torch.ops.h2o.h2o_attention_decode is the same.
//   query         [batch, num_q_heads, num_new, head_dim], rotated already unless rope_cos is given
//   k_new, v_new  [batch, num_kv_heads, num_new, head_dim]
//   position_new  [batch, num_new], int32 or int64, increasing along a row; negative = padding
H2O_API DecodeResult attention_decode(const at::Tensor& query, const KVCache& cache,
                                      const at::Tensor& k_new, const at::Tensor& v_new,
                                      const at::Tensor& position_new, const EvictionPolicy& policy,
                                      const DecodeOptions& options = {});

}  // namespace h2o
