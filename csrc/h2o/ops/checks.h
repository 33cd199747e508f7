#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <optional>

#include "h2o/budget.h"

// Checks that the operators share. Sizes are symbolic integers, so that the same code runs under
// tracing; every message has the form `<op>: <argument> must be <rule>, got <values>`.
namespace h2o {

// `tensor` has exactly the sizes `sizes`, which `names` spells out: "[batch, num_new]".
void check_sizes(const char* op, const char* argument, const at::Tensor& tensor, const char* names,
                 std::initializer_list<c10::SymInt> sizes);
void check_dim(const char* op, const char* argument, const at::Tensor& tensor, const char* names,
               int64_t dim);
void check_dtype(const char* op, const char* argument, const at::Tensor& tensor,
                 at::ScalarType dtype);
void check_device(const char* op, const char* argument, const at::Tensor& tensor,
                  const char* other_argument, const at::Tensor& other);
// int32 or int64.
void check_index_dtype(const char* op, const char* argument, const at::Tensor& tensor);
// One of float32, float16, bfloat16, float64.
void check_floating_dtype(const char* op, const char* argument, const at::Tensor& tensor);
void check_head_dim(const char* op, const c10::SymInt& head_dim);
void check_group(const char* op, const c10::SymInt& num_q_heads, const c10::SymInt& num_kv_heads);
// Each count >= 0, their sum in 1..capacity (no upper bound where capacity is not given).
void check_budget(const char* op, const Budget& budget, const std::optional<c10::SymInt>& capacity);
// [batch, 3], int32 or int64; its values are checked where they can be read.
void check_row_budget(const char* op, const std::optional<at::Tensor>& row_budget,
                      const char* like_argument, const at::Tensor& like);
// [num_q_heads], float32 or float64.
void check_alibi_slopes(const char* op, const std::optional<at::Tensor>& slopes,
                        const at::Tensor& query);

// What an operator writes in place, on a device that has memory: a tensor of vectors
// ([..., head_dim]) or of numbers, no two elements of which are one.
void check_written(const char* op, const char* argument, const at::Tensor& tensor);
// Two of them.
void check_apart(const char* op, const char* a_name, const at::Tensor& a, const char* b_name,
                 const at::Tensor& b);
// Tells autograd that `tensor` was written, so that it notices if it had saved it.
void mark_written(const at::Tensor& tensor);

// The dtype of scores beside a cache of `cache_dtype`.
inline at::ScalarType score_dtype(at::ScalarType cache_dtype) {
  return cache_dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// An input with stride 1 in its last dimension, and not on storage that the operator writes:
// `tensor` itself where that holds already, else a copy.
at::Tensor readable_input(const at::Tensor& tensor,
                          std::initializer_list<const at::Tensor*> written);

}  // namespace h2o
