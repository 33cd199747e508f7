// The operators are for inference: a backward pass through them raises instead of giving wrong
// gradients.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "h2o/ops/registration.h"

static const h2o::Registration registration(c10::DispatchKey::Autograd, [](torch::Library& m) {
  for (const char* name :
       {"h2o_attention_decode", "h2o_evict", "h2o_prefill_select", "h2o_rotate"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
});
