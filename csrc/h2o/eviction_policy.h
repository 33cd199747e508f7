#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "h2o/budget.h"
#include "h2o/export.h"
#include "h2o/scoring.h"

namespace h2o {

// The largest count of tokens: positions are int32.
inline constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

// "sum" or "max" -> GqaReduce; anything else throws std::invalid_argument that starts with `who`.
H2O_API GqaReduce parse_gqa_reduce(std::string_view who, std::string_view name);
H2O_API std::string_view to_string(GqaReduce reduce);
// Likewise "sum", "decay", "mean", "value", "misses", "prompt", "random", "given".
H2O_API ScoreRule parse_score_rule(std::string_view who, std::string_view name);
H2O_API std::string_view to_string(ScoreRule rule);

// Throw std::invalid_argument where numbers are out of range or do not go together: `start`, then
// the name of the operators' argument and the rule.
void check_scoring(std::string_view start, const Scoring& scoring);
void check_reading(std::string_view start, const Reading& reading, const Scoring& scoring);

// What a policy is made from; each of heavy and recent is given as a count or as a ratio.
struct EvictionPolicyOptions {
  std::optional<int64_t> num_heavy = std::nullopt;  // tokens, 0 <= count <= kMaxTokens
  std::optional<int64_t> num_recent = std::nullopt;
  int64_t num_sink = 0;
  std::optional<double> heavy_ratio = std::nullopt;   // of the prompt's tokens, 0 < ratio <= 1
  std::optional<double> recent_ratio = std::nullopt;  // likewise
  GqaReduce gqa_reduce = GqaReduce::kSum;
  Scoring scoring = {};  // another rule than H2O's
  Reading reading = {};  // less than everything

  friend bool operator==(const EvictionPolicyOptions&, const EvictionPolicyOptions&) = default;
};

// Which tokens stay: sinks, heavy hitters and recent ones (H2O, arXiv 2306.14048, Algorithm 1; the
// sinks, counted inside the budget, are StreamingLLM's and 0 in plain H2O). Immutable and checked
// when made: a bad value throws std::invalid_argument. Knows no tensor.
class H2O_API EvictionPolicy {
 public:
  explicit EvictionPolicy(const EvictionPolicyOptions& options);

  const EvictionPolicyOptions& options() const { return options_; }
  GqaReduce gqa_reduce() const { return options_.gqa_reduce; }
  const Scoring& scoring() const { return options_.scoring; }
  const Reading& reading() const { return options_.reading; }
  // Of a layer, for ScoreRule::kRandom: layers draw different numbers.
  int64_t layer_seed(int64_t layer) const {
    return static_cast<int64_t>(static_cast<uint64_t>(options_.scoring.seed) * 65537u +
                                static_cast<uint64_t>(layer));
  }
  bool has_ratio() const { return options_.heavy_ratio || options_.recent_ratio; }

  // The counts for a prompt of `prompt_len` tokens. A ratio gives floor(ratio * prompt_len + 1e-9),
  // at least 1: 0.57 of 100 is 57, although 0.57 * 100 is a little less in binary.
  Budget resolve(int64_t prompt_len) const;
  // The counts of a policy that has no ratio; one that has throws std::invalid_argument.
  Budget budget() const;

  // How the policy is written in Python, e.g.
  // EvictionPolicy(heavy_ratio=0.1, num_recent=64, num_sink=4, gqa_reduce="sum").
  std::string to_string() const;

  friend bool operator==(const EvictionPolicy&, const EvictionPolicy&) = default;

 private:
  EvictionPolicyOptions options_;
};

}  // namespace h2o
