#include "h2o/kv_cache.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "h2o/ops/checks.h"

namespace h2o {

KVCache KVCache::from(const char* op, const at::Tensor& k_cache, const at::Tensor& v_cache,
                      const at::Tensor& scores, const at::Tensor& positions) {
  constexpr const char* kKv = "[batch, num_kv_heads, capacity, head_dim]";
  constexpr const char* kSlots = "[batch, num_kv_heads, capacity]";
  check_dim(op, "k_cache", k_cache, kKv, 4);
  const c10::SymInt batch = k_cache.sym_size(0), heads = k_cache.sym_size(1),
                    capacity = k_cache.sym_size(2), head_dim = k_cache.sym_size(3);
  check_sizes(op, "v_cache", v_cache, kKv, {batch, heads, capacity, head_dim});
  check_sizes(op, "scores", scores, kSlots, {batch, heads, capacity});
  check_sizes(op, "positions", positions, kSlots, {batch, heads, capacity});
  check_head_dim(op, head_dim);
  TORCH_CHECK(heads >= 1, op, ": num_kv_heads must be >= 1, got ", heads);
  TORCH_CHECK(capacity <= INT32_MAX, op, ": capacity must be <= ", INT32_MAX, ", got ", capacity);
  check_floating_dtype(op, "k_cache", k_cache);
  check_dtype(op, "v_cache", v_cache, k_cache.scalar_type());
  check_dtype(op, "scores", scores, score_dtype(k_cache.scalar_type()));
  check_dtype(op, "positions", positions, at::kInt);
  check_device(op, "v_cache", v_cache, "k_cache", k_cache);
  check_device(op, "scores", scores, "k_cache", k_cache);
  check_device(op, "positions", positions, "k_cache", k_cache);
  if (!k_cache.is_meta()) {
    check_written(op, "k_cache", k_cache);
    check_written(op, "v_cache", v_cache);
    check_written(op, "scores", scores);
    check_written(op, "positions", positions);
    check_apart(op, "k_cache", k_cache, "v_cache", v_cache);
    check_apart(op, "scores", scores, "k_cache", k_cache);
    check_apart(op, "scores", scores, "v_cache", v_cache);
    check_apart(op, "positions", positions, "scores", scores);
    check_apart(op, "positions", positions, "k_cache", k_cache);
    check_apart(op, "positions", positions, "v_cache", v_cache);
  }
  return {k_cache, v_cache, scores, positions};
}

KVCache KVCache::allocate(int64_t batch, int64_t num_kv_heads, int64_t capacity, int64_t head_dim,
                          const at::TensorOptions& options) {
  constexpr const char* kOp = "KVCache::allocate";
  for (const auto& [name, size] : {std::pair("batch", batch),
                                   {"num_kv_heads", num_kv_heads},
                                   {"capacity", capacity},
                                   {"head_dim", head_dim}}) {
    TORCH_CHECK(size >= 0, kOp, ": ", name, " must be >= 0, got ", size);
  }
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  return from(kOp, at::empty({batch, num_kv_heads, capacity, head_dim}, options),
              at::empty({batch, num_kv_heads, capacity, head_dim}, options),
              at::zeros({batch, num_kv_heads, capacity}, options.dtype(score_dtype(dtype))),
              at::full({batch, num_kv_heads, capacity}, -1, options.dtype(at::kInt)));
}

at::Tensor KVCache::cache_len() const { return positions.ge(0).sum(-1); }

void KVCache::mark_written() const {
  for (const at::Tensor* tensor : {&k_cache, &v_cache, &scores, &positions}) {
    h2o::mark_written(*tensor);
  }
}

}  // namespace h2o
