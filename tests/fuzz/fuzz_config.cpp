#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

#include "h2o/config.h"
#include "require.h"

// Any bytes are a config or std::invalid_argument, and a config keeps to configs/schema.json.
namespace {

using Json = nlohmann::json;

bool one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_count(int64_t count, int64_t lowest) { return count >= lowest && count <= h2o::kMaxTokens; }

void check_schema(const h2o::Config& config) {
  require(!config.model.name || !config.model.name->empty(), "model.name is empty");
  require(one_of(config.model.dtype, {"auto", "float32", "float16", "bfloat16", "float64"}),
          "model.dtype");
  const h2o::RunConfig& run = config.run;
  require(is_count(run.prefill_chunk, 1), "run.prefill_chunk");
  require(is_count(run.max_new_tokens, 1), "run.max_new_tokens");
  require(run.seed >= 0, "run.seed");
  require(run.temperature >= 0.0, "run.temperature");
  require(run.top_p > 0.0 && run.top_p <= 1.0, "run.top_p");
  require(one_of(run.device, {"auto", "cpu", "cuda"}) || run.device.starts_with("cuda:"),
          "run.device");
  require(!run.threads || (*run.threads >= 1 && *run.threads <= 1024), "run.threads");
  require(config.policy.resolve(0).total() >= 1, "the budget of no prompt");
  require(config.policy.resolve(h2o::kMaxTokens).total() >= 1, "the budget of a long prompt");
}

template <typename Count, typename Ratio>
Json size_or_ratio(const Count& count, const Ratio& ratio) {
  return count ? Json{{"size", *count}} : Json{{"ratio", *ratio}};
}

// The config as a file that leaves nothing out.
Json written(const h2o::Config& config) {
  const h2o::EvictionPolicyOptions& policy = config.policy.options();
  const h2o::RunConfig& run = config.run;
  return {
      {"model",
       {{"name", config.model.name ? Json(*config.model.name) : Json()},
        {"dtype", config.model.dtype}}},
      {"policy",
       {{"num_sink", policy.num_sink},
        {"heavy", size_or_ratio(policy.num_heavy, policy.heavy_ratio)},
        {"recent", size_or_ratio(policy.num_recent, policy.recent_ratio)},
        {"gqa_reduce", h2o::to_string(policy.gqa_reduce)}}},
      {"run",
       {{"prefill", h2o::to_string(run.prefill)},
        {"prefill_chunk", run.prefill_chunk},
        {"max_new_tokens", run.max_new_tokens},
        {"seed", run.seed},
        {"temperature", run.temperature},
        {"top_p", run.top_p},
        {"device", run.device},
        {"threads", run.threads ? Json(*run.threads) : Json()}}},
  };
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const h2o::Config config = h2o::parse_config(text, "fuzz.json");
    check_schema(config);
    require(h2o::parse_config(written(config).dump(), "written.json") == config,
            "a config that is written and read again is another");
  } catch (const std::invalid_argument& error) {
    require(std::string_view(error.what()).starts_with("fuzz.json: "),
            "a message that does not open with the file");
  }
  return 0;
}
