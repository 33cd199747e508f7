#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "h2o/ops/attention_decode.h"
#include "tensors.h"

// Calls of attention_decode, whole or in parts.

inline h2o::EvictionPolicy policy_of(int64_t num_sink, int64_t num_heavy, int64_t num_recent,
                                     h2o::GqaReduce reduce = h2o::GqaReduce::kSum) {
  return h2o::EvictionPolicy({.num_heavy = num_heavy,
                              .num_recent = num_recent,
                              .num_sink = num_sink,
                              .gqa_reduce = reduce});
}

// The new tokens of a call.
struct Call {
  at::Tensor query, k_new, v_new, position_new;

  int64_t num_new() const { return k_new.size(2); }
  Call columns(int64_t first, int64_t count) const {
    return {query.narrow(2, first, count), k_new.narrow(2, first, count),
            v_new.narrow(2, first, count), position_new.narrow(1, first, count)};
  }
  Call row(int64_t index) const {
    return {query.narrow(0, index, 1), k_new.narrow(0, index, 1), v_new.narrow(0, index, 1),
            position_new.narrow(0, index, 1)};
  }
  Call clone() const { return {query.clone(), k_new.clone(), v_new.clone(), position_new.clone()}; }
};

inline Call random_call(Random& random, int64_t batch, int64_t num_kv_heads, int64_t group_size,
                        int64_t num_new, int64_t head_dim, at::ScalarType dtype = at::kFloat,
                        int64_t first_position = 0) {
  return {random.queries({batch, num_kv_heads * group_size, num_new, head_dim}, dtype),
          random.keys({batch, num_kv_heads, num_new, head_dim}, dtype),
          random.tensor({batch, num_kv_heads, num_new, head_dim}, dtype),
          position_range(batch, first_position, num_new)};
}

inline h2o::DecodeResult decode(const h2o::KVCache& cache, const Call& call,
                                const h2o::EvictionPolicy& policy,
                                const h2o::DecodeOptions& options = {}) {
  return h2o::attention_decode(call.query, cache, call.k_new, call.v_new, call.position_new, policy,
                               options);
}

inline bool same_result(const h2o::DecodeResult& a, const h2o::DecodeResult& b) {
  return same_bits(a.output, b.output) && same_bits(a.evicted, b.evicted);
}
