#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "h2o/eviction_policy.h"
#include "test_helpers.h"

namespace {

using h2o::Budget;
using h2o::EvictionPolicy;
using h2o::EvictionPolicyOptions;
using h2o::GqaReduce;

EvictionPolicyOptions counts(int64_t num_sink, int64_t num_heavy, int64_t num_recent) {
  return {.num_heavy = num_heavy, .num_recent = num_recent, .num_sink = num_sink};
}

EvictionPolicyOptions ratios(double heavy_ratio, double recent_ratio) {
  return {.heavy_ratio = heavy_ratio, .recent_ratio = recent_ratio};
}

void check_refused(const EvictionPolicyOptions& options, const std::string& message) {
  CAPTURE(message);
  CHECK_THROWS_AS(EvictionPolicy(options), std::invalid_argument);
  CHECK_THROWS_WITH(EvictionPolicy(options), "EvictionPolicy: " + message);
}

}  // namespace

TEST_CASE("a policy of counts gives them for every prompt", "[eviction_policy]") {
  const EvictionPolicy policy(counts(4, 20, 30));
  const int64_t prompt_len = GENERATE(0, 1, 53, 54, 55, 100000);
  CAPTURE(prompt_len);
  CHECK(policy.resolve(prompt_len) == Budget{.num_sink = 4, .num_heavy = 20, .num_recent = 30});
  CHECK(policy.budget() == policy.resolve(prompt_len));
  CHECK(policy.budget().total() == 54);
  CHECK_FALSE(policy.has_ratio());
}

TEST_CASE("each part of a budget may be 0, but not all", "[eviction_policy]") {
  CHECK(EvictionPolicy(counts(1, 0, 0)).budget() == Budget{.num_sink = 1});
  CHECK(EvictionPolicy(counts(0, 1, 0)).budget() == Budget{.num_heavy = 1});
  CHECK(EvictionPolicy(counts(0, 0, 1)).budget() == Budget{.num_recent = 1});
  check_refused(counts(0, 0, 0), "num_sink + num_heavy + num_recent must be >= 1, got 0");
}

TEST_CASE("a ratio of the prompt is rounded down and at least one token", "[eviction_policy]") {
  struct Case {
    double ratio;
    int64_t prompt_len, tokens;
  };
  // 0.29 * 100 and 0.57 * 100 are a little below 29 and 57 in binary.
  const Case c =
      GENERATE(Case{0.29, 100, 29}, Case{0.57, 100, 57}, Case{0.1, 1500, 150}, Case{0.1, 19, 1},
               Case{0.1, 20, 2}, Case{0.2, 4, 1}, Case{0.1, 1, 1}, Case{0.1, 0, 1}, Case{1.0, 7, 7},
               Case{1e-12, 1000, 1}, Case{1.0, h2o::kMaxTokens, h2o::kMaxTokens});
  CAPTURE(c.ratio, c.prompt_len, c.tokens);
  const EvictionPolicy heavy({.num_recent = 3, .num_sink = 2, .heavy_ratio = c.ratio});
  CHECK(heavy.resolve(c.prompt_len) ==
        Budget{.num_sink = 2, .num_heavy = c.tokens, .num_recent = 3});
  const EvictionPolicy recent({.num_heavy = 0, .recent_ratio = c.ratio});
  CHECK(recent.resolve(c.prompt_len) == Budget{.num_recent = c.tokens});
  CHECK(heavy.has_ratio());
  CHECK(recent.has_ratio());
}

TEST_CASE("hundredths of a prompt are exact at every length", "[eviction_policy]") {
  const int64_t prompt_len = GENERATE(1, 3, 99, 100, 101, 1000, 4096, 100000, 1048577);
  CAPTURE(prompt_len);
  int wrong = 0;
  for (int64_t percent = 1; percent <= 100; ++percent) {
    const int64_t exact = std::max<int64_t>(1, percent * prompt_len / 100);
    const EvictionPolicy policy(ratios(static_cast<double>(percent) / 100.0, 1.0));
    wrong += policy.resolve(prompt_len).num_heavy != exact;
  }
  CHECK(wrong == 0);
}

TEST_CASE("heavy and recent each take exactly one of count and ratio", "[eviction_policy]") {
  check_refused({.num_recent = 1},
                "exactly one of num_heavy and heavy_ratio must be given, got neither");
  check_refused({.num_heavy = 1, .num_recent = 1, .heavy_ratio = 0.1},
                "exactly one of num_heavy and heavy_ratio must be given, got both");
  check_refused({.num_heavy = 1},
                "exactly one of num_recent and recent_ratio must be given, got neither");
  check_refused({.num_heavy = 1, .num_recent = 1, .recent_ratio = 0.1},
                "exactly one of num_recent and recent_ratio must be given, got both");
}

TEST_CASE("a count out of range is refused by name and value", "[eviction_policy]") {
  constexpr int64_t kMax = h2o::kMaxTokens;
  CHECK_NOTHROW(EvictionPolicy(counts(kMax, kMax, kMax)));
  CHECK(EvictionPolicy(counts(kMax, kMax, kMax)).budget().total() == 3 * kMax);
  check_refused(counts(-1, 1, 1), "num_sink must be >= 0, got -1");
  check_refused(counts(1, -1, 1), "num_heavy must be >= 0, got -1");
  check_refused(counts(1, 1, -1), "num_recent must be >= 0, got -1");
  check_refused(counts(kMax + 1, 1, 1), "num_sink must be <= 2147483647, got 2147483648");
  check_refused(counts(1, kMax + 1, 1), "num_heavy must be <= 2147483647, got 2147483648");
  check_refused(counts(1, 1, std::numeric_limits<int64_t>::max()),
                "num_recent must be <= 2147483647, got 9223372036854775807");
}

TEST_CASE("a ratio out of range is refused by name and value", "[eviction_policy]") {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  check_refused(ratios(0.0, 0.1), "heavy_ratio must be > 0 and <= 1, got 0");
  check_refused(ratios(-0.0, 0.1), "heavy_ratio must be > 0 and <= 1, got -0");
  check_refused(ratios(-0.1, 0.1), "heavy_ratio must be > 0 and <= 1, got -0.1");
  check_refused(ratios(1.5, 0.1), "heavy_ratio must be > 0 and <= 1, got 1.5");
  check_refused(ratios(std::nextafter(1.0, 2.0), 0.1),
                "heavy_ratio must be > 0 and <= 1, got 1.0000000000000002");
  check_refused(ratios(0.1, kInfinity), "recent_ratio must be > 0 and <= 1, got inf");
  check_refused(ratios(0.1, -kInfinity), "recent_ratio must be > 0 and <= 1, got -inf");
  check_refused(ratios(0.1, std::nan("")), "recent_ratio must be > 0 and <= 1, got nan");
  check_refused(ratios(0.1, -std::nan("")), "recent_ratio must be > 0 and <= 1, got nan");
}

TEST_CASE("a prompt length out of range is refused", "[eviction_policy]") {
  const EvictionPolicy policy(ratios(0.1, 0.1));
  CHECK_THROWS_WITH(policy.resolve(-1), "EvictionPolicy: prompt_len must be >= 0, got -1");
  CHECK_THROWS_WITH(policy.resolve(h2o::kMaxTokens + 1),
                    "EvictionPolicy: prompt_len must be <= 2147483647, got 2147483648");
}

TEST_CASE("the budget of a policy with a ratio needs a prompt", "[eviction_policy]") {
  const EvictionPolicy policy({.num_heavy = 5, .recent_ratio = 0.25});
  CHECK_THROWS_AS(policy.budget(), std::invalid_argument);
  CHECK_THROWS_WITH(policy.budget(),
                    "EvictionPolicy: budget() must be asked of a policy without ratios "
                    "(resolve(prompt_len) gives the counts), got EvictionPolicy(num_heavy=5, "
                    "recent_ratio=0.25, num_sink=0, gqa_reduce=\"sum\")");
}

TEST_CASE("gqa_reduce names and values are each other's inverse", "[eviction_policy]") {
  CHECK(h2o::to_string(GqaReduce::kSum) == "sum");
  CHECK(h2o::to_string(GqaReduce::kMax) == "max");
  CHECK(h2o::parse_gqa_reduce("h2o_evict", "sum") == GqaReduce::kSum);
  CHECK(h2o::parse_gqa_reduce("h2o_evict", "max") == GqaReduce::kMax);
  const std::string name = GENERATE("mean", "", "Sum", "sum ", "summ");
  CAPTURE(name);
  CHECK_THROWS_AS(h2o::parse_gqa_reduce("h2o_evict", name), std::invalid_argument);
  CHECK_THROWS_WITH(h2o::parse_gqa_reduce("h2o_evict", name),
                    "h2o_evict: gqa_reduce must be one of \"sum\", \"max\", got \"" + name + "\"");
}

TEST_CASE("a policy is written as Python would make it", "[eviction_policy]") {
  CHECK(EvictionPolicy(counts(4, 128, 64)).to_string() ==
        "EvictionPolicy(num_heavy=128, num_recent=64, num_sink=4, gqa_reduce=\"sum\")");
  EvictionPolicyOptions options = ratios(0.1, 1.0 / 3.0);
  options.gqa_reduce = GqaReduce::kMax;
  CHECK(EvictionPolicy(options).to_string() ==
        "EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.3333333333333333, num_sink=0, "
        "gqa_reduce=\"max\")");
}

TEST_CASE("policies are equal when every option is", "[eviction_policy]") {
  const EvictionPolicyOptions options = counts(1, 2, 3);
  const EvictionPolicy policy(options);
  CHECK(policy == EvictionPolicy(options));
  CHECK(policy.options() == options);
  CHECK(policy.gqa_reduce() == GqaReduce::kSum);
  CHECK_FALSE(policy == EvictionPolicy(counts(0, 2, 3)));
  CHECK_FALSE(policy == EvictionPolicy(counts(1, 0, 3)));
  CHECK_FALSE(policy == EvictionPolicy(counts(1, 2, 0)));
  EvictionPolicyOptions max = options;
  max.gqa_reduce = GqaReduce::kMax;
  CHECK_FALSE(policy == EvictionPolicy(max));
  CHECK_FALSE(EvictionPolicy(ratios(0.1, 0.2)) == EvictionPolicy(ratios(0.2, 0.2)));
  CHECK_FALSE(EvictionPolicy(ratios(0.1, 0.2)) == EvictionPolicy(ratios(0.1, 0.1)));
}

TEST_CASE("the rules are checked and shown where they are not H2O's", "[eviction_policy]") {
  EvictionPolicyOptions options = counts(1, 4, 2);
  options.scoring = {.rule = h2o::ScoreRule::kRandom, .seed = 7};
  options.reading = {};
  CHECK(EvictionPolicy(options).to_string() ==
        R"(EvictionPolicy(num_heavy=4, num_recent=2, num_sink=1, gqa_reduce="sum", )"
        R"(score_rule="random", score_seed=7))");
  CHECK(EvictionPolicy(options) != EvictionPolicy(counts(1, 4, 2)));
  CHECK(EvictionPolicy(options).layer_seed(3) != EvictionPolicy(options).layer_seed(4));

  const auto scoring = [&options](const h2o::Scoring& value) {
    options.scoring = value;
    return options;
  };
  check_refused(scoring({.rule = h2o::ScoreRule::kDecay, .decay = 0}),
                "score_decay must be > 0 and <= 1, got 0");
  check_refused(scoring({.decay = std::nan("")}), "score_decay must be > 0 and <= 1, got nan");
  check_refused(scoring({.seed = 1}),
                R"(score_seed must be 0 unless score_rule is "random", got 1 with "sum")");
  check_refused(scoring({.rule = h2o::ScoreRule::kRandom, .seed = h2o::kMaxTokens + 1}),
                "score_seed must be <= 2147483647, got 2147483648");
  check_refused(scoring({.rule = h2o::ScoreRule::kRandom, .seed = -1}),
                "score_seed must be >= 0, got -1");
  check_refused(scoring({.num_queries = -1}), "score_queries must be >= 0, got -1");
  check_refused(scoring({.pool = 2}), "score_pool must be odd and >= 1, got 2");
  check_refused(scoring({.pattern_stride = 4, .pattern_columns = 5}),
                "pattern_columns must be in 1..pattern_stride = 4, got 5");
  options.scoring = {};
  options.reading = {.slots = 0, .page = 2};
  check_refused(options, "read_page must be 1 unless read_slots is given, got 2");
}
