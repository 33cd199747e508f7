#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "h2o/config.h"
#include "h2o/eviction_policy.h"
#include "require.h"

// Options of any values make a policy or std::invalid_argument; a policy keeps what it is made
// from, resolves every prompt to counts that make sense, and is the same written as JSON. The bytes
// are text as EvictionPolicy::to_string() writes it: num_heavy=3, recent_ratio=0.5, ...
namespace {

using h2o::Budget;
using h2o::EvictionPolicy;
using h2o::EvictionPolicyOptions;
using Json = nlohmann::json;

// What stands behind `key` as a number, where there is one.
template <typename Number>
std::optional<Number> number_at(std::string_view text, std::string_view key) {
  const size_t found = text.find(key);
  if (found == std::string_view::npos) return std::nullopt;
  const char* const first = text.data() + found + key.size();
  Number number{};
  if (std::from_chars(first, text.data() + text.size(), number).ec != std::errc{}) {
    return std::nullopt;
  }
  return number;
}

EvictionPolicyOptions options_in(std::string_view text) {
  return {.num_heavy = number_at<int64_t>(text, "num_heavy="),
          .num_recent = number_at<int64_t>(text, "num_recent="),
          .num_sink = number_at<int64_t>(text, "num_sink=").value_or(0),
          .heavy_ratio = number_at<double>(text, "heavy_ratio="),
          .recent_ratio = number_at<double>(text, "recent_ratio="),
          .gqa_reduce = text.find(R"(gqa_reduce="max")") == std::string_view::npos
                            ? h2o::GqaReduce::kSum
                            : h2o::GqaReduce::kMax};
}

std::string message_of(const std::invalid_argument& error) { return error.what(); }

std::optional<EvictionPolicy> policy_of(const EvictionPolicyOptions& options) {
  try {
    return EvictionPolicy(options);
  } catch (const std::invalid_argument& error) {
    require(message_of(error).starts_with("EvictionPolicy: "), "a message without its subject");
    return std::nullopt;
  }
}

Json size_and_ratio(const std::optional<int64_t>& size, const std::optional<double>& ratio) {
  Json object = Json::object();
  if (size) object["size"] = *size;
  if (ratio) object["ratio"] = *ratio;
  return object;
}

// The policy of a file with these options.
std::optional<EvictionPolicy> policy_of_file(const EvictionPolicyOptions& options) {
  const Json policy = {{"num_sink", options.num_sink},
                       {"heavy", size_and_ratio(options.num_heavy, options.heavy_ratio)},
                       {"recent", size_and_ratio(options.num_recent, options.recent_ratio)},
                       {"gqa_reduce", h2o::to_string(options.gqa_reduce)}};
  try {
    return h2o::parse_config(Json{{"policy", policy}}.dump(), "fuzz.json").policy;
  } catch (const std::invalid_argument& error) {
    require(message_of(error).starts_with("fuzz.json: policy"), "a message about something else");
    return std::nullopt;
  }
}

void check_counts(const EvictionPolicyOptions& options, const Budget& budget, int64_t prompt_len) {
  const auto check = [&](const std::optional<int64_t>& count, int64_t resolved) {
    require(
        count ? resolved == *count : resolved >= 1 && resolved <= std::max<int64_t>(1, prompt_len),
        "a count that the prompt does not allow");
  };
  check(options.num_heavy, budget.num_heavy);
  check(options.num_recent, budget.num_recent);
  require(budget.num_sink == options.num_sink && budget.total() >= 1, "a budget of nothing");
}

void check_resolve(const EvictionPolicy& policy, int64_t prompt_len) {
  const bool in_range = prompt_len >= 0 && prompt_len <= h2o::kMaxTokens;
  try {
    const Budget budget = policy.resolve(prompt_len);
    require(in_range, "a prompt of impossible length is resolved");
    check_counts(policy.options(), budget, prompt_len);
    if (prompt_len == 0) return;
    const Budget before = policy.resolve(prompt_len - 1);
    require(before.num_heavy <= budget.num_heavy && before.num_recent <= budget.num_recent,
            "a longer prompt has less");
  } catch (const std::invalid_argument&) {
    require(!in_range, "a prompt is refused");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const EvictionPolicyOptions options = options_in(text);
  const std::optional<EvictionPolicy> policy = policy_of(options);
  // JSON has no word for NaN and infinity.
  if (std::isfinite(options.heavy_ratio.value_or(0)) &&
      std::isfinite(options.recent_ratio.value_or(0))) {
    require(policy_of_file(options) == policy, "a file means another policy than its options");
  }
  if (!policy) return 0;
  require(policy->options() == options, "options that changed");
  require(options_in(policy->to_string()) == options, "a policy is written as another");
  for (const int64_t prompt_len :
       {int64_t{0}, h2o::kMaxTokens, number_at<int64_t>(text, "prompt_len=").value_or(1)}) {
    check_resolve(*policy, prompt_len);
  }
  try {
    require(policy->budget() == policy->resolve(7) && !policy->has_ratio(), "a budget of a ratio");
  } catch (const std::invalid_argument&) {
    require(policy->has_ratio(), "a policy of counts has no budget");
  }
  return 0;
}
