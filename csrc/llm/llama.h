#pragma once

#include <vector>

#include "llm/decoder.h"
#include "llm/layers.h"
#include "llm/weights.h"

namespace h2o::llm {

// LLaMA (Touvron et al., arXiv 2302.13971) with grouped-query attention, as in transformers'
// LlamaForCausalLM.
class Llama : public Decoder {
 public:
  Llama(const DecoderConfig& config, const Weights& weights);

  at::Tensor forward(const Tokens& tokens, DecoderCache& cache) override;
  at::Tensor logits(const at::Tensor& hidden) const override;

 private:
  struct Layer {
    RmsNorm input_norm;
    Linear qkv, o;
    RmsNorm post_attention_norm;
    Linear gate_up, down;
  };

  DecoderConfig config_;
  at::Tensor embedding_;  // [vocab_size, hidden_size]
  std::vector<Layer> layers_;
  RmsNorm norm_;
  Linear head_;
  Rotary rotary_;
};

}  // namespace h2o::llm
