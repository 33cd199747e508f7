#include "llm/decoder_cache.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "h2o/ops/attention_decode.h"
#include "llm/proc.h"

namespace h2o::llm {
namespace {

// The policy's counts after a prompt. Where a part holds every token, so does the whole, and
// nothing is evicted: a larger part would take memory and change nothing.
Budget resolve(const EvictionPolicy& policy, int64_t prompt_len, int64_t tokens) {
  const Budget budget = policy.resolve(prompt_len);
  return {.num_sink = std::min(budget.num_sink, tokens),
          .num_heavy = std::min(budget.num_heavy, tokens),
          .num_recent = std::min(budget.num_recent, tokens)};
}

int64_t largest(const std::vector<int64_t>& lengths) {
  return *std::max_element(lengths.begin(), lengths.end());
}

bool has_ratio(const CacheOptions& options) {
  return options.policy && options.policy->has_ratio();
}

// What a cache has room for: the counts of the longest row, and no more slots than it will have
// tokens where rows do not differ.
EvictionPolicy with_counts(const CacheOptions& options, int64_t longest, int64_t max_new_tokens) {
  const int64_t tokens = longest + max_new_tokens;
  if (!options.policy) return EvictionPolicy({.num_heavy = 0, .num_recent = tokens});
  Budget budget = resolve(*options.policy, longest, tokens);
  if (!has_ratio(options) && budget.total() > tokens) budget = {.num_recent = tokens};
  EvictionPolicyOptions counts = options.policy->options();
  counts.num_heavy = budget.num_heavy;
  counts.num_recent = budget.num_recent;
  counts.num_sink = budget.num_sink;
  counts.heavy_ratio = counts.recent_ratio = std::nullopt;
  return EvictionPolicy(counts);
}

int64_t bytes_of(const KVCache& layer) {
  int64_t bytes = 0;
  for (const at::Tensor* tensor :
       {&layer.k_cache, &layer.v_cache, &layer.scores, &layer.positions}) {
    bytes += static_cast<int64_t>(tensor->nbytes());
  }
  return bytes;
}

// Linux grants more memory than there is, and ends the process that uses it.
void check_memory(const DecoderConfig& config, int64_t batch, int64_t slots,
                  const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return;  // others refuse to allocate
  const KVCache slot =
      KVCache::allocate(batch, config.num_kv_heads, 1, config.head_dim, options.device(at::kMeta));
  const double needed =
      static_cast<double>(bytes_of(slot) * config.num_layers) * static_cast<double>(slots);
  const auto available = proc_bytes("/proc/meminfo", "MemAvailable");
  if (available && needed > *available) {
    const auto megabytes = [](double bytes) { return std::to_string(std::llround(bytes / 1e6)); };
    throw std::invalid_argument("generate: the KV cache must fit into memory, got " +
                                std::to_string(slots) + " slots of each layer and row, " +
                                megabytes(needed) + " MB, and " + megabytes(*available) +
                                " MB available");
  }
}

}  // namespace

DecoderCache::DecoderCache(const DecoderConfig& config, const CacheOptions& options,
                           const std::vector<int64_t>& prompt_lengths, int64_t max_new_tokens,
                           const at::TensorOptions& tensor_options)
    : options_(options), policy_(with_counts(options, largest(prompt_lengths), max_new_tokens)) {
  const auto batch = static_cast<int64_t>(prompt_lengths.size());
  if (has_ratio(options)) {
    const int64_t tokens = largest(prompt_lengths) + max_new_tokens;
    std::vector<int64_t> budgets;
    for (const int64_t length : prompt_lengths) {
      const Budget budget = resolve(*options.policy, length, tokens);
      budgets.insert(budgets.end(), {budget.num_sink, budget.num_heavy, budget.num_recent});
    }
    row_budget_ = at::tensor(budgets, at::kLong).view({batch, 3}).to(tensor_options.device());
  }
  const int64_t slots = policy_.budget().total();
  check_memory(config, batch, slots, tensor_options);
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    layers_.push_back(
        KVCache::allocate(batch, config.num_kv_heads, slots, config.head_dim, tensor_options));
  }
}

at::Tensor DecoderCache::attend(size_t layer, const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const at::Tensor& positions) {
  const int64_t num_new = query.size(2);
  const bool one_shot = options_.prefill == Prefill::kOneShot;
  DecodeOptions decode{.chunk = one_shot ? num_new : std::min(num_new, options_.prefill_chunk),
                       .row_budget = row_budget_};
  if (policy_.scoring().rule == ScoreRule::kRandom) {
    decode.score_seed = policy_.layer_seed(static_cast<int64_t>(layer));
  }
  return attention_decode(query, layers_[layer], key, value, positions, policy_, decode).output;
}

std::vector<int64_t> DecoderCache::tokens_kept() const {
  std::vector<int64_t> kept;
  for (const KVCache& layer : layers_) kept.push_back(layer.cache_len().max().item<int64_t>());
  return kept;
}

int64_t DecoderCache::nbytes() const {
  int64_t bytes = 0;
  for (const KVCache& layer : layers_) bytes += bytes_of(layer);
  return bytes;
}

}  // namespace h2o::llm
