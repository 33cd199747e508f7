#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "h2o/eviction_policy.h"
#include "h2o/export.h"

// The settings of one run, read from JSON. configs/schema.json and docs/config.md describe every
// key; the defaults below are what a key that is left out means.
namespace h2o {

// How the prompt enters the cache: all of it with full attention and one selection at the end, or
// in chunks that are evicted as they come.
enum class Prefill : int32_t { kOneShot, kStreaming };

// "one_shot" or "streaming".
H2O_API std::string_view to_string(Prefill prefill);

struct ModelConfig {
  std::optional<std::string> name =
      std::nullopt;               // folder, hub id or GGUF file; none = the default model
  std::string dtype = "float32";  // or "float16", "bfloat16", "float64", "auto"

  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

inline constexpr int64_t kMaxThreads = 1024;

struct RunConfig {
  Prefill prefill = Prefill::kOneShot;
  int64_t prefill_chunk = 64;    // tokens, >= 1; what a streaming prefill takes at a time
  int64_t max_new_tokens = 128;  // tokens, >= 1
  int64_t seed = 0;              // >= 0
  double temperature = 0.0;      // >= 0; 0 = greedy
  double top_p = 1.0;            // 0 < top_p <= 1
  std::string device = "auto";   // or "cpu", "cuda", "cuda:<index>"
  std::optional<int64_t> threads =
      std::nullopt;  // CPU threads, 1..kMaxThreads; none = PyTorch's choice

  friend bool operator==(const RunConfig&, const RunConfig&) = default;
};

struct Config {
  ModelConfig model;
  // A fifth of the prompt, the paper's setting: half of it for heavy hitters, half for recent
  // tokens.
  EvictionPolicy policy{EvictionPolicyOptions{.heavy_ratio = 0.1, .recent_ratio = 0.1}};
  RunConfig run;

  friend bool operator==(const Config&, const Config&) = default;
};

// Reads JSON text; `name` (a file's, as a rule) opens every message. Throws std::invalid_argument
// on a syntax error, an unknown or repeated key, a wrong type or a value out of range.
H2O_API Config parse_config(std::string_view text, const std::string& name);

// parse_config of a file; one that cannot be read throws std::system_error.
H2O_API Config load_config(const std::filesystem::path& path);

// The path of every key that parse_config knows, e.g. "policy.heavy.ratio".
H2O_API std::vector<std::string> known_config_keys();

}  // namespace h2o
