#pragma once

#include "h2o/kernels/cpu/rows.h"

// Rotation of vectors by angles (RoPE) on the CPU. rotate_kernels_isa.cpp is compiled once per
// instruction set.
namespace h2o::cpu {

// Rows `begin` to `end` of some vectors: the elements i and i + pairs of a row are turned by the
// angle i of the row that `index` names; elements from 2 * pairs on are copied.
template <typename T>
struct Rotation {
  using A = Accumulator<T>;
  int64_t begin, end;
  int64_t pairs, head_dim;
  VectorRows<const T> from;
  VectorRows<T> to;
  const int32_t* index;  // < 0: the row becomes zeros
  VectorRows<const A> cos, sin;
};

template <typename T>
using Rotate = void(const Rotation<T>&);
// That for this CPU.
template <typename T>
Rotate<T>& rotate_kernel();

}  // namespace h2o::cpu
