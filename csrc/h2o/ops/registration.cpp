#include "h2o/ops/registration.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include "h2o/version.h"

namespace h2o {
namespace {

// The file that this copy was loaded from: a shared library, or a program that has it built in.
const char* this_file() {
  static const char address = 0;
  Dl_info info;
  return dladdr(&address, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "?";
}

// Asked first while this copy is being loaded, before it has registered anything.
bool is_first_copy() {
  static const bool first = [] {
    const bool found =
        c10::Dispatcher::singleton().findSchema({"h2o::h2o_attention_decode", ""}).has_value();
    if (found) {
      TORCH_WARN(
          "libh2o: another copy of the library has registered torch.ops.h2o in this process; this "
          "copy, ",
          version(), " in ", this_file(), ", registers nothing");
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
