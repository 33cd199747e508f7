#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "llm/decoder.h"
#include "llm/decoder_cache.h"
#include "llm/decoder_config.h"

namespace h2o::llm {

struct GenerateOptions {
  CacheOptions cache;
  int64_t max_new_tokens = 128;  // of each row, >= 1
  double temperature = 0.0;      // as Sampler
  double top_p = 1.0;
  int64_t seed = 0;  // of row 0; row r draws from seed + r
  bool ignore_eos = false;
  bool logprobs = false;
};

enum class FinishReason { kLength, kEos };
// "length" or "eos".
std::string_view to_string(FinishReason reason);

struct ChosenToken {
  int64_t row, index;  // index counts the new tokens of the row
  int64_t id;
  std::optional<double> logprob;  // natural, of the model's own distribution, if it was asked for
};

// What is told while generate() runs; each may be empty.
struct GenerateEvents {
  std::function<void(int64_t tokens, int64_t of)> prefill = {};  // prompt tokens that have passed
  std::function<void(const ChosenToken&)> token = {};
  std::function<void(int64_t row, FinishReason)> end = {};
  std::function<void(const DecoderCache&)> cache = {};  // after the prefill and after every step
};

struct GenerateResult {
  std::vector<std::vector<int64_t>> tokens;  // new ones, of each row
  std::vector<FinishReason> finish_reasons;
  double prefill_s = 0;              // seconds until the first tokens are chosen
  std::vector<double> step_ms;       // milliseconds of every later step, choice of tokens included
  std::vector<int64_t> tokens_kept;  // as DecoderCache has them at the end
  int64_t kv_bytes = 0;
};

// Throws std::invalid_argument where an argument is out of range or the model has no position for
// so many tokens. The model itself need not be loaded.
void check_request(const DecoderConfig& config, const std::vector<std::vector<int64_t>>& prompts,
                   const GenerateOptions& options);

// Continues each of `prompts` (token ids, at least one each) until an end-of-text token or
// max_new_tokens. Rows of different lengths run together, and none differs from what it would be
// alone; one that has ended is padding. A streaming prefill cuts every row at the same places as if
// it were alone. Throws what check_request() does, before anything runs.
GenerateResult generate(Decoder& decoder, const DecoderConfig& config,
                        const std::vector<std::vector<int64_t>>& prompts,
                        const GenerateOptions& options, const at::TensorOptions& tensor_options,
                        const GenerateEvents& events = {});

}  // namespace h2o::llm
