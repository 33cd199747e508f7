#include "llm/generate.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_softmax.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>

#include "llm/sampler.h"

namespace h2o::llm {
namespace {

constexpr int64_t kStreamingCallTokens = 512;  // that a streaming prefill runs the layers with

using Prompts = std::vector<std::vector<int64_t>>;

// Columns begin..end-1 of every row, counted from its own first token. `ids` and `positions` are
// filled by row and column on the CPU.
Tokens columns(const Prompts& prompts, int64_t begin, int64_t end, at::Device device) {
  const auto batch = static_cast<int64_t>(prompts.size());
  at::Tensor ids = at::full({batch, end - begin}, 0, at::kLong);
  at::Tensor positions = at::full({batch, end - begin}, -1, at::kLong);
  auto id = ids.accessor<int64_t, 2>(), position = positions.accessor<int64_t, 2>();
  for (int64_t row = 0; row < batch; ++row) {
    const int64_t last = std::min(end, static_cast<int64_t>(prompts[row].size()));
    for (int64_t column = begin; column < last; ++column) {
      id[row][column - begin] = prompts[row][column];
      position[row][column - begin] = column;
    }
  }
  return {ids.to(device), positions.to(device), end};
}

// The hidden states after each row's last prompt token, [batch, hidden_size].
at::Tensor prefill(Decoder& decoder, DecoderCache& cache, const Prompts& prompts,
                   const CacheOptions& options, at::Device device, const GenerateEvents& events) {
  int64_t longest = 0;
  for (const auto& prompt : prompts)
    longest = std::max(longest, static_cast<int64_t>(prompt.size()));
  const int64_t chunk = options.prefill_chunk;
  // Whole chunks, so that the calls cut a row where its chunks end.
  const int64_t call_tokens = options.prefill == Prefill::kOneShot
                                  ? longest
                                  : std::max(chunk, kStreamingCallTokens / chunk * chunk);
  at::Tensor last;
  for (int64_t begin = 0; begin < longest; begin += call_tokens) {
    const int64_t end = std::min(longest, begin + call_tokens);
    const at::Tensor hidden = decoder.forward(columns(prompts, begin, end, device), cache);
    if (!last.defined()) {
      last = at::empty({hidden.size(0), hidden.size(2)}, hidden.options());
    }
    for (size_t row = 0; row < prompts.size(); ++row) {
      const int64_t column = static_cast<int64_t>(prompts[row].size()) - 1 - begin;
      if (column >= 0 && column < end - begin) last[row].copy_(hidden[row][column]);
    }
    if (events.prefill) events.prefill(end, longest);
  }
  return last;
}

// What is known of each row while it runs.
class Rows {
 public:
  Rows(const DecoderConfig& config, const Prompts& prompts, const GenerateOptions& options,
       const GenerateEvents& events)
      : config_(config),
        prompts_(prompts),
        options_(options),
        events_(events),
        tokens_(prompts.size()),
        reasons_(prompts.size()) {
    for (size_t row = 0; row < prompts.size(); ++row) {
      samplers_.emplace_back(options.temperature, options.top_p,
                             static_cast<uint64_t>(options.seed) + row);
    }
  }

  bool any_left() const {
    return std::any_of(reasons_.begin(), reasons_.end(),
                       [](const auto& reason) { return !reason; });
  }

  // The next token of every row that has not ended, out of logits [batch, vocab_size].
  void choose(const at::Tensor& logits) {
    for (size_t row = 0; row < tokens_.size(); ++row) {
      if (reasons_[row]) continue;
      const int64_t token = samplers_[row].choose(logits[row]);
      std::optional<double> logprob;
      if (options_.logprobs) {
        logprob = at::log_softmax(logits[row], -1, at::kFloat)[token].item<double>();
      }
      tokens_[row].push_back(token);
      const auto count = static_cast<int64_t>(tokens_[row].size());
      if (events_.token) {
        events_.token({static_cast<int64_t>(row), count - 1, token, logprob});
      }
      const auto& eos = config_.eos_token_ids;
      if (!options_.ignore_eos && std::find(eos.begin(), eos.end(), token) != eos.end()) {
        reasons_[row] = FinishReason::kEos;
      } else if (count == options_.max_new_tokens) {
        reasons_[row] = FinishReason::kLength;
      }
      if (reasons_[row] && events_.end) events_.end(row, *reasons_[row]);
    }
  }

  // The tokens chosen last; a row that has ended is padding.
  Tokens newest(at::Device device) const {
    const auto batch = static_cast<int64_t>(tokens_.size());
    at::Tensor ids = at::full({batch, 1}, 0, at::kLong),
               positions = at::full({batch, 1}, -1, at::kLong);
    int64_t num_positions = 0;
    for (int64_t row = 0; row < batch; ++row) {
      if (reasons_[row]) continue;
      const auto position = static_cast<int64_t>(prompts_[row].size() + tokens_[row].size() - 1);
      ids.data_ptr<int64_t>()[row] = tokens_[row].back();
      positions.data_ptr<int64_t>()[row] = position;
      num_positions = std::max(num_positions, position + 1);
    }
    return {ids.to(device), positions.to(device), num_positions};
  }

  void finish(GenerateResult& result) {
    result.tokens = std::move(tokens_);
    for (const auto& reason : reasons_) result.finish_reasons.push_back(*reason);
  }

 private:
  const DecoderConfig& config_;
  const Prompts& prompts_;
  const GenerateOptions& options_;
  const GenerateEvents& events_;
  std::vector<Sampler> samplers_;
  std::vector<std::vector<int64_t>> tokens_;
  std::vector<std::optional<FinishReason>> reasons_;  // none while a row runs
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::string_view to_string(FinishReason reason) {
  return reason == FinishReason::kLength ? "length" : "eos";
}

void check_request(const DecoderConfig& config, const Prompts& prompts,
                   const GenerateOptions& options) {
  const auto require = [](bool holds, const std::string& message) {
    if (!holds) throw std::invalid_argument("generate: " + message);
  };
  require(!prompts.empty(), "prompts must have at least one row, got 0");
  for (size_t row = 0; row < prompts.size(); ++row) {
    const std::string name = "prompts[" + std::to_string(row) + "]";
    require(!prompts[row].empty(), name + " must have at least one token, got 0");
    for (const int64_t id : prompts[row]) {
      require(id >= 0 && id < config.vocab_size, name + " must have tokens from 0 to " +
                                                     std::to_string(config.vocab_size - 1) +
                                                     ", got " + std::to_string(id));
    }
    const auto tokens = static_cast<int64_t>(prompts[row].size());
    require(options.max_new_tokens >= 1 && options.max_new_tokens <= kMaxTokens - tokens,
            "max_new_tokens must be from 1 to " + std::to_string(kMaxTokens - tokens) + ", got " +
                std::to_string(options.max_new_tokens));
    // A learned table ends. The last token that is chosen is not run.
    const int64_t positions = tokens + options.max_new_tokens - 1;
    require(config.architecture != Architecture::kOpt || positions <= config.max_positions,
            name + " and max_new_tokens must need at most " + std::to_string(config.max_positions) +
                " positions, which is all that the model has, got " + std::to_string(positions));
  }
  require(options.cache.prefill_chunk >= 1,
          "prefill_chunk must be >= 1, got " + std::to_string(options.cache.prefill_chunk));
  require(options.temperature >= 0,
          "temperature must be >= 0, got " + std::to_string(options.temperature));
  require(options.top_p > 0 && options.top_p <= 1,
          "top_p must be > 0 and <= 1, got " + std::to_string(options.top_p));
}

GenerateResult generate(Decoder& decoder, const DecoderConfig& config, const Prompts& prompts,
                        const GenerateOptions& options, const at::TensorOptions& tensor_options,
                        const GenerateEvents& events) {
  check_request(config, prompts, options);
  const c10::InferenceMode inference;
  const at::Device device = tensor_options.device();
  std::vector<int64_t> lengths;
  for (const auto& prompt : prompts) lengths.push_back(static_cast<int64_t>(prompt.size()));
  DecoderCache cache(config, options.cache, lengths, options.max_new_tokens, tensor_options);
  Rows rows(config, prompts, options, events);
  GenerateResult result;

  auto start = std::chrono::steady_clock::now();
  rows.choose(decoder.logits(prefill(decoder, cache, prompts, options.cache, device, events)));
  result.prefill_s = seconds_since(start);
  if (events.cache) events.cache(cache);
  while (rows.any_left()) {
    start = std::chrono::steady_clock::now();
    rows.choose(decoder.logits(decoder.forward(rows.newest(device), cache).select(1, 0)));
    result.step_ms.push_back(1000 * seconds_since(start));
    if (events.cache) events.cache(cache);
  }
  rows.finish(result);
  result.tokens_kept = cache.tokens_kept();
  result.kv_bytes = cache.nbytes();
  return result;
}

}  // namespace h2o::llm
