#include "h2o/ops/checks.h"

#include <ATen/core/Formatting.h>
#include <c10/util/irange.h>

namespace h2o {
namespace {

constexpr int64_t kMaxHeadDim = 512;

const char* dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kInt:
      return "int32";
    default:
      return c10::toString(dtype);
  }
}

}  // namespace

void check_dim(const char* op, const char* argument, const at::Tensor& tensor, const char* names,
               int64_t dim) {
  TORCH_CHECK(tensor.dim() == dim, op, ": ", argument, " must be ", names, ", got ",
              tensor.sym_sizes());
}

void check_sizes(const char* op, const char* argument, const at::Tensor& tensor, const char* names,
                 std::initializer_list<c10::SymInt> sizes) {
  bool equal = tensor.dim() == static_cast<int64_t>(sizes.size());
  int64_t i = 0;
  for (const auto& size : sizes) equal = equal && tensor.sym_size(i++) == size;
  TORCH_CHECK(equal, op, ": ", argument, " must be ", names, " = ",
              c10::SymIntArrayRef(sizes.begin(), sizes.size()), ", got ", tensor.sym_sizes());
}

void check_dtype(const char* op, const char* argument, const at::Tensor& tensor,
                 at::ScalarType dtype) {
  TORCH_CHECK(tensor.scalar_type() == dtype, op, ": ", argument, " must be ", dtype_name(dtype),
              ", got ", tensor.scalar_type());
}

void check_device(const char* op, const char* argument, const at::Tensor& tensor,
                  const char* other_argument, const at::Tensor& other) {
  TORCH_CHECK(tensor.device() == other.device(), op, ": ", argument, " must be on the device of ",
              other_argument, ", got ", tensor.device(), " and ", other.device());
}

void check_index_dtype(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, op, ": ",
              argument, " must be int32 or int64, got ", tensor.scalar_type());
}

void check_floating_dtype(const char* op, const char* argument, const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK(
      dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kDouble,
      op, ": ", argument, " must be float32, float16, bfloat16 or float64, got ", dtype);
}

void check_head_dim(const char* op, const c10::SymInt& head_dim) {
  TORCH_CHECK(head_dim >= 1 && head_dim <= kMaxHeadDim, op, ": head_dim must be in 1..",
              kMaxHeadDim, ", got ", head_dim);
}

void check_group(const char* op, const c10::SymInt& num_q_heads, const c10::SymInt& num_kv_heads) {
  TORCH_CHECK(num_kv_heads >= 1, op, ": num_kv_heads must be >= 1, got ", num_kv_heads);
  TORCH_CHECK(num_q_heads >= 1 && num_q_heads % num_kv_heads == 0, op,
              ": num_q_heads must be a multiple of num_kv_heads, got num_q_heads=", num_q_heads,
              ", num_kv_heads=", num_kv_heads);
}

void check_budget(const char* op, const Budget& budget,
                  const std::optional<c10::SymInt>& capacity) {
  static constexpr int64_t kMost =
      INT32_MAX;  // positions are int32; also keeps the sum from overflowing
  const auto check_count = [op](const char* name, int64_t count) {
    TORCH_CHECK_VALUE(count >= 0 && count <= kMost, op, ": ", name, " must be in 0..", kMost,
                      ", got ", count);
  };
  check_count("num_sink", budget.num_sink);
  check_count("num_heavy", budget.num_heavy);
  check_count("num_recent", budget.num_recent);
  TORCH_CHECK_VALUE(budget.total() >= 1, op,
                    ": the budget num_sink + num_heavy + num_recent must be >= 1, got ",
                    budget.num_sink, " + ", budget.num_heavy, " + ", budget.num_recent);
  TORCH_CHECK_VALUE(!capacity || *capacity >= budget.total(), op,
                    ": the budget num_sink + num_heavy + num_recent must be <= capacity, got ",
                    budget.num_sink, " + ", budget.num_heavy, " + ", budget.num_recent, " = ",
                    budget.total(), ", capacity=", *capacity);
}

void check_row_budget(const char* op, const std::optional<at::Tensor>& row_budget,
                      const char* like_argument, const at::Tensor& like) {
  if (!row_budget) return;
  check_device(op, "row_budget", *row_budget, like_argument, like);
  check_index_dtype(op, "row_budget", *row_budget);
  check_sizes(op, "row_budget", *row_budget, "[batch, 3]", {like.sym_size(0), 3});
}

void check_alibi_slopes(const char* op, const std::optional<at::Tensor>& slopes,
                        const at::Tensor& query) {
  if (!slopes) return;
  check_device(op, "alibi_slopes", *slopes, "query", query);
  TORCH_CHECK(slopes->scalar_type() == at::kFloat || slopes->scalar_type() == at::kDouble, op,
              ": alibi_slopes must be float32 or float64, got ", slopes->scalar_type());
  check_sizes(op, "alibi_slopes", *slopes, "[num_q_heads]", {query.sym_size(1)});
}

at::Tensor readable_input(const at::Tensor& tensor,
                          std::initializer_list<const at::Tensor*> written) {
  for (const at::Tensor* other : written) {
    if (tensor.is_alias_of(*other)) return tensor.clone(at::MemoryFormat::Contiguous);
  }
  return tensor.dim() == 0 || tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor
                                                                             : tensor.contiguous();
}

}  // namespace h2o
