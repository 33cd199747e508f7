#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "h2o/eviction_policy.h"
#include "h2o/export.h"

namespace h2o {

struct PrefillOptions {
  std::optional<double> scale = std::nullopt;  // factor on q . k; head_dim ** -0.5 if not given
  std::optional<at::Tensor> alibi_slopes = std::nullopt;  // [num_q_heads]
  std::optional<at::Tensor> row_budget =
      std::nullopt;  // [batch, 3], instead of the policy's counts
};

struct PrefillSelection {
  at::Tensor
      selected;  // [batch, num_kv_heads, budget], int64: indices into seq_len, ascending, then -1
  at::Tensor
      scores;  // [batch, num_kv_heads, budget]: accumulated score of each, 0 where selected is -1
};

// Which tokens of a prompt stay after one-shot prefill: the scores are the column sums of the full
// causal attention; sinks, recent window and the num_heavy highest others are kept. Memory is
// linear in seq_len.
//   query     [batch, num_q_heads, seq_len, head_dim], rotated already
//   key       [batch, num_kv_heads, seq_len, head_dim]
//   position  [batch, seq_len], int32 or int64, increasing along a row; negative = padding
H2O_API PrefillSelection prefill_select(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& position, const EvictionPolicy& policy,
                                        const PrefillOptions& options = {});

}  // namespace h2o
