#pragma once

#include <cstdint>
#include <type_traits>

#include "h2o/budget.h"

// How kernels see tensors: pointers and strides in plain structs, passed to a launch by value.
// Strides are in elements; every offset is computed in 64 bits.
namespace h2o::cuda {

// What a storage type is accumulated in; also the type of its scores.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// [batch, heads, tokens] of single numbers, or of vectors whose elements lie side by side.
template <typename T>
struct View {
  T* data = nullptr;
  int64_t row_stride = 0, head_stride = 0, token_stride = 0;

  H2O_HOST_DEVICE T* at(int64_t row, int64_t head, int64_t token = 0) const {
    return data + row * row_stride + head * head_stride + token * token_stride;
  }
};

// [batch, columns] of int32 or int64.
struct IndexView {
  const void* data = nullptr;
  bool is_int64 = false;
  int64_t row_stride = 0, column_stride = 0;

  // As int32, in which positions are stored: what is greater becomes the greatest, what is negative
  // -1.
  H2O_HOST_DEVICE int32_t at(int64_t row, int64_t column) const {
    const int64_t offset = row * row_stride + column * column_stride;
    const int64_t value = is_int64 ? static_cast<const int64_t*>(data)[offset]
                                   : int64_t{static_cast<const int32_t*>(data)[offset]};
    return value < 0 ? -1 : value > INT32_MAX ? INT32_MAX : static_cast<int32_t>(value);
  }
};

// The budget of each row: `rows` [batch, 3] where there is one, else `common`.
struct BudgetView {
  Budget common;
  IndexView rows;

  // Counts below 0, which only the device could have seen, count as 0.
  H2O_HOST_DEVICE Budget at(int64_t row) const {
    if (rows.data == nullptr) return common;
    const auto count = [&](int64_t column) {
      const int32_t value = rows.at(row, column);
      return int64_t{value < 0 ? 0 : value};
    };
    return {count(0), count(1), count(2)};
  }
};

// What a logit is made of besides q . k.
template <typename A>
struct LogitTerms {
  A scale = 1;
  const void* alibi_slopes = nullptr;  // [num_q_heads], or null
  bool slopes_are_double = false;
  int64_t slope_stride = 0;

  // scale * dot + slope * (key position - query position)
  H2O_HOST_DEVICE A logit(A dot, int64_t q_head, int32_t key_position,
                          int32_t query_position) const {
    if (alibi_slopes == nullptr) return scale * dot;
    const int64_t offset = q_head * slope_stride;
    const A slope = slopes_are_double
                        ? static_cast<A>(static_cast<const double*>(alibi_slopes)[offset])
                        : static_cast<A>(static_cast<const float*>(alibi_slopes)[offset]);
    return scale * dot + slope * static_cast<A>(key_position - query_position);
  }
};

// The state of one layer. Of an empty slot (position < 0) only the position is ever read.
template <typename T>
struct CacheView {
  View<T> k, v;  // [batch, num_kv_heads, capacity] vectors
  View<Accumulator<T>> scores;
  View<int32_t> positions;
  int32_t capacity = 0;
};

// The sizes that every kernel needs. Query head h reads KV head h / group_size.
struct Sizes {
  int64_t batch = 0, num_kv_heads = 0;
  int32_t group_size = 0, head_dim = 0, num_new = 0;
};

// The real tokens of each row, padding left out: one int32 buffer [batch, 1 + 2 * num_new] that
// holds the row's count, then their columns, then their positions.
struct TokenList {
  int32_t* data = nullptr;
  int32_t num_new = 0;

  H2O_HOST_DEVICE int32_t* count(int64_t row) const {
    return data + row * (1 + 2 * int64_t{num_new});
  }
  H2O_HOST_DEVICE int32_t* columns(int64_t row) const { return count(row) + 1; }
  H2O_HOST_DEVICE int32_t* positions(int64_t row) const { return columns(row) + num_new; }
};

// Some consecutive real tokens of each row that join the cache together: first .. first + size,
// fewer where the row has no more.
struct Chunk {
  int32_t first = 0, size = 0;

  H2O_HOST_DEVICE int32_t count(const TokenList& tokens, int64_t row) const {
    const int32_t left = *tokens.count(row) - first;
    return left < 0 ? 0 : left < size ? left : size;
  }
};

}  // namespace h2o::cuda
