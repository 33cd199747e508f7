// The C++ API from outside: versions, and errors that are caught by their types.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <h2o/h2o.h>

#include <iostream>
#include <stdexcept>
#include <string_view>

#if !H2O_VERSION_AT_LEAST(H2O_VERSION_MAJOR, H2O_VERSION_MINOR, H2O_VERSION_PATCH) ||    \
    !H2O_VERSION_AT_LEAST(0, 0, 999) ||                                                  \
    H2O_VERSION_AT_LEAST(H2O_VERSION_MAJOR, H2O_VERSION_MINOR, H2O_VERSION_PATCH + 1) || \
    H2O_VERSION_AT_LEAST(H2O_VERSION_MAJOR, H2O_VERSION_MINOR + 1, 0) ||                 \
    H2O_VERSION_AT_LEAST(H2O_VERSION_MAJOR + 1, 0, 0)
#error "H2O_VERSION_AT_LEAST"
#endif

namespace {

template <typename Error, typename Call>
bool throws(const char* words, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    if (std::string_view(error.what()).find(words) != std::string_view::npos) return true;
    std::cerr << "another message: " << error.what() << '\n';
  }
  std::cerr << "expected an error that says: " << words << '\n';
  return false;
}

}  // namespace

int main() {
  const h2o::EvictionPolicy policy({.num_heavy = 2, .num_recent = 2});
  const auto cache = h2o::KVCache::allocate(1, 1, 4, 8, at::kFloat);
  const at::Tensor token = at::zeros({1, 1, 1, 8}), position = at::full({1, 1}, 0, at::kLong);
  const bool passed =
      std::string_view(h2o::library_version()) == h2o::version() &&
      throws<std::invalid_argument>(
          "num_heavy", [] { h2o::EvictionPolicy({.num_heavy = -1, .num_recent = 2}); }) &&
      throws<c10::Error>("query must be",
                         [&] {
                           h2o::attention_decode(at::zeros({1, 1, 8}), cache, token, token,
                                                 position, policy);
                         }) &&
      throws<c10::ValueError>("chunk must be >= 1", [&] {
        h2o::attention_decode(token, cache, token, token, position, policy, {.chunk = 0});
      });
  if (passed) std::cout << "h2o " << h2o::library_version() << ": errors arrive by their types\n";
  return passed ? 0 : 1;
}
