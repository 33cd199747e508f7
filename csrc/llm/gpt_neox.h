#pragma once

#include <vector>

#include "llm/decoder.h"
#include "llm/layers.h"
#include "llm/weights.h"

namespace h2o::llm {

// GPT-NeoX (Black et al., arXiv 2204.06745), of which Pythia is one, as in transformers'
// GPTNeoXForCausalLM.
class GptNeoX : public Decoder {
 public:
  GptNeoX(const DecoderConfig& config, const Weights& weights);

  at::Tensor forward(const Tokens& tokens, DecoderCache& cache) override;
  at::Tensor logits(const at::Tensor& hidden) const override;

 private:
  struct Layer {
    LayerNorm input_norm;
    Linear query_key_value, dense;
    LayerNorm post_attention_norm;
    Linear h_to_4h, four_h_to_h;
  };

  DecoderConfig config_;
  at::Tensor embedding_;  // [vocab_size, hidden_size]
  std::vector<Layer> layers_;
  LayerNorm final_norm_;
  Linear head_;
  Rotary rotary_;
};

}  // namespace h2o::llm
