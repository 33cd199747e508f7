#include "llm/llama.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>

namespace h2o::llm {

Llama::Llama(const DecoderConfig& config, const Weights& weights)
    : config_(config),
      embedding_(
          weights.take("model.embed_tokens.weight", {config.vocab_size, config.hidden_size})),
      norm_(RmsNorm::load(weights, "model.norm", config.hidden_size, config.norm_eps)),
      rotary_(config.rope, embedding_.scalar_type(), embedding_.device()) {
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const int64_t q_size = config.num_q_heads * config.head_dim,
                kv_size = config.num_kv_heads * config.head_dim;
  const bool bias = config.attention_bias, mlp_bias = config.mlp_bias;
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    const std::string attention = layer + "self_attn.", mlp = layer + "mlp.";
    layers_.push_back({
        .input_norm = RmsNorm::load(weights, layer + "input_layernorm", hidden, config.norm_eps),
        .q = Linear::load(weights, attention + "q_proj", q_size, hidden, bias),
        .k = Linear::load(weights, attention + "k_proj", kv_size, hidden, bias),
        .v = Linear::load(weights, attention + "v_proj", kv_size, hidden, bias),
        .o = Linear::load(weights, attention + "o_proj", hidden, q_size, bias),
        .post_attention_norm =
            RmsNorm::load(weights, layer + "post_attention_layernorm", hidden, config.norm_eps),
        .gate = Linear::load(weights, mlp + "gate_proj", inner, hidden, mlp_bias),
        .up = Linear::load(weights, mlp + "up_proj", inner, hidden, mlp_bias),
        .down = Linear::load(weights, mlp + "down_proj", hidden, inner, mlp_bias),
    });
  }
  head_ = config.tied_embeddings
              ? Linear{embedding_, {}}
              : Linear::load(weights, "lm_head", config.vocab_size, hidden, false);
}

at::Tensor Llama::forward(const Tokens& tokens, DecoderCache& cache) {
  rotary_.reserve(tokens.num_positions);
  at::Tensor x = at::embedding(embedding_, tokens.ids);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    at::Tensor normed = layer.input_norm(x);
    const at::Tensor q = rotary_(split_heads(layer.q(normed), config_.head_dim), tokens.positions);
    const at::Tensor k = rotary_(split_heads(layer.k(normed), config_.head_dim), tokens.positions);
    const at::Tensor v = split_heads(layer.v(normed), config_.head_dim);
    x = x + layer.o(merge_heads(cache.attend(i, q, k, v, tokens.positions)));

    normed = layer.post_attention_norm(x);
    x = x + layer.down(activate(config_.activation, layer.gate(normed)) * layer.up(normed));
  }
  return x;
}

at::Tensor Llama::logits(const at::Tensor& hidden) const { return head_(norm_(hidden)); }

}  // namespace h2o::llm
