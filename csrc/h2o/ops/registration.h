#pragma once

#include <torch/library.h>

#include <optional>

namespace h2o {

// Registers operators (no key) or kernels (a key) with the dispatcher while the library is loaded:
// what TORCH_LIBRARY and TORCH_LIBRARY_IMPL do, but a second copy of the library in one process
// registers nothing and says so, where theirs would end the process.
class Registration {
 public:
  Registration(std::optional<c10::DispatchKey> key, void (*fill)(torch::Library&));

 private:
  std::optional<torch::Library> library_;
};

}  // namespace h2o
