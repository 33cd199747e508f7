#include "h2o/ops/checks.h"

#include <ATen/core/Formatting.h>
#include <c10/util/SmallVector.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

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

void check_written(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.dim() < 4 || tensor.stride(3) == 1 || tensor.size(3) == 1, op, ": ", argument,
              " must have stride 1 in head_dim, since it is written in place, got strides ",
              tensor.strides());
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

void mark_written(const at::Tensor& tensor) {
  // What was made under inference_mode has no version; autograd refuses to save it anyway.
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
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
