#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "llm/decoder_config.h"
#include "llm/weights.h"

// The pieces that the decoders are made of, each with its weights. Vectors are the last dimension.
namespace h2o::llm {

struct Linear {
  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out], or undefined

  static Linear load(const Weights& weights, const std::string& name, int64_t out, int64_t in,
                     bool has_bias);
  at::Tensor operator()(const at::Tensor& x) const;
};

struct LayerNorm {
  at::Tensor weight, bias;  // [size], or undefined
  double eps;
  int64_t size;

  static LayerNorm load(const Weights& weights, const std::string& name, int64_t size, double eps,
                        bool has_weight = true);
  at::Tensor operator()(const at::Tensor& x) const;
};

struct RmsNorm {
  at::Tensor weight;  // [size]
  double eps;

  static RmsNorm load(const Weights& weights, const std::string& name, int64_t size, double eps);
  at::Tensor operator()(const at::Tensor& x) const;
};

at::Tensor activate(Activation activation, const at::Tensor& x);

// [batch, n, heads * head_dim] -> [batch, heads, n, head_dim], a view; and back.
at::Tensor split_heads(const at::Tensor& x, int64_t head_dim);
at::Tensor merge_heads(const at::Tensor& x);

// Rotary position embeddings: cosine and sine of every angle up to a position that grows on demand,
// in float32, computed as transformers does.
class Rotary {
 public:
  Rotary(const RopeConfig& config, at::ScalarType dtype, at::Device device);

  // Angles for positions 0..positions-1 at least.
  void reserve(int64_t positions);
  // x [batch, heads, n, head_dim] at positions [batch, n]; where a position is negative, zeros.
  at::Tensor operator()(const at::Tensor& x, const at::Tensor& positions) const;

 private:
  at::ScalarType table_dtype_;
  at::Tensor frequencies_;  // [pairs], float32: the angle of a step by one position
  at::Tensor cos_, sin_;    // [positions, pairs]
};

}  // namespace h2o::llm
