#include <stdexcept>
#include <string>
#include <vector>

#include "h2o/json.h"
#include "llm/decoder_config.h"
#include "test_helpers.h"

namespace {

using h2o::Json;
using h2o::llm::Activation;
using h2o::llm::Architecture;
using h2o::llm::DecoderConfig;
using h2o::llm::RopeConfig;

const Json kLlama = {{"model_type", "llama"},    {"vocab_size", 100},
                     {"hidden_size", 64},        {"num_hidden_layers", 2},
                     {"num_attention_heads", 4}, {"intermediate_size", 96}};
const Json kOpt = {{"model_type", "opt"},    {"vocab_size", 100},        {"hidden_size", 64},
                   {"num_hidden_layers", 2}, {"num_attention_heads", 4}, {"ffn_dim", 96}};
const Json kGptNeoX = {{"model_type", "gpt_neox"}, {"vocab_size", 100},
                       {"hidden_size", 64},        {"num_hidden_layers", 2},
                       {"num_attention_heads", 4}, {"intermediate_size", 96}};

// `base` with the keys of `changes`; one that is null is left out.
Json with(Json base, const Json& changes) {
  base.merge_patch(changes);
  return base;
}

DecoderConfig parse(const Json& json) {
  return h2o::llm::parse_decoder_config(json.dump(), "config.json");
}

void check_refused(const Json& json, const std::string& message) {
  CAPTURE(message);
  CHECK_THROWS_AS(parse(json), std::invalid_argument);
  CHECK_THROWS_WITH(parse(json), "config.json: " + message);
}

}  // namespace

TEST_CASE("what a LLaMA config leaves out is transformers' default", "[decoder_config]") {
  const DecoderConfig config = parse(kLlama);
  CHECK(config.architecture == Architecture::kLlama);
  CHECK(config.num_kv_heads == 4);
  CHECK(config.head_dim == 16);
  CHECK(config.max_positions == 2048);
  CHECK(config.norm_eps == 1e-6);
  CHECK(config.activation == Activation::kSilu);
  CHECK_FALSE(config.attention_bias);
  CHECK_FALSE(config.mlp_bias);
  CHECK_FALSE(config.tied_embeddings);
  CHECK(config.dtype == "float32");
  CHECK(config.eos_token_ids == std::vector<int64_t>{2});
  CHECK(config.rope.theta == 10000.0);
  CHECK(config.rope.rotary_dim == 16);
  CHECK(config.rope.scaling == RopeConfig::Scaling::kNone);
}

TEST_CASE("what an OPT and a GPT-NeoX config leave out is transformers' default",
          "[decoder_config]") {
  const DecoderConfig opt = parse(kOpt);
  CHECK(opt.architecture == Architecture::kOpt);
  CHECK(opt.embedding_size == 64);
  CHECK(opt.intermediate_size == 96);
  CHECK((opt.attention_bias && opt.mlp_bias && opt.tied_embeddings));
  CHECK((opt.norm_first && opt.final_norm && opt.norm_weights));
  CHECK(opt.activation == Activation::kRelu);
  CHECK_FALSE(parse(with(kOpt, {{"do_layer_norm_before", false}})).final_norm);
  const DecoderConfig neox = parse(kGptNeoX);
  CHECK(neox.architecture == Architecture::kGptNeoX);
  CHECK((neox.attention_bias && neox.mlp_bias && neox.parallel_residual));
  CHECK_FALSE(neox.tied_embeddings);
  CHECK(neox.activation == Activation::kGelu);
  CHECK(neox.rope.rotary_dim == 4);
  CHECK(parse(with(kGptNeoX, {{"rotary_pct", 1.0}, {"rotary_emb_base", 500}})).rope.rotary_dim ==
        16);
  CHECK(parse(with(kGptNeoX, {{"rotary_emb_base", 500}})).rope.theta == 500.0);
  CHECK(parse(with(kGptNeoX, {{"rope_theta", 500}})).rope.theta ==
        10000.0);  // another model's name
}

TEST_CASE("rotary positions are read as transformers 5 and 4 write them", "[decoder_config]") {
  const Json llama3 = {{"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}};
  const Json new_form = with(
      kLlama, {{"rope_parameters", with(llama3, {{"rope_type", "llama3"}, {"rope_theta", 5e5}})}});
  const Json old_form =
      with(kLlama, {{"rope_theta", 5e5}, {"rope_scaling", with(llama3, {{"type", "llama3"}})}});
  for (const Json& json : {new_form, old_form}) {
    const RopeConfig rope = parse(json).rope;
    CHECK(rope.scaling == RopeConfig::Scaling::kLlama3);
    CHECK(rope.theta == 5e5);
    CHECK(rope.factor == 8.0);
    CHECK(rope.high_freq_factor == 4.0);
    CHECK(rope.original_max_positions == 8192);
  }
  // Of both, rope_scaling; an empty one is none.
  const Json linear = {{"type", "linear"}, {"factor", 2.0}};
  Json both = with(kLlama, {{"rope_parameters", {{"rope_theta", 7.0}}}, {"rope_scaling", linear}});
  CHECK(parse(both).rope.scaling == RopeConfig::Scaling::kLinear);
  CHECK(parse(both).rope.theta == 10000.0);
  both["rope_scaling"] = Json::object();
  CHECK(parse(both).rope.scaling == RopeConfig::Scaling::kNone);
  CHECK(parse(both).rope.theta == 7.0);
  check_refused(with(kLlama, {{"rope_scaling", {{"type", "linear"}}}}),
                "rope_scaling.factor must be given, got none");
  check_refused(with(kLlama, {{"rope_scaling", {{"type", "dynamic"}, {"factor", 2}}}}),
                R"(rope_scaling.type must be one of "default", "linear", "llama3", got "dynamic")");
  check_refused(with(kLlama, {{"rope_parameters", with(llama3, {{"rope_type", "llama3"},
                                                                {"high_freq_factor", 0.5}})}}),
                "rope_parameters.high_freq_factor must be above low_freq_factor, got 0.5");
  check_refused(with(kLlama, {{"rope_theta", 1e300}}),
                "rope_theta must be a number > 0, got 1e+300");
  check_refused(with(kGptNeoX, {{"rotary_pct", 0.1}}),
                "partial_rotary_factor must be such that an even number of a head's 16 elements is "
                "rotated, got 0.100000");
  check_refused(with(kLlama, {{"partial_rotary_factor", 0.5}}),
                "partial_rotary_factor must be 1 in a LLaMA model, got 8 of 16 elements of a head");
}

TEST_CASE("tokens that end a text are one, several or none", "[decoder_config]") {
  CHECK(parse(with(kLlama, {{"eos_token_id", 7}})).eos_token_ids == std::vector<int64_t>{7});
  CHECK(parse(with(kLlama, {{"eos_token_id", {7, 9}}})).eos_token_ids ==
        std::vector<int64_t>{7, 9});
  CHECK(h2o::llm::parse_decoder_config(
            with(kLlama, {{"x", 1}}).dump().insert(1, R"("eos_token_id": null, )"), "config.json")
            .eos_token_ids.empty());
  check_refused(with(kLlama, {{"eos_token_id", "7"}}),
                R"(eos_token_id must be an integer >= 0 or a list of them, got "7")");
  check_refused(with(kLlama, {{"eos_token_id", {7, -1}}}),
                "eos_token_id must be an integer >= 0 or a list of them, got -1");
}

TEST_CASE("a decoder config that is wrong or not built is refused", "[decoder_config]") {
  CHECK_THROWS_WITH(h2o::llm::parse_decoder_config("[]", "c"),
                    "c: the top level must be an object, got an array");
  check_refused(with(kLlama, {{"model_type", nullptr}}), "model_type must be given, got none");
  check_refused(with(kLlama, {{"model_type", "mamba"}}),
                R"(model_type must be one of "llama", "opt", "gpt_neox", got "mamba")");
  check_refused(with(kLlama, {{"vocab_size", nullptr}}), "vocab_size must be given, got none");
  for (const Json& size :
       {Json(0), Json(-1), Json(2.0), Json("64"), Json(4294967296), Json(18446744073709551615U)}) {
    check_refused(with(kLlama, {{"hidden_size", size}}),
                  "hidden_size must be an integer from 1 to 2147483647, got " + size.dump());
  }
  check_refused(with(kLlama, {{"num_attention_heads", 5}}),
                "hidden_size must be a multiple of num_attention_heads, got 64 and 5");
  CHECK(parse(with(kLlama, {{"num_attention_heads", 5}, {"head_dim", 10}})).head_dim == 10);
  check_refused(with(kLlama, {{"num_key_value_heads", 3}}),
                "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3");
  check_refused(with(kLlama, {{"attention_bias", 1}}),
                "attention_bias must be true or false, got 1");
  check_refused(with(kLlama, {{"rms_norm_eps", 0}}), "rms_norm_eps must be a number > 0, got 0");
  check_refused(with(kLlama, {{"hidden_act", 3}}), "hidden_act must be a string, got 3");
  check_refused(with(kLlama, {{"rope_scaling", 3}}), "rope_scaling must be an object, got 3");
  check_refused(
      with(kLlama, {{"dtype", "float8"}}),
      R"(dtype must be one of "float32", "float16", "bfloat16", "float64", got "float8")");
  CHECK(parse(with(kLlama, {{"torch_dtype", "bfloat16"}})).dtype == "bfloat16");
}

TEST_CASE("only a LLaMA model has heads of another size than the hidden state gives",
          "[decoder_config]") {
  CHECK(parse(with(kLlama, {{"num_attention_heads", 5}, {"head_dim", 8}})).head_dim == 8);
  for (const Json& other : {kOpt, kGptNeoX}) {
    CHECK(parse(with(other, {{"head_dim", 8}})).head_dim == 16);
    check_refused(with(other, {{"num_attention_heads", 5}, {"head_dim", 8}}),
                  "hidden_size must be a multiple of num_attention_heads, got 64 and 5");
  }
}
