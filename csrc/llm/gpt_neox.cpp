#include "llm/gpt_neox.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>

namespace h2o::llm {

GptNeoX::GptNeoX(const DecoderConfig& config, const Weights& weights)
    : config_(config),
      embedding_(weights.take("gpt_neox.embed_in.weight", {config.vocab_size, config.hidden_size})),
      final_norm_(LayerNorm::load(weights, "gpt_neox.final_layer_norm", config.hidden_size,
                                  config.norm_eps)),
      rotary_(config.rope, embedding_.scalar_type(), embedding_.device()) {
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const bool bias = config.attention_bias, mlp_bias = config.mlp_bias;
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const std::string layer = "gpt_neox.layers." + std::to_string(i) + ".";
    layers_.push_back({
        .input_norm = LayerNorm::load(weights, layer + "input_layernorm", hidden, config.norm_eps),
        .query_key_value =
            Linear::load(weights, layer + "attention.query_key_value", 3 * hidden, hidden, bias),
        .dense = Linear::load(weights, layer + "attention.dense", hidden, hidden, bias),
        .post_attention_norm =
            LayerNorm::load(weights, layer + "post_attention_layernorm", hidden, config.norm_eps),
        .h_to_4h = Linear::load(weights, layer + "mlp.dense_h_to_4h", inner, hidden, mlp_bias),
        .four_h_to_h = Linear::load(weights, layer + "mlp.dense_4h_to_h", hidden, inner, mlp_bias),
    });
  }
  head_ = load_head(weights, "embed_out", embedding_, config.tied_embeddings);
}

at::Tensor GptNeoX::forward(const Tokens& tokens, DecoderCache& cache) {
  rotary_.reserve(tokens.num_positions);
  const auto mlp = [&](const Layer& layer, const at::Tensor& input) {
    const at::Tensor normed = layer.post_attention_norm(input);
    return layer.four_h_to_h(activate(config_.activation, layer.h_to_4h(normed)));
  };
  at::Tensor x = at::embedding(embedding_, tokens.ids);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    // Each head's query, key and value lie side by side.
    const auto qkv = split_heads(layer.query_key_value(layer.input_norm(x)), 3 * config_.head_dim)
                         .chunk(3, /*dim=*/-1);
    const at::Tensor q = rotary_(qkv[0], tokens.positions), k = rotary_(qkv[1], tokens.positions);
    const at::Tensor attention =
        layer.dense(merge_heads(cache.attend(i, q, k, qkv[2], tokens.positions)));
    if (config_.parallel_residual) {
      x = mlp(layer, x) + attention + x;
    } else {
      x = attention + x;
      x = mlp(layer, x) + x;
    }
  }
  return x;
}

at::Tensor GptNeoX::logits(const at::Tensor& hidden) const { return head_(final_norm_(hidden)); }

}  // namespace h2o::llm
