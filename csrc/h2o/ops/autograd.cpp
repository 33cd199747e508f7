// What autograd sees of the operators. They are for inference: a backward pass through them raises
// instead of giving wrong gradients, and autograd learns which tensors were written, so that it
// notices when it needed one of them.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <vector>

namespace h2o {
namespace {

void count_writes(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) written.push_back((*stack)[first + i].toTensor());
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const at::Tensor& tensor : written) {
    // Tensors made under inference_mode have no version; autograd refuses to save them anyway.
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(h2o, Autograd, m) {
  for (const char* name : {"h2o_attention_decode", "h2o_evict", "h2o_prefill_select"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

TORCH_LIBRARY_IMPL(h2o, ADInplaceOrView, m) {
  for (const char* name : {"h2o_attention_decode", "h2o_evict"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&count_writes>());
  }
}

}  // namespace h2o
