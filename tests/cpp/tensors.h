#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <array>
#include <cmath>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "h2o/kv_cache.h"
#include "reference.h"

// What the tests of the operators share: making tensors, looking into them, and the way to and from
// reference.h.

// ---- Tensors ------------------------------------------------------------------------------------

inline at::Tensor tensor_of(const std::vector<double>& values, at::IntArrayRef sizes,
                            at::ScalarType dtype = at::kFloat) {
  at::Tensor tensor = at::empty(sizes, at::kDouble);
  TORCH_INTERNAL_ASSERT(tensor.numel() == static_cast<int64_t>(values.size()));
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<double>());
  return tensor.to(dtype);
}
inline at::Tensor integers(const std::vector<int64_t>& values, at::IntArrayRef sizes,
                           at::ScalarType dtype = at::kInt) {
  at::Tensor tensor = at::empty(sizes, at::kLong);
  TORCH_INTERNAL_ASSERT(tensor.numel() == static_cast<int64_t>(values.size()));
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor.to(dtype);
}
// first, first + 1, ..., once for every row.
inline at::Tensor position_range(int64_t batch, int64_t first, int64_t count,
                                 at::ScalarType dtype = at::kLong) {
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < batch * count; ++i) positions.push_back(first + i % count);
  return integers(positions, {batch, count}, dtype);
}

inline std::vector<double> doubles(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kDouble).contiguous();
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}
inline std::vector<int64_t> int64s(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kLong).contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

// Normal random numbers, the same in every run.
class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}

  double normal() { return normal_(engine_); }
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(bound));
  }
  at::Tensor tensor(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
    at::Tensor values = at::empty(sizes, at::kDouble);
    double* const data = values.mutable_data_ptr<double>();
    for (int64_t i = 0; i < values.numel(); ++i) data[i] = normal();
    return values.to(dtype);
  }
  // Queries that all lean towards one direction, and keys of which every fifth token's points
  // there: heavy hitters, so that the scores are far from flat.
  at::Tensor queries(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
    return tensor(sizes, at::kDouble).add(0.5).to(dtype);
  }
  at::Tensor keys(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
    const at::Tensor values = tensor(sizes, at::kDouble);
    for (int64_t i = 0; i < values.size(2); i += 5) values.select(2, i).add_(0.5);
    return values.to(dtype);
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<double> normal_;
};

// ---- Bits ---------------------------------------------------------------------------------------

// Same dtype, sizes and bytes: unlike a comparison of numbers, tells -0 from 0 and finds NaN equal
// to itself.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor flat_a = a.contiguous(), flat_b = b.contiguous();
  return a.numel() == 0 ||
         std::memcmp(flat_a.const_data_ptr(), flat_b.const_data_ptr(), flat_a.nbytes()) == 0;
}
// What an empty slot holds in K and V does not count.
inline bool same_state(const h2o::KVCache& a, const h2o::KVCache& b) {
  const at::Tensor empty = a.positions.lt(0).unsqueeze(-1);
  return same_bits(a.positions, b.positions) && same_bits(a.scores, b.scores) &&
         same_bits(a.k_cache.masked_fill(empty, 0.0), b.k_cache.masked_fill(empty, 0.0)) &&
         same_bits(a.v_cache.masked_fill(empty, 0.0), b.v_cache.masked_fill(empty, 0.0));
}
inline h2o::KVCache copy_of(const h2o::KVCache& cache) {
  return {cache.k_cache.clone(), cache.v_cache.clone(), cache.scores.clone(),
          cache.positions.clone()};
}
// One row of the batch, as a cache of its own (a view).
inline h2o::KVCache row_of(const h2o::KVCache& cache, int64_t row) {
  const auto narrow = [row](const at::Tensor& tensor) { return tensor.narrow(0, row, 1); };
  return {narrow(cache.k_cache), narrow(cache.v_cache), narrow(cache.scores),
          narrow(cache.positions)};
}

// Every tensor that is given, as it is now; unchanged() tells whether all still are.
class Snapshot {
 public:
  explicit Snapshot(std::initializer_list<at::Tensor> tensors) {
    for (const at::Tensor& tensor : tensors) watch(tensor);
  }
  Snapshot(const h2o::KVCache& cache, std::initializer_list<at::Tensor> tensors)
      : Snapshot(tensors) {
    for (const at::Tensor& tensor : {cache.k_cache, cache.v_cache, cache.scores, cache.positions})
      watch(tensor);
  }
  void watch(const at::Tensor& tensor) { tensors_.emplace_back(tensor, tensor.clone()); }
  bool unchanged() const {
    for (const auto& [tensor, before] : tensors_) {
      if (!same_bits(tensor, before)) return false;
    }
    return true;
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
};

// ---- Errors -------------------------------------------------------------------------------------

// The first line of what `call` throws, with the kind of the exception: "ValueError: ..." for
// c10::ValueError (numbers and names), "Error: ..." for any other c10::Error (tensors), "std: ..."
// for any other exception.
template <typename Call>
std::string refusal(const Call& call) {
  const auto first_line = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  try {
    call();
  } catch (const c10::ValueError& error) {
    return "ValueError: " + first_line(error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return "Error: " + first_line(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return "std: " + first_line(error.what());
  }
  return "nothing was thrown";
}

// ---- To and from the reference ------------------------------------------------------------------

// The last dimension of a tensor at the indices before it.
inline reference::Row row_at(const at::Tensor& tensor, std::initializer_list<int64_t> indices) {
  at::Tensor row = tensor;
  for (const int64_t index : indices) row = row.select(0, index);
  return doubles(row);
}

inline reference::Head head_of(const h2o::KVCache& cache, int64_t row, int64_t head) {
  const std::vector<int64_t> positions = int64s(cache.positions.select(0, row).select(0, head));
  const std::vector<double> scores = doubles(cache.scores.select(0, row).select(0, head));
  std::vector<reference::Token> slots;
  for (int64_t slot = 0; slot < cache.capacity(); ++slot) {
    slots.push_back({positions[static_cast<size_t>(slot)], scores[static_cast<size_t>(slot)],
                     row_at(cache.k_cache, {row, head, slot}),
                     row_at(cache.v_cache, {row, head, slot})});
  }
  return reference::Head(slots);
}

// The real tokens of one (row, KV head), and which column of the call each is.
struct NewTokens {
  std::vector<reference::NewToken> tokens;
  std::vector<int64_t> columns;
};
// `v_new` may be an undefined tensor.
inline NewTokens new_tokens_of(const at::Tensor& query, const at::Tensor& k_new,
                               const at::Tensor& v_new, const at::Tensor& position_new, int64_t row,
                               int64_t head) {
  const int64_t group_size = query.size(1) / k_new.size(1);
  const std::vector<int64_t> positions = int64s(position_new.select(0, row));
  NewTokens result;
  for (int64_t column = 0; column < k_new.size(2); ++column) {
    if (positions[static_cast<size_t>(column)] < 0) continue;
    reference::NewToken token{positions[static_cast<size_t>(column)],
                              row_at(k_new, {row, head, column})};
    token.value = v_new.defined() ? row_at(v_new, {row, head, column}) : reference::Row{};
    for (int64_t h = 0; h < group_size; ++h) {
      token.queries.push_back(row_at(query, {row, head * group_size + h, column}));
    }
    result.tokens.push_back(token);
    result.columns.push_back(column);
  }
  return result;
}

// What storing a number of this dtype may cost, relative to it, and what the arithmetic before it
// may.
inline double rounding_of(at::ScalarType dtype) {
  return dtype == at::kDouble  ? 0x1p-53
         : dtype == at::kFloat ? 0x1p-24
         : dtype == at::kHalf  ? 0x1p-11
                               : 0x1p-8;
}
inline double arithmetic_of(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-12 : 2e-5; }

// By how much `actual` is off at most beyond the rounding of its own dtype; infinite for a NaN.
inline double error_of(const at::Tensor& actual, const reference::Row& expected) {
  const std::vector<double> values = doubles(actual);
  if (values.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double worst = 0.0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double rounding =
        rounding_of(actual.scalar_type()) * std::max(std::abs(expected[i]), 0x1p-14);
    const double error = std::abs(values[i] - expected[i]) - rounding;
    worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
  }
  return worst;
}

// How the state that an operator left differs from the reference's: positions by slot, then the
// bytes of every stored token, then the scores within `tolerance`. Empty where it does not.
inline std::string difference(const h2o::KVCache& cache, int64_t row, int64_t head,
                              const reference::Head& expected, double tolerance) {
  const std::vector<reference::Token> slots = head_of(cache, row, head).slots();
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const reference::Token &actual = slots[slot], &wanted = expected.slots()[slot];
    const std::string where = " in row " + std::to_string(row) + ", head " + std::to_string(head) +
                              ", slot " + std::to_string(slot);
    if (actual.position != wanted.position) {
      return "position " + std::to_string(actual.position) + " instead of " +
             std::to_string(wanted.position) + where;
    }
    if (!(std::abs(actual.score - wanted.score) <= tolerance) &&
        !(std::isnan(actual.score) && std::isnan(wanted.score))) {
      return "score " + std::to_string(actual.score) + " instead of " +
             std::to_string(wanted.score) + where;
    }
    if (wanted.position < 0) continue;
    if (actual.key != wanted.key || actual.value != wanted.value)
      return "another key or value" + where;
  }
  return "";
}
