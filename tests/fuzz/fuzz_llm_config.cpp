#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string_view>

#include "llm/decoder_config.h"
#include "require.h"

// Any bytes are a model's config.json or std::invalid_argument, and what is read is a model that
// can be built.
namespace {

using h2o::llm::Architecture;
using h2o::llm::DecoderConfig;

void check_model(const DecoderConfig& config) {
  for (const int64_t size : {config.vocab_size, config.hidden_size, config.embedding_size,
                             config.intermediate_size, config.num_layers, config.num_q_heads,
                             config.num_kv_heads, config.head_dim, config.max_positions}) {
    require(size >= 1 && size <= std::numeric_limits<int32_t>::max(), "a size out of range");
  }
  require(config.num_q_heads % config.num_kv_heads == 0, "query heads without a KV head");
  require(config.architecture == Architecture::kLlama ||
              config.num_q_heads * config.head_dim == config.hidden_size,
          "heads that are not the hidden state's");
  require(static_cast<float>(config.norm_eps) > 0.0F, "norm_eps");
  for (const int64_t id : config.eos_token_ids) require(id >= 0, "a negative token");
  if (config.architecture == Architecture::kOpt) return;
  const h2o::llm::RopeConfig& rope = config.rope;
  require(rope.rotary_dim >= 2 && rope.rotary_dim <= config.head_dim && rope.rotary_dim % 2 == 0,
          "rotary_dim");
  require(rope.theta > 0.0 && rope.factor > 0.0, "rope");
  require(rope.scaling != h2o::llm::RopeConfig::Scaling::kLlama3 ||
              (rope.high_freq_factor > rope.low_freq_factor && rope.low_freq_factor > 0.0 &&
               rope.original_max_positions >= 1),
          "llama3 scaling");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    check_model(h2o::llm::parse_decoder_config(text, "fuzz.json"));
  } catch (const std::invalid_argument& error) {
    require(std::string_view(error.what()).starts_with("fuzz.json: "),
            "a message that does not open with the file");
  }
  return 0;
}
