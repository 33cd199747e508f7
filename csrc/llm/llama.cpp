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
        .qkv = Linear::load(weights,
                            {attention + "q_proj", attention + "k_proj", attention + "v_proj"},
                            {q_size, kv_size, kv_size}, hidden, bias),
        .o = Linear::load(weights, attention + "o_proj", hidden, q_size, bias),
        .post_attention_norm =
            RmsNorm::load(weights, layer + "post_attention_layernorm", hidden, config.norm_eps),
        .gate_up = Linear::load(weights, {mlp + "gate_proj", mlp + "up_proj"}, {inner, inner},
                                hidden, mlp_bias),
        .down = Linear::load(weights, mlp + "down_proj", hidden, inner, mlp_bias),
    });
  }
  head_ = load_head(weights, "lm_head", embedding_, config.tied_embeddings);
}

at::Tensor Llama::forward(const Tokens& tokens, DecoderCache& cache) {
  rotary_.reserve(tokens.num_positions);
  const int64_t q_heads = config_.num_q_heads, kv_heads = config_.num_kv_heads;
  at::Tensor x = at::embedding(embedding_, tokens.ids);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const at::Tensor qkv = split_heads(layer.qkv(layer.input_norm(x)), config_.head_dim);
    const at::Tensor qk = rotary_(qkv.narrow(1, 0, q_heads + kv_heads), tokens.positions);
    const at::Tensor attention =
        cache.attend(i, qk.narrow(1, 0, q_heads), qk.narrow(1, q_heads, kv_heads),
                     qkv.narrow(1, q_heads + kv_heads, kv_heads), tokens.positions);
    x = x + layer.o(merge_heads(attention));

    const auto gate_up = layer.gate_up(layer.post_attention_norm(x)).chunk(2, /*dim=*/-1);
    x = x + layer.down(activate(config_.activation, gate_up[0]) * gate_up[1]);
  }
  return x;
}

at::Tensor Llama::logits(const at::Tensor& hidden) const { return head_(norm_(hidden)); }

}  // namespace h2o::llm
