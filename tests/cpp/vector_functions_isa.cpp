// Compiled once per instruction set, like decode_kernels_isa.cpp: nothing but the table leaves
// this file.
#include "h2o/kernels/cpu/vector.h"
#include "vector_functions.h"

namespace {

using namespace h2o::cpu;

template <typename A>
void exponential_of(const A* from, int64_t count, A* to) {
  for (int64_t i = 0; i < count; i += kLanes<A>) store(to + i, exponential(load(from + i)));
}

// `count` elements of a storage type, widened: as many at a time as make a pair.
template <typename T>
void widen_all(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kPairLanes<float>) {
    const int64_t rest = count - i < kPairLanes<float> ? count - i : kPairLanes<float>;
    const T* const row = reinterpret_cast<const T*>(from + i);
    const Pair<float> pair =
        in_order<T>(rest < kPairLanes<float> ? load_pair(row, rest) : load_pair(row));
    store_first<float>(to + i, pair, rest);
  }
}

template <typename T>
void narrow_all(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; i += kPairLanes<float>) {
    const int64_t rest = count - i < kPairLanes<float> ? count - i : kPairLanes<float>;
    store_first<T>(reinterpret_cast<T*>(to + i), load_pair(from + i, rest), rest);
  }
}

// A whole pair of which the first `count` elements are there.
template <typename T>
void load_first(const void* from, int64_t count, float* to) {
  store_first<float>(to, in_order<T>(load_pair(static_cast<const T*>(from), count)),
                     kPairLanes<float>);
}

float sum(const float* lanes) { return sum_lanes<float>(load(lanes)); }

}  // namespace

namespace H2O_ISA {
const VectorFunctions vector_functions = {
    kLanes<float>,
    exponential_of<float>,
    exponential_of<double>,
    widen_all<at::Half>,
    widen_all<at::BFloat16>,
    narrow_all<at::Half>,
    narrow_all<at::BFloat16>,
    load_first<float>,
    load_first<at::Half>,
    load_first<at::BFloat16>,
    sum,
};
}  // namespace H2O_ISA
