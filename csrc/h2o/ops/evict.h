#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "h2o/eviction_policy.h"
#include "h2o/export.h"
#include "h2o/kv_cache.h"

namespace h2o {

// Places scored tokens (there may be none) and evicts until the budget holds, lowest score first:
// the second half of attention_decode alone, and the way to shrink a cache. The recent window ends
// at the largest position present in the (row, KV head). The cache is written in place.
//   k_new, v_new  [batch, num_kv_heads, num_new, head_dim]
//   scores_new    [batch, num_kv_heads, num_new], dtype of the cache's scores
//   position_new  [batch, num_new], int32 or int64; negative = padding
// Returns the positions that left, [batch, num_kv_heads, capacity + num_new] int32, in the order
// they left, then -1.
H2O_API at::Tensor evict(const KVCache& cache, const at::Tensor& k_new, const at::Tensor& v_new,
                         const at::Tensor& scores_new, const at::Tensor& position_new,
                         const EvictionPolicy& policy,
                         const std::optional<at::Tensor>& row_budget = std::nullopt);

}  // namespace h2o
