#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "decode_call.h"
#include "h2o/ops/attention_decode.h"
#include "tensors.h"
#include "test_helpers.h"

namespace {

using h2o::attention_decode;
using h2o::DecodeOptions;
using h2o::DecodeResult;
using h2o::EvictionPolicy;
using h2o::GqaReduce;
using h2o::KVCache;

struct Comparison {
  int64_t decided = 0;  // evictions in which the reference's choice was clear, and the same
  int64_t undecided =
      0;  // those in which the two lowest scores were closer than float32 can tell apart
};

// Runs the call on the operator and on the reference, both from the cache's present state, and
// checks every part of the result. Rows, heads and chunks are those of design: a chunk is `chunk`
// of the row's own tokens.
void check_against_reference(const KVCache& cache, const Call& call, const EvictionPolicy& policy,
                             const DecodeOptions& options, Comparison& comparison) {
  const at::ScalarType dtype = call.query.scalar_type();
  const int64_t group_size = call.query.size(1) / cache.num_kv_heads();
  const KVCache before = copy_of(cache);
  const DecodeResult result = decode(cache, call, policy, options);
  for (int64_t row = 0; row < cache.batch(); ++row) {
    for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
      h2o::Budget budget = policy.budget();
      if (options.row_budget) {
        const std::vector<int64_t> own = int64s(options.row_budget->select(0, row));
        budget = {own[0], own[1], own[2]};
      }
      reference::Rules rules = {
          .num_sink = budget.num_sink,
          .num_heavy = budget.num_heavy,
          .num_recent = budget.num_recent,
          .reduce_max = policy.gqa_reduce() == GqaReduce::kMax,
          .scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(cache.head_dim())))};
      if (options.alibi_slopes) {
        rules.alibi_slopes =
            doubles(options.alibi_slopes->narrow(0, head * group_size, group_size));
      }
      reference::Head expected = head_of(before, row, head);
      const NewTokens fresh =
          new_tokens_of(call.query, call.k_new, call.v_new, call.position_new, row, head);
      at::Tensor output = at::zeros({group_size, call.num_new(), cache.head_dim()}, at::kDouble);
      std::vector<int64_t> evicted(static_cast<size_t>(call.num_new()), -1);
      for (size_t first = 0; first < fresh.tokens.size();
           first += static_cast<size_t>(options.chunk)) {
        const size_t end =
            std::min(fresh.tokens.size(), first + static_cast<size_t>(options.chunk));
        const auto begin = fresh.tokens.begin();
        const reference::StepResult step = expected.step(
            {begin + static_cast<std::ptrdiff_t>(first), begin + static_cast<std::ptrdiff_t>(end)},
            rules);
        for (size_t i = first; i < end; ++i) {
          for (int64_t h = 0; h < group_size; ++h) {
            output.select(0, h)
                .select(0, fresh.columns[i])
                .copy_(tensor_of(step.output[i - first][static_cast<size_t>(h)], {cache.head_dim()},
                                 at::kDouble));
          }
        }
        for (size_t i = 0; i < step.evicted.size(); ++i) {
          evicted[static_cast<size_t>(fresh.columns[first]) + i] = step.evicted[i];
        }
        comparison.decided += static_cast<int64_t>(step.evicted.size());
      }
      // The largest score counts: float32 holds a sum with that many digits.
      double largest = 1.0;
      for (const reference::Token& token : expected.slots())
        largest = std::max(largest, token.score);
      const double tolerance = arithmetic_of(dtype) * static_cast<double>(group_size) * largest;
      if (expected.margin() <= tolerance) {
        ++comparison.undecided;
        continue;
      }
      const at::Tensor actual =
          result.output.select(0, row).narrow(0, head * group_size, group_size);
      CHECK(error_of(actual, doubles(output)) < arithmetic_of(dtype));
      CHECK(int64s(result.evicted.select(0, row).select(0, head)) == evicted);
      CHECK(difference(cache, row, head, expected, tolerance) == "");
    }
  }
  CHECK(result.output.scalar_type() == dtype);
  CHECK(result.evicted.scalar_type() == at::kInt);
}

// The hand-worked example of the source documents: capacity 6 = 3 heavy + 3 recent, one step at
// position 11 with the weights 0.2, 0.05, 0.02, 0.08, 0.15, 0.3 and, for the new token, 0.2.
struct HandExample {
  KVCache cache;
  Call call;

  explicit HandExample(at::ScalarType dtype) : cache(KVCache::allocate(1, 1, 6, 8, dtype)) {
    const std::vector<double> weights = {0.2, 0.05, 0.02, 0.08, 0.15, 0.3};
    cache.k_cache.zero_();
    for (int64_t slot = 0; slot < 6; ++slot) {
      cache.k_cache.select(2, slot).select(2, 0).fill_(
          std::log(weights[static_cast<size_t>(slot)]));
      for (int64_t d = 0; d < 8; ++d) {
        cache.v_cache.select(2, slot).select(2, d).fill_(0.1 * static_cast<double>(8 * slot + d));
      }
    }
    cache.scores.copy_(tensor_of({2.4, 1.7, 1.2, 0.3, 0.2, 0.0}, {1, 1, 6}, at::kDouble));
    cache.positions.copy_(integers({1, 3, 5, 8, 9, 10}, {1, 1, 6}));
    call.query = at::zeros({1, 1, 1, 8}, dtype);
    call.query.select(3, 0).fill_(1.0);
    call.k_new = at::zeros({1, 1, 1, 8}, dtype);
    call.k_new.select(3, 0).fill_(std::log(0.2));
    call.v_new = at::full({1, 1, 1, 8}, 7.0, dtype);
    call.position_new = integers({11}, {1, 1});
  }
};

}  // namespace

// ---- Worked by hand -----------------------------------------------------------------------------

TEST_CASE("the hand example evicts position 8 and stores 11 in its slot",
          "[attention_decode][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kDouble, at::kFloat);
  HandExample example(dtype);
  const KVCache before = copy_of(example.cache);
  const DecodeResult result =
      decode(example.cache, example.call, policy_of(0, 3, 3), {.scale = 1.0});
  const double tolerance = dtype == at::kDouble ? 1e-12 : 1e-6;

  CHECK(int64s(result.evicted) == std::vector<int64_t>{8});
  CHECK(int64s(example.cache.positions) == std::vector<int64_t>{1, 3, 5, 11, 9, 10});
  const std::vector<double> scores = {2.6, 1.75, 1.22, 0.2, 0.35, 0.3};
  CHECK(error_of(example.cache.scores, scores) < tolerance);
  // The token that leaves still counts in the output.
  CHECK(error_of(result.output, {3.344, 3.424, 3.504, 3.584, 3.664, 3.744, 3.824, 3.904}) <
        tolerance);
  for (int64_t slot = 0; slot < 6; ++slot) {
    CAPTURE(slot);
    const at::Tensor key =
        slot == 3 ? example.call.k_new.select(2, 0) : before.k_cache.select(2, slot);
    const at::Tensor value =
        slot == 3 ? example.call.v_new.select(2, 0) : before.v_cache.select(2, slot);
    CHECK(same_bits(example.cache.k_cache.select(2, slot), key));
    CHECK(same_bits(example.cache.v_cache.select(2, slot), value));
  }
}

TEST_CASE("the first token of an empty cache is its own output", "[attention_decode][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kHalf, at::kBFloat16, at::kDouble);
  const GqaReduce reduce = GENERATE(GqaReduce::kSum, GqaReduce::kMax);
  Random random(1);
  const KVCache cache = KVCache::allocate(1, 1, 3, 5, dtype);
  const Call call = random_call(random, 1, 1, 4, 1, 5, dtype);
  const DecodeResult result = decode(cache, call, policy_of(0, 2, 1, reduce));
  CHECK(same_bits(result.output, call.v_new.expand({1, 4, 1, 5})));
  CHECK(int64s(result.evicted) == std::vector<int64_t>{-1});
  CHECK(int64s(cache.positions) == std::vector<int64_t>{0, -1, -1});
  CHECK(doubles(cache.scores) ==
        std::vector<double>{reduce == GqaReduce::kSum ? 4.0 : 1.0, 0.0, 0.0});
}

TEST_CASE("the weights of a group become a score by sum or by max", "[attention_decode][cpu]") {
  // Four query heads, two KV heads; the logits are the logarithms of the weights.
  const std::vector<double> weights = {.7,  .1,  .1,  .1,  .1,  .6,  .2,  .1,
                                       .25, .25, .25, .25, .05, .05, .05, .85};
  const GqaReduce reduce = GENERATE(GqaReduce::kSum, GqaReduce::kMax);
  const KVCache cache = KVCache::allocate(1, 2, 4, 4, at::kDouble);
  // Key i is the i-th unit vector, so query element i is its logit.
  Call call;
  call.query = tensor_of(weights, {1, 4, 1, 4}, at::kDouble).log();
  at::Tensor keys = at::zeros({1, 2, 4, 4}, at::kDouble);
  for (int64_t i = 0; i < 4; ++i) keys.select(2, i).select(2, i).fill_(1.0);
  cache.k_cache.narrow(2, 0, 3).copy_(keys.narrow(2, 0, 3));
  cache.v_cache.zero_();
  cache.positions.copy_(integers({0, 1, 2, -1, 0, 1, 2, -1}, {1, 2, 4}));
  call.k_new = keys.narrow(2, 3, 1);
  call.v_new = at::zeros({1, 2, 1, 4}, at::kDouble);
  call.position_new = integers({3}, {1, 1});
  decode(cache, call, policy_of(0, 4, 0, reduce), {.scale = 1.0});
  const std::vector<double> expected =
      reduce == GqaReduce::kSum ? std::vector<double>{.8, .7, .3, .2, .3, .3, .3, 1.1}
                                : std::vector<double>{.7, .6, .2, .1, .25, .25, .25, .85};
  CHECK(error_of(cache.scores, expected) < 1e-12);
}

TEST_CASE("sum and max can evict different tokens", "[attention_decode][cpu]") {
  // Weights [.5, .3, .2] and [0, .25, .75]: the sums are .5, .55, .95, the maxima .5, .3, .75.
  const GqaReduce reduce = GENERATE(GqaReduce::kSum, GqaReduce::kMax);
  const KVCache cache = KVCache::allocate(1, 1, 2, 3, at::kFloat);
  Call call;
  call.query = tensor_of({.5, .3, .2, 1e-30, .25, .75}, {1, 2, 1, 3}).log();
  cache.k_cache.copy_(tensor_of({1, 0, 0, 0, 1, 0}, {1, 1, 2, 3}));
  cache.v_cache.zero_();
  cache.positions.copy_(integers({0, 1}, {1, 1, 2}));
  call.k_new = tensor_of({0, 0, 1}, {1, 1, 1, 3});
  call.v_new = at::zeros({1, 1, 1, 3});
  call.position_new = integers({2}, {1, 1});
  const DecodeResult result = decode(cache, call, policy_of(0, 1, 1, reduce), {.scale = 1.0});
  CHECK(int64s(result.evicted) == std::vector<int64_t>{reduce == GqaReduce::kSum ? 0 : 1});
}

TEST_CASE("rows and heads evict by their own scores", "[attention_decode][cpu]") {
  // Summed over the batch, slot 2 would be the lowest.
  const KVCache cache = KVCache::allocate(2, 1, 4, 2, at::kFloat);
  cache.k_cache.zero_();
  cache.v_cache.zero_();
  cache.scores.copy_(tensor_of({9, 1, 2, 3, 1, 9, 2, 3}, {2, 1, 4}));
  cache.positions.copy_(integers({0, 1, 2, 3, 0, 1, 2, 3}, {2, 1, 4}));
  const Call call = {at::zeros({2, 1, 1, 2}), at::zeros({2, 1, 1, 2}), at::zeros({2, 1, 1, 2}),
                     integers({4, 4}, {2, 1})};
  CHECK(int64s(decode(cache, call, policy_of(0, 2, 2)).evicted) == std::vector<int64_t>{1, 0});
  CHECK(int64s(cache.positions) == std::vector<int64_t>{0, 4, 2, 3, 4, 1, 2, 3});
}

TEST_CASE("equal scores evict the smaller position, wherever it lies", "[attention_decode][cpu]") {
  // All keys are equal, so all weights are; the two zeros are equal too.
  const double zero = GENERATE(0.0, -0.0);
  const KVCache cache = KVCache::allocate(1, 1, 4, 2, at::kFloat);
  cache.k_cache.zero_();
  cache.v_cache.zero_();
  cache.scores.copy_(tensor_of({0.0, zero, -zero, 0.0}, {1, 1, 4}));
  cache.positions.copy_(integers({3, 1, 0, 2}, {1, 1, 4}));
  const Call call = {at::zeros({1, 1, 1, 2}), at::zeros({1, 1, 1, 2}), at::zeros({1, 1, 1, 2}),
                     integers({9}, {1, 1})};
  CHECK(int64s(decode(cache, call, policy_of(0, 3, 1)).evicted) == std::vector<int64_t>{0});
  CHECK(int64s(cache.positions) == std::vector<int64_t>{3, 1, 9, 2});
}

TEST_CASE("a NaN score leaves first and reaches nobody else", "[attention_decode][cpu]") {
  const KVCache cache = KVCache::allocate(1, 1, 4, 2, at::kFloat);
  cache.k_cache.zero_();
  cache.v_cache.zero_();
  cache.scores.copy_(tensor_of({-5.0, 1.0, std::nan(""), std::nan("")}, {1, 1, 4}));
  cache.positions.copy_(integers({0, 1, 3, 2}, {1, 1, 4}));
  Call call = {at::zeros({1, 1, 1, 2}), at::zeros({1, 1, 1, 2}), at::zeros({1, 1, 1, 2}),
               integers({4}, {1, 1})};
  CHECK(int64s(decode(cache, call, policy_of(0, 3, 1)).evicted) == std::vector<int64_t>{2});
  call.position_new.fill_(5);
  CHECK(int64s(decode(cache, call, policy_of(0, 3, 1)).evicted) == std::vector<int64_t>{3});
  CHECK(int64s(cache.positions) == std::vector<int64_t>{0, 1, 5, 4});
  CHECK(std::isfinite(cache.scores.sum().item<double>()));
}

TEST_CASE("two sinks and a window of three keep those and nothing else",
          "[attention_decode][cpu]") {
  Random random(2);
  const KVCache cache = KVCache::allocate(1, 1, 5, 4, at::kFloat);
  for (int64_t t = 0; t <= 6; ++t) {
    decode(cache, random_call(random, 1, 1, 1, 1, 4, at::kFloat, t), policy_of(2, 0, 3));
    CHECK(int64s(cache.cache_len()) == std::vector<int64_t>{std::min<int64_t>(t + 1, 5)});
  }
  std::vector<int64_t> kept = int64s(cache.positions);
  std::sort(kept.begin(), kept.end());
  CHECK(kept == std::vector<int64_t>{0, 1, 4, 5, 6});
}

TEST_CASE("the newest tokens are always kept and start from their own attention",
          "[attention_decode][cpu]") {
  // Two heavy, two recent, 43 steps.
  Random random(3);
  const KVCache cache = KVCache::allocate(1, 1, 4, 8, at::kFloat);
  for (int64_t t = 0; t < 43; ++t) {
    CAPTURE(t);
    const DecodeResult result =
        decode(cache, random_call(random, 1, 1, 1, 1, 8, at::kFloat, t), policy_of(0, 2, 2));
    CHECK(int64s(result.evicted)[0] != t);
    const std::vector<int64_t> positions = int64s(cache.positions);
    const auto newest = std::find(positions.begin(), positions.end(), t);
    REQUIRE(newest != positions.end());
    CHECK((t == 0 || std::count(positions.begin(), positions.end(), t - 1) == 1));
    const double score = doubles(cache.scores)[static_cast<size_t>(newest - positions.begin())];
    CHECK(score > 0.0);
    CHECK(score <= 1.0);  // one query's weight, not what the victim had gathered
  }
}

TEST_CASE("without a recent window the new token may leave at once and leaves no trace",
          "[attention_decode][cpu]") {
  const KVCache cache = KVCache::allocate(1, 1, 3, 2, at::kFloat);
  cache.k_cache.zero_();
  cache.v_cache.zero_();
  cache.scores.copy_(tensor_of({5, 6, 7}, {1, 1, 3}));
  cache.positions.copy_(integers({0, 1, 2}, {1, 1, 3}));
  const Call call = {at::zeros({1, 1, 1, 2}), at::ones({1, 1, 1, 2}), at::ones({1, 1, 1, 2}),
                     integers({3}, {1, 1})};
  const KVCache before = copy_of(cache);
  const DecodeResult result = decode(cache, call, policy_of(0, 3, 0));
  CHECK(int64s(result.evicted) == std::vector<int64_t>{3});
  CHECK(doubles(result.output) == std::vector<double>{0.25, 0.25});  // it was attended all the same
  CHECK(same_bits(cache.positions, before.positions));
  CHECK(same_bits(cache.k_cache, before.k_cache));
  CHECK(same_bits(cache.v_cache, before.v_cache));
  CHECK(doubles(cache.scores) == std::vector<double>{5.25, 6.25, 7.25});
}

TEST_CASE("an empty slot is taken from the lowest up, and only within the budget",
          "[attention_decode][cpu]") {
  Random random(4);
  const KVCache cache = KVCache::allocate(1, 1, 6, 4, at::kFloat);
  decode(cache, random_call(random, 1, 1, 1, 5, 4), policy_of(0, 0, 3));
  CHECK(int64s(cache.positions) == std::vector<int64_t>{3, 4, 2, -1, -1, -1});
  decode(cache, random_call(random, 1, 1, 1, 1, 4, at::kFloat, 5), policy_of(0, 0, 5));
  CHECK(int64s(cache.positions) == std::vector<int64_t>{3, 4, 2, 5, -1, -1});
}

// ---- Against the reference ----------------------------------------------------------------------

TEST_CASE("every step equals the float64 reference", "[attention_decode][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kDouble, at::kFloat, at::kHalf, at::kBFloat16);
  struct Shape {
    int64_t num_kv_heads, group_size, head_dim, num_sink, num_heavy, num_recent;
  };
  const Shape shape =
      GENERATE(Shape{2, 1, 16, 1, 4, 3}, Shape{1, 4, 17, 0, 5, 0}, Shape{2, 3, 1, 0, 0, 4},
               Shape{1, 8, 64, 2, 3, 2}, Shape{1, 1, 80, 4, 0, 0}, Shape{1, 2, 7, 0, 1, 0},
               Shape{1, 9, 128, 0, 6, 6});
  const GqaReduce reduce = GENERATE(GqaReduce::kSum, GqaReduce::kMax);
  CAPTURE(dtype, shape.group_size, shape.head_dim, shape.num_sink, shape.num_heavy,
          shape.num_recent, reduce == GqaReduce::kMax);
  Random random(6);
  const EvictionPolicy policy =
      policy_of(shape.num_sink, shape.num_heavy, shape.num_recent, reduce);
  const KVCache cache =
      KVCache::allocate(2, shape.num_kv_heads, policy.budget().total() + 2, shape.head_dim, dtype);
  Comparison comparison;
  for (int64_t t = 0; t < 24; ++t) {
    CAPTURE(t);
    const Call call =
        random_call(random, 2, shape.num_kv_heads, shape.group_size, 1, shape.head_dim, dtype, t);
    check_against_reference(cache, call, policy, {}, comparison);
  }
  CAPTURE(comparison.decided, comparison.undecided);
  CHECK(comparison.undecided * 10 <= comparison.decided);
  CHECK(comparison.decided == 2 * shape.num_kv_heads * (24 - policy.budget().total()));
  // The stream had heavy hitters: the scores are far from flat.
  if (policy.budget().num_heavy >= 3 && shape.head_dim > 1) {
    CHECK(cache.scores.max().item<double>() > 2.0 * cache.scores.median().item<double>());
  }
}

TEST_CASE("an over-full cache neither grows nor shrinks", "[attention_decode][cpu]") {
  // Six tokens for a budget of two: as many leave with a chunk as came.
  const int64_t chunk = GENERATE(1, 2, 4, 100);
  CAPTURE(chunk);
  Random random(5);
  const KVCache cache = KVCache::allocate(2, 2, 7, 4, at::kDouble);
  decode(cache, random_call(random, 2, 2, 1, 6, 4, at::kDouble), policy_of(0, 6, 0));
  Comparison comparison;
  check_against_reference(cache, random_call(random, 2, 2, 1, 4, 4, at::kDouble, 6),
                          policy_of(0, 1, 1), {.chunk = chunk}, comparison);
  CHECK(comparison.decided == 2 * 2 * 4);
  CHECK(comparison.undecided == 0);
  CHECK(int64s(cache.cache_len()) == std::vector<int64_t>{6, 6, 6, 6});
}

TEST_CASE("chunks of any size equal the float64 reference", "[attention_decode][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kDouble, at::kFloat, at::kBFloat16);
  const int64_t chunk = GENERATE(2, 3, 5, 64, 1000000);
  const int64_t group_size = GENERATE(1, 3);
  CAPTURE(dtype, chunk, group_size);
  Random random(7);
  const EvictionPolicy policy =
      policy_of(1, 4, 3, group_size == 3 ? GqaReduce::kMax : GqaReduce::kSum);
  const KVCache cache = KVCache::allocate(2, 2, 9, 16, dtype);
  Comparison comparison;
  int64_t position = 0;
  for (const int64_t num_new : {14, 1, 7, 2, 20}) {
    CAPTURE(num_new);
    const Call call = random_call(random, 2, 2, group_size, num_new, 16, dtype, position);
    check_against_reference(cache, call, policy, {.chunk = chunk}, comparison);
    position += num_new;
    CHECK(cache.cache_len().max().item<int64_t>() <= 8);
  }
  CHECK(comparison.decided == 4 * (position - 8));
  CHECK(comparison.undecided <= 2);
}

TEST_CASE("tokens older than the cache's are attended but not stored", "[attention_decode][cpu]") {
  // Positions 10 to 13 are all inside the window of any token before them, so nobody else may
  // leave.
  const int64_t chunk = GENERATE(1, 2, 3);
  CAPTURE(chunk);
  Random random(28);
  const KVCache cache = KVCache::allocate(1, 2, 4, 8, at::kDouble);
  decode(cache, random_call(random, 1, 2, 1, 4, 8, at::kDouble, 10), policy_of(0, 0, 4));
  Comparison comparison;
  check_against_reference(cache, random_call(random, 1, 2, 1, 3, 8, at::kDouble, 5),
                          policy_of(0, 0, 4), {.chunk = chunk}, comparison);
  CHECK(comparison.decided == 2 * 3);
  CHECK(int64s(cache.positions) == std::vector<int64_t>{10, 11, 12, 13, 10, 11, 12, 13});
}

TEST_CASE("ALiBi, scale and row budgets equal the float64 reference", "[attention_decode][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kDouble, at::kFloat);
  const int64_t chunk = GENERATE(1, 4);
  const at::ScalarType slope_dtype = GENERATE(at::kFloat, at::kDouble);
  const at::ScalarType budget_dtype = GENERATE(at::kInt, at::kLong);
  CAPTURE(dtype, chunk);
  Random random(8);
  const KVCache cache = KVCache::allocate(3, 2, 9, 8, dtype);
  DecodeOptions options = {.scale = 0.3, .chunk = chunk};
  options.alibi_slopes = tensor_of({0.5, 0.25, 0.125, 0.0625}, {4}, slope_dtype);
  options.row_budget = integers({0, 1, 0, 2, 3, 4, 0, 5, 2}, {3, 3}, budget_dtype);
  Comparison comparison;
  int64_t position = 3;
  for (const int64_t num_new : {6, 1, 5, 8}) {
    check_against_reference(cache, random_call(random, 3, 2, 2, num_new, 8, dtype, position),
                            policy_of(0, 9, 0), options, comparison);
    position += num_new + 2;  // positions may have gaps
  }
  CHECK(comparison.undecided <= 2);
  CHECK(int64s(cache.cache_len()) == std::vector<int64_t>{1, 1, 9, 9, 7, 7});
}

TEST_CASE("a cache of several ranges of slots equals the float64 reference",
          "[attention_decode][cpu]") {
  const int64_t capacity = GENERATE(127, 128, 129, 300);
  CAPTURE(capacity);
  Random random(9);
  const KVCache cache = KVCache::allocate(1, 1, capacity, 16, at::kFloat);
  const EvictionPolicy policy = policy_of(4, capacity / 2, capacity / 4);
  decode(cache, random_call(random, 1, 1, 2, capacity, 16), policy, {.chunk = 32});
  Comparison comparison;
  for (int64_t t = capacity; t < capacity + 6; ++t) {
    check_against_reference(cache, random_call(random, 1, 1, 2, 1, 16, at::kFloat, t), policy, {},
                            comparison);
  }
  CHECK(comparison.decided == 6);
  CHECK(comparison.undecided <= 2);
}

// ---- Equalities bit for bit ---------------------------------------------------------------------

TEST_CASE("one call of several tokens equals as many calls of one", "[attention_decode][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kHalf, at::kBFloat16, at::kDouble);
  Random random(10);
  const Call call = random_call(random, 2, 2, 3, 20, 17, dtype);
  const EvictionPolicy policy = policy_of(1, 3, 2);
  const KVCache together = KVCache::allocate(2, 2, 7, 17, dtype), single = copy_of(together);
  const DecodeResult all = decode(together, call, policy);
  for (int64_t t = 0; t < call.num_new(); ++t) {
    CAPTURE(t);
    const DecodeResult one = decode(single, call.columns(t, 1), policy);
    CHECK(same_bits(one.output, all.output.narrow(2, t, 1)));
    CHECK(same_bits(one.evicted, all.evicted.narrow(2, t, 1)));
  }
  CHECK(same_state(together, single));
}

TEST_CASE("a call split between two chunks equals the whole call", "[attention_decode][cpu]") {
  Random random(11);
  const Call call = random_call(random, 1, 2, 2, 12, 8);
  const EvictionPolicy policy = policy_of(0, 3, 2);
  const KVCache together = KVCache::allocate(1, 2, 5, 8, at::kFloat), halves = copy_of(together);
  decode(together, call, policy, {.chunk = 4});
  decode(halves, call.columns(0, 8), policy, {.chunk = 4});
  decode(halves, call.columns(8, 4), policy, {.chunk = 4});
  CHECK(same_state(together, halves));
}

TEST_CASE("a row alone equals the row in a padded batch", "[attention_decode][cpu]") {
  const int64_t chunk = GENERATE(1, 3, 100);
  CAPTURE(chunk);
  Random random(12);
  // Rows of 9, 4, 0 and 6 tokens; padding left, right, everywhere and in between, any negative
  // number.
  Call call = random_call(random, 4, 2, 2, 9, 17);
  call.position_new = integers({0,  1,  2,  3,  4,  5,  6,  7,  8,  //
                                -1, -1, -1, -1, -1, 3,  4,  5,  6,  //
                                -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 2, -7, 3, 5, -1, 8, 9, 11},
                               {4, 9});
  // What lies in padding is never looked at.
  const at::Tensor padding = call.position_new.lt(0).unsqueeze(1).unsqueeze(-1);
  for (const at::Tensor& tensor : {call.query, call.k_new, call.v_new}) {
    tensor.masked_fill_(padding, std::numeric_limits<double>::quiet_NaN());
  }
  const EvictionPolicy policy = policy_of(1, 2, 2);
  const KVCache cache = KVCache::allocate(4, 2, 6, 17, at::kFloat), fresh = copy_of(cache);
  const DecodeResult batch = decode(cache, call, policy, {.chunk = chunk});
  for (int64_t row = 0; row < 4; ++row) {
    CAPTURE(row);
    // The row's tokens without its padding.
    const std::vector<int64_t> positions = int64s(call.position_new.select(0, row));
    std::vector<int64_t> real;
    for (int64_t column = 0; column < 9; ++column) {
      if (positions[static_cast<size_t>(column)] < 0) {
        CHECK(batch.output.select(0, row).select(1, column).abs().max().item<double>() == 0.0);
        CHECK(batch.evicted.select(0, row).select(1, column).max().item<int64_t>() == -1);
      } else {
        real.push_back(column);
      }
    }
    const at::Tensor index = integers(real, {static_cast<int64_t>(real.size())}, at::kLong);
    const Call own = call.row(row);
    const Call alone = {own.query.index_select(2, index), own.k_new.index_select(2, index),
                        own.v_new.index_select(2, index), own.position_new.index_select(1, index)};
    const KVCache own_cache = copy_of(row_of(fresh, row));
    const DecodeResult result = decode(own_cache, alone, policy, {.chunk = chunk});
    CHECK(same_bits(result.output, batch.output.narrow(0, row, 1).index_select(2, index)));
    CHECK(same_state(own_cache, row_of(cache, row)));
    // `evicted` is packed from the column of the chunk's first token; compare what left, in order.
    std::vector<int64_t> left_alone, left_in_batch;
    for (const int64_t position : int64s(result.evicted)) {
      if (position >= 0) left_alone.push_back(position);
    }
    for (const int64_t position : int64s(batch.evicted.select(0, row))) {
      if (position >= 0) left_in_batch.push_back(position);
    }
    CHECK(left_alone == left_in_batch);
  }
}

TEST_CASE("the number of threads changes no bit", "[attention_decode][cpu]") {
  const int64_t chunk = GENERATE(1, 50);
  const int before = at::get_num_threads();
  Random random(13);
  const Call prompt = random_call(random, 2, 2, 4, 600, 32),
             call = random_call(random, 2, 2, 4, 50, 32, at::kFloat, 600);
  const EvictionPolicy policy = policy_of(4, 400, 100);
  std::vector<KVCache> caches;
  std::vector<DecodeResult> results;
  for (const int threads : {1, 2, 2, 3}) {
    at::set_num_threads(threads);
    REQUIRE(at::get_num_threads() == threads);
    const KVCache& cache = caches.emplace_back(KVCache::allocate(2, 2, 600, 32, at::kFloat));
    decode(cache, prompt, policy, {.chunk = 200});
    results.push_back(decode(cache, call, policy, {.chunk = chunk}));
  }
  at::set_num_threads(before);
  for (size_t i = 1; i < caches.size(); ++i) {
    CHECK(same_result(results[0], results[i]));
    CHECK(same_state(caches[0], caches[i]));
  }
}

TEST_CASE("what lies in empty slots changes no bit", "[attention_decode][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kHalf, at::kBFloat16, at::kDouble);
  const double garbage = GENERATE(std::nan(""), std::numeric_limits<double>::infinity());
  const int64_t chunk = GENERATE(1, 5);
  CAPTURE(dtype, garbage, chunk);
  Random random(14);
  const Call prompt = random_call(random, 1, 2, 2, 3, 16, dtype),
             call = random_call(random, 1, 2, 2, 5, 16, dtype, 3);
  const EvictionPolicy policy = policy_of(0, 8, 0);
  KVCache clean = KVCache::allocate(1, 2, 8, 16, dtype), dirty = copy_of(clean);
  for (KVCache* cache : {&clean, &dirty}) {
    const double value = cache == &clean ? 0.0 : garbage;
    cache->k_cache.fill_(value);
    cache->v_cache.fill_(value);
    decode(*cache, prompt, policy);
  }
  CHECK(doubles(dirty.scores.narrow(2, 3, 5)) == std::vector<double>(10, 0.0));
  const DecodeResult expected = decode(clean, call, policy, {.chunk = chunk});
  CHECK(same_result(decode(dirty, call, policy, {.chunk = chunk}), expected));
  CHECK(same_state(dirty, clean));
}

TEST_CASE("int32 and int64 positions are the same", "[attention_decode][cpu]") {
  Random random(15);
  Call call = random_call(random, 2, 1, 2, 9, 8);
  const KVCache wide = KVCache::allocate(2, 1, 4, 8, at::kFloat), narrow = copy_of(wide);
  const DecodeResult expected = decode(wide, call, policy_of(0, 2, 2));
  call.position_new = call.position_new.to(at::kInt);
  CHECK(same_result(decode(narrow, call, policy_of(0, 2, 2)), expected));
  CHECK(same_state(narrow, wide));
}

TEST_CASE("strided inputs and caches are the same as contiguous ones", "[attention_decode][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const int64_t chunk = GENERATE(1, 4);
  CAPTURE(dtype, chunk);
  Random random(16);
  const Call call = random_call(random, 2, 2, 2, 9, 16, dtype);
  const EvictionPolicy policy = policy_of(1, 2, 2);
  const KVCache expected_cache = KVCache::allocate(2, 2, 6, 16, dtype);
  const DecodeResult expected = decode(expected_cache, call, policy, {.chunk = chunk});
  KVCache cache = KVCache::allocate(2, 2, 6, 16, dtype);
  Call strided = call;
  SECTION("transposed from [batch, num_new, heads, head_dim]") {
    for (at::Tensor* tensor : {&strided.query, &strided.k_new, &strided.v_new}) {
      *tensor = tensor->transpose(1, 2).contiguous().transpose(1, 2);
    }
  }
  SECTION("slices of one fused tensor") {
    const at::Tensor fused = at::cat({call.query, call.k_new, call.v_new}, 1);
    strided.query = fused.narrow(1, 0, 4);
    strided.k_new = fused.narrow(1, 4, 2);
    strided.v_new = fused.narrow(1, 6, 2);
  }
  SECTION("every second element of head_dim") {
    for (at::Tensor* tensor : {&strided.query, &strided.k_new, &strided.v_new}) {
      *tensor = at::stack({*tensor, at::full(tensor->sizes(), std::nan(""), dtype)}, -1)
                    .view({2, -1, 9, 32})
                    .slice(3, 0, 32, 2);
    }
    strided.position_new = at::stack({call.position_new, call.position_new}, -1).select(-1, 0);
  }
  SECTION("a cache of [batch, capacity, num_kv_heads, head_dim]") {
    const auto transposed = [](const at::Tensor& tensor) {
      return tensor.transpose(1, 2).contiguous().transpose(1, 2);
    };
    cache = {transposed(cache.k_cache), transposed(cache.v_cache), transposed(cache.scores),
             transposed(cache.positions)};
  }
  SECTION("a cache that is a slice of a larger one, which stays as it is around it") {
    const KVCache larger = KVCache::allocate(3, 3, 20, 16, dtype);
    larger.k_cache.fill_(-3.0);
    larger.v_cache.fill_(-3.0);
    larger.scores.fill_(-3.0);
    larger.positions.fill_(-3);
    const auto slice = [](const at::Tensor& tensor) {
      return tensor.narrow(0, 1, 2).narrow(1, 1, 2).slice(2, 2, 20, 3);
    };
    cache = {slice(larger.k_cache), slice(larger.v_cache), slice(larger.scores),
             slice(larger.positions)};
    cache.scores.zero_();
    const DecodeResult result = decode(cache, strided, policy, {.chunk = chunk});
    CHECK(same_result(result, expected));
    // Whatever lies between is -3 still: the slices hold all that is not.
    for (const at::Tensor& whole :
         {larger.k_cache, larger.v_cache, larger.scores, larger.positions}) {
      const at::Tensor rest = whole.clone();
      slice(rest).fill_(-3);
      CHECK(rest.eq(-3).all().item<bool>());
    }
    cache.positions.masked_fill_(cache.positions.lt(0), -1);
    CHECK(same_state(cache, expected_cache));
    return;
  }
  CHECK(same_result(decode(cache, strided, policy, {.chunk = chunk}), expected));
  CHECK(same_state(cache, expected_cache));
}

TEST_CASE("an expanded batch is read as its one row", "[attention_decode][cpu]") {
  Random random(17);
  Call call = random_call(random, 1, 2, 2, 6, 8);
  const KVCache one = KVCache::allocate(1, 2, 4, 8, at::kFloat),
                three = KVCache::allocate(3, 2, 4, 8, at::kFloat);
  const DecodeResult expected = decode(one, call, policy_of(0, 2, 2));
  call = {call.query.expand({3, -1, -1, -1}), call.k_new.expand({3, -1, -1, -1}),
          call.v_new.expand({3, -1, -1, -1}), call.position_new.expand({3, -1})};
  const DecodeResult result = decode(three, call, policy_of(0, 2, 2));
  for (int64_t row = 0; row < 3; ++row) {
    CHECK(same_bits(result.output.narrow(0, row, 1), expected.output));
    CHECK(same_state(row_of(three, row), one));
  }
}

TEST_CASE("new tokens may be views of the cache itself", "[attention_decode][cpu]") {
  Random random(18);
  const KVCache cache = KVCache::allocate(1, 1, 4, 8, at::kFloat);
  decode(cache, random_call(random, 1, 1, 1, 4, 8), policy_of(0, 4, 0));
  // Slots 0 and 1 come as positions 4 and 5, and evict each other's sources.
  const Call views = {cache.k_cache.narrow(2, 2, 2), cache.k_cache.narrow(2, 0, 2),
                      cache.v_cache.narrow(2, 0, 2), position_range(1, 4, 2)};
  const Call copies = views.clone();
  const KVCache expected_cache = copy_of(cache);
  const DecodeResult expected = decode(expected_cache, copies, policy_of(0, 2, 2));
  CHECK(same_result(decode(cache, views, policy_of(0, 2, 2)), expected));
  CHECK(same_state(cache, expected_cache));
}

TEST_CASE("a call reads its inputs and writes the cache alone", "[attention_decode][cpu]") {
  Random random(19);
  const Call call = random_call(random, 2, 2, 2, 9, 8);
  const KVCache cache = KVCache::allocate(2, 2, 4, 8, at::kFloat);
  DecodeOptions options;
  options.alibi_slopes = tensor_of({.1, .2, .3, .4}, {4});
  options.row_budget = integers({1, 2, 1, 0, 2, 2}, {2, 3});
  const Snapshot inputs({call.query, call.k_new, call.v_new, call.position_new,
                         *options.alibi_slopes, *options.row_budget});
  const DecodeResult result = decode(cache, call, policy_of(0, 4, 0), options);
  CHECK(inputs.unchanged());
  // What is returned is new memory.
  for (const at::Tensor& tensor :
       {cache.k_cache, cache.v_cache, cache.scores, cache.positions, call.query}) {
    CHECK_FALSE(result.output.is_alias_of(tensor));
    CHECK_FALSE(result.evicted.is_alias_of(tensor));
  }
}

// ---- What leaves --------------------------------------------------------------------------------

TEST_CASE("what leaves is handed out as its slot held it", "[attention_decode][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kDouble, at::kFloat, at::kHalf, at::kBFloat16);
  const int64_t chunk = GENERATE(1, 3), num_recent = GENERATE(0, 2);
  CAPTURE(dtype, chunk, num_recent);
  Random random(31);
  const Call call = random_call(random, 2, 2, 3, 24, 8, dtype);
  call.position_new.select(0, 1).narrow(0, 0, 5).fill_(-1);  // row 1 begins with padding
  const EvictionPolicy policy = policy_of(1, 4, num_recent);
  KVCache cache = KVCache::allocate(2, 2, 5 + num_recent, 8, dtype);
  const KVCache whole_cache = copy_of(cache), plain_cache = copy_of(cache);
  const at::Tensor none = at::full(call.k_new.sizes(), 7.0, call.k_new.options());
  const DecodeOptions whole = {
      .chunk = chunk, .k_evicted = none.clone(), .v_evicted = none.clone()};
  const DecodeResult result = decode(whole_cache, call, policy, whole);
  CHECK(same_result(result, decode(plain_cache, call, policy, {.chunk = chunk})));
  CHECK(same_state(whole_cache, plain_cache));

  int64_t handed_out = 0, never_stored = 0;
  for (int64_t first = 0; first < call.num_new(); first += chunk) {
    // Chunks are counted in a row's own tokens, so each row has them from other columns.
    for (int64_t row = 0; row < 2; ++row) {
      const int64_t begin = row == 0 ? first : first + 5;
      const int64_t count = std::min(chunk, call.num_new() - begin);
      if (count <= 0) continue;
      const KVCache before = copy_of(row_of(cache, row));
      decode(row_of(cache, row), call.row(row).columns(begin, count), policy, {.chunk = chunk});
      for (int64_t head = 0; head < 2; ++head) {
        for (int64_t column = begin; column < begin + count; ++column) {
          const auto at = [&](const at::Tensor& tensor) {
            return tensor.select(0, row).select(0, head).select(0, column);
          };
          const int64_t left = at(result.evicted).item<int64_t>();
          at::Tensor key = at(none), value = at(none);
          const std::vector<int64_t> positions =
              int64s(before.positions.select(0, 0).select(0, head));
          const auto found = std::find(positions.begin(), positions.end(), left);
          if (left >= 0 && found != positions.end()) {
            key = before.k_cache.select(0, 0).select(0, head).select(0, found - positions.begin());
            value =
                before.v_cache.select(0, 0).select(0, head).select(0, found - positions.begin());
            ++handed_out;
          } else if (left >= 0) {
            ++never_stored;
          }
          CAPTURE(row, head, column, left);
          CHECK(same_bits(at(*whole.k_evicted), key));
          CHECK(same_bits(at(*whole.v_evicted), value));
        }
      }
    }
  }
  CHECK(same_state(cache, whole_cache));
  CHECK(handed_out > (num_recent == 0 ? 3 : 20));
  CHECK((never_stored > 0) == (num_recent == 0 || chunk > num_recent));
}

TEST_CASE("autograd learns which tensors a call has written", "[attention_decode][cpu]") {
  Random random(27);
  const KVCache cache = KVCache::allocate(1, 1, 4, 8, at::kFloat);
  const Call call = random_call(random, 1, 1, 1, 2, 8);
  const DecodeOptions options = {.k_evicted = call.k_new.clone(), .v_evicted = call.k_new.clone()};
  const auto versions = [&] {
    return std::vector<int64_t>{cache.k_cache._version(),      cache.v_cache._version(),
                                cache.scores._version(),       cache.positions._version(),
                                options.k_evicted->_version(), options.v_evicted->_version()};
  };
  const std::vector<int64_t> before = versions();
  decode(cache, call, policy_of(0, 4, 0), options);
  for (size_t i = 0; i < before.size(); ++i) {
    CAPTURE(i);
    CHECK(versions()[i] > before[i]);
  }
  CHECK(call.k_new._version() == 0);
}

// ---- Extremes -----------------------------------------------------------------------------------

TEST_CASE("nothing in gives nothing out", "[attention_decode][cpu]") {
  Random random(20);
  const KVCache cache = KVCache::allocate(2, 2, 4, 8, at::kFloat),
                none = KVCache::allocate(0, 2, 4, 8, at::kFloat);
  decode(cache, random_call(random, 2, 2, 2, 3, 8), policy_of(0, 4, 0));
  const Snapshot before(cache, {});
  const DecodeResult no_tokens =
      decode(cache, random_call(random, 2, 2, 2, 0, 8), policy_of(0, 1, 0));
  CHECK(no_tokens.output.sizes() == at::IntArrayRef({2, 4, 0, 8}));
  CHECK(no_tokens.evicted.sizes() == at::IntArrayRef({2, 2, 0}));
  CHECK(before.unchanged());
  const DecodeResult no_rows =
      decode(none, random_call(random, 0, 2, 2, 3, 8), policy_of(0, 1, 0), {.chunk = 2});
  CHECK(no_rows.output.sizes() == at::IntArrayRef({0, 4, 3, 8}));
  CHECK(no_rows.evicted.sizes() == at::IntArrayRef({0, 2, 3}));
}

TEST_CASE("products beyond float16 stay finite", "[attention_decode][cpu]") {
  // q . k is 288,000; scaled it is 32,199. Values 2, 4, 100, keys 60s, 60s, -60s.
  const at::ScalarType dtype = GENERATE(at::kHalf, at::kBFloat16, at::kFloat);
  const int64_t chunk = GENERATE(1, 3);
  const KVCache cache = KVCache::allocate(1, 1, 3, 80, dtype);
  Call call = {at::full({1, 1, 3, 80}, 60.0, dtype), at::full({1, 1, 3, 80}, 60.0, dtype),
               at::full({1, 1, 3, 80}, 2.0, dtype), position_range(1, 0, 3)};
  call.k_new.select(2, 0).fill_(-60.0);
  call.v_new.select(2, 0).fill_(100.0);
  call.v_new.select(2, 1).fill_(4.0);
  const DecodeResult result = decode(cache, call, policy_of(0, 3, 0), {.chunk = chunk});
  CHECK(result.output.select(2, 0).eq(100.0).all().item<bool>());
  CHECK(result.output.select(2, 1).eq(4.0).all().item<bool>());
  CHECK(result.output.select(2, 2).eq(3.0).all().item<bool>());
  CHECK(doubles(cache.scores) == std::vector<double>{1.0, 1.5, 0.5});
}

TEST_CASE("16-bit caches hold the very bits that came", "[attention_decode][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kHalf, at::kBFloat16);
  Random random(21);
  const Call call = random_call(random, 1, 1, 1, 3, 5, dtype);
  const KVCache cache = KVCache::allocate(1, 1, 3, 5, dtype);
  decode(cache, call, policy_of(0, 3, 0));
  CHECK(same_bits(cache.k_cache, call.k_new));
  CHECK(same_bits(cache.v_cache, call.v_new));
}

TEST_CASE("the last position that fits is stored", "[attention_decode][cpu]") {
  Random random(22);
  const int64_t last = std::numeric_limits<int32_t>::max() - 1;
  const KVCache cache = KVCache::allocate(1, 1, 2, 4, at::kFloat);
  decode(cache, random_call(random, 1, 1, 1, 3, 4, at::kFloat, last - 2), policy_of(0, 1, 1));
  CHECK(int64s(cache.positions.max()) == std::vector<int64_t>{last});
}

TEST_CASE("a later token's NaN or infinity does not reach the outputs before it",
          "[attention_decode][cpu]") {
  const double later = GENERATE(std::nan(""), std::numeric_limits<double>::infinity());
  const int64_t chunk = GENERATE(1, 2, 6);
  CAPTURE(later, chunk);
  Random random(23);
  const Call call = random_call(random, 1, 2, 2, 6, 8);
  Call spoilt = call.clone();
  spoilt.v_new.select(2, 5).fill_(later);
  const KVCache cache = KVCache::allocate(1, 2, 8, 8, at::kFloat), other = copy_of(cache);
  const DecodeResult expected = decode(cache, call, policy_of(0, 8, 0), {.chunk = chunk});
  const DecodeResult result = decode(other, spoilt, policy_of(0, 8, 0), {.chunk = chunk});
  CHECK(same_bits(result.output.narrow(2, 0, 5), expected.output.narrow(2, 0, 5)));
  CHECK(same_bits(other.scores, cache.scores));
}

TEST_CASE("inference mode works, a backward pass raises", "[attention_decode][cpu]") {
  Random random(24);
  const EvictionPolicy policy = policy_of(0, 2, 2);
  Call call = random_call(random, 1, 1, 2, 6, 8);
  const KVCache cache = KVCache::allocate(1, 1, 4, 8, at::kFloat);
  const DecodeResult expected = decode(copy_of(cache), call, policy);
  {
    const c10::InferenceMode guard;
    const KVCache inner = KVCache::allocate(1, 1, 4, 8, at::kFloat);
    CHECK(same_result(decode(inner, call, policy), expected));
    CHECK(same_result(decode(copy_of(cache), call, policy), expected));
  }
  call.query.requires_grad_();
  const DecodeResult result = decode(cache, call, policy);
  CHECK(same_bits(result.output.detach(), expected.output));
  const std::string message = refusal([&] { result.output.sum().backward(); });
  CAPTURE(message);
  CHECK(message.find("h2o_attention_decode is not implemented") != std::string::npos);
}

TEST_CASE("the meta device gives the sizes, dtypes and strides of the CPU",
          "[attention_decode][meta]") {
  Random random(25);
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kHalf);
  Call call = random_call(random, 2, 2, 3, 5, 8, dtype);
  call.query = call.query.transpose(1, 2).contiguous().transpose(1, 2);
  const KVCache cache = KVCache::allocate(2, 2, 4, 8, dtype);
  const KVCache meta = KVCache::allocate(2, 2, 4, 8, at::TensorOptions(dtype).device(at::kMeta));
  const Call meta_call = {call.query.to(at::kMeta), call.k_new.to(at::kMeta),
                          call.v_new.to(at::kMeta), call.position_new.to(at::kMeta)};
  const DecodeResult real = decode(cache, call, policy_of(0, 2, 2)),
                     fake = decode(meta, meta_call, policy_of(0, 2, 2));
  const auto check_like = [](const at::Tensor& tensor, const at::Tensor& expected) {
    CHECK(tensor.is_meta());
    CHECK(tensor.sizes() == expected.sizes());
    CHECK(tensor.strides() == expected.strides());
    CHECK(tensor.scalar_type() == expected.scalar_type());
  };
  check_like(fake.output, real.output);
  check_like(fake.evicted, real.evicted);
  // And the same sentences.
  CHECK(refusal([&] { decode(meta, meta_call, policy_of(0, 9, 0)); }) ==
        refusal([&] { decode(cache, call, policy_of(0, 9, 0)); }));
}

// ---- Errors -------------------------------------------------------------------------------------

namespace {

// A good call of batch 2, 2 KV heads, 4 query heads, 3 tokens, head_dim 8, capacity 5, for one part
// to be spoilt.
struct Good {
  KVCache cache;
  Call call;
  DecodeOptions options;
  EvictionPolicy policy = policy_of(1, 2, 2);

  Good() : cache(KVCache::allocate(2, 2, 5, 8, at::kFloat)) {
    Random random(26);
    decode(cache, random_call(random, 2, 2, 2, 5, 8), policy);
    call = random_call(random, 2, 2, 2, 3, 8, at::kFloat, 5);
    options.alibi_slopes = tensor_of({.1, .2, .3, .4}, {4});
    options.row_budget = integers({1, 2, 2, 0, 3, 2}, {2, 3});
    options.k_evicted = at::zeros({2, 2, 3, 8});
    options.v_evicted = at::zeros({2, 2, 3, 8});
  }

  // What the call says, having checked that it wrote nothing.
  std::string refusal() const {
    Snapshot before(cache, {call.query, call.k_new, call.v_new, call.position_new});
    for (const auto& tensor : {options.k_evicted, options.v_evicted}) {
      if (tensor) before.watch(*tensor);
    }
    const std::string message = ::refusal([this] { decode(cache, call, policy, options); });
    CHECK(before.unchanged());
    return message;
  }
};

}  // namespace

TEST_CASE("the call that the error tests spoil is a good one", "[attention_decode][cpu]") {
  const Good good;
  CHECK_NOTHROW(decode(good.cache, good.call, good.policy, good.options));
  CHECK(good.cache.positions.max().item<int64_t>() == 7);
}

TEST_CASE("decode refuses tensors that do not fit, before it writes", "[attention_decode][cpu]") {
  Good good;
  std::string message;
  SECTION("a cache of another dtype") {
    good.cache.scores = good.cache.scores.to(at::kDouble);
    message = "scores must be float32, got Double";
  }
  SECTION("a query without a batch") {
    good.call.query = good.call.query.select(0, 0);
    message = "query must be [batch, num_q_heads, num_new, head_dim], got [4, 3, 8]";
  }
  SECTION("query heads that are no multiple of the KV heads") {
    good.call.query = good.call.query.narrow(1, 0, 3);
    message = "num_q_heads must be a multiple of num_kv_heads, got num_q_heads=3, num_kv_heads=2";
  }
  SECTION("no query heads") {
    good.call.query = good.call.query.narrow(1, 0, 0);
    message = "num_q_heads must be a multiple of num_kv_heads, got num_q_heads=0, num_kv_heads=2";
  }
  SECTION("queries for another number of tokens") {
    good.call.query = good.call.query.narrow(2, 0, 2);
    message =
        "query must be [batch, num_q_heads, num_new, head_dim] = [2, 4, 3, 8], got [2, 4, 2, 8]";
  }
  SECTION("queries of one row for two") {
    good.call.query = good.call.query.narrow(0, 0, 1);
    message =
        "query must be [batch, num_q_heads, num_new, head_dim] = [2, 4, 3, 8], got [1, 4, 3, 8]";
  }
  SECTION("a query of another head_dim") {
    good.call.query = good.call.query.narrow(3, 0, 4);
    message =
        "query must be [batch, num_q_heads, num_new, head_dim] = [2, 4, 3, 8], got [2, 4, 3, 4]";
  }
  SECTION("a query of another dtype") {
    good.call.query = good.call.query.to(at::kBFloat16);
    message = "query must be float32, got BFloat16";
  }
  SECTION("keys without tokens as a dimension") {
    good.call.k_new = good.call.k_new.select(2, 0);
    message = "k_new must be [batch, num_kv_heads, num_new, head_dim], got [2, 2, 8]";
  }
  SECTION("keys repeated to the query heads") {
    good.call.k_new = at::cat({good.call.k_new, good.call.k_new}, 1);
    message =
        "k_new must be [batch, num_kv_heads, num_new, head_dim] = [2, 2, 3, 8], got [2, 4, 3, 8]";
  }
  SECTION("keys of another dtype") {
    good.call.k_new = good.call.k_new.to(at::kHalf);
    message = "k_new must be float32, got Half";
  }
  SECTION("values for another number of tokens") {
    good.call.v_new = good.call.v_new.narrow(2, 0, 2);
    message =
        "v_new must be [batch, num_kv_heads, num_new, head_dim] = [2, 2, 3, 8], got [2, 2, 2, 8]";
  }
  SECTION("values of another dtype") {
    good.call.v_new = good.call.v_new.to(at::kDouble);
    message = "v_new must be float32, got Double";
  }
  SECTION("positions without a batch") {
    good.call.position_new = good.call.position_new.select(0, 0);
    message = "position_new must be [batch, num_new] = [2, 3], got [3]";
  }
  SECTION("positions of one row for two") {
    good.call.position_new = good.call.position_new.narrow(0, 0, 1);
    message = "position_new must be [batch, num_new] = [2, 3], got [1, 3]";
  }
  SECTION("positions that are no integers") {
    good.call.position_new = good.call.position_new.to(at::kFloat);
    message = "position_new must be int32 or int64, got Float";
  }
  SECTION("positions of int16") {
    good.call.position_new = good.call.position_new.to(at::kShort);
    message = "position_new must be int32 or int64, got Short";
  }
  SECTION("slopes for the KV heads") {
    good.options.alibi_slopes = tensor_of({.1, .2}, {2});
    message = "alibi_slopes must be [num_q_heads] = [4], got [2]";
  }
  SECTION("slopes of float16") {
    good.options.alibi_slopes = tensor_of({.1, .2, .3, .4}, {4}, at::kHalf);
    message = "alibi_slopes must be float32 or float64, got Half";
  }
  SECTION("one budget for two rows") {
    good.options.row_budget = integers({1, 2, 2}, {3});
    message = "row_budget must be [batch, 3] = [2, 3], got [3]";
  }
  SECTION("budgets of floats") {
    good.options.row_budget = good.options.row_budget->to(at::kFloat);
    message = "row_budget must be int32 or int64, got Float";
  }
  SECTION("room for the keys that leave, but not for their values") {
    good.options.v_evicted.reset();
    message = "k_evicted and v_evicted must be given together, got k_evicted alone";
  }
  SECTION("room for values without keys") {
    good.options.k_evicted.reset();
    message = "k_evicted and v_evicted must be given together, got v_evicted alone";
  }
  SECTION("room for fewer tokens than come") {
    good.options.k_evicted = at::zeros({2, 2, 2, 8});
    message =
        "k_evicted must be [batch, num_kv_heads, num_new, head_dim] = [2, 2, 3, 8], got "
        "[2, 2, 2, 8]";
  }
  SECTION("room for values of another dtype") {
    good.options.v_evicted = good.options.v_evicted->to(at::kDouble);
    message = "v_evicted must be float32, got Double";
  }
  SECTION("room that is not dense in head_dim") {
    good.options.v_evicted = at::zeros({2, 2, 3, 16}).slice(3, 0, 16, 2);
    message =
        "v_evicted must have stride 1 in head_dim, since it is written in place, got strides "
        "[96, 48, 16, 2]";
  }
  SECTION("one room for all rows") {
    good.options.k_evicted = at::zeros({1, 2, 3, 8}).expand({2, 2, 3, 8});
    message =
        "k_evicted must not overlap itself, since it is written in place, got sizes [2, 2, 3, 8] "
        "and strides [0, 24, 8, 1]";
  }
  SECTION("keys and values in one room") {
    good.options.v_evicted = good.options.k_evicted;
    message = "v_evicted and k_evicted must not share memory, since both are written in place";
  }
  SECTION("room in the cache") {
    good.options.k_evicted = good.cache.v_cache.narrow(2, 0, 3);
    message = "k_evicted and v_cache must not share memory, since both are written in place";
  }
  CHECK(good.refusal() == "Error: h2o_attention_decode: " + message);
}

TEST_CASE("decode refuses tensors that are not there", "[attention_decode][cpu]") {
  Good good;
  std::string name;
  SECTION("query") {
    good.call.query = at::Tensor();
    name = "query";
  }
  SECTION("k_new") {
    good.call.k_new = at::Tensor();
    name = "k_new";
  }
  SECTION("v_new") {
    good.call.v_new = at::Tensor();
    name = "v_new";
  }
  SECTION("position_new") {
    good.call.position_new = at::Tensor();
    name = "position_new";
  }
  SECTION("a part of the cache") {
    good.cache.scores = at::Tensor();
    name = "scores";
  }
  const std::string message =
      refusal([&] { decode(good.cache, good.call, good.policy, good.options); });
  CHECK_THAT(message,
             Catch::Matchers::StartsWith("Error: h2o_attention_decode: " + name + " must be "));
}

TEST_CASE("decode refuses tensors of another device", "[attention_decode][cpu]") {
  // The dispatcher takes CPU and meta together as meta, where nothing is written.
  Good good;
  std::string message;
  SECTION("k_new") {
    good.call.k_new = good.call.k_new.to(at::kMeta);
    message = "k_new must be on the device of k_cache, got meta and cpu";
  }
  SECTION("v_new") {
    good.call.v_new = good.call.v_new.to(at::kMeta);
    message = "v_new must be on the device of k_cache, got meta and cpu";
  }
  SECTION("position_new") {
    good.call.position_new = good.call.position_new.to(at::kMeta);
    message = "position_new must be on the device of k_cache, got meta and cpu";
  }
  SECTION("query") {
    good.call.query = good.call.query.to(at::kMeta);
    message = "query must be on the device of k_cache, got meta and cpu";
  }
  SECTION("alibi_slopes") {
    good.options.alibi_slopes = good.options.alibi_slopes->to(at::kMeta);
    message = "alibi_slopes must be on the device of query, got meta and cpu";
  }
  SECTION("row_budget") {
    good.options.row_budget = good.options.row_budget->to(at::kMeta);
    message = "row_budget must be on the device of k_cache, got meta and cpu";
  }
  SECTION("v_evicted") {
    good.options.v_evicted = good.options.v_evicted->to(at::kMeta);
    message = "v_evicted must be on the device of k_cache, got meta and cpu";
  }
  CHECK(refusal([&] { decode(good.cache, good.call, good.policy, good.options); }) ==
        "Error: h2o_attention_decode: " + message);
}

TEST_CASE("decode refuses numbers out of range, before it writes", "[attention_decode][cpu]") {
  Good good;
  std::string message;
  SECTION("a budget above capacity") {
    good.policy = policy_of(1, 3, 2);
    message =
        "the budget num_sink + num_heavy + num_recent must be <= capacity, got 1 + 3 + 2 = 6, "
        "capacity=5";
  }
  SECTION("a budget beyond every int") {
    good.policy = policy_of(h2o::kMaxTokens, h2o::kMaxTokens, h2o::kMaxTokens);
    message =
        "the budget num_sink + num_heavy + num_recent must be <= capacity, got 2147483647 + "
        "2147483647 + "
        "2147483647 = 6442450941, capacity=5";
  }
  SECTION("a chunk of none") {
    good.options.chunk = GENERATE(0, -1, std::numeric_limits<int64_t>::min());
    message = "chunk must be >= 1, got " + std::to_string(good.options.chunk);
  }
  SECTION("an infinite scale") {
    good.options.scale = std::numeric_limits<double>::infinity();
    message = "scale must be finite, got inf";
  }
  SECTION("a scale that is infinite where it is used") {
    good.options.scale = 1e39;
    message = "scale must be within float32's range, got 1e+39";
  }
  SECTION("a scale that is no number") {
    good.options.scale = std::nan("");
    message = "scale must be finite, got nan";
  }
  SECTION("an infinite slope") {
    good.options.alibi_slopes =
        tensor_of({.1, .2, -std::numeric_limits<double>::infinity(), .4}, {4});
    message = "alibi_slopes must be finite as float32, got -inf for query head 2";
  }
  SECTION("a slope that is NaN") {
    good.options.alibi_slopes = tensor_of({std::nan(""), .2, .3, .4}, {4}, at::kDouble);
    message = "alibi_slopes must be finite as float32, got nan for query head 0";
  }
  SECTION("a slope that is infinite in float32") {
    good.options.alibi_slopes = tensor_of({.1, .2, .3, 1e39}, {4}, at::kDouble);
    message = "alibi_slopes must be finite as float32, got 1e+39 for query head 3";
  }
  SECTION("a position twice") {
    good.call.position_new = integers({5, 6, 7, 5, 6, 6}, {2, 3});
    message = "position_new must increase along a row, got 6 before 6 in row 1, column 2";
  }
  SECTION("positions that fall, across padding") {
    good.call.position_new = integers({6, -1, 5, 5, 6, 7}, {2, 3}, at::kLong);
    message = "position_new must increase along a row, got 6 before 5 in row 0, column 2";
  }
  SECTION("a position that int32 does not hold") {
    good.call.position_new = integers({5, 6, int64_t{1} << 32, 5, 6, 7}, {2, 3}, at::kLong);
    message = "position_new must be < 2147483647, got 4294967296 in row 0, column 2";
  }
  SECTION("the largest int32, which is no position") {
    good.call.position_new = integers({5, 6, 2147483647, 5, 6, 7}, {2, 3});
    message = "position_new must be < 2147483647, got 2147483647 in row 0, column 2";
  }
  SECTION("a row's budget above capacity") {
    good.options.row_budget = integers({1, 2, 2, 1, 3, 2}, {2, 3});
    message =
        "row_budget must have counts >= 0 with a sum in 1..5 in every row, got 1, 3, 2 in row 1";
  }
  SECTION("a row's budget of none") {
    good.options.row_budget = integers({0, 0, 0, 1, 2, 2}, {2, 3});
    message =
        "row_budget must have counts >= 0 with a sum in 1..5 in every row, got 0, 0, 0 in row 0";
  }
  SECTION("a negative count in a row's budget") {
    good.options.row_budget = integers({1, 2, 2, -1, 2, 2}, {2, 3}, at::kLong);
    message =
        "row_budget must have counts >= 0 with a sum in 1..5 in every row, got -1, 2, 2 in row 1";
  }
  SECTION("counts whose sum overflows") {
    const int64_t most = std::numeric_limits<int64_t>::max();
    good.options.row_budget = integers({most, most, 3, 1, 2, 2}, {2, 3}, at::kLong);
    message =
        "row_budget must have counts >= 0 with a sum in 1..5 in every row, got "
        "9223372036854775807, "
        "9223372036854775807, 3 in row 0";
  }
  CHECK(good.refusal() == "ValueError: h2o_attention_decode: " + message);
}

TEST_CASE("decode needs counts, not ratios", "[attention_decode][cpu]") {
  Good good;
  good.policy = EvictionPolicy({.num_recent = 2, .heavy_ratio = 0.5});
  CHECK_THAT(good.refusal(),
             Catch::Matchers::StartsWith("std: EvictionPolicy: budget() must be asked of a policy "
                                         "without ratios"));
}

TEST_CASE("the dispatcher's entry refuses what the C++ types cannot hold",
          "[attention_decode][cpu]") {
  using Signature = std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
      const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t,
      std::string_view, std::optional<double>, int64_t, const std::optional<at::Tensor>&,
      const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
      const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
      const std::optional<at::Tensor>&, std::string_view, double, int64_t, int64_t, int64_t,
      const std::optional<at::Tensor>&, int64_t, int64_t, int64_t, int64_t);
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("h2o::h2o_attention_decode", "")
                      .typed<Signature>();
  const Good good;
  const auto refused = [&](int64_t num_sink, int64_t num_heavy, int64_t num_recent,
                           const char* reduce, const char* rule = "sum") {
    return refusal([&] {
      op.call(good.call.query, good.cache.k_cache, good.cache.v_cache, good.cache.scores,
              good.cache.positions, good.call.k_new, good.call.v_new, good.call.position_new,
              num_sink, num_heavy, num_recent, reduce, {}, 1, {}, {}, {}, {}, {}, {}, rule, 1.0, 0,
              0, 1, {}, 0, 0, 0, 1);
    });
  };
  const Snapshot before(good.cache, {});
  const std::string who = "ValueError: h2o_attention_decode: ";
  CHECK(refused(-1, 2, 2, "sum") == who + "num_sink must be in 0..2147483647, got -1");
  CHECK(refused(1, -2, 2, "sum") == who + "num_heavy must be in 0..2147483647, got -2");
  CHECK(refused(1, 2, 2147483648, "sum") ==
        who + "num_recent must be in 0..2147483647, got 2147483648");
  CHECK(refused(0, 0, 0, "sum") ==
        who + "the budget num_sink + num_heavy + num_recent must be >= 1, got 0 + 0 + 0");
  CHECK(refused(1, 2, 2, "mean") ==
        who + "gqa_reduce must be one of \"sum\", \"max\", got \"mean\"");
  CHECK(refused(1, 2, 2, "") == who + "gqa_reduce must be one of \"sum\", \"max\", got \"\"");
  CHECK(refused(1, 2, 2, "sum", "max") ==
        who + R"(score_rule must be one of "sum", "decay", "mean", "value", "misses", "prompt", )"
              R"("random", "given", got "max")");
  CHECK(before.unchanged());
  CHECK(refused(1, 2, 2, "max") == "nothing was thrown");
  CHECK_FALSE(before.unchanged());
}
