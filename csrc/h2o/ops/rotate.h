#pragma once

#include <ATen/core/Tensor.h>

#include "h2o/export.h"

namespace h2o {

// Rotates vectors by angles, as rotary position embeddings do (Su et al., arXiv 2104.09864) in the
// layout of LLaMA and GPT-NeoX: with p pairs, the elements i and i + p of a vector are turned
// together by angle i, and elements from 2 * p on stay as they are. With sin negated it is undone.
// Goes through the dispatcher: torch.ops.h2o.h2o_rotate is the same.
//   input     [batch, heads, n, head_dim], float32, float16, bfloat16 or float64
//   index     [batch or 1, heads or 1, n], int32 or int64: by which row of cos and sin; negative =
//             the result is zeros
//   cos, sin  [num_angles, p], float32 (float64 for float64 vectors), 2 * p <= head_dim
// Returns a tensor as input, contiguous.
H2O_API at::Tensor rotate(const at::Tensor& input, const at::Tensor& index, const at::Tensor& cos,
                          const at::Tensor& sin);

}  // namespace h2o
