#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "h2o/config.h"
#include "h2o/eviction_policy.h"
#include "h2o/kv_cache.h"
#include "llm/decoder_config.h"

namespace h2o::llm {

// How the caches of a run are kept.
struct CacheOptions {
  std::optional<EvictionPolicy> policy = std::nullopt;  // none: every token stays
  Prefill prefill = Prefill::kOneShot;
  int64_t prefill_chunk = 64;  // tokens, >= 1, of a streaming prefill
};

// The KV cache of every layer of a decoder, each of the size that the policy allows and no larger.
class DecoderCache {
 public:
  //   prompt_lengths  tokens of each row's prompt, >= 1: what ratios are of
  //   max_new_tokens  that a row will have at most: with no policy, the room for them
  DecoderCache(const DecoderConfig& config, const CacheOptions& options,
               const std::vector<int64_t>& prompt_lengths, int64_t max_new_tokens,
               const at::TensorOptions& tensor_options);

  // Attention of one layer, scores, eviction and storage, in one call of h2o::attention_decode.
  //   query       [batch, num_q_heads, n, head_dim], rotated if the model rotates
  //   key, value  [batch, num_kv_heads, n, head_dim]
  //   positions   [batch, n]; negative = padding
  // Returns a tensor as query.
  at::Tensor attend(size_t layer, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value, const at::Tensor& positions);

  const std::vector<KVCache>& layers() const { return layers_; }
  // Occupied slots of each layer: of the row and KV head that has most.
  std::vector<int64_t> tokens_kept() const;
  // Bytes of keys, values, scores and positions.
  int64_t nbytes() const;

 private:
  CacheOptions options_;
  EvictionPolicy policy_;                 // counts: those of the longest prompt
  std::optional<at::Tensor> row_budget_;  // [batch, 3], where rows differ
  std::vector<KVCache> layers_;
};

}  // namespace h2o::llm
