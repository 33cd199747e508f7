#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "h2o/export.h"

namespace h2o {

// The state of one layer: four tensors that move together. A slot says where a token is stored, a
// position says which token it is; the order of slots means nothing. Making one of these is the
// check, and no kernel reads a size any other way. Copies share the tensors.
struct H2O_API KVCache {
  at::Tensor
      k_cache;  // [batch, num_kv_heads, capacity, head_dim], model dtype, head_dim has stride 1
  at::Tensor v_cache;    // likewise
  at::Tensor scores;     // [batch, num_kv_heads, capacity], float32 (float64 for a float64 cache)
  at::Tensor positions;  // [batch, num_kv_heads, capacity], int32; -1 = empty, the only record of
                         // occupancy

  // Checks the four tensors against each other and against what the kernels can write in place; a
  // breach throws c10::Error that starts with `op` and names the tensor, the rule and what was
  // given.
  static KVCache from(const char* op, const at::Tensor& k_cache, const at::Tensor& v_cache,
                      const at::Tensor& scores, const at::Tensor& positions);

  // An empty cache: positions -1, scores 0, K and V not initialised (they are never read while
  // empty).
  static KVCache allocate(int64_t batch, int64_t num_kv_heads, int64_t capacity, int64_t head_dim,
                          const at::TensorOptions& options);

  int64_t batch() const { return k_cache.size(0); }
  int64_t num_kv_heads() const { return k_cache.size(1); }
  int64_t capacity() const { return k_cache.size(2); }
  int64_t head_dim() const { return k_cache.size(3); }
  // Occupied slots, [batch, num_kv_heads], int64: computed, never stored beside the positions.
  at::Tensor cache_len() const;
  // Tells autograd that the four tensors were written, so that it notices if it had saved one of
  // them.
  void mark_written() const;
};

}  // namespace h2o
