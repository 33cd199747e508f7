#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "llm/decoder_config.h"
#include "llm/weights.h"

// The pieces that the decoders are made of, each with its weights. Vectors are the last dimension.
namespace h2o::llm {

// y = x W^T + b. On a CPU that oneDNN serves, the weights are stored in its blocked layout, which a
// single row of x goes through at the speed of memory.
class Linear {
 public:
  Linear() = default;
  explicit Linear(const at::Tensor& weight, const at::Tensor& bias = {});  // [out, in], [out]

  // What `names` name, one matrix below the other: they have the same input.
  static Linear load(const Weights& weights, const std::vector<std::string>& names,
                     const std::vector<int64_t>& outs, int64_t in, bool has_bias);
  static Linear load(const Weights& weights, const std::string& name, int64_t out, int64_t in,
                     bool has_bias);

  at::Tensor operator()(const at::Tensor& x) const;

 private:
  at::Tensor weight_;  // [out, in], or oneDNN's
  std::optional<at::Tensor> bias_;
  bool packed_ = false;
};

// The output matrix, which has the embedding's shape. Tied, it is the embedding, unless the files
// hold one of its own: transformers 5 ties only what is equal.
Linear load_head(const Weights& weights, const std::string& name, const at::Tensor& embedding,
                 bool tied);

struct LayerNorm {
  std::optional<at::Tensor> weight, bias;  // [size]
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
