#include "h2o/ops/cpu/rows.h"

#include <c10/util/Exception.h>

#include <cmath>

#include "h2o/ops/checks.h"

namespace h2o::cpu {
namespace {

// int32 or int64 at (row, column), as int64.
int64_t read_integer(const at::Tensor& tensor, int64_t row, int64_t column) {
  const int64_t offset = row * tensor.stride(0) + column * tensor.stride(1);
  return tensor.scalar_type() == at::kInt ? tensor.const_data_ptr<int32_t>()[offset]
                                          : tensor.const_data_ptr<int64_t>()[offset];
}

}  // namespace

std::vector<RowTokens> read_tokens(const char* op, const char* argument,
                                   const at::Tensor& positions) {
  std::vector<RowTokens> rows(static_cast<size_t>(positions.size(0)));
  for (int64_t row = 0; row < positions.size(0); ++row) {
    RowTokens& tokens = rows[static_cast<size_t>(row)];
    for (int64_t column = 0; column < positions.size(1); ++column) {
      const int64_t position = read_integer(positions, row, column);
      if (position < 0) continue;
      TORCH_CHECK_VALUE(position < INT32_MAX, op, ": ", argument, " must be < ", INT32_MAX,
                        ", got ", position, " in row ", row, ", column ", column);
      TORCH_CHECK_VALUE(tokens.positions.empty() || position > tokens.positions.back(), op, ": ",
                        argument, " must increase along a row, got ", tokens.positions.back(),
                        " before ", position, " in row ", row, ", column ", column);
      tokens.columns.push_back(static_cast<int32_t>(column));
      tokens.positions.push_back(static_cast<int32_t>(position));
    }
  }
  return rows;
}

std::vector<Budget> read_budgets(const char* op, const std::optional<at::Tensor>& row_budget,
                                 const Budget& budget, int64_t batch, int64_t capacity) {
  std::vector<Budget> budgets(static_cast<size_t>(batch), budget);
  if (!row_budget) return budgets;
  for (int64_t row = 0; row < batch; ++row) {
    const Budget own{read_integer(*row_budget, row, 0), read_integer(*row_budget, row, 1),
                     read_integer(*row_budget, row, 2)};
    TORCH_CHECK_VALUE(own.num_sink >= 0 && own.num_heavy >= 0 && own.num_recent >= 0 &&
                          own.num_sink <= capacity && own.num_heavy <= capacity &&
                          own.num_recent <= capacity && own.total() >= 1 && own.total() <= capacity,
                      op, ": row_budget must have counts >= 0 with a sum in 1..", capacity,
                      " in every row, got ", own.num_sink, ", ", own.num_heavy, ", ",
                      own.num_recent, " in row ", row);
    budgets[static_cast<size_t>(row)] = own;
  }
  return budgets;
}

template <typename A>
std::vector<A> read_slopes(const char* op, const std::optional<at::Tensor>& slopes) {
  std::vector<A> read;
  if (!slopes) return read;
  for (int64_t head = 0; head < slopes->size(0); ++head) {
    const int64_t offset = head * slopes->stride(0);
    const double given = slopes->scalar_type() == at::kFloat
                             ? slopes->const_data_ptr<float>()[offset]
                             : slopes->const_data_ptr<double>()[offset];
    // What is too large for the logits' type is infinite there.
    read.push_back(static_cast<A>(given));
    TORCH_CHECK_VALUE(std::isfinite(read.back()), op, ": alibi_slopes must be finite as ",
                      std::is_same_v<A, double> ? "float64" : "float32", ", got ", given,
                      " for query head ", head);
  }
  return read;
}

template std::vector<float> read_slopes(const char*, const std::optional<at::Tensor>&);
template std::vector<double> read_slopes(const char*, const std::optional<at::Tensor>&);

}  // namespace h2o::cpu
