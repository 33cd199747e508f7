#include "llm/decoder_cache.h"

#include <ATen/ops/tensor.h>

#include <algorithm>

#include "h2o/ops/attention_decode.h"

namespace h2o::llm {
namespace {

EvictionPolicy keep_all(int64_t tokens) {
  return EvictionPolicy({.num_heavy = 0, .num_recent = tokens});
}

// Where a part holds every token, so does the whole, and nothing is evicted: a larger part would
// take memory and change nothing.
Budget resolve(const EvictionPolicy& policy, int64_t prompt_len, int64_t tokens) {
  const Budget budget = policy.resolve(prompt_len);
  return {.num_sink = std::min(budget.num_sink, tokens),
          .num_heavy = std::min(budget.num_heavy, tokens),
          .num_recent = std::min(budget.num_recent, tokens)};
}

EvictionPolicy with_counts(const EvictionPolicy& policy, const Budget& budget) {
  return EvictionPolicy({.num_heavy = budget.num_heavy,
                         .num_recent = budget.num_recent,
                         .num_sink = budget.num_sink,
                         .gqa_reduce = policy.gqa_reduce()});
}

}  // namespace

DecoderCache::DecoderCache(const DecoderConfig& config, const CacheOptions& options,
                           const std::vector<int64_t>& prompt_lengths, int64_t max_new_tokens,
                           const at::TensorOptions& tensor_options)
    : options_(options), policy_(keep_all(1)) {
  const int64_t longest = *std::max_element(prompt_lengths.begin(), prompt_lengths.end());
  const int64_t tokens = longest + max_new_tokens;
  if (options.policy)
    policy_ = with_counts(*options.policy, resolve(*options.policy, longest, tokens));
  const bool has_ratio = options.policy && options.policy->has_ratio();
  // No more slots than there are tokens.
  if (!options.policy || (!has_ratio && policy_.budget().total() > tokens))
    policy_ = keep_all(tokens);
  if (has_ratio) {
    std::vector<int64_t> budgets;
    for (const int64_t length : prompt_lengths) {
      const Budget budget = resolve(*options.policy, length, tokens);
      budgets.insert(budgets.end(), {budget.num_sink, budget.num_heavy, budget.num_recent});
    }
    row_budget_ = at::tensor(budgets, at::kLong)
                      .view({static_cast<int64_t>(prompt_lengths.size()), 3})
                      .to(tensor_options.device());
  }
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    layers_.push_back(KVCache::allocate(static_cast<int64_t>(prompt_lengths.size()),
                                        config.num_kv_heads, policy_.budget().total(),
                                        config.head_dim, tensor_options));
  }
}

at::Tensor DecoderCache::attend(size_t layer, const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const at::Tensor& positions) {
  const int64_t num_new = query.size(2);
  const bool one_shot = options_.prefill == Prefill::kOneShot;
  const DecodeOptions decode{
      .chunk = one_shot ? num_new : std::min(num_new, options_.prefill_chunk),
      .row_budget = row_budget_};
  return attention_decode(query, layers_[layer], key, value, positions, policy_, decode).output;
}

std::vector<int64_t> DecoderCache::tokens_kept() const {
  std::vector<int64_t> kept;
  for (const KVCache& layer : layers_) kept.push_back(layer.cache_len().max().item<int64_t>());
  return kept;
}

int64_t DecoderCache::nbytes() const {
  int64_t bytes = 0;
  for (const KVCache& layer : layers_) {
    for (const at::Tensor* tensor :
         {&layer.k_cache, &layer.v_cache, &layer.scores, &layer.positions}) {
      bytes += static_cast<int64_t>(tensor->nbytes());
    }
  }
  return bytes;
}

}  // namespace h2o::llm
