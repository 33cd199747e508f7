#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "h2o/budget.h"
#include "h2o/kernels/cpu/rows.h"

// What the CPU operators read before they start: which columns of each row hold tokens, each row's
// budget, each head's slope. On the CPU the values can be looked at, so they are checked here,
// before anything is written.
namespace h2o::cpu {

// What one (row, head) of a tensor [batch, heads, count, ...] has, by slot or column.
template <typename T>
VectorRows<T> rows_of(const at::Tensor& tensor, int64_t row, int64_t head) {
  T* const first = static_cast<T*>(tensor.data_ptr());
  return {first + row * tensor.stride(0) + head * tensor.stride(1), tensor.stride(2)};
}

// The tokens of one row, padding left out.
struct RowTokens {
  std::vector<int32_t> columns;
  std::vector<int32_t> positions;  // of those columns, increasing
};

// Throws where positions do not increase along a row or do not fit into int32.
std::vector<RowTokens> read_tokens(const char* op, const char* argument,
                                   const at::Tensor& positions);

// The budget of every row: `row_budget`'s where given (throws where one is not in 1..capacity),
// else `budget`.
std::vector<Budget> read_budgets(const char* op, const std::optional<at::Tensor>& row_budget,
                                 const Budget& budget, int64_t batch, int64_t capacity);

// ALiBi's slope of every query head; empty where there are none. Throws where one is not finite as
// an A (float or double).
template <typename A>
std::vector<A> read_slopes(const char* op, const std::optional<at::Tensor>& slopes);

}  // namespace h2o::cpu
