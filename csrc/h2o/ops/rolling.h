#pragma once

#include "h2o/ops/calls.h"

// Position rolling: attention_decode on keys that are stored without rotation and rotated by their
// rank among the kept tokens in every step.
namespace h2o {

// What a device does in its own way.
struct RollingKernels {
  DecodeOutputs (*decode)(const DecodeCall&);
  // Rank of each position among those >= 0 of its (row, KV head), int32; -1 where it is negative.
  at::Tensor (*rank)(const at::Tensor& positions);
  at::Tensor (*rotate)(const RotateCall&);
  bool on_host;  // numbers in tensors can be looked at
};

// The step of a call with rope_cos and rope_sin.
DecodeOutputs decode_rolling(const DecodeCall& call, const RollingKernels& kernels);

// For devices that have nothing better: out of ATen's operators, without a copy to the host.
at::Tensor rank_by_sorting(const at::Tensor& positions);
at::Tensor rotate_by_gathering(const RotateCall& call);

}  // namespace h2o
