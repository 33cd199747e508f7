#pragma once

#include "h2o/ops/calls.h"

// Steps that attend to a part of what the cache holds: each query head reads the slots of the
// highest logits (Top-K), or whole pages of slots by the bound that the extremes of their keys give
// (Quest, arXiv 2406.10774, section 3.2). Nothing leaves for it that the budget lets stay.
namespace h2o {

// Whether the tokens of a call join one by one and do not read everything. With a greater chunk all
// attend to all, also one that is left alone.
bool reads_sparsely(const DecodeCall& call);

// Such a call, out of ATen's operators and the device's own `evict`, without a copy to the host.
DecodeOutputs decode_sparsely(const DecodeCall& call, at::Tensor (*evict)(const EvictCall&));

}  // namespace h2o
