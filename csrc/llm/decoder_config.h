#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// What a Hugging Face folder's config.json says of a decoder, with transformers' defaults for what
// it leaves out.
namespace h2o::llm {

enum class Architecture { kLlama, kOpt, kGptNeoX };

// The functions between the two matrices of a feed-forward block.
enum class Activation { kRelu, kGelu, kGeluTanh, kSilu };

// Rotary position embeddings (Su et al., arXiv 2104.09864): the angle of pair i at position p is
// p * theta ** (-2 i / rotary_dim), but for the rules by which a model was stretched.
struct RopeConfig {
  enum class Scaling {
    kNone,
    kLinear,  // every angle divided by `factor`
    kLlama3,  // the slow ones divided by `factor`, the fast ones not, those between by degrees
  };

  double theta = 10000.0;
  int64_t rotary_dim = 0;  // elements of a head that are rotated, even; the others stay as they are
  Scaling scaling = Scaling::kNone;
  double factor = 1.0;
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  int64_t original_max_positions = 8192;                 // llama3
};

struct DecoderConfig {
  Architecture architecture = Architecture::kLlama;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t embedding_size = 0;  // hidden_size, but for OPT models with projections around the layers
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_q_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t max_positions = 0;  // tokens of a sequence that the model was made for
  double norm_eps = 1e-5;
  Activation activation = Activation::kSilu;
  RopeConfig rope;                     // LLaMA and GPT-NeoX
  bool attention_bias = false;         // on all four projections of attention
  bool mlp_bias = false;               // on those of the feed-forward block
  bool tied_embeddings = false;        // the output matrix is the embedding
  bool norm_first = true;              // OPT: before each block; false: after its residual sum
  bool final_norm = true;              // OPT: a norm after the last layer
  bool norm_weights = true;            // OPT: norms have weights
  bool parallel_residual = false;      // GPT-NeoX: both blocks read the layer's input
  std::string dtype = "float32";       // that the weights were made in
  std::vector<int64_t> eos_token_ids;  // those that end a text
};

// Of the text of config.json; `name` opens every message. Throws std::invalid_argument where a key
// is missing, has the wrong type or a value out of range, and where the model is none of the three
// or asks for what is not built (sliding windows, other rope scalings, other activations).
DecoderConfig parse_decoder_config(std::string_view text, const std::string& name);

// Of a model folder: config.json, but eos_token_id of generation_config.json where that file has
// one. A file that cannot be read throws std::system_error.
DecoderConfig load_decoder_config(const std::filesystem::path& folder);

}  // namespace h2o::llm
