#pragma once

#include "h2o/ops/calls.h"

// The operators on the CPU, behind their checks.
namespace h2o::cpu {

DecodeOutputs attention_decode(const DecodeCall& call);
at::Tensor evict(const EvictCall& call);
SelectOutputs prefill_select(const SelectCall& call);
at::Tensor rotate(const RotateCall& call);
// See RollingKernels.
at::Tensor rank(const at::Tensor& positions);

}  // namespace h2o::cpu
