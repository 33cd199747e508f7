#include "h2o/ops/registration.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

namespace h2o {
namespace {

// Asked first while this copy is being loaded, before it has registered anything.
bool is_first_copy() {
  static const bool first = [] {
    const bool found =
        c10::Dispatcher::singleton().findSchema({"h2o::h2o_attention_decode", ""}).has_value();
    if (found) {
      TORCH_WARN(
          "libh2o: another copy of the library has registered torch.ops.h2o in this process; this "
          "copy "
          "registers nothing");
    }
    return !found;
  }();
  return first;
}

}  // namespace

Registration::Registration(std::optional<c10::DispatchKey> key, void (*fill)(torch::Library&)) {
  if (!is_first_copy()) return;
  library_.emplace(key ? torch::Library::IMPL : torch::Library::DEF, "h2o", key, __FILE__,
                   __LINE__);
  fill(*library_);
}

}  // namespace h2o
