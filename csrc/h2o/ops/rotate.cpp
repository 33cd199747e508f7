#include "h2o/ops/rotate.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include "h2o/ops/calls.h"
#include "h2o/ops/registration.h"

namespace h2o {
namespace {

at::Tensor rotate_meta(const RotateCall& call) {
  return at::empty_symint(call.input.sym_sizes(), call.input.options());
}

}  // namespace

at::Tensor rotate(const at::Tensor& input, const at::Tensor& index, const at::Tensor& cos,
                  const at::Tensor& sin) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("h2o::h2o_rotate", "")
                             .typed<decltype(rotate_entry<rotate_meta>)>();
  return op.call(input, index, cos, sin);
}

static const Registration registration(c10::DispatchKey::Meta, [](torch::Library& m) {
  m.impl("h2o_rotate", &rotate_entry<rotate_meta>);
});

}  // namespace h2o
