// Stands in for CUDA's <cuda_fp16.h>: the type is torch's, and arithmetic is done in float.
#pragma once

#include <c10/util/Half.h>

using __half = c10::Half;
using half = c10::Half;

inline float __half2float(half x) { return x; }
inline half __float2half(float x) { return x; }
inline half __float2half_rn(float x) { return x; }
