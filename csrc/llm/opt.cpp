#include "llm/opt.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>

namespace h2o::llm {
namespace {

constexpr int64_t kPositionOffset = 2;  // the table's first rows are for padding

}  // namespace

Opt::Opt(const DecoderConfig& config, const Weights& weights) : config_(config) {
  // Checkpoints of the hub were saved with the model's own prefix and without.
  const std::string root =
      weights.has("model.decoder.embed_tokens.weight") ? "model.decoder." : "decoder.";
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size,
                narrow = config.embedding_size;
  const auto norm = [&](const std::string& name) {
    return LayerNorm::load(weights, name, hidden, config.norm_eps, config.norm_weights);
  };
  embedding_ = weights.take(root + "embed_tokens.weight", {config.vocab_size, narrow});
  position_embedding_ = weights.take(root + "embed_positions.weight",
                                     {config.max_positions + kPositionOffset, hidden});
  if (narrow != hidden) {
    project_in_ = Linear::load(weights, root + "project_in", hidden, narrow, false);
    project_out_ = Linear::load(weights, root + "project_out", narrow, hidden, false);
  }
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const std::string layer = root + "layers." + std::to_string(i) + ".";
    const std::string attention = layer + "self_attn.";
    layers_.push_back({
        .attention_norm = norm(layer + "self_attn_layer_norm"),
        .qkv = Linear::load(weights,
                            {attention + "q_proj", attention + "k_proj", attention + "v_proj"},
                            {hidden, hidden, hidden}, hidden, config.attention_bias),
        .out = Linear::load(weights, attention + "out_proj", hidden, hidden, config.attention_bias),
        .mlp_norm = norm(layer + "final_layer_norm"),
        .fc1 = Linear::load(weights, layer + "fc1", inner, hidden, config.mlp_bias),
        .fc2 = Linear::load(weights, layer + "fc2", hidden, inner, config.mlp_bias),
    });
  }
  if (config.final_norm) final_norm_ = norm(root + "final_layer_norm");
  head_ = load_head(weights, "lm_head", embedding_, config.tied_embeddings);
}

at::Tensor Opt::forward(const Tokens& tokens, DecoderCache& cache) {
  at::Tensor x = at::embedding(embedding_, tokens.ids);
  if (project_in_) x = (*project_in_)(x);
  x = x + at::embedding(position_embedding_, tokens.positions + kPositionOffset);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const bool first = config_.norm_first;
    at::Tensor normed = first ? layer.attention_norm(x) : x;
    const auto qkv = split_heads(layer.qkv(normed), config_.head_dim).chunk(3, /*dim=*/1);
    const at::Tensor attention = cache.attend(i, qkv[0], qkv[1], qkv[2], tokens.positions);
    x = x + layer.out(merge_heads(attention));
    if (!first) x = layer.attention_norm(x);

    normed = first ? layer.mlp_norm(x) : x;
    x = x + layer.fc2(activate(config_.activation, layer.fc1(normed)));
    if (!first) x = layer.mlp_norm(x);
  }
  return x;
}

at::Tensor Opt::logits(const at::Tensor& hidden) const {
  at::Tensor x = final_norm_ ? (*final_norm_)(hidden) : hidden;
  if (project_out_) x = (*project_out_)(x);
  return head_(x);
}

}  // namespace h2o::llm
