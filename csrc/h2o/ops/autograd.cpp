// The operators are for inference: a backward pass through them raises instead of giving wrong
// gradients.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

TORCH_LIBRARY_IMPL(h2o, Autograd, m) {
  for (const char* name : {"h2o_attention_decode", "h2o_evict", "h2o_prefill_select"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}
