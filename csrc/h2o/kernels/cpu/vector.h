#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// Fixed-width vectors over GCC's and Clang's vector extension: the compiler turns them into
// whatever the target of this translation unit has. Everything is in an unnamed namespace, because
// the files that include this are compiled once per instruction set and must not share one copy of
// a function.
#if defined(__AVX512F__)
#define H2O_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define H2O_VECTOR_BYTES 32
#else
#define H2O_VECTOR_BYTES 16
#endif

// Before a loop of few, constant turns over an array of vectors: unrolled at once, the array
// becomes registers.
#if defined(__clang__)
#define H2O_UNROLL _Pragma("unroll")
#else
#define H2O_UNROLL _Pragma("GCC unroll 16")
#endif

namespace h2o::cpu {

// Storage of 16-bit floating-point numbers, bit for bit what c10::Half and c10::BFloat16 hold.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// What a storage type is accumulated in.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

namespace {

template <typename A>
struct VectorOf {
  typedef A type __attribute__((vector_size(H2O_VECTOR_BYTES)));
};
template <typename A>
using Vector = typename VectorOf<A>::type;
template <typename A>
inline constexpr int64_t kLanes = H2O_VECTOR_BYTES / sizeof(A);

using FloatVector = Vector<float>;
using UintVector = Vector<uint32_t>;
using IntVector = Vector<int32_t>;
typedef uint16_t ShortVector __attribute__((vector_size(H2O_VECTOR_BYTES / 2)));

template <typename A>
inline Vector<A> splat(A value) {
  return value - Vector<A>{};
}

inline FloatVector widen(const Float16*, UintVector bits) {
  // Exponent and mantissa move to float's place; the product with 2^112 mends the exponent's bias,
  // for subnormal numbers too. Infinity and NaN keep an exponent of all ones.
  const UintVector magnitude = (bits & 0x7fffu) << 13;
  const FloatVector finite = (FloatVector)magnitude * 0x1p112f;
  const UintVector special = (UintVector)(magnitude >= 0x0f800000u);
  const UintVector value =
      (((UintVector)finite) & ~special) | ((magnitude | 0x7f800000u) & special);
  return (FloatVector)(value | ((bits & 0x8000u) << 16));
}
inline FloatVector widen(const BFloat16*, UintVector bits) { return (FloatVector)(bits << 16); }

inline FloatVector load(const float* from) {
  FloatVector value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
inline Vector<double> load(const double* from) {
  Vector<double> value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
template <typename T>
inline FloatVector load(const T* from) {
  ShortVector bits;
  std::memcpy(&bits, from, sizeof(bits));
  return widen(from, __builtin_convertvector(bits, UintVector));
}

// The first `count` elements, then zeros.
template <typename T>
inline Vector<Accumulator<T>> load_first(const T* from, int64_t count) {
  T padded[kLanes<Accumulator<T>>] = {};
  std::memcpy(padded, from, static_cast<size_t>(count) * sizeof(T));
  return load(padded);
}

template <typename A>
inline void store(A* to, Vector<A> value) {
  std::memcpy(to, &value, sizeof(value));
}

// One number to its storage type, rounded to nearest even.
inline void narrow(float value, float* to) { *to = value; }
inline void narrow(double value, double* to) { *to = value; }
inline void narrow(float value, BFloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  bits += 0x7fffu + ((bits >> 16) & 1u);
  to->bits = is_nan ? uint16_t{0x7fc0} : static_cast<uint16_t>(bits >> 16);
}
inline void narrow(float value, Float16* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    result = 0x7c00u;  // 65,520 and more round to infinity
  } else if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 shifts the mantissa into place and lets the hardware round.
    float shifted;
    std::memcpy(&shifted, &magnitude, sizeof(shifted));
    shifted += 0.5f;
    std::memcpy(&result, &shifted, sizeof(result));
    result -= 0x3f000000u;
  } else {
    result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | result);
}

// Sum of the lanes by halving, always in the same order.
template <typename A, int kBytes>
inline A sum_lanes_of(const A* lanes) {
  constexpr int kCount = kBytes / static_cast<int>(sizeof(A));
  if constexpr (kCount == 1) {
    return lanes[0];
  } else {
    constexpr int kHalf = kCount / 2;
    typedef A Half __attribute__((vector_size(kBytes / 2)));
    Half low, high;
    std::memcpy(&low, lanes, sizeof(low));
    std::memcpy(&high, lanes + kHalf, sizeof(high));
    low += high;
    A half[kHalf];
    std::memcpy(half, &low, sizeof(low));
    return sum_lanes_of<A, kBytes / 2>(half);
  }
}
// [a0 + a1, a2 + a3, ..., b0 + b1, ...]
template <typename A, int64_t... kIndex>
inline Vector<A> add_pairs(Vector<A> a, Vector<A> b, std::integer_sequence<int64_t, kIndex...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (2 * kIndex)...) +
         __builtin_shufflevector(a, b, (2 * kIndex + 1)...);
#else
  using Indices = Vector<std::conditional_t<sizeof(A) == 8, int64_t, int32_t>>;
  return __builtin_shuffle(a, b, Indices{(2 * kIndex)...}) +
         __builtin_shuffle(a, b, Indices{(2 * kIndex + 1)...});
#endif
}
// The lanes' sum of each of kCount vectors, a power of two, side by side from `to`: neighbours are
// added until one is left, so a vector's sum does not depend on kCount.
template <typename A, int kCount>
inline void sum_lanes_of_each(const Vector<A> (&values)[kCount], A* to) {
  constexpr std::make_integer_sequence<int64_t, kLanes<A>> kIndices;
  constexpr int kAtOnce = kCount < kLanes<A> ? kCount : static_cast<int>(kLanes<A>);
  H2O_UNROLL
  for (int first = 0; first < kCount; first += kAtOnce) {
    Vector<A> sums[kAtOnce];
    H2O_UNROLL
    for (int i = 0; i < kAtOnce; ++i) sums[i] = values[first + i];
    H2O_UNROLL
    for (int left = kAtOnce; left > 1; left /= 2) {
      H2O_UNROLL
      for (int i = 0; i < left / 2; ++i) {
        sums[i] = add_pairs<A>(sums[2 * i], sums[2 * i + 1], kIndices);
      }
    }
    H2O_UNROLL
    for (int64_t left = kLanes<A> / kAtOnce; left > 1; left /= 2) {
      sums[0] = add_pairs<A>(sums[0], sums[0], kIndices);
    }
    std::memcpy(to + first, &sums[0], kAtOnce * sizeof(A));
  }
}
template <typename A>
inline A sum_lanes(Vector<A> value) {
  A lanes[kLanes<A>];
  std::memcpy(lanes, &value, sizeof(value));
  return sum_lanes_of<A, H2O_VECTOR_BYTES>(lanes);
}

// e^x for x <= 0 (what a softmax needs), within 2 units in the last place of float32; 0 below
// -87.3, NaN for NaN. Cephes' range reduction and polynomial.
inline FloatVector exponential(FloatVector x) {
  const IntVector underflow = x < -87.33654f;
  const FloatVector clamped = (FloatVector)(((UintVector)x & ~(UintVector)underflow));
  // Adding and taking away 1.5 * 2^23 rounds to the nearest whole number.
  const FloatVector magic = splat(12582912.0f);
  const FloatVector shifted = clamped * 1.44269504088896341f + magic;
  const FloatVector whole = shifted - magic;
  FloatVector r = clamped - whole * 0.693359375f;
  r = r - whole * -2.12194440e-4f;
  FloatVector y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const IntVector exponent = ((IntVector)shifted - (IntVector)magic) << 23;
  const FloatVector scaled = (FloatVector)((IntVector)y + exponent);
  // A NaN must stay one: its y is NaN, and the exponent's bits may have spoilt it.
  const IntVector is_nan = x != x;
  const UintVector result =
      (((UintVector)scaled & ~(UintVector)is_nan) | ((UintVector)x & (UintVector)is_nan)) &
      ~(UintVector)underflow;
  return (FloatVector)result;
}
inline float exponential(float x) { return exponential(splat(x))[0]; }
inline double exponential(double x) { return __builtin_exp(x); }
inline Vector<double> exponential(Vector<double> x) {
  for (int64_t i = 0; i < kLanes<double>; ++i) x[i] = __builtin_exp(x[i]);
  return x;
}

}  // namespace
}  // namespace h2o::cpu
