#include <cstdint>
#include <stdexcept>
#include <string>

#include "llm/decoder_config.h"
#include "test_helpers.h"

namespace {

using h2o::llm::parse_decoder_config;

std::string config(const std::string& model_type, const std::string& more) {
  return R"({"model_type": ")" + model_type + R"(", "vocab_size": 9, "hidden_size": 24,
             "intermediate_size": 4, "ffn_dim": 4, "num_hidden_layers": 1, )" +
         more + "}";
}

}  // namespace

TEST_CASE("only a LLaMA model has heads of another size than the hidden state gives",
          "[decoder_config]") {
  const std::string five = R"("num_attention_heads": 5, "head_dim": 8)",
                    three = R"("num_attention_heads": 3, "head_dim": 16)";
  CHECK(parse_decoder_config(config("llama", five), "config.json").head_dim == 8);
  const std::string other = GENERATE("opt", "gpt_neox");
  CAPTURE(other);
  CHECK(parse_decoder_config(config(other, three), "config.json").head_dim == 8);
  CHECK_THROWS_AS(parse_decoder_config(config(other, five), "config.json"), std::invalid_argument);
  CHECK_THROWS_WITH(
      parse_decoder_config(config(other, five), "config.json"),
      "config.json: hidden_size must be a multiple of num_attention_heads, got 24 and 5");
}
