// Compiled once per instruction set, like attention_kernels_isa.cpp: nothing but the table leaves
// this file.
#include "h2o/kernels/cpu/vector.h"
#include "vector_functions.h"

namespace {

using namespace h2o::cpu;

template <typename A>
void exponential_of(const A* from, int64_t count, A* to) {
  for (int64_t i = 0; i < count; i += kLanes<A>) store<A>(to + i, exponential(load(from + i)));
}

template <typename T>
void widen_all(const uint16_t* from, int64_t count, float* to) {
  static_assert(sizeof(T) == sizeof(uint16_t));
  for (int64_t i = 0; i < count; i += kLanes<float>) {
    T lanes[kLanes<float>];
    __builtin_memcpy(lanes, from + i, sizeof(lanes));
    store<float>(to + i, load(lanes));
  }
}

template <typename T>
void narrow_all(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    narrow(from[i], &value);
    to[i] = value.bits;
  }
}

void load_first_float(const float* from, int64_t count, float* to) {
  store<float>(to, load_first(from, count));
}

void load_first_float16(const uint16_t* from, int64_t count, float* to) {
  Float16 values[kLanes<float>];
  for (int64_t i = 0; i < count; ++i) values[i].bits = from[i];
  store<float>(to, load_first(values, count));
}

float sum(const float* lanes) { return sum_lanes<float>(load(lanes)); }

}  // namespace

namespace H2O_ISA {
const VectorFunctions vector_functions = {
    kLanes<float>,          exponential_of<float>,
    exponential_of<double>, widen_all<Float16>,
    widen_all<BFloat16>,    narrow_all<Float16>,
    narrow_all<BFloat16>,   load_first_float,
    load_first_float16,     sum,
};
}  // namespace H2O_ISA
