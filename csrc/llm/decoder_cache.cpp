#include "llm/decoder_cache.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <stdexcept>
#include <string>

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

// MemAvailable of the system in bytes; none where it does not tell.
std::optional<double> available_memory() {
  std::ifstream info("/proc/meminfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("MemAvailable:")) return 1024 * std::stod(line.substr(line.find(':') + 1));
  }
  return std::nullopt;
}

// Linux grants more memory than there is, and ends the process that uses it.
void check_memory(const DecoderConfig& config, int64_t batch, int64_t slots,
                  const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return;  // others refuse to allocate
  const auto element = static_cast<double>(options.dtype().itemsize());
  const double slot =
      2 * static_cast<double>(config.head_dim) * element + std::max(4.0, element) + 4;
  const double needed = slot * static_cast<double>(slots) * static_cast<double>(batch) *
                        static_cast<double>(config.num_layers * config.num_kv_heads);
  const auto available = available_memory();
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
  const auto batch = static_cast<int64_t>(prompt_lengths.size());
  check_memory(config, batch, policy_.budget().total(), tensor_options);
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    layers_.push_back(KVCache::allocate(batch, config.num_kv_heads, policy_.budget().total(),
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
