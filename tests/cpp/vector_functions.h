#pragma once

#include <cstdint>

// The functions of kernels/cpu/vector.h as one instruction set compiles them, over arrays. Counts
// are multiples of `lanes` unless said otherwise.
struct VectorFunctions {
  int64_t lanes;  // of float
  void (*exponential)(const float* from, int64_t count, float* to);
  void (*exponential_double)(const double* from, int64_t count, double* to);
  // Any count:
  void (*widen_float16)(const uint16_t* from, int64_t count, float* to);
  void (*widen_bfloat16)(const uint16_t* from, int64_t count, float* to);
  void (*narrow_float16)(const float* from, int64_t count, uint16_t* to);
  void (*narrow_bfloat16)(const float* from, int64_t count, uint16_t* to);
  // count <= 2 * lanes; 2 * lanes floats are written:
  void (*load_first_float)(const void* from, int64_t count, float* to);
  void (*load_first_float16)(const void* from, int64_t count, float* to);
  void (*load_first_bfloat16)(const void* from, int64_t count, float* to);
  float (*sum_lanes)(const float* lanes);
};

// Those that vector_functions_isa.cpp defines; which of them this CPU can run is for the caller to
// ask.
namespace baseline {
extern const VectorFunctions vector_functions;
}
#if defined(H2O_X86)
namespace avx2 {
extern const VectorFunctions vector_functions;
}
namespace avx512 {
extern const VectorFunctions vector_functions;
}
namespace avx512_bf16 {
extern const VectorFunctions vector_functions;
}
#endif
