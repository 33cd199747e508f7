// Runs the layer that export_decode_layer.py compiled, on a cache of this program's, and compares
// each step with what Python wrote down.
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <h2o/h2o.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace {

c10::impl::GenericDict read_tensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, path, " cannot be read");
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  return torch::jit::pickle_load(bytes).toGenericDict();
}

void run(const std::string& folder) {
  const auto written = read_tensors(folder + "/expected.pt");
  const auto expected = [&](const char* name) { return written.at(name).toTensor(); };
  const at::Tensor hidden = expected("hidden"), position = expected("position");

  const at::Tensor k_cache = expected("k_cache");
  const auto cache = h2o::KVCache::allocate(k_cache.size(0), k_cache.size(1), k_cache.size(2),
                                            k_cache.size(3), k_cache.options());
  torch::inductor::AOTIModelPackageLoader layer(folder + "/decode_layer.pt2");
  for (int64_t step = 0; step < hidden.size(0); ++step) {
    const auto results = layer.run({hidden[step], position[step], cache.k_cache, cache.v_cache,
                                    cache.scores, cache.positions});
    TORCH_CHECK(at::allclose(results.at(0), expected("output")[step], 1e-4, 1e-5),
                "another output than in Python at step ", step);
    TORCH_CHECK(at::equal(results.at(1), expected("evicted")[step]),
                "another token evicted than in Python at step ", step);
  }
  TORCH_CHECK(at::equal(cache.positions, expected("positions")), "other tokens kept");
  TORCH_CHECK(at::allclose(cache.k_cache, k_cache, 1e-4, 1e-5), "other keys");
  TORCH_CHECK(at::allclose(cache.v_cache, expected("v_cache"), 1e-4, 1e-5), "other values");
  TORCH_CHECK(at::allclose(cache.scores, expected("scores"), 1e-4, 1e-5), "other scores");
  std::cout << hidden.size(0) << " steps as in Python: row 0, head 0 keeps "
            << cache.cache_len()[0][0].item<int64_t>() << " of " << hidden.size(0) << " tokens\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: " << argv[0] << " FOLDER (that export_decode_layer.py wrote)\n";
    return 2;
  }
  try {
    run(argv[1]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
