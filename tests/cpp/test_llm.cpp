// Decoders, sampling and generation; tests/python/test_h2o_generate.py compares them with
// transformers.
#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "llm/decoder.h"
#include "llm/generate.h"
#include "llm/layers.h"
#include "llm/sampler.h"
#include "llm/token_file.h"
#include "llm/weights.h"
#include "test_helpers.h"

namespace {

using namespace h2o::llm;
using Rows = std::vector<std::vector<int64_t>>;

const std::filesystem::path kModels = H2O_TEST_MODELS;

struct Model {
  explicit Model(const std::string& name)
      : config(load_decoder_config(kModels / name)),
        decoder(load_decoder(kModels / name, config, at::kFloat, at::kCPU)) {
    config.eos_token_ids.clear();
  }

  GenerateResult run(const Rows& prompts, const GenerateOptions& options,
                     const GenerateEvents& events = {}) const {
    return generate(*decoder, config, prompts, options, at::TensorOptions(at::kFloat), events);
  }

  DecoderConfig config;
  std::unique_ptr<Decoder> decoder;
};

std::vector<int64_t> prompt(int64_t length, int64_t seed) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < length; ++i) ids.push_back(3 + (i * i * 7 + seed * 31 + i) % 500);
  return ids;
}

GenerateOptions options(int64_t new_tokens, h2o::Prefill prefill) {
  GenerateOptions options;
  options.cache.policy = h2o::EvictionPolicy({.num_heavy = 6, .num_recent = 5, .num_sink = 1});
  options.cache.prefill = prefill;
  options.cache.prefill_chunk = 7;
  options.max_new_tokens = new_tokens;
  return options;
}

// The positions of every layer after every step.
Rows kept_positions(const DecoderCache& cache, int64_t row) {
  Rows kept;
  for (const h2o::KVCache& layer : cache.layers()) {
    const at::Tensor sorted = std::get<0>(layer.positions[row].sort(-1)).flatten().to(at::kLong);
    kept.emplace_back(sorted.data_ptr<int64_t>(), sorted.data_ptr<int64_t>() + sorted.numel());
  }
  return kept;
}

// A folder that is gone when the test is over.
class TemporaryFolder {
 public:
  TemporaryFolder()
      : path_(std::filesystem::temp_directory_path() /
              ("h2o_test_llm_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
  }

 private:
  std::filesystem::path path_;
};

// A .safetensors file of float32 tensors [n], all bytes of whose header are given: an odd number of
// them puts the data where no float32 may lie.
std::string safetensors(const std::string& header, const std::vector<float>& values) {
  std::string file;
  for (size_t i = 0; i < 8; ++i) file += static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  return file + header +
         std::string(reinterpret_cast<const char*>(values.data()), 4 * values.size());
}

}  // namespace

TEST_CASE("a row of a batch is what it is alone, whatever the threads", "[llm]") {
  const Model model(GENERATE("tiny_opt", "tiny_gpt_neox"));
  const auto prefill = GENERATE(h2o::Prefill::kOneShot, h2o::Prefill::kStreaming);
  const Rows prompts = {prompt(40, 1), prompt(3, 2), prompt(25, 3)};
  const GenerateOptions settings = options(9, prefill);
  std::vector<std::vector<Rows>> together(prompts.size());
  const auto result =
      model.run(prompts, settings, {.cache = [&](const DecoderCache& cache) {
                  for (size_t row = 0; row < prompts.size(); ++row) {
                    together[row].push_back(kept_positions(cache, static_cast<int64_t>(row)));
                  }
                }});
  const int threads = at::get_num_threads();
  at::set_num_threads(threads == 1 ? 2 : 1);
  for (size_t row = 0; row < prompts.size(); ++row) {
    CAPTURE(row);
    std::vector<Rows> alone;
    const auto single = model.run(
        {prompts[row]}, settings,
        {.cache = [&](const DecoderCache& cache) { alone.push_back(kept_positions(cache, 0)); }});
    CHECK(single.tokens[0] == result.tokens[row]);
    CHECK(alone == together[row]);
  }
  at::set_num_threads(threads);
  CHECK(result.step_ms.size() == 8);
  CHECK(result.tokens_kept ==
        std::vector<int64_t>(static_cast<size_t>(model.config.num_layers), 12));
}

TEST_CASE("with room for all, both prefills and the full cache say the same", "[llm]") {
  const Model model(GENERATE("tiny_opt", "tiny_gpt_neox"));
  const Rows prompts = {prompt(30, 4), prompt(11, 5)};
  GenerateOptions full = options(12, h2o::Prefill::kOneShot);
  full.cache.policy.reset();
  const auto expected = model.run(prompts, full);
  for (const auto prefill : {h2o::Prefill::kOneShot, h2o::Prefill::kStreaming}) {
    GenerateOptions ample = options(12, prefill);
    ample.cache.policy = h2o::EvictionPolicy({.num_heavy = 50, .num_recent = 14});
    CHECK(model.run(prompts, ample).tokens == expected.tokens);
  }
  CHECK(std::set<int64_t>(expected.tokens[0].begin(), expected.tokens[0].end()).size() > 3);
  CHECK(model.run(prompts, options(12, h2o::Prefill::kOneShot)).tokens != expected.tokens);
}

TEST_CASE("a cache has no more slots than there are tokens", "[llm]") {
  const Model model("tiny_opt");
  GenerateOptions settings = options(4, h2o::Prefill::kOneShot);
  settings.cache.policy = h2o::EvictionPolicy({.num_heavy = 1'000'000'000, .num_recent = 5});
  GenerateOptions full = settings;
  full.cache.policy.reset();
  const auto result = model.run({prompt(30, 4)}, settings),
             expected = model.run({prompt(30, 4)}, full);
  CHECK(result.tokens == expected.tokens);
  CHECK(result.kv_bytes == expected.kv_bytes);

  // Beside a ratio each part is held to that by itself.
  settings.cache.policy =
      h2o::EvictionPolicy({.num_heavy = 10'000, .num_sink = 2, .recent_ratio = 0.1});
  const auto mixed = model.run({prompt(30, 4), prompt(9, 5)}, settings);
  CHECK(mixed.tokens[0] == expected.tokens[0]);
  CHECK(mixed.kv_bytes < 4 * expected.kv_bytes);
}

TEST_CASE("a cache that memory cannot hold is refused", "[llm]") {
  const Model model("tiny_gpt_neox");
  GenerateOptions settings = options(2'000'000'000, h2o::Prefill::kOneShot);
  settings.cache.policy.reset();
  std::string message;
  try {
    model.run({prompt(3, 1)}, settings);
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CHECK(message.find(
            "the KV cache must fit into memory, got 2000000003 slots of each layer and row, ") !=
        std::string::npos);
}

TEST_CASE("weights come from files", "[llm]") {
  const TemporaryFolder folder;
  REQUIRE(mkfifo((folder.path() / "model.safetensors").c_str(), 0600) == 0);
  CHECK_THROWS_WITH(Weights(folder.path(), at::kFloat, at::kCPU),
                    (folder.path() / "model.safetensors").string() + ": must be a file");
}

TEST_CASE("a streaming prefill is cut in a row's own chunks across calls", "[llm]") {
  // Longer than one call of the layers, with a chunk that does not divide it.
  const Model model("tiny_gpt_neox");
  const Rows prompts = {prompt(700, 6), prompt(20, 7)};
  std::vector<int64_t> calls;
  const auto result =
      model.run(prompts, options(3, h2o::Prefill::kStreaming),
                {.prefill = [&](int64_t tokens, int64_t) { calls.push_back(tokens); }});
  CHECK(calls == std::vector<int64_t>{511, 700});
  CHECK(model.run({prompts[1]}, options(3, h2o::Prefill::kStreaming)).tokens[0] ==
        result.tokens[1]);
}

TEST_CASE("rows end by a token or by length, each for itself", "[llm]") {
  Model model("tiny_opt");
  const Rows prompts = {prompt(20, 1), prompt(9, 2)};
  GenerateOptions settings = options(10, h2o::Prefill::kOneShot);
  settings.cache.policy.reset();
  const auto free = model.run(prompts, settings);
  const auto& others = free.tokens[1];
  const auto first = std::find_if(free.tokens[0].begin(), free.tokens[0].end(), [&](int64_t token) {
    return std::find(others.begin(), others.end(), token) == others.end();
  });
  REQUIRE(first < free.tokens[0].end() - 1);
  const int64_t end = *first;
  model.config.eos_token_ids = {end};
  std::vector<std::pair<int64_t, FinishReason>> ends;
  const auto result =
      model.run(prompts, settings,
                {.end = [&](int64_t row, FinishReason reason) { ends.emplace_back(row, reason); }});
  CHECK(result.tokens[0] == std::vector<int64_t>(free.tokens[0].begin(), first + 1));
  CHECK(result.tokens[1] == free.tokens[1]);
  CHECK((ends == std::vector<std::pair<int64_t, FinishReason>>{{0, FinishReason::kEos},
                                                               {1, FinishReason::kLength}}));
  settings.ignore_eos = true;
  CHECK(model.run(prompts, settings).tokens == free.tokens);
}

TEST_CASE("generate refuses what it cannot run before it runs", "[llm]") {
  const Model model("tiny_opt");
  const auto refused = [&](const Rows& prompts, const std::function<void(GenerateOptions&)>& change,
                           const std::string& message) {
    GenerateOptions settings = options(4, h2o::Prefill::kOneShot);
    change(settings);
    CAPTURE(message);
    CHECK_THROWS_AS(model.run(prompts, settings), std::invalid_argument);
    CHECK_THROWS_WITH(model.run(prompts, settings), "generate: " + message);
  };
  const auto nothing = [](GenerateOptions&) {};
  const std::string vocabulary = std::to_string(model.config.vocab_size - 1);
  refused({}, nothing, "prompts must have at least one row, got 0");
  refused({{5}, {}}, nothing, "prompts[1] must have at least one token, got 0");
  refused({{5, -1}}, nothing, "prompts[0] must have tokens from 0 to " + vocabulary + ", got -1");
  refused({{5, 512}}, nothing, "prompts[0] must have tokens from 0 to " + vocabulary + ", got 512");
  refused(
      {{5}}, [](GenerateOptions& o) { o.max_new_tokens = 0; },
      "max_new_tokens must be from 1 to 2147483646, got 0");
  refused({prompt(510, 1)}, nothing,
          "prompts[0] and max_new_tokens must need at most 512 positions, which is all that the "
          "model has, got 513");
  refused(
      {{5}}, [](GenerateOptions& o) { o.cache.prefill_chunk = 0; },
      "prefill_chunk must be >= 1, got 0");
  refused(
      {{5}}, [](GenerateOptions& o) { o.temperature = -1; },
      "temperature must be >= 0, got -1.000000");
  refused(
      {{5}}, [](GenerateOptions& o) { o.top_p = 0; }, "top_p must be > 0 and <= 1, got 0.000000");
}

TEST_CASE("a sampler is greedy at 0 and draws from the nucleus by its seed", "[llm]") {
  const at::Tensor logits = at::tensor({0.0, 2.0, 1.0, -30.0}, at::kFloat);
  CHECK(Sampler(0.0, 1.0, 1).choose(logits) == 1);
  CHECK(Sampler(1e-300, 1.0, 1).choose(logits) == 1);
  CHECK(Sampler(5.0, 0.1, 1).choose(logits) == 1);  // the first always stays
  std::vector<int> counts(4);
  Sampler sampler(1.0, 1.0, 7);
  for (int i = 0; i < 4000; ++i) ++counts[static_cast<size_t>(sampler.choose(logits))];
  const double sum = 1 + std::exp(1.0) + std::exp(2.0);
  CHECK(counts[0] == Approx(4000 / sum).margin(100));
  CHECK(counts[1] == Approx(4000 * std::exp(2.0) / sum).margin(120));
  CHECK(counts[3] == 0);
  std::set<int64_t> nucleus;
  Sampler narrow(1.0, 0.9, 7);  // 0.665 + 0.245 reach it
  for (int i = 0; i < 300; ++i) nucleus.insert(narrow.choose(logits));
  CHECK(nucleus == std::set<int64_t>{1, 2});
  std::vector<int64_t> first, second;
  Sampler a(1.0, 1.0, 3), b(1.0, 1.0, 3);
  for (int i = 0; i < 50; ++i) {
    first.push_back(a.choose(logits));
    second.push_back(b.choose(logits));
  }
  CHECK(first == second);
}

TEST_CASE("a rotary table grows and keeps its angles", "[llm]") {
  RopeConfig config;
  config.theta = 100.0;
  config.rotary_dim = 4;
  Rotary rotary(config, at::kFloat, at::kCPU);
  rotary.reserve(3);
  rotary.reserve(40);
  const at::Tensor x = at::tensor({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, at::kFloat).view({1, 1, 1, 6});
  const at::Tensor y = rotary(x, at::full({1, 1}, 37, at::kLong)).flatten();
  for (int pair = 0; pair < 2; ++pair) {
    const double angle = 37 * std::pow(100.0, -pair / 2.0);
    const double a = 1 + pair, b = 3 + pair;
    CHECK(y[pair].item<double>() == Approx(a * std::cos(angle) - b * std::sin(angle)).margin(1e-4));
    CHECK(y[pair + 2].item<double>() ==
          Approx(b * std::cos(angle) + a * std::sin(angle)).margin(1e-4));
  }
  CHECK(y[4].item<double>() == 5.0);  // beyond rotary_dim
  CHECK(at::equal(rotary(x, at::full({1, 1}, -1, at::kLong)), at::zeros_like(x)));
}

TEST_CASE("the matrices of one input are applied as one", "[llm]") {
  const TemporaryFolder folder;
  folder.write("model.safetensors",
               safetensors(R"({"a.weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
                           R"("b.weight":{"dtype":"F32","shape":[1,2],"data_offsets":[16,24]},)"
                           R"("a.bias":{"dtype":"F32","shape":[2],"data_offsets":[24,32]},)"
                           R"("b.bias":{"dtype":"F32","shape":[1],"data_offsets":[32,36]}})",
                           {1, 2, 3, 4, 5, 6, 10, 20, 30}));
  const Weights weights(folder.path(), at::kFloat, at::kCPU);
  const Linear linear = Linear::load(weights, {"a", "b"}, {2, 1}, 2, true);
  const at::Tensor y = linear(at::tensor({1.0, -1.0}, at::kFloat).view({1, 2}));
  CHECK(at::equal(y, at::tensor({9.0, 19.0, 29.0}, at::kFloat).view({1, 3})));
}

TEST_CASE("weights are read where they lie, and copied where they cannot", "[llm]") {
  const TemporaryFolder folder;
  const std::string header = R"({"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}})";
  for (const std::string& padding : {std::string(), std::string(" "), std::string("   ")}) {
    CAPTURE(padding.size());
    folder.write("model.safetensors", safetensors(header + padding, {1.5F, -2.0F, 3.0F}));
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      const Weights weights(folder.path(), dtype, at::kCPU);
      const at::Tensor w = weights.take("w", {3});
      weights.drop_pages();  // what is used again is read again
      CHECK(w.scalar_type() == dtype);
      CHECK(at::equal(w.to(at::kFloat), at::tensor({1.5, -2.0, 3.0}, at::kFloat)));
    }
  }
  const Weights weights(folder.path(), at::kFloat, at::kCPU);
  CHECK(weights.has("w"));
  CHECK_FALSE(weights.has("v"));
  CHECK_THROWS_WITH(
      weights.take("v", {3}),
      folder.path().string() + ": the weights must have v, in floating point, got none");
  CHECK_THROWS_WITH(weights.take("w", {4}),
                    folder.path().string() + ": w must be [4] by config.json, got [3]");
}

TEST_CASE("an index names the files of its folder", "[llm]") {
  const TemporaryFolder folder;
  const std::string index = (folder.path() / "model.safetensors.index.json").string();
  const auto refused = [&](const std::string& text, const std::string& message) {
    folder.write("model.safetensors.index.json", text);
    CHECK_THROWS_WITH(Weights(folder.path(), at::kFloat, at::kCPU), index + ": " + message);
  };
  refused("[]", "weight_map must be an object, got none");
  refused(R"({"weight_map": 3})", "weight_map must be an object, got 3");
  for (const char* file : {"\"\"", "\"../a\"", "3"}) {
    refused(
        std::string(R"({"weight_map": {"w": )") + file + "}}",
        std::string("weight_map of \"w\" must be the name of a file in the folder, got ") + file);
  }
  folder.write("model.safetensors.index.json", R"({"weight_map": {"w": "a.safetensors"}})");
  CHECK_THROWS_AS(Weights(folder.path(), at::kFloat, at::kCPU), std::system_error);
  folder.write("a.safetensors",
               safetensors(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", {7}));
  CHECK(Weights(folder.path(), at::kFloat, at::kCPU).take("w", {1}).item<float>() == 7.0F);
  // A model that was saved whole over its shards leaves the index.
  folder.write("model.safetensors",
               safetensors(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", {8}));
  CHECK(Weights(folder.path(), at::kFloat, at::kCPU).take("w", {1}).item<float>() == 8.0F);
}

TEST_CASE("a token file is an object, rows or one row", "[llm]") {
  CHECK(parse_token_file(R"({"tokens": [[1, 2], [3]], "text": "x"})", "t") == Rows{{1, 2}, {3}});
  CHECK(parse_token_file("[[1, 2], [3]]", "t") == Rows{{1, 2}, {3}});
  CHECK(parse_token_file("[1, 2]", "t") == Rows{{1, 2}});
  CHECK_THROWS_WITH(parse_token_file("[[1], [2, 4294967296]]", "t"),
                    "t: tokens[1][1] must be a token id, an integer >= 0, got 4294967296");
}
