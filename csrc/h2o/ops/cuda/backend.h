#pragma once

#include "h2o/ops/calls.h"

// The operators on CUDA, behind their checks: on the current stream of the tensors' device, without
// a copy to the host, so that a CUDA graph can hold them.
namespace h2o::cuda {

DecodeOutputs attention_decode(const DecodeCall& call);
at::Tensor evict(const EvictCall& call);
SelectOutputs prefill_select(const SelectCall& call);
at::Tensor rotate(const RotateCall& call);

}  // namespace h2o::cuda
