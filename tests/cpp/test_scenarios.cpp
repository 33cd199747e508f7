#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "decode_call.h"
#include "tensors.h"
#include "test_helpers.h"

// The worked cases of python/h2o_kv/cases, step by step through the operator in float64: who is a
// candidate, what each weighs and scores, who leaves, who stays, what comes out.
namespace {

using Json = nlohmann::json;
using h2o::KVCache;

constexpr double kTolerance = 1e-12;

Json load_case(const std::string& name) {
  std::ifstream file(std::string(H2O_CASES_DIR) + "/" + name + ".json");
  REQUIRE(file);
  return Json::parse(file);
}

// [heads][tokens][head_dim] as [1, heads, tokens, head_dim].
at::Tensor tensor_in(const Json& heads) {
  std::vector<double> values;
  for (const Json& head : heads) {
    for (const Json& token : head) {
      for (const Json& value : token) values.push_back(value);
    }
  }
  return tensor_of(values, {1, std::ssize(heads), std::ssize(heads[0]), std::ssize(heads[0][0])},
                   at::kDouble);
}

struct WorkedCase {
  Json json;
  Call all;
  int64_t num_sink, num_heavy, num_recent, chunk;
  h2o::GqaReduce reduce;

  explicit WorkedCase(const std::string& name) : json(load_case(name)) {
    const Json& config = json["config"];
    all = {tensor_in(json["query"]), tensor_in(json["key"]), tensor_in(json["value"]), {}};
    all.position_new = position_range(1, 0, all.num_new());
    num_sink = config.value("sink", int64_t{0});
    num_heavy = config["heavy"];
    num_recent = config["recent"];
    chunk = config.value("chunk", int64_t{1});
    reduce = h2o::parse_gqa_reduce("config", config.value("gqa", "sum"));
  }

  int64_t num_steps() const { return std::ssize(json["steps"]); }
  const Json& head(int64_t step, int64_t head) const {
    return json["steps"][static_cast<size_t>(step)]["heads"][static_cast<size_t>(head)];
  }
  Call step(int64_t index) const {
    const int64_t first = index * chunk;
    return all.columns(first, std::min(chunk, all.num_new() - first));
  }
  h2o::EvictionPolicy policy(int64_t more_heavy = 0) const {
    return policy_of(num_sink, num_heavy + more_heavy, num_recent, reduce);
  }
  // With room for a chunk above the budget.
  KVCache allocate() const {
    return KVCache::allocate(1, all.k_new.size(1), policy().budget().total() + chunk,
                             all.k_new.size(3), at::kDouble);
  }
};

// Score by slot of the tokens that are there, in the order of `positions`.
std::vector<double> scores_at(const KVCache& cache, int64_t head,
                              const std::vector<int64_t>& positions) {
  const reference::Head slots = head_of(cache, 0, head);
  std::vector<double> scores;
  for (const int64_t position : positions) {
    const auto slot =
        std::find_if(slots.slots().begin(), slots.slots().end(),
                     [&](const reference::Token& token) { return token.position == position; });
    scores.push_back(slot == slots.slots().end() ? 0.0 : slot->score);
  }
  return scores;
}

std::vector<int64_t> present(const at::Tensor& positions) {
  std::vector<int64_t> found = int64s(positions);
  std::erase_if(found, [](int64_t position) { return position < 0; });
  return found;
}

std::vector<int64_t> sorted(std::vector<int64_t> positions) {
  std::sort(positions.begin(), positions.end());
  return positions;
}

// What a head's candidates gain in a step: over its tokens the sum, over the group's query heads
// the sum or the max of the weights, [token][query head][candidate].
reference::Row gain(const Json& weights, h2o::GqaReduce reduce, size_t num_candidates) {
  reference::Row total(num_candidates, 0.0);
  for (const Json& token : weights) {
    for (size_t k = 0; k < token[0].size(); ++k) {
      double reduced = 0.0;
      for (const Json& query_head : token) {
        const double weight = query_head[k];
        reduced = reduce == h2o::GqaReduce::kMax ? std::max(reduced, weight) : reduced + weight;
      }
      total[k] += reduced;
    }
  }
  return total;
}

// One step of one head against what the case says of it. `everybody` has made the same step with a
// budget for all candidates.
void check_head(const WorkedCase& worked, int64_t step, int64_t head, const KVCache& before,
                const KVCache& everybody, const KVCache& after, const at::Tensor& evicted) {
  const Json& expected = worked.head(step, head);
  const auto of_head = [head](const at::Tensor& tensor) { return tensor[0][head]; };
  const std::vector<int64_t> candidates = expected["candidates"];
  std::vector<int64_t> actual = present(of_head(before.positions));
  for (const int64_t position : int64s(worked.step(step).position_new)) actual.push_back(position);
  CHECK(sorted(actual) == sorted(candidates));

  const reference::Row scores = scores_at(everybody, head, candidates);
  const at::Tensor all_scores = tensor_of(scores, {std::ssize(scores)}, at::kDouble);
  CHECK(error_of(all_scores, expected["scores"]) < kTolerance);
  const at::Tensor old_scores =
      tensor_of(scores_at(before, head, candidates), {std::ssize(scores)}, at::kDouble);
  CHECK(error_of(all_scores.sub(old_scores),
                 gain(expected["weights"], worked.reduce, candidates.size())) < kTolerance);

  CHECK(present(of_head(evicted)) == expected["victims"].get<std::vector<int64_t>>());
  const std::vector<int64_t> kept = sorted(present(of_head(after.positions)));
  CHECK(kept == sorted(expected["kept"]));
  CHECK(scores_at(after, head, kept) == scores_at(everybody, head, kept));
  for (const int64_t recent : expected["recent"].get<std::vector<int64_t>>()) {
    CHECK(std::binary_search(kept.begin(), kept.end(), recent));
  }
}

struct Outcome {
  KVCache cache;
  std::vector<int64_t> evicted;  // of head 0
};

Outcome replay(const WorkedCase& worked) {
  Outcome outcome{worked.allocate(), {}};
  for (int64_t step = 0; step < worked.num_steps(); ++step) {
    CAPTURE(step);
    const KVCache before = copy_of(outcome.cache), everybody = copy_of(outcome.cache);
    const h2o::DecodeOptions options = {.chunk = worked.chunk};
    const Call call = worked.step(step);
    decode(everybody, call, worked.policy(worked.chunk), options);
    const h2o::DecodeResult result = decode(outcome.cache, call, worked.policy(), options);
    const at::Tensor output = tensor_in(worked.json["output"]);
    CHECK(error_of(result.output, doubles(output.narrow(2, step * worked.chunk, call.num_new()))) <
          kTolerance);
    for (int64_t head = 0; head < outcome.cache.num_kv_heads(); ++head) {
      CAPTURE(head);
      check_head(worked, step, head, before, everybody, outcome.cache, result.evicted);
    }
    for (const int64_t position : present(result.evicted[0][0])) {
      outcome.evicted.push_back(position);
    }
  }
  return outcome;
}

using Positions = std::vector<int64_t>;

}  // namespace

TEST_CASE("every worked case is what the operator does", "[scenarios][attention_decode][cpu]") {
  const std::string name = GENERATE("chunked_prefill", "gqa_conflict_max", "gqa_conflict_sum",
                                    "gqa_sinks", "local_only", "random_16", "recent_zero_ties");
  CAPTURE(name);
  const WorkedCase worked(name);
  const Outcome outcome = replay(worked);
  CHECK(std::ssize(outcome.evicted) == worked.all.num_new() - worked.policy().budget().total());
}

TEST_CASE("uniform attention keeps the oldest tokens and the newest",
          "[scenarios][attention_decode][cpu]") {
  const Outcome outcome = replay(WorkedCase("uniform_attention"));
  CHECK(outcome.evicted == Positions{3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  CHECK(sorted(present(outcome.cache.positions)) == Positions{0, 1, 2, 13, 14, 15});
  // 1 + 1/2 + ... + 1/6, then ten sevenths.
  CHECK(scores_at(outcome.cache, 0, {0})[0] == Approx(2.45 + 10.0 / 7).epsilon(kTolerance));
  CHECK(scores_at(outcome.cache, 0, {15})[0] == Approx(1.0 / 7).epsilon(kTolerance));
}

TEST_CASE("a distant token that every query reads stays", "[scenarios][attention_decode][cpu]") {
  const Outcome outcome = replay(WorkedCase("distant_hotspot"));
  CHECK(outcome.evicted == Positions{2, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  CHECK(sorted(present(outcome.cache.positions)) == Positions{0, 1, 3, 13, 14, 15});
  CHECK(scores_at(outcome.cache, 0, {1})[0] == Approx(13.793904920398733).epsilon(kTolerance));
}

TEST_CASE("old heavy hitters outlive their use, and a new one takes its place beside them",
          "[scenarios][attention_decode][cpu]") {
  const Outcome outcome = replay(WorkedCase("hotspot_switch"));
  // 12 and 14 are read from step 12 on: 14 leaves at step 17, with less than 1 and 2 had before.
  CHECK(outcome.evicted ==
        Positions{3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24});
  CHECK(sorted(present(outcome.cache.positions)) == Positions{1, 2, 12, 25, 26, 27});
  CHECK(scores_at(outcome.cache, 0, {1})[0] == Approx(7.48879627383981).epsilon(kTolerance));
  CHECK(scores_at(outcome.cache, 0, {12})[0] == Approx(14.331737364603176).epsilon(kTolerance));
}

TEST_CASE("a token that is needed after it has left does not come back",
          "[scenarios][attention_decode][cpu]") {
  const WorkedCase worked("delayed_reference");
  const Outcome outcome = replay(worked);
  CHECK(outcome.evicted == Positions{2, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  CHECK(sorted(present(outcome.cache.positions)) == Positions{0, 1, 3, 13, 14, 15});
  // With room for all, step 14 reads 2 and hardly anything else.
  const KVCache full = KVCache::allocate(1, 1, 16, worked.all.k_new.size(3), at::kDouble);
  const h2o::EvictionPolicy all = policy_of(0, 13, 3);
  for (int64_t step = 0; step < 14; ++step) decode(full, worked.step(step), all);
  const double before = scores_at(full, 0, {2})[0];
  decode(full, worked.step(14), all);
  CHECK(scores_at(full, 0, {2})[0] - before > 0.9);
}
