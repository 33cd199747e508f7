#include "h2o/eviction_policy.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <stdexcept>

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

}  // namespace

GqaReduce parse_gqa_reduce(std::string_view who, std::string_view name) {
  for (const GqaReduce reduce : {GqaReduce::kSum, GqaReduce::kMax}) {
    if (name == to_string(reduce)) return reduce;
  }
  throw std::invalid_argument(std::string(who) +
                              R"(: gqa_reduce must be one of "sum", "max", got ")" +
                              std::string(name) + "\"");
}

std::string_view to_string(GqaReduce reduce) { return reduce == GqaReduce::kSum ? "sum" : "max"; }

EvictionPolicy::EvictionPolicy(const EvictionPolicyOptions& options) : options_(options) {
  check_count_or_ratio("num_heavy", options.num_heavy, "heavy_ratio", options.heavy_ratio);
  check_count_or_ratio("num_recent", options.num_recent, "recent_ratio", options.recent_ratio);
  check_count("num_sink", options.num_sink);
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
         std::string(h2o::to_string(options_.gqa_reduce)) + "\")";
}

}  // namespace h2o
