// Looks torch.ops.h2o up in the dispatcher and calls one of its operators, naming nothing of h2o.
//
// Arguments, in turn: a file is loaded with dlopen; --global lets later ones see its symbols;
// --close unloads the newest.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <dlfcn.h>

#include <exception>
#include <iostream>
#include <string>
#include <vector>

namespace {

void load(const std::vector<std::string>& arguments) {
  int mode = RTLD_LOCAL;
  std::vector<void*> loaded;
  for (const std::string& argument : arguments) {
    if (argument == "--global") {
      mode = RTLD_GLOBAL;
    } else if (argument == "--close") {
      dlclose(loaded.back());
      loaded.pop_back();
    } else {
      loaded.push_back(dlopen(argument.c_str(), RTLD_NOW | mode));
      TORCH_CHECK(loaded.back(), dlerror());
    }
  }
}

void check_operators() {
  for (const char* name : {"h2o::h2o_attention_decode", "h2o::h2o_evict", "h2o::h2o_prefill_select",
                           "h2o::h2o_rotate"}) {
    const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
    TORCH_CHECK(op, name, " is not registered");
    for (const auto key :
         {c10::DispatchKey::CPU, c10::DispatchKey::Meta, c10::DispatchKey::Autograd}) {
      TORCH_CHECK(op->hasKernelForDispatchKey(key), name, " has no kernel for ", toString(key));
    }
  }
  const auto rotate = c10::Dispatcher::singleton()
                          .findSchemaOrThrow("h2o::h2o_rotate", "")
                          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                            const at::Tensor&)>();
  const at::Tensor turned =
      rotate.call(at::tensor({1.0F, 2.0F}).view({1, 1, 1, 2}), at::zeros({1, 1, 1}, at::kLong),
                  at::zeros({1, 1}), at::tensor({1.0F}).view({1, 1}));
  TORCH_CHECK(at::equal(turned.view(2), at::tensor({-2.0F, 1.0F})), "h2o_rotate gives ", turned);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    load({argv + 1, argv + argc});
    check_operators();
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  std::cout << "the operators are there and work\n";
}
