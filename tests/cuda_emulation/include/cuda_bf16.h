// Stands in for CUDA's <cuda_bf16.h>: the type is torch's, and arithmetic is done in float.
#pragma once

#include <c10/util/BFloat16.h>

using __nv_bfloat16 = c10::BFloat16;
using nv_bfloat16 = c10::BFloat16;

inline float __bfloat162float(nv_bfloat16 x) { return x; }
inline nv_bfloat16 __float2bfloat16(float x) { return x; }
inline nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
