#include "h2o/eviction_policy.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace h2o {
namespace {

[[noreturn]] void fail(const std::string& message) {
  throw std::invalid_argument("EvictionPolicy: " + message);
}

// The shortest decimal that reads back as the same double, whatever the locale.
std::string to_decimal(double value) {
  if (std::isnan(value)) return "nan";
  std::array<char, 32> buffer;
  const auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return {buffer.data(), result.ptr};
}

void check_count(const std::string& name, int64_t count) {
  if (count < 0) fail(name + " must be >= 0, got " + std::to_string(count));
  if (count > kMaxTokens) {
    fail(name + " must be <= " + std::to_string(kMaxTokens) + ", got " + std::to_string(count));
  }
}

void check_count_or_ratio(const std::string& count_name, const std::optional<int64_t>& count,
                          const std::string& ratio_name, const std::optional<double>& ratio) {
  if (count.has_value() == ratio.has_value()) {
    fail("exactly one of " + count_name + " and " + ratio_name + " must be given, got " +
         (count ? "both" : "neither"));
  }
  if (count) check_count(count_name, *count);
  // Negated, so that NaN is refused too.
  if (ratio && !(*ratio > 0.0 && *ratio <= 1.0)) {
    fail(ratio_name + " must be > 0 and <= 1, got " + to_decimal(*ratio));
  }
}

int64_t tokens_of(const std::optional<int64_t>& count, const std::optional<double>& ratio,
                  int64_t prompt_len) {
  if (count) return *count;
  // 1e-9 puts back what a decimal ratio loses in binary: 0.57 * 100 is 56.99999999999999.
  const double tokens = std::floor(*ratio * static_cast<double>(prompt_len) + 1e-9);
  return std::max<int64_t>(1, static_cast<int64_t>(tokens));
}

std::string count_or_ratio(const std::string& kind, const std::optional<int64_t>& count,
                           const std::optional<double>& ratio) {
  return count ? "num_" + kind + "=" + std::to_string(*count)
               : kind + "_ratio=" + to_decimal(*ratio);
}

constexpr std::array<std::pair<ScoreRule, std::string_view>, 8> kScoreRules = {{
    {ScoreRule::kSum, "sum"},
    {ScoreRule::kDecay, "decay"},
    {ScoreRule::kMean, "mean"},
    {ScoreRule::kValue, "value"},
    {ScoreRule::kMisses, "misses"},
    {ScoreRule::kPrompt, "prompt"},
    {ScoreRule::kRandom, "random"},
    {ScoreRule::kGiven, "given"},
}};

std::string quoted(std::string_view text) {
  std::string result("\"");
  return result.append(text).append("\"");
}

void require(bool holds, std::string_view start, const std::string& rule, const std::string& got) {
  if (!holds) throw std::invalid_argument(std::string(start) + rule + ", got " + got);
}

// The options that are not the default, each after a comma.
std::string named_options(const Scoring& scoring, const Reading& reading) {
  std::string text;
  const auto add = [&text](std::string_view name, int64_t value, int64_t otherwise) {
    if (value != otherwise) text += ", " + std::string(name) + "=" + std::to_string(value);
  };
  if (scoring.rule != ScoreRule::kSum) {
    text.append(", score_rule=").append(quoted(to_string(scoring.rule)));
  }
  if (scoring.decay != 1) text += ", score_decay=" + to_decimal(scoring.decay);
  add("score_seed", scoring.seed, 0);
  add("score_queries", scoring.num_queries, 0);
  add("score_pool", scoring.pool, 1);
  add("pattern_stride", scoring.pattern_stride, 0);
  add("pattern_columns", scoring.pattern_columns, 0);
  add("read_slots", reading.slots, 0);
  add("read_page", reading.page, 1);
  return text;
}

}  // namespace

GqaReduce parse_gqa_reduce(std::string_view who, std::string_view name) {
  for (const GqaReduce reduce : {GqaReduce::kSum, GqaReduce::kMax}) {
    if (name == to_string(reduce)) return reduce;
  }
  throw std::invalid_argument(std::string(who) +
                              R"(: gqa_reduce must be one of "sum", "max", got )" + quoted(name));
}

std::string_view to_string(GqaReduce reduce) { return reduce == GqaReduce::kSum ? "sum" : "max"; }

ScoreRule parse_score_rule(std::string_view who, std::string_view name) {
  std::string names;
  for (const auto& [rule, own_name] : kScoreRules) {
    if (name == own_name) return rule;
    names.append(names.empty() ? "" : ", ").append(quoted(own_name));
  }
  throw std::invalid_argument(std::string(who) + ": score_rule must be one of " + names + ", got " +
                              quoted(name));
}

std::string_view to_string(ScoreRule rule) {
  return std::find_if(kScoreRules.begin(), kScoreRules.end(),
                      [rule](const auto& entry) { return entry.first == rule; })
      ->second;
}

void check_scoring(std::string_view start, const Scoring& scoring) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  require(scoring.decay > 0 && scoring.decay <= 1, start, "score_decay must be > 0 and <= 1",
          to_decimal(scoring.decay));
  require(scoring.decay == 1 || scoring.rule == ScoreRule::kDecay, start,
          "score_decay must be 1 unless score_rule is \"decay\"",
          to_decimal(scoring.decay) + " with " + quoted(to_string(scoring.rule)));
  require(scoring.seed == 0 || scoring.rule == ScoreRule::kRandom, start,
          "score_seed must be 0 unless score_rule is \"random\"",
          number(scoring.seed) + " with " + quoted(to_string(scoring.rule)));
  require(scoring.num_queries >= 0, start, "score_queries must be >= 0",
          number(scoring.num_queries));
  require(scoring.pool >= 1 && scoring.pool % 2 == 1, start, "score_pool must be odd and >= 1",
          number(scoring.pool));
  require(scoring.pattern_stride >= 0 && scoring.pattern_stride <= kMaxTokens, start,
          "pattern_stride must be in 0.." + number(kMaxTokens), number(scoring.pattern_stride));
  const int64_t least = scoring.pattern_stride > 0 ? 1 : 0;
  require(scoring.pattern_columns >= least && scoring.pattern_columns <= scoring.pattern_stride,
          start,
          "pattern_columns must be in " + number(least) +
              "..pattern_stride = " + number(scoring.pattern_stride),
          number(scoring.pattern_columns));
}

void check_reading(std::string_view start, const Reading& reading, const Scoring& scoring) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  require(reading.slots >= 0, start, "read_slots must be >= 0", number(reading.slots));
  require(reading.page >= 1 && reading.page <= kMaxTokens, start,
          "read_page must be in 1.." + number(kMaxTokens), number(reading.page));
  require(reading.slots > 0 || reading.page == 1, start,
          "read_page must be 1 unless read_slots is given", number(reading.page));
  require(reading.slots == 0 || scoring.rule == ScoreRule::kSum, start,
          "score_rule must be \"sum\" with read_slots", quoted(to_string(scoring.rule)));
}

EvictionPolicy::EvictionPolicy(const EvictionPolicyOptions& options) : options_(options) {
  check_count_or_ratio("num_heavy", options.num_heavy, "heavy_ratio", options.heavy_ratio);
  check_count_or_ratio("num_recent", options.num_recent, "recent_ratio", options.recent_ratio);
  check_count("num_sink", options.num_sink);
  check_count("score_seed", options.scoring.seed);
  check_count("score_queries", options.scoring.num_queries);
  check_count("score_pool", options.scoring.pool);
  check_count("read_slots", options.reading.slots);
  check_scoring("EvictionPolicy: ", options.scoring);
  check_reading("EvictionPolicy: ", options.reading, options.scoring);
  if (!has_ratio() && budget().total() == 0) {
    fail("num_sink + num_heavy + num_recent must be >= 1, got 0");
  }
}

Budget EvictionPolicy::resolve(int64_t prompt_len) const {
  check_count("prompt_len", prompt_len);
  return {.num_sink = options_.num_sink,
          .num_heavy = tokens_of(options_.num_heavy, options_.heavy_ratio, prompt_len),
          .num_recent = tokens_of(options_.num_recent, options_.recent_ratio, prompt_len)};
}

Budget EvictionPolicy::budget() const {
  if (has_ratio()) {
    fail(
        "budget() must be asked of a policy without ratios (resolve(prompt_len) gives the counts), "
        "got " +
        to_string());
  }
  return resolve(0);
}

std::string EvictionPolicy::to_string() const {
  return "EvictionPolicy(" + count_or_ratio("heavy", options_.num_heavy, options_.heavy_ratio) +
         ", " + count_or_ratio("recent", options_.num_recent, options_.recent_ratio) +
         ", num_sink=" + std::to_string(options_.num_sink) + ", gqa_reduce=\"" +
         std::string(h2o::to_string(options_.gqa_reduce)) + "\"" +
         named_options(options_.scoring, options_.reading) + ")";
}

}  // namespace h2o
