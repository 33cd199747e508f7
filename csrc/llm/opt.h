#pragma once

#include <optional>
#include <vector>

#include "llm/decoder.h"
#include "llm/layers.h"
#include "llm/weights.h"

namespace h2o::llm {

// OPT (Zhang et al., arXiv 2205.01068), as in transformers' OPTForCausalLM.
class Opt : public Decoder {
 public:
  Opt(const DecoderConfig& config, const Weights& weights);

  at::Tensor forward(const Tokens& tokens, DecoderCache& cache) override;
  at::Tensor logits(const at::Tensor& hidden) const override;

 private:
  struct Layer {
    LayerNorm attention_norm;
    Linear qkv, out;
    LayerNorm mlp_norm;
    Linear fc1, fc2;
  };

  DecoderConfig config_;
  at::Tensor embedding_;           // [vocab_size, embedding_size]
  at::Tensor position_embedding_;  // [max_positions + 2, hidden_size]
  std::optional<Linear> project_in_, project_out_;
  std::vector<Layer> layers_;
  std::optional<LayerNorm> final_norm_;
  Linear head_;
};

}  // namespace h2o::llm
