#pragma once

#include <ATen/OpMathType.h>

#include <cstdint>

// What the parameters of all CPU kernels are made of.
namespace h2o::cpu {

// What a storage type is accumulated in: double for double, else float.
template <typename T>
using Accumulator = at::opmath_type<T>;

// `count` vectors of head_dim elements each, the elements of one side by side.
template <typename T>
struct VectorRows {
  T* data = nullptr;
  int64_t stride = 0;  // in elements, from one row to the next

  T* operator[](int64_t row) const { return data + row * stride; }
};

// What a logit is made of besides q . k.
template <typename A>
struct LogitTerms {
  A scale;
  const A* alibi_slopes;  // [group_size], or null: adds slope * (key position - query position)
};

}  // namespace h2o::cpu
