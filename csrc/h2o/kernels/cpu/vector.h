#pragma once

#include <ATen/OpMathType.h>
#include <ATen/cpu/vec/functional.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "h2o/kernels/gqa_reduce.h"

// What the CPU kernels need beside ATen's vectors (at::vec, headers alone: AVX-512, AVX2, NEON or
// plain arrays, as CPU_CAPABILITY says). For files that are compiled once per instruction set:
// everything is in an unnamed namespace, so that they do not share one copy of a function.

// Before a loop of few, constant turns over an array of vectors: unrolled at once, the array
// becomes registers.
#if defined(__clang__)
#define H2O_UNROLL _Pragma("unroll")
#else
#define H2O_UNROLL _Pragma("GCC unroll 16")
#endif

namespace h2o::cpu {
namespace {

template <typename A>
using Vector = at::vec::Vectorized<A>;
template <typename A>
inline constexpr int64_t kLanes = Vector<A>::size();
// Whether there are 32 registers for vectors, not 16.
#if defined(CPU_CAPABILITY_AVX512) || defined(__aarch64__)
inline constexpr bool kManyRegisters = true;
#else
inline constexpr bool kManyRegisters = false;
#endif

// std::min for files that may share no function with others.
constexpr int64_t smaller(int64_t a, int64_t b) { return b < a ? b : a; }

template <typename A>
inline Vector<A> load(const A* from) {
  return Vector<A>::loadu(from);
}
template <typename A>
inline void store(A* to, const Vector<A>& value) {
  value.store(to);
}

// kPairLanes consecutive elements of a storage type, as the numbers that they are accumulated in.
// Which of them is in which lane is the storage type's own business: the same in all of its pairs,
// and undone by in_order().
template <typename A>
struct Pair {
  Vector<A> first, second;
};
template <typename A>
inline constexpr int64_t kPairLanes = 2 * kLanes<A>;

template <typename T>
inline constexpr bool kIsStoredWide = std::is_same_v<T, at::opmath_type<T>>;
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
// A bfloat16 is the upper half of a float: of two in one word, the even one is shifted there, the
// odd one is there once the even one is cleared away.
inline Pair<float> widen(const Vector<at::BFloat16>& values) {
  const Vector<int32_t> words(values);
  return {at::vec::cast<float>(words << Vector<int32_t>(16)),
          at::vec::cast<float>(words & Vector<int32_t>(-0x10000))};
}
template <typename T>
inline constexpr bool kIsPairedByParity = std::is_same_v<T, at::BFloat16>;
#else
inline Pair<float> widen(const Vector<at::BFloat16>& values) {
  const auto [first, second] = at::vec::convert_to_float<at::BFloat16>(values);
  return {first, second};
}
template <typename T>
inline constexpr bool kIsPairedByParity = false;
#endif
inline Pair<float> widen(const Vector<at::Half>& values) {
  const auto [first, second] = at::vec::convert_to_float<at::Half>(values);
  return {first, second};
}

template <typename T>
inline Pair<at::opmath_type<T>> load_pair(const T* from) {
  if constexpr (kIsStoredWide<T>) {
    return {load(from), load(from + kLanes<T>)};
  } else if constexpr (std::is_same_v<T, at::Half>) {
    Pair<float> pair;
    at::vec::load_to_float(from, pair.first);
    at::vec::load_to_float(from + kLanes<float>, pair.second);
    return pair;
  } else {
    return widen(Vector<T>::loadu(from));
  }
}
// The first `count` elements, then zeros.
template <typename T>
inline Pair<at::opmath_type<T>> load_pair(const T* from, int64_t count) {
  if constexpr (kIsStoredWide<T>) {
    const int64_t in_first = smaller(count, kLanes<T>);
    return {Vector<T>::loadu(from, in_first), Vector<T>::loadu(from + in_first, count - in_first)};
  } else {
    return widen(Vector<T>::loadu(from, count));
  }
}

template <typename A>
inline void store_pair(A* to, const Pair<A>& pair) {
  store(to, pair.first);
  store(to + kLanes<A>, pair.second);
}

// The pair's elements in their own order.
template <typename T>
inline Pair<at::opmath_type<T>> in_order(const Pair<at::opmath_type<T>>& pair) {
  if constexpr (kIsPairedByParity<T>) {
    const auto [first, second] = at::vec::interleave2(pair.first, pair.second);
    return {first, second};
  } else {
    return pair;
  }
}
// The first `count` elements of numbers in their own order, rounded to nearest even.
template <typename T>
inline void store_first(T* to, const Pair<at::opmath_type<T>>& numbers, int64_t count) {
  if constexpr (kIsStoredWide<T>) {
    const int64_t in_first = smaller(count, kLanes<T>);
    numbers.first.store(to, static_cast<int>(in_first));
    numbers.second.store(to + in_first, static_cast<int>(count - in_first));
  } else {
    at::vec::convert_from_float<T>(numbers.first, numbers.second)
        .store(to, static_cast<int>(count));
  }
}

// The sums of the lanes of kCount vectors, side by side from `to`: neighbours are added until one
// is left, so that a vector's sum does not depend on the others.
template <typename A, int kCount>
inline void sum_lanes_of_each(const Vector<A> (&values)[kCount], A* to) {
  // As many as share their additions: a power of two.
  constexpr int kAtOnce = static_cast<int>(smaller(kCount & -kCount, kLanes<A>));
  const auto add_neighbours = [](const Vector<A>& a, const Vector<A>& b) {
    const auto [even, odd] = at::vec::deinterleave2(a, b);
    return even + odd;
  };
  H2O_UNROLL
  for (int first = 0; first < kCount; first += kAtOnce) {
    Vector<A> sums[kAtOnce];
    H2O_UNROLL
    for (int i = 0; i < kAtOnce; ++i) sums[i] = values[first + i];
    H2O_UNROLL
    for (int left = kAtOnce; left > 1; left /= 2) {
      H2O_UNROLL
      for (int i = 0; i < left / 2; ++i) sums[i] = add_neighbours(sums[2 * i], sums[2 * i + 1]);
    }
    H2O_UNROLL
    for (int64_t left = kLanes<A> / kAtOnce; left > 1; left /= 2) {
      sums[0] = add_neighbours(sums[0], sums[0]);
    }
    sums[0].store(to + first, kAtOnce);
  }
}
template <typename A>
inline A sum_lanes(const Vector<A>& value) {
  const Vector<A> values[1] = {value};
  A sum;
  sum_lanes_of_each<A, 1>(values, &sum);
  return sum;
}

// e^x for x <= 0 (what a softmax needs), within 2 units in the last place of float32; 0 from -87
// on, so never subnormal; NaN for NaN. Cephes' range reduction and polynomial:
// Vectorized::exp_u20() is off by up to 20 units and Vectorized::exp() is a call of Sleef's.
inline Vector<float> exponential(const Vector<float>& power) {
  using V = Vector<float>;
  const V x = at::vec::clamp_min(power, V(-87.0f));
  // Adding and taking away 1.5 * 2^23 rounds to the nearest whole number. With 126 more the sum
  // ends in the bits of 2^(whole - 1)'s exponent, which are those of 0 for -126, the least.
  const V magic(12582912.0f + 126.0f);
  const V shifted = at::vec::fmadd(x, V(1.44269504088896341f), magic);
  const V half = at::vec::cast<float>(at::vec::cast<int32_t>(shifted) << Vector<int32_t>(23));
  const V whole = shifted - magic;
  V r = at::vec::fmadd(whole, V(-0.693359375f), x);
  r = at::vec::fmadd(whole, V(2.12194440e-4f), r);
  // Twice e^r.
  V y = at::vec::fmadd(V(2 * 1.9875691500e-4f), r, V(2 * 1.3981999507e-3f));
  y = at::vec::fmadd(y, r, V(2 * 8.3334519073e-3f));
  y = at::vec::fmadd(y, r, V(2 * 4.1665795894e-2f));
  y = at::vec::fmadd(y, r, V(2 * 1.6666665459e-1f));
  y = at::vec::fmadd(y, r, V(2 * 5.0000001201e-1f));
  y = at::vec::fmadd(y, r, V(2.0f));
  y = at::vec::fmadd(y, r, V(2.0f));
  return y * half;  // a product, so that a NaN stays one
}
inline float exponential(float x) {
  float lanes[kLanes<float>];
  store(lanes, exponential(Vector<float>(x)));
  return lanes[0];
}
inline double exponential(double x) { return __builtin_exp(x); }
inline Vector<double> exponential(const Vector<double>& x) {
  double lanes[kLanes<double>];
  store(lanes, x);
  for (double& lane : lanes) lane = __builtin_exp(lane);
  return load(lanes);
}

// The weights of the group's heads for one slot, or for a vector of slots, become one number.
template <typename Reduce, typename V>
inline V combine(const V& a, const V& b) {
  if constexpr (std::is_arithmetic_v<V>) {
    return Reduce::combine(a, b);
  } else if constexpr (std::is_same_v<Reduce, SumReduce>) {
    return a + b;
  } else {
    return at::vec::maximum(a, b);  // NaN if one of them is
  }
}

// ---- Rows of head_dim elements

constexpr int64_t kMaxHeadDim = 512;
template <typename A>
constexpr A kMinusInfinity = -std::numeric_limits<A>::infinity();

constexpr int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
template <typename A>
constexpr A larger(A a, A b) {
  return b > a ? b : a;  // a NaN in b is passed over: it shows in the sum
}

// Calls body(pair, d) for every pair of a row; the last one is filled up with zeros.
template <typename T, typename Body>
inline void for_each_pair(const T* row, int64_t head_dim, const Body& body) {
  constexpr int64_t kStep = kPairLanes<at::opmath_type<T>>;
  int64_t d = 0;
  for (; d + kStep <= head_dim; d += kStep) body(load_pair(row + d), d);
  if (d < head_dim) body(load_pair(row + d, head_dim - d), d);
}

}  // namespace
}  // namespace h2o::cpu
