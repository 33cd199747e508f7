#include "h2o/kv_cache.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "h2o/ops/checks.h"

namespace h2o {
namespace {

using Dims = c10::SmallVector<std::pair<int64_t, int64_t>, 5>;  // stride and size, in elements

// Whether no two index tuples lead to one element. True for every slice, transposition or select of
// an ordinary tensor; layouts interleaved in ways that those cannot make are answered with false
// although they might be fine.
bool elements_are_apart(Dims dims) {
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < extent) return false;
    extent += stride * (size - 1);
  }
  return true;
}

Dims dims_of(const at::Tensor& tensor) {
  Dims dims;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  return dims;
}

// Whether two tensors share no memory: they lie in different places, or are alike and interleaved
// as, for example, the halves of the last dimension of one buffer.
bool tensors_are_apart(const at::Tensor& a, const at::Tensor& b) {
  const auto begin = [](const at::Tensor& tensor) {
    return static_cast<const char*>(tensor.const_data_ptr());
  };
  const auto end = [&begin](const at::Tensor& tensor) {
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d) last += tensor.stride(d) * (tensor.size(d) - 1);
    return begin(tensor) + (last + 1) * static_cast<int64_t>(tensor.element_size());
  };
  if (a.numel() == 0 || b.numel() == 0 || end(a) <= begin(b) || end(b) <= begin(a)) return true;
  Dims dims = dims_of(a);
  const int64_t bytes = std::abs(begin(a) - begin(b)),
                item = static_cast<int64_t>(a.element_size());
  if (dims != dims_of(b) || a.scalar_type() != b.scalar_type() || bytes % item != 0) return false;
  dims.emplace_back(bytes / item, 2);
  return elements_are_apart(std::move(dims));
}

void check_written(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_non_overlapping_and_dense() || tensor.numel() == 0 ||
                  elements_are_apart(dims_of(tensor)),
              op, ": ", argument,
              " must not overlap itself, since it is written in place, got sizes ", tensor.sizes(),
              " and strides ", tensor.strides());
}

void check_apart(const char* op, const char* a_name, const at::Tensor& a, const char* b_name,
                 const at::Tensor& b) {
  TORCH_CHECK(tensors_are_apart(a, b), op, ": ", a_name, " and ", b_name,
              " must not share memory, since both are written in place");
}

}  // namespace

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
    const auto check_stride = [op](const char* argument, const at::Tensor& tensor) {
      TORCH_CHECK(tensor.stride(3) == 1 || tensor.size(3) == 1, op, ": ", argument,
                  " must have stride 1 in head_dim, since it is written in place, got strides ",
                  tensor.strides());
    };
    check_stride("k_cache", k_cache);
    check_stride("v_cache", v_cache);
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
    // What was made under inference_mode has no version; autograd refuses to save it anyway.
    if (!tensor->is_inference()) tensor->unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace h2o
