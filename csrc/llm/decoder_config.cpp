#include "llm/decoder_config.h"

#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "h2o/json.h"

namespace h2o::llm {
namespace {

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();  // of any dimension of a model

// Keys of one object of the file. Keys that nothing here asks for are left alone, since config.json
// has many; one that is null counts as left out, as in transformers.
class Keys {
 public:
  Keys(const std::string& file, std::string path, const Json& object)
      : file_(file), path_(std::move(path)), object_(object) {
    if (!object.is_object()) {
      throw std::invalid_argument(file_ + ": " + (path_.empty() ? "the top level" : path_) +
                                  " must be an object, got " + shown(object));
    }
  }

  [[noreturn]] void fail(const std::string& key, const std::string& rule,
                         const std::string& got) const {
    throw std::invalid_argument(file_ + ": " + joined(path_, key) + " must be " + rule + ", got " +
                                got);
  }

  // Whether it is there, null or not.
  bool has(const std::string& key) const { return object_.contains(key); }
  // Null where it is left out.
  const Json* find(const std::string& key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  std::optional<int64_t> integer(const std::string& key, int64_t lowest) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    const bool fits = value->is_number_integer() && value->get<int64_t>() >= lowest &&
                      value->get<int64_t>() <= kMaxSize;
    if (!fits) {
      fail(key, "an integer from " + std::to_string(lowest) + " to " + std::to_string(kMaxSize),
           shown(*value));
    }
    return value->get<int64_t>();
  }

  int64_t size(const std::string& key) const {
    const auto value = integer(key, 1);
    if (!value) fail(key, "given", "none");
    return *value;
  }

  std::optional<double> positive(const std::string& key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    // As float32, in which the angles are computed.
    const double number = value->is_number() ? value->get<double>() : 0.0;
    if (!(static_cast<float>(number) > 0.0F && std::isfinite(static_cast<float>(number)))) {
      fail(key, "a number > 0", shown(*value));
    }
    return number;
  }

  bool boolean(const std::string& key, bool otherwise) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) fail(key, "true or false", shown(*value));
    return value->get<bool>();
  }

  std::optional<std::string> text(const std::string& key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) fail(key, "a string", shown(*value));
    return value->get<std::string>();
  }

  // An object inside this one, by reference: the text lives as long as what was parsed.
  std::optional<Keys> section(const std::string& key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    return Keys(file_, joined(path_, key), *value);
  }

 private:
  const std::string& file_;
  std::string path_;
  const Json& object_;
};

// `name` among the names of `values`.
template <typename T, size_t n>
T choice(const Keys& keys, const std::string& key, const std::string& name,
         const std::array<std::pair<const char*, T>, n>& values) {
  std::array<std::string_view, n> names;
  for (size_t i = 0; i < n; ++i) {
    if (name == values[i].first) return values[i].second;
    names[i] = values[i].first;
  }
  keys.fail(key, "one of " + list_in_quotes(names), in_quotes(shortened(name)));
}

constexpr std::array<std::pair<const char*, Architecture>, 3> kArchitectures = {
    {{"llama", Architecture::kLlama},
     {"opt", Architecture::kOpt},
     {"gpt_neox", Architecture::kGptNeoX}}};

constexpr std::array<std::pair<const char*, Activation>, 6> kActivations = {
    {{"relu", Activation::kRelu},
     {"gelu", Activation::kGelu},
     {"gelu_new", Activation::kGeluTanh},
     {"gelu_fast", Activation::kGeluTanh},
     {"gelu_pytorch_tanh", Activation::kGeluTanh},
     {"silu", Activation::kSilu}}};

constexpr std::array<std::pair<const char*, RopeConfig::Scaling>, 3> kScalings = {
    {{"default", RopeConfig::Scaling::kNone},
     {"linear", RopeConfig::Scaling::kLinear},
     {"llama3", RopeConfig::Scaling::kLlama3}}};

// `rope_parameters` as transformers 5 writes it; before that, `rope_scaling` beside keys of the top
// level, whose names differ from model to model. Of both, transformers reads `rope_scaling`.
RopeConfig read_rope(const Keys& top, int64_t head_dim, const char* theta_key, const char* part_key,
                     double part) {
  const Json* scaling = top.find("rope_scaling");
  const bool is_old = scaling != nullptr && !scaling->empty();
  const std::optional<Keys> section = top.section(is_old ? "rope_scaling" : "rope_parameters");
  const Keys& keys = section ? *section : top;
  RopeConfig rope;
  rope.theta = top.positive(theta_key).value_or(rope.theta);
  part = top.positive(part_key).value_or(part);
  if (section) {
    rope.theta = keys.positive("rope_theta").value_or(rope.theta);
    part = keys.positive("partial_rotary_factor").value_or(part);
  }
  const double rotary_dim = std::floor(static_cast<double>(head_dim) * part);
  if (!(rotary_dim >= 2 && rotary_dim <= static_cast<double>(head_dim) &&
        std::fmod(rotary_dim, 2) == 0)) {
    keys.fail(
        "partial_rotary_factor",
        "such that an even number of a head's " + std::to_string(head_dim) + " elements is rotated",
        std::to_string(part));
  }
  rope.rotary_dim = static_cast<int64_t>(rotary_dim);
  if (!section) return rope;

  const char* type_key = keys.find("rope_type") != nullptr ? "rope_type" : "type";
  rope.scaling = choice(keys, type_key, keys.text(type_key).value_or("default"), kScalings);
  if (rope.scaling == RopeConfig::Scaling::kNone) return rope;
  const auto needed = [&](const char* key) {
    const auto value = keys.positive(key);
    if (!value) keys.fail(key, "given", "none");
    return *value;
  };
  rope.factor = needed("factor");
  if (rope.scaling == RopeConfig::Scaling::kLlama3) {
    rope.low_freq_factor = needed("low_freq_factor");
    rope.high_freq_factor = needed("high_freq_factor");
    rope.original_max_positions = keys.size("original_max_position_embeddings");
    if (!(rope.high_freq_factor > rope.low_freq_factor)) {
      keys.fail("high_freq_factor", "above low_freq_factor", shown(*keys.find("high_freq_factor")));
    }
  }
  return rope;
}

// One id, a list of them, or null for none.
std::vector<int64_t> read_eos(const Keys& keys, std::vector<int64_t> otherwise) {
  if (!keys.has("eos_token_id")) return otherwise;
  const Json* value = keys.find("eos_token_id");
  if (value == nullptr) return {};
  const Json list = value->is_array() ? *value : Json::array({*value});
  std::vector<int64_t> ids;
  for (const Json& id : list) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0) {
      keys.fail("eos_token_id", "an integer >= 0 or a list of them", shown(id));
    }
    ids.push_back(id.get<int64_t>());
  }
  return ids;
}

void read_llama(const Keys& keys, DecoderConfig& config) {
  config.intermediate_size = keys.size("intermediate_size");
  config.num_kv_heads = keys.integer("num_key_value_heads", 1).value_or(config.num_q_heads);
  config.head_dim = keys.integer("head_dim", 1).value_or(config.head_dim);
  config.norm_eps = keys.positive("rms_norm_eps").value_or(1e-6);
  config.attention_bias = keys.boolean("attention_bias", false);
  config.mlp_bias = keys.boolean("mlp_bias", false);
  config.tied_embeddings = keys.boolean("tie_word_embeddings", false);
  config.activation =
      choice(keys, "hidden_act", keys.text("hidden_act").value_or("silu"), kActivations);
  config.rope = read_rope(keys, config.head_dim, "rope_theta", "partial_rotary_factor", 1.0);
  if (config.rope.rotary_dim != config.head_dim) {  // transformers' LLaMA rotates all the same
    keys.fail("partial_rotary_factor", "1 in a LLaMA model",
              std::to_string(config.rope.rotary_dim) + " of " + std::to_string(config.head_dim) +
                  " elements of a head");
  }
  config.eos_token_ids = read_eos(keys, {2});
}

void read_opt(const Keys& keys, DecoderConfig& config) {
  config.intermediate_size = keys.size("ffn_dim");
  config.num_kv_heads = config.num_q_heads;
  config.embedding_size = keys.integer("word_embed_proj_dim", 1).value_or(config.hidden_size);
  config.norm_eps = 1e-5;
  config.attention_bias = config.mlp_bias = keys.boolean("enable_bias", true);
  config.tied_embeddings = keys.boolean("tie_word_embeddings", true);
  config.norm_first = keys.boolean("do_layer_norm_before", true);
  config.final_norm = config.norm_first && !keys.boolean("_remove_final_layer_norm", false);
  config.norm_weights = keys.boolean("layer_norm_elementwise_affine", true);
  config.activation = choice(keys, "activation_function",
                             keys.text("activation_function").value_or("relu"), kActivations);
  config.eos_token_ids = read_eos(keys, {2});
}

void read_gpt_neox(const Keys& keys, DecoderConfig& config) {
  config.intermediate_size = keys.size("intermediate_size");
  config.num_kv_heads = config.num_q_heads;
  config.norm_eps = keys.positive("layer_norm_eps").value_or(1e-5);
  config.attention_bias = keys.boolean("attention_bias", true);
  config.mlp_bias = true;
  config.tied_embeddings = keys.boolean("tie_word_embeddings", false);
  config.parallel_residual = keys.boolean("use_parallel_residual", true);
  config.activation =
      choice(keys, "hidden_act", keys.text("hidden_act").value_or("gelu"), kActivations);
  config.rope = read_rope(keys, config.head_dim, "rotary_emb_base", "rotary_pct", 0.25);
  config.eos_token_ids = read_eos(keys, {2});
}

// Both names of the key: transformers 5 writes the first.
std::string read_dtype(const Keys& keys) {
  for (const char* key : {"dtype", "torch_dtype"}) {
    const auto dtype = keys.text(key);
    if (!dtype) continue;
    constexpr std::array<std::pair<const char*, const char*>, 4> kDtypes = {
        {{"float32", "float32"},
         {"float16", "float16"},
         {"bfloat16", "bfloat16"},
         {"float64", "float64"}}};
    return choice(keys, key, *dtype, kDtypes);
  }
  return "float32";
}

}  // namespace

DecoderConfig parse_decoder_config(std::string_view text, const std::string& name) {
  const Json root = parse_json(text, name);
  const Keys keys(name, "", root);
  DecoderConfig config;
  const auto model_type = keys.text("model_type");
  if (!model_type) keys.fail("model_type", "given", "none");
  config.architecture = choice(keys, "model_type", *model_type, kArchitectures);
  config.vocab_size = keys.size("vocab_size");
  config.hidden_size = keys.size("hidden_size");
  config.embedding_size = config.hidden_size;
  config.num_layers = keys.size("num_hidden_layers");
  config.num_q_heads = keys.size("num_attention_heads");
  config.max_positions = keys.integer("max_position_embeddings", 1).value_or(2048);
  config.dtype = read_dtype(keys);
  const bool own_head_dim =
      config.architecture == Architecture::kLlama && keys.find("head_dim") != nullptr;
  if (!own_head_dim && config.hidden_size % config.num_q_heads != 0) {
    keys.fail("hidden_size", "a multiple of num_attention_heads",
              std::to_string(config.hidden_size) + " and " + std::to_string(config.num_q_heads));
  }
  config.head_dim = config.hidden_size / config.num_q_heads;
  switch (config.architecture) {
    case Architecture::kLlama:
      read_llama(keys, config);
      break;
    case Architecture::kOpt:
      read_opt(keys, config);
      break;
    case Architecture::kGptNeoX:
      read_gpt_neox(keys, config);
      break;
  }
  if (config.num_q_heads % config.num_kv_heads != 0) {
    keys.fail("num_attention_heads", "a multiple of num_key_value_heads",
              std::to_string(config.num_q_heads) + " and " + std::to_string(config.num_kv_heads));
  }
  return config;
}

DecoderConfig load_decoder_config(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "config.json";
  DecoderConfig config = parse_decoder_config(read_text_file(file), file.string());
  const std::filesystem::path generation = folder / "generation_config.json";
  if (std::filesystem::exists(generation)) {
    const std::string name = generation.string();
    const Json root = parse_json(read_text_file(generation), name);
    const Keys keys(name, "", root);
    // Null there leaves it to config.json.
    if (keys.find("eos_token_id") != nullptr) config.eos_token_ids = read_eos(keys, {});
  }
  return config;
}

}  // namespace h2o::llm
