#include "llm/layers.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "h2o/ops/rotate.h"

namespace h2o::llm {
namespace {

// The operators by which torch.compile reaches oneDNN's own weight layouts; null where this PyTorch
// or this CPU has none for a dtype.
struct OneDnn {
  using Pack = at::Tensor(const at::Tensor&, std::optional<int64_t>);
  using Apply = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                           std::string_view, c10::List<std::optional<at::Scalar>>,
                           std::optional<std::string_view>);

  c10::TypedOperatorHandle<Pack> pack;
  c10::TypedOperatorHandle<Apply> apply;
  bool has_bfloat16;

  static const OneDnn* find() {
    static const std::optional<OneDnn> found = []() -> std::optional<OneDnn> {
      if (!at::hasMKLDNN()) return std::nullopt;
      try {
        auto& dispatcher = c10::Dispatcher::singleton();
        const auto has_bfloat16 =
            dispatcher.findSchemaOrThrow("mkldnn::_is_mkldnn_bf16_supported", "").typed<bool()>();
        return OneDnn{
            dispatcher.findSchemaOrThrow("mkldnn::_reorder_linear_weight", "").typed<Pack>(),
            dispatcher.findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Apply>(),
            has_bfloat16.call()};
      } catch (const c10::Error&) {  // not part of PyTorch's promises
        return std::nullopt;
      }
    }();
    return found ? &*found : nullptr;
  }

  bool serves(const at::Tensor& weight) const {
    const auto dtype = weight.scalar_type();
    return weight.is_cpu() && (dtype == at::kFloat || (dtype == at::kBFloat16 && has_bfloat16));
  }
};

// The slow angles divided by the factor, the fast ones as they are, and between them by degrees
// (The Llama 3 Herd of Models, arXiv 2407.21783; transformers' _compute_llama3_parameters).
at::Tensor stretch_llama3(const at::Tensor& frequencies, const RopeConfig& config) {
  const auto original = static_cast<double>(config.original_max_positions);
  const at::Tensor wavelength = 2 * std::numbers::pi / frequencies;
  const at::Tensor part = (original / wavelength - config.low_freq_factor) /
                          (config.high_freq_factor - config.low_freq_factor);
  const at::Tensor between = (1 - part) * frequencies / config.factor + part * frequencies;
  const at::Tensor slow = wavelength > original / config.low_freq_factor;
  const at::Tensor fast = wavelength < original / config.high_freq_factor;
  return at::where(slow, frequencies / config.factor, at::where(fast, frequencies, between));
}

}  // namespace

Linear::Linear(const at::Tensor& weight, const at::Tensor& bias) : weight_(weight) {
  if (bias.defined()) bias_ = bias;
  const OneDnn* onednn = OneDnn::find();
  packed_ = onednn != nullptr && onednn->serves(weight);
  if (packed_) weight_ = onednn->pack.call(weight, std::nullopt);
}

Linear Linear::load(const Weights& weights, const std::vector<std::string>& names,
                    const std::vector<int64_t>& outs, int64_t in, bool has_bias) {
  std::vector<at::Tensor> matrices, biases;
  for (size_t i = 0; i < names.size(); ++i) {
    matrices.push_back(weights.take(names[i] + ".weight", {outs[i], in}));
    if (has_bias) biases.push_back(weights.take(names[i] + ".bias", {outs[i]}));
  }
  const Linear linear(matrices.size() == 1 ? matrices[0] : at::cat(matrices),
                      has_bias ? at::cat(biases) : at::Tensor());
  weights.drop_pages();  // or a model would be in memory twice while it is loaded
  return linear;
}

Linear Linear::load(const Weights& weights, const std::string& name, int64_t out, int64_t in,
                    bool has_bias) {
  return load(weights, std::vector{name}, {out}, in, has_bias);
}

Linear load_head(const Weights& weights, const std::string& name, const at::Tensor& embedding,
                 bool tied) {
  if (tied && !weights.has(name + ".weight")) return Linear(embedding);
  return Linear::load(weights, name, embedding.size(0), embedding.size(1), false);
}

at::Tensor Linear::operator()(const at::Tensor& x) const {
  if (!packed_) return at::linear(x, weight_, bias_);
  return OneDnn::find()->apply.call(x, weight_, bias_, "none",
                                    c10::List<std::optional<at::Scalar>>(), "");
}

LayerNorm LayerNorm::load(const Weights& weights, const std::string& name, int64_t size, double eps,
                          bool has_weight) {
  if (!has_weight) return {std::nullopt, std::nullopt, eps, size};
  return {weights.take(name + ".weight", {size}), weights.take(name + ".bias", {size}), eps, size};
}

at::Tensor LayerNorm::operator()(const at::Tensor& x) const {
  return at::layer_norm(x, size, weight, bias, eps);
}

RmsNorm RmsNorm::load(const Weights& weights, const std::string& name, int64_t size, double eps) {
  return {weights.take(name + ".weight", {size}), eps};
}

at::Tensor RmsNorm::operator()(const at::Tensor& x) const {
  return at::rms_norm(x, weight.sizes(), weight, eps);
}

at::Tensor activate(Activation activation, const at::Tensor& x) {
  switch (activation) {
    case Activation::kRelu:
      return at::relu(x);
    case Activation::kGelu:
      return at::gelu(x);
    case Activation::kGeluTanh:
      return at::gelu(x, "tanh");
    case Activation::kSilu:
      return at::silu(x);
  }
  TORCH_INTERNAL_ASSERT(false, "no such activation");
}

at::Tensor split_heads(const at::Tensor& x, int64_t head_dim) {
  return x.view({x.size(0), x.size(1), x.size(2) / head_dim, head_dim}).transpose(1, 2);
}

at::Tensor merge_heads(const at::Tensor& x) { return x.transpose(1, 2).flatten(2); }

Rotary::Rotary(const RopeConfig& config, at::ScalarType dtype, at::Device device)
    : table_dtype_(dtype == at::kDouble ? at::kDouble : at::kFloat) {
  const auto options = at::TensorOptions().device(device).dtype(at::kFloat);
  const at::Tensor exponent = at::arange(0, config.rotary_dim, 2, options) / config.rotary_dim;
  frequencies_ = 1.0 / at::pow(config.theta, exponent);
  if (config.scaling == RopeConfig::Scaling::kLinear) frequencies_ = frequencies_ / config.factor;
  if (config.scaling == RopeConfig::Scaling::kLlama3)
    frequencies_ = stretch_llama3(frequencies_, config);
}

void Rotary::reserve(int64_t positions) {
  const int64_t size = cos_.defined() ? cos_.size(0) : 0;
  if (positions <= size) return;
  const at::Tensor position = at::arange(std::max(positions, 2 * size), frequencies_.options());
  const at::Tensor angles = at::outer(position, frequencies_);
  cos_ = angles.cos().to(table_dtype_);
  sin_ = angles.sin().to(table_dtype_);
}

at::Tensor Rotary::operator()(const at::Tensor& x, const at::Tensor& positions) const {
  return h2o::rotate(x, positions.unsqueeze(1), cos_, sin_);
}

}  // namespace h2o::llm
