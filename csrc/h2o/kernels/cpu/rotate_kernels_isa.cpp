// Compiled once per instruction set, under the rules that decode_kernels_isa.cpp states.
#include "h2o/kernels/cpu/rotate_kernels.h"

#include "h2o/kernels/cpu/vector.h"

namespace h2o::cpu {
namespace {

// Numbers of a row in their own order, the last of them filled up with zeros.
template <typename T>
inline Pair<Accumulator<T>> numbers(const T* from, int64_t count) {
  return in_order<T>(count < kPairLanes<Accumulator<T>> ? load_pair(from, count) : load_pair(from));
}

template <typename T>
void rotate(const Rotation<T>& rotation) {
  using A = Accumulator<T>;
  const int64_t pairs = rotation.pairs;
  for (int64_t row = rotation.begin; row < rotation.end; ++row) {
    T* const to = rotation.to[row];
    const int32_t index = rotation.index[row];
    if (index < 0) {
      __builtin_memset(static_cast<void*>(to), 0,
                       static_cast<size_t>(rotation.head_dim) * sizeof(T));
      continue;
    }
    const T* const from = rotation.from[row];
    const A *const cos = rotation.cos[index], *const sin = rotation.sin[index];
    for (int64_t i = 0; i < pairs; i += kPairLanes<A>) {
      const int64_t count = smaller(pairs - i, kPairLanes<A>);
      const Pair<A> x = numbers(from + i, count), y = numbers(from + pairs + i, count),
                    c = numbers(cos + i, count), s = numbers(sin + i, count);
      store_first(
          to + i,
          {x.first * c.first - y.first * s.first, x.second * c.second - y.second * s.second},
          count);
      store_first(
          to + pairs + i,
          {y.first * c.first + x.first * s.first, y.second * c.second + x.second * s.second},
          count);
    }
    __builtin_memcpy(static_cast<void*>(to + 2 * pairs), from + 2 * pairs,
                     static_cast<size_t>(rotation.head_dim - 2 * pairs) * sizeof(T));
  }
}

}  // namespace

namespace H2O_ISA {
template <typename T>
Rotate<T>& rotate_kernel();
template <>
Rotate<float>& rotate_kernel() {
  return rotate<float>;
}
template <>
Rotate<double>& rotate_kernel() {
  return rotate<double>;
}
template <>
Rotate<at::Half>& rotate_kernel() {
  return rotate<at::Half>;
}
template <>
Rotate<at::BFloat16>& rotate_kernel() {
  return rotate<at::BFloat16>;
}
}  // namespace H2O_ISA

}  // namespace h2o::cpu
