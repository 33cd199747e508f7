#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <memory>

#include "llm/decoder_cache.h"
#include "llm/decoder_config.h"

namespace h2o::llm {

// The tokens of one forward. A row that has fewer than the others is padded, anywhere.
struct Tokens {
  at::Tensor ids;         // [batch, n], int64
  at::Tensor positions;   // [batch, n], int64, increasing along a row; -1 = padding
  int64_t num_positions;  // above every position
};

// A language model without its KV cache, which it is given: weights and what is done with them.
class Decoder {
 public:
  virtual ~Decoder() = default;

  // The last layer's hidden states, [batch, n, hidden_size]; `cache` takes the tokens in.
  virtual at::Tensor forward(const Tokens& tokens, DecoderCache& cache) = 0;
  // Of the next token, [..., vocab_size], from hidden states [..., hidden_size].
  virtual at::Tensor logits(const at::Tensor& hidden) const = 0;
};

// The decoder in a Hugging Face model folder. Throws std::system_error where a file cannot be read,
// std::invalid_argument where weights and config do not agree.
std::unique_ptr<Decoder> load_decoder(const std::filesystem::path& folder,
                                      const DecoderConfig& config, at::ScalarType dtype,
                                      at::Device device);

}  // namespace h2o::llm
