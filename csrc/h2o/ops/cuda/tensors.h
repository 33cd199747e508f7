#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <optional>

#include "h2o/kernels/cuda/kernels.h"
#include "h2o/kv_cache.h"

// From tensors to what kernels take.
namespace h2o::cuda {

// The first three dimensions of a tensor; where there is a fourth, its stride is 1.
template <typename T>
View<T> written(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<T>(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}
template <typename T>
View<const T> read(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

inline IndexView indices(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.scalar_type() == at::kLong, tensor.stride(0),
          tensor.stride(1)};
}

inline BudgetView budgets(const Budget& budget, const std::optional<at::Tensor>& row_budget) {
  return {budget, row_budget ? indices(*row_budget) : IndexView{}};
}

template <typename A>
LogitTerms<A> logit_terms(double scale, const std::optional<at::Tensor>& slopes) {
  if (!slopes) return {static_cast<A>(scale), nullptr, false, 0};
  return {static_cast<A>(scale), slopes->const_data_ptr(), slopes->scalar_type() == at::kDouble,
          slopes->stride(0)};
}

template <typename T>
CacheView<T> cache_view(const KVCache& cache) {
  return {written<T>(cache.k_cache), written<T>(cache.v_cache),
          written<Accumulator<T>>(cache.scores), written<int32_t>(cache.positions),
          static_cast<int32_t>(cache.capacity())};
}

// Whether each vector of the last dimension starts at, and is, a multiple of 16 bytes.
inline bool is_aligned(const at::Tensor& tensor) {
  const auto is_multiple = [](int64_t bytes) { return bytes % 16 == 0; };
  const auto item = static_cast<int64_t>(tensor.element_size());
  return is_multiple(reinterpret_cast<intptr_t>(tensor.const_data_ptr())) &&
         is_multiple(tensor.size(3) * item) && is_multiple(tensor.stride(0) * item) &&
         is_multiple(tensor.stride(1) * item) && is_multiple(tensor.stride(2) * item);
}

// Memory for one call, from the caching allocator.
inline at::Tensor workspace(const at::Tensor& like, int64_t elements, at::ScalarType dtype) {
  return at::empty({elements}, like.options().dtype(dtype));
}

// A buffer that holds the real tokens of each row.
inline at::Tensor token_list(const at::Tensor& position_new) {
  return workspace(position_new, position_new.size(0) * (1 + 2 * position_new.size(1)), at::kInt);
}

// Kernels index with int32 what lies within one (row, KV head).
inline void check_candidates(const char* op, const char* what, int64_t count) {
  TORCH_CHECK(count <= kMaxCandidates, op, ": ", what, " must be <= ", kMaxCandidates,
              " on CUDA, got ", count);
}

// Calls run(T{}) with the storage type of `dtype`, which is checked already.
template <typename Run>
void with_storage_type(at::ScalarType dtype, Run run) {
  switch (dtype) {
    case at::kDouble:
      return run(double{});
    case at::kFloat:
      return run(float{});
    case at::kHalf:
      return run(c10::Half{});
    case at::kBFloat16:
      return run(c10::BFloat16{});
    default:
      TORCH_INTERNAL_ASSERT(false, "no kernel for ", dtype);
  }
}

}  // namespace h2o::cuda
