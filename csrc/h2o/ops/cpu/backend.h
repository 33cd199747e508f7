#pragma once

#include "h2o/ops/calls.h"

// The operators on the CPU, behind their checks.
namespace h2o::cpu {

DecodeOutputs attention_decode(const DecodeCall& call);
at::Tensor evict(const EvictCall& call);
SelectOutputs prefill_select(const SelectCall& call);

}  // namespace h2o::cpu
