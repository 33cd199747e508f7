#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "decode_call.h"
#include "h2o/ops/attention_decode.h"
#include "h2o/ops/evict.h"
#include "tensors.h"
#include "test_helpers.h"

namespace {

using h2o::evict;
using h2o::EvictionPolicy;
using h2o::KVCache;

// The new tokens of a call, scored already.
struct Scored {
  at::Tensor k_new, v_new, scores_new, position_new;
};

// Tokens whose every element of K is their position and of V its negative.
Scored scored(const std::vector<double>& scores, const std::vector<int64_t>& positions,
              int64_t head_dim = 2, at::ScalarType dtype = at::kFloat) {
  const int64_t count = static_cast<int64_t>(positions.size());
  const at::Tensor position_new = integers(positions, {1, count}, at::kLong);
  const at::Tensor k_new = position_new.to(dtype)
                               .unsqueeze(1)
                               .unsqueeze(-1)
                               .expand({1, 1, count, head_dim})
                               .contiguous();
  return {k_new, -k_new,
          tensor_of(scores, {1, 1, count}, dtype == at::kDouble ? at::kDouble : at::kFloat),
          position_new};
}

// A cache of one head that holds these scores and positions by slot.
KVCache cache_of(const std::vector<double>& scores, const std::vector<int64_t>& positions,
                 at::ScalarType dtype = at::kFloat) {
  const int64_t capacity = static_cast<int64_t>(positions.size());
  const KVCache cache = KVCache::allocate(1, 1, capacity, 2, dtype);
  const Scored tokens = scored(scores, positions, 2, dtype);
  cache.k_cache.copy_(tokens.k_new);
  cache.v_cache.copy_(tokens.v_new);
  cache.scores.copy_(tokens.scores_new);
  cache.positions.copy_(tokens.position_new.unsqueeze(1));
  return cache;
}

at::Tensor evict_with(const KVCache& cache, const Scored& tokens, const EvictionPolicy& policy,
                      const std::optional<at::Tensor>& row_budget = std::nullopt) {
  return evict(cache, tokens.k_new, tokens.v_new, tokens.scores_new, tokens.position_new, policy,
               row_budget);
}

// The positions that left, in order.
std::vector<int64_t> left_of(const at::Tensor& evicted) {
  std::vector<int64_t> left = int64s(evicted);
  // Nothing follows a -1 but more of them.
  CHECK(std::is_partitioned(left.begin(), left.end(),
                            [](int64_t position) { return position >= 0; }));
  left.erase(std::remove(left.begin(), left.end(), -1), left.end());
  return left;
}

std::vector<double> keys_of(const KVCache& cache) { return doubles(cache.k_cache.select(3, 0)); }

Scored random_tokens(Random& random, int64_t batch, int64_t num_kv_heads, int64_t num_new,
                     int64_t head_dim, int64_t first_position, at::ScalarType dtype = at::kFloat) {
  return {random.tensor({batch, num_kv_heads, num_new, head_dim}, dtype),
          random.tensor({batch, num_kv_heads, num_new, head_dim}, dtype),
          random.tensor({batch, num_kv_heads, num_new},
                        dtype == at::kDouble ? at::kDouble : at::kFloat),
          position_range(batch, first_position, num_new)};
}

}  // namespace

// ---- Worked by hand -----------------------------------------------------------------------------

TEST_CASE("evict overwrites the lowest-scoring unprotected slot", "[evict][cpu]") {
  // The hand example after its attention: 9, 10 and 11 are recent, 8 has the lowest score of the
  // rest.
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kHalf, at::kBFloat16, at::kDouble);
  const KVCache cache = cache_of({2.6, 1.75, 1.22, 0.38, 0.35, 0.3}, {1, 3, 5, 8, 9, 10}, dtype);
  const at::Tensor evicted = evict_with(cache, scored({0.2}, {11}, 2, dtype), policy_of(0, 3, 3));
  CHECK(evicted.sizes() == at::IntArrayRef({1, 1, 7}));
  CHECK(evicted.scalar_type() == at::kInt);
  CHECK(left_of(evicted) == std::vector<int64_t>{8});
  CHECK(int64s(cache.positions) == std::vector<int64_t>{1, 3, 5, 11, 9, 10});
  CHECK(error_of(cache.scores, {2.6, 1.75, 1.22, 0.2, 0.35, 0.3}) < 1e-12);
  CHECK(keys_of(cache) == std::vector<double>{1, 3, 5, 11, 9, 10});
  CHECK(doubles(cache.v_cache.select(3, 1)) == std::vector<double>{-1, -3, -5, -11, -9, -10});
}

TEST_CASE("evict without new tokens shrinks a cache", "[evict][cpu]") {
  const KVCache cache = cache_of({5, 1, 4, 2, 3, 0}, {0, 1, 2, 3, 4, 5});
  const at::Tensor evicted = evict_with(cache, scored({}, {}), policy_of(1, 1, 1));
  CHECK(evicted.sizes() == at::IntArrayRef({1, 1, 6}));
  CHECK(left_of(evicted) == std::vector<int64_t>{1, 3, 4});
  // A slot that is freed is empty: position -1, score 0. Its bytes stay.
  CHECK(int64s(cache.positions) == std::vector<int64_t>{0, -1, 2, -1, -1, 5});
  CHECK(doubles(cache.scores) == std::vector<double>{5, 0, 4, 0, 0, 0});
  CHECK(keys_of(cache) == std::vector<double>{0, 1, 2, 3, 4, 5});
}

TEST_CASE("evict takes freed slots first, then empty ones, each from the lowest up",
          "[evict][cpu]") {
  const KVCache cache = cache_of({0, 9, 2, 8, 0, 1}, {-1, 0, 1, 2, -1, 3});
  // Six candidates for a budget of five: 3 leaves slot 5 to the older of the new tokens.
  const at::Tensor evicted = evict_with(cache, scored({5, 6}, {4, 5}), policy_of(0, 5, 0));
  CHECK(left_of(evicted) == std::vector<int64_t>{3});
  CHECK(int64s(cache.positions) == std::vector<int64_t>{5, 0, 1, 2, -1, 4});
  CHECK(doubles(cache.scores) == std::vector<double>{6, 9, 2, 8, 0, 5});
}

TEST_CASE("a new token may be evicted before it is stored", "[evict][cpu]") {
  const KVCache cache = cache_of({5, 6, 7}, {0, 1, 2});
  const at::Tensor evicted = evict_with(cache, scored({1, 8, 0.5}, {3, 4, 5}), policy_of(0, 3, 0));
  CHECK(left_of(evicted) == std::vector<int64_t>{5, 3, 0});
  CHECK(int64s(cache.positions) == std::vector<int64_t>{4, 1, 2});
  CHECK(keys_of(cache) == std::vector<double>{4, 1, 2});
}

TEST_CASE("the window ends at the largest position present", "[evict][cpu]") {
  // It is in the cache, not among the new tokens, of which the older comes last into its place.
  const KVCache cache = cache_of({0, 0, 0, 0}, {9, 8, 2, -1});
  const at::Tensor evicted = evict_with(cache, scored({-1, -2}, {5, 6}), policy_of(0, 1, 2));
  CHECK(left_of(evicted) == std::vector<int64_t>{6, 5});
  CHECK(int64s(cache.positions) == std::vector<int64_t>{9, 8, 2, -1});
}

TEST_CASE("sinks and recent tokens stay when all scores are equal", "[evict][cpu]") {
  const double score =
      GENERATE(0.0, 1.0, 3e38, std::numeric_limits<double>::infinity(), std::nan(""));
  CAPTURE(score);
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < 16; ++i) positions.push_back(i);
  const KVCache cache = cache_of(std::vector<double>(16, score), positions);
  const at::Tensor evicted = evict_with(cache, scored({}, {}), policy_of(2, 2, 4));
  CHECK(left_of(evicted) == std::vector<int64_t>{2, 3, 4, 5, 6, 7, 8, 9});
  CHECK(int64s(cache.positions) ==
        std::vector<int64_t>{0, 1, -1, -1, -1, -1, -1, -1, -1, -1, 10, 11, 12, 13, 14, 15});
}

TEST_CASE("each part of a budget may be 0", "[evict][cpu]") {
  const std::vector<double> scores = {3, 1, 2, 5, 4};
  struct Case {
    EvictionPolicy policy;
    std::vector<int64_t> left;
  };
  const Case c = GENERATE(Case{policy_of(0, 0, 2), {1, 2, 0}}, Case{policy_of(2, 0, 0), {2, 4, 3}},
                          Case{policy_of(0, 2, 0), {1, 2, 0}}, Case{policy_of(1, 0, 1), {1, 2, 3}},
                          Case{policy_of(0, 1, 1), {1, 2, 0}}, Case{policy_of(5, 0, 0), {}});
  CAPTURE(c.policy.to_string());
  CHECK(left_of(evict_with(cache_of(scores, {0, 1, 2, 3, 4}), scored({}, {}), c.policy)) == c.left);
}

TEST_CASE("NaN leaves first and the smaller position among equals", "[evict][cpu]") {
  const double nan = std::nan("");
  const KVCache cache = cache_of({-1.0, nan, 0.0, -0.0, nan}, {0, 4, 3, 1, 2});
  CHECK(left_of(evict_with(cache, scored({nan, 5.0}, {5, 6}), policy_of(0, 1, 1))) ==
        std::vector<int64_t>{2, 4, 5, 0, 1});
  CHECK(int64s(cache.positions) == std::vector<int64_t>{6, -1, 3, -1, -1});
}

TEST_CASE("where too many are protected the newest token is left out for want of a slot",
          "[evict][cpu]") {
  // Positions that repeat: all four are sinks, and there is room for three.
  const KVCache cache = cache_of({1, 2, 3}, {0, 1, 2});
  const at::Tensor evicted = evict_with(cache, scored({9}, {2}), policy_of(3, 0, 0));
  CHECK(left_of(evicted) == std::vector<int64_t>{2});
  CHECK(int64s(cache.positions) == std::vector<int64_t>{0, 1, 2});
  CHECK(doubles(cache.scores) == std::vector<double>{1, 2, 3});
}

TEST_CASE("a cache within its budget is left as it is", "[evict][cpu]") {
  const KVCache cache = cache_of({1, 2, 0}, {0, 1, -1});
  const Snapshot before(cache, {});
  CHECK(left_of(evict_with(cache, scored({}, {}), policy_of(0, 2, 0))).empty());
  CHECK(before.unchanged());
}

TEST_CASE("decode is evict after the attention", "[evict][attention_decode][cpu]") {
  // Every key is 0, so each of the 5 candidates of a full cache gets a weight of 1/5.
  const KVCache fused = cache_of({1, 4, 2, 3}, {0, 1, 2, 3});
  fused.k_cache.zero_();
  const KVCache halves = copy_of(fused);
  Scored token = scored({0.2}, {4});
  token.k_new.zero_();
  const h2o::DecodeResult result =
      h2o::attention_decode(at::zeros({1, 1, 1, 2}), fused, token.k_new, token.v_new,
                            token.position_new, policy_of(0, 3, 1));
  halves.scores.add_(0.2f);
  const at::Tensor evicted = evict_with(halves, token, policy_of(0, 3, 1));
  CHECK(left_of(evicted) == int64s(result.evicted));
  CHECK(same_bits(halves.positions, fused.positions));
  CHECK(error_of(halves.scores, doubles(fused.scores)) < 1e-6);
  CHECK(same_bits(halves.v_cache, fused.v_cache));
}

// ---- Against the reference ----------------------------------------------------------------------

TEST_CASE("given the same scores evict equals the reference exactly", "[evict][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kHalf, at::kBFloat16, at::kDouble);
  const bool few_scores = GENERATE(false, true);  // ties, zeros of both signs, NaN
  CAPTURE(dtype, few_scores);
  Random random(31);
  const int64_t capacity = 12, batch = 3, heads = 2;
  const KVCache cache = KVCache::allocate(batch, heads, capacity, 5, dtype);
  cache.k_cache.zero_();
  cache.v_cache.zero_();
  int64_t position = 0, evictions = 0;
  for (int step = 0; step < 60; ++step) {
    CAPTURE(step);
    const int64_t num_new = random.below(7);
    Scored tokens = random_tokens(random, batch, heads, num_new, 5, position, dtype);
    position += num_new + random.below(3);
    if (few_scores) {
      std::vector<double> scores;
      for (int64_t i = 0; i < batch * heads * num_new; ++i) {
        const int64_t kind = random.below(6);
        scores.push_back(kind == 0   ? std::nan("")
                         : kind == 1 ? -0.0
                                     : static_cast<double>(kind - 2));
      }
      tokens.scores_new =
          tensor_of(scores, {batch, heads, num_new}, tokens.scores_new.scalar_type());
    }
    // Some columns of some rows are padding.
    for (int64_t row = 0; row < batch; ++row) {
      for (int64_t column = 0; column < num_new; ++column) {
        if (random.below(4) == 0) tokens.position_new.select(0, row).select(0, column).fill_(-1);
      }
    }
    std::vector<int64_t> budgets;
    for (int64_t row = 0; row < batch; ++row) {
      budgets.insert(budgets.end(), {random.below(4), 1 + random.below(5), random.below(4)});
    }
    const at::Tensor row_budget = integers(budgets, {batch, 3});
    const KVCache before = copy_of(cache);
    const at::Tensor evicted = evict_with(cache, tokens, policy_of(0, 1, 0), row_budget);
    for (int64_t row = 0; row < batch; ++row) {
      for (int64_t head = 0; head < heads; ++head) {
        reference::Head expected = head_of(before, row, head);
        std::vector<reference::Token> fresh;
        const std::vector<int64_t> positions = int64s(tokens.position_new.select(0, row));
        const std::vector<double> scores =
            doubles(tokens.scores_new.select(0, row).select(0, head));
        for (int64_t i = 0; i < num_new; ++i) {
          if (positions[static_cast<size_t>(i)] < 0) continue;
          fresh.push_back({positions[static_cast<size_t>(i)], scores[static_cast<size_t>(i)],
                           row_at(tokens.k_new, {row, head, i}),
                           row_at(tokens.v_new, {row, head, i})});
        }
        const size_t b = static_cast<size_t>(3 * row);
        const std::vector<int64_t> left = expected.evict(
            fresh,
            {.num_sink = budgets[b], .num_heavy = budgets[b + 1], .num_recent = budgets[b + 2]});
        evictions += static_cast<int64_t>(left.size());
        CHECK(left_of(evicted.select(0, row).select(0, head)) == left);
        CHECK(difference(cache, row, head, expected, 0.0) == "");
      }
    }
  }
  CHECK(evictions > 300);
}

// ---- Equalities bit for bit ---------------------------------------------------------------------

TEST_CASE("evict changes no bit with threads, batch or strides", "[evict][cpu]") {
  const int before = at::get_num_threads();
  Random random(32);
  const int64_t capacity = 600;
  KVCache cache = KVCache::allocate(4, 3, capacity, 8, at::kFloat);
  Scored tokens = random_tokens(random, 4, 3, 700, 8, 0);
  const KVCache expected_cache = copy_of(cache);
  at::set_num_threads(1);
  const at::Tensor expected = evict_with(expected_cache, tokens, policy_of(4, 300, 200));
  SECTION("threads") { at::set_num_threads(2); }
  SECTION("strides") {
    const auto transposed = [](const at::Tensor& tensor) {
      return tensor.transpose(1, 2).contiguous().transpose(1, 2);
    };
    cache = {transposed(cache.k_cache), transposed(cache.v_cache), transposed(cache.scores),
             transposed(cache.positions)};
    tokens = {transposed(tokens.k_new), transposed(tokens.v_new), transposed(tokens.scores_new),
              tokens.position_new.t().contiguous().t()};
  }
  SECTION("int32 positions") { tokens.position_new = tokens.position_new.to(at::kInt); }
  SECTION("one row after the other") {
    std::vector<at::Tensor> evicted;
    for (int64_t row = 0; row < 4; ++row) {
      const auto own = [row](const at::Tensor& tensor) { return tensor.narrow(0, row, 1); };
      const at::Tensor left = evict_with(
          row_of(cache, row),
          {own(tokens.k_new), own(tokens.v_new), own(tokens.scores_new), own(tokens.position_new)},
          policy_of(4, 300, 200));
      CHECK(same_bits(left, own(expected)));
    }
    CHECK(same_state(cache, expected_cache));
    at::set_num_threads(before);
    return;
  }
  CHECK(same_bits(evict_with(cache, tokens, policy_of(4, 300, 200)), expected));
  CHECK(same_state(cache, expected_cache));
  at::set_num_threads(before);
}

TEST_CASE("evict may be given views of the cache itself", "[evict][cpu]") {
  // Slots 0 and 1 come as positions 4 and 5, into slots 1 and 2: the first overwrites the second's
  // source.
  const KVCache cache = cache_of({4, 1, 2, 3}, {0, 1, 2, 3}), expected_cache = copy_of(cache);
  const Scored views = {cache.k_cache.narrow(2, 0, 2), cache.v_cache.narrow(2, 0, 2),
                        cache.scores.narrow(2, 0, 2), position_range(1, 4, 2)};
  const Scored copies = {views.k_new.clone(), views.v_new.clone(), views.scores_new.clone(),
                         views.position_new};
  const at::Tensor expected = evict_with(expected_cache, copies, policy_of(0, 2, 2));
  CHECK(same_bits(evict_with(cache, views, policy_of(0, 2, 2)), expected));
  CHECK(same_state(cache, expected_cache));
  CHECK(int64s(cache.positions) == std::vector<int64_t>{0, 4, 5, 3});
  CHECK(keys_of(cache) == std::vector<double>{0, 0, 1, 3});
}

TEST_CASE("evict reads its inputs and writes the cache alone", "[evict][cpu]") {
  Random random(33);
  const KVCache cache = KVCache::allocate(2, 2, 4, 8, at::kFloat);
  const Scored tokens = random_tokens(random, 2, 2, 9, 8, 0);
  const at::Tensor row_budget = integers({1, 2, 1, 0, 2, 2}, {2, 3});
  const Snapshot inputs(
      {tokens.k_new, tokens.v_new, tokens.scores_new, tokens.position_new, row_budget});
  const at::Tensor evicted = evict_with(cache, tokens, policy_of(0, 4, 0), row_budget);
  CHECK(inputs.unchanged());
  CHECK_FALSE(evicted.is_alias_of(cache.positions));
  CHECK_FALSE(evicted.is_alias_of(tokens.position_new));
}

TEST_CASE("autograd learns which tensors evict has written", "[evict][cpu]") {
  const KVCache cache = cache_of({1, 2, 3, 4}, {0, 1, 2, 3});
  const auto versions = [&] {
    return std::vector<int64_t>{cache.k_cache._version(), cache.v_cache._version(),
                                cache.scores._version(), cache.positions._version()};
  };
  const std::vector<int64_t> before = versions();
  evict_with(cache, scored({5}, {4}), policy_of(0, 4, 0));
  for (size_t i = 0; i < before.size(); ++i) {
    CAPTURE(i);
    CHECK(versions()[i] > before[i]);
  }
}

TEST_CASE("evict of nothing gives nothing, in inference mode too", "[evict][cpu]") {
  const c10::InferenceMode guard(GENERATE(false, true));
  Random random(34);
  const KVCache none = KVCache::allocate(0, 2, 4, 8, at::kFloat),
                empty = KVCache::allocate(2, 2, 4, 8, at::kFloat);
  CHECK(evict_with(none, random_tokens(random, 0, 2, 3, 8, 0), policy_of(0, 1, 0)).sizes() ==
        at::IntArrayRef({0, 2, 7}));
  const Snapshot before(empty, {});
  const at::Tensor evicted =
      evict_with(empty, random_tokens(random, 2, 2, 0, 8, 0), policy_of(0, 1, 0));
  CHECK(evicted.sizes() == at::IntArrayRef({2, 2, 4}));
  CHECK(evicted.max().item<int64_t>() == -1);
  CHECK(before.unchanged());
  evict_with(empty, random_tokens(random, 2, 2, 3, 8, 0), policy_of(0, 2, 0));
  CHECK(int64s(empty.cache_len()) == std::vector<int64_t>{2, 2, 2, 2});
}

TEST_CASE("evict on the meta device gives the sizes of the CPU", "[evict][meta]") {
  const KVCache meta =
      KVCache::allocate(2, 3, 4, 8, at::TensorOptions(at::kHalf).device(at::kMeta));
  const auto empty = [](at::IntArrayRef sizes, at::ScalarType dtype) {
    return at::empty(sizes, at::TensorOptions(dtype).device(at::kMeta));
  };
  const at::Tensor evicted =
      evict(meta, empty({2, 3, 5, 8}, at::kHalf), empty({2, 3, 5, 8}, at::kHalf),
            empty({2, 3, 5}, at::kFloat), empty({2, 5}, at::kLong), policy_of(0, 4, 0));
  CHECK(evicted.is_meta());
  CHECK(evicted.sizes() == at::IntArrayRef({2, 3, 9}));
  CHECK(evicted.scalar_type() == at::kInt);
}

// ---- Errors -------------------------------------------------------------------------------------

namespace {

// A good call of batch 2, 2 KV heads, 3 tokens, head_dim 8, capacity 5, for one part to be spoilt.
struct Good {
  KVCache cache = KVCache::allocate(2, 2, 5, 8, at::kFloat);
  Scored tokens;
  EvictionPolicy policy = policy_of(1, 2, 2);
  at::Tensor row_budget = integers({1, 2, 2, 0, 3, 2}, {2, 3});

  Good() {
    Random random(35);
    evict_with(cache, random_tokens(random, 2, 2, 5, 8, 0), policy);
    tokens = random_tokens(random, 2, 2, 3, 8, 5);
  }

  // What the call says, having checked that it wrote nothing.
  std::string refusal() const {
    const Snapshot before(cache,
                          {tokens.k_new, tokens.v_new, tokens.scores_new, tokens.position_new});
    const std::string message =
        ::refusal([this] { evict_with(cache, tokens, policy, row_budget); });
    CHECK(before.unchanged());
    return message;
  }
};

}  // namespace

TEST_CASE("evict refuses tensors that do not fit, before it writes", "[evict][cpu]") {
  Good good;
  std::string message;
  SECTION("a cache of another dtype") {
    good.cache.scores = good.cache.scores.to(at::kDouble);
    message = "scores must be float32, got Double";
  }
  SECTION("keys without tokens as a dimension") {
    good.tokens.k_new = good.tokens.k_new.select(2, 0);
    message = "k_new must be [batch, num_kv_heads, num_new, head_dim], got [2, 2, 8]";
  }
  SECTION("keys of another head_dim") {
    good.tokens.k_new = good.tokens.k_new.narrow(3, 0, 4);
    message =
        "k_new must be [batch, num_kv_heads, num_new, head_dim] = [2, 2, 3, 8], got [2, 2, 3, 4]";
  }
  SECTION("values of one head for two") {
    good.tokens.v_new = good.tokens.v_new.narrow(1, 0, 1);
    message =
        "v_new must be [batch, num_kv_heads, num_new, head_dim] = [2, 2, 3, 8], got [2, 1, 3, 8]";
  }
  SECTION("values of another dtype") {
    good.tokens.v_new = good.tokens.v_new.to(at::kHalf);
    message = "v_new must be float32, got Half";
  }
  SECTION("scores for another number of tokens") {
    good.tokens.scores_new = good.tokens.scores_new.narrow(2, 0, 2);
    message = "scores_new must be [batch, num_kv_heads, num_new] = [2, 2, 3], got [2, 2, 2]";
  }
  SECTION("scores of another dtype than the cache's") {
    good.tokens.scores_new = good.tokens.scores_new.to(at::kDouble);
    message = "scores_new must be float32, got Double";
  }
  SECTION("positions of floats") {
    good.tokens.position_new = good.tokens.position_new.to(at::kDouble);
    message = "position_new must be int32 or int64, got Double";
  }
  SECTION("positions per head") {
    good.tokens.position_new = good.tokens.position_new.unsqueeze(1).expand({2, 2, 3});
    message = "position_new must be [batch, num_new] = [2, 3], got [2, 2, 3]";
  }
  SECTION("budgets of two numbers") {
    good.row_budget = good.row_budget.narrow(1, 0, 2);
    message = "row_budget must be [batch, 3] = [2, 3], got [2, 2]";
  }
  SECTION("budgets of int8") {
    good.row_budget = good.row_budget.to(at::kChar);
    message = "row_budget must be int32 or int64, got Char";
  }
  CHECK(good.refusal() == "Error: h2o_evict: " + message);
}

TEST_CASE("evict refuses numbers out of range, before it writes", "[evict][cpu]") {
  Good good;
  std::string message;
  SECTION("a budget above capacity") {
    good.policy = policy_of(2, 2, 2);
    message =
        "the budget num_sink + num_heavy + num_recent must be <= capacity, got 2 + 2 + 2 = 6, "
        "capacity=5";
  }
  SECTION("a position twice") {
    good.tokens.position_new = integers({5, 5, 6, 5, 6, 7}, {2, 3});
    message = "position_new must increase along a row, got 5 before 5 in row 0, column 1";
  }
  SECTION("a position that int32 does not hold") {
    good.tokens.position_new = integers({5, 6, 7, 5, 6, int64_t{1} << 40}, {2, 3}, at::kLong);
    message = "position_new must be < 2147483647, got 1099511627776 in row 1, column 2";
  }
  SECTION("a row's budget above capacity") {
    good.row_budget = integers({1, 2, 2, 0, 6, 0}, {2, 3});
    message =
        "row_budget must have counts >= 0 with a sum in 1..5 in every row, got 0, 6, 0 in row 1";
  }
  CHECK(good.refusal() == "ValueError: h2o_evict: " + message);
}

TEST_CASE("evict refuses tensors that are not there or elsewhere", "[evict][cpu]") {
  Good good;
  std::string message;
  SECTION("k_new") {
    good.tokens.k_new = at::Tensor();
    message = "k_new must be ";
  }
  SECTION("scores_new") {
    good.tokens.scores_new = at::Tensor();
    message = "scores_new must be ";
  }
  SECTION("v_new") {
    good.tokens.v_new = at::Tensor();
    message = "v_new must be ";
  }
  SECTION("position_new") {
    good.tokens.position_new = at::Tensor();
    message = "position_new must be ";
  }
  SECTION("k_new on the meta device") {
    good.tokens.k_new = good.tokens.k_new.to(at::kMeta);
    message = "k_new must be on the device of k_cache, got meta and cpu";
  }
  SECTION("v_new on the meta device") {
    good.tokens.v_new = good.tokens.v_new.to(at::kMeta);
    message = "v_new must be on the device of k_cache, got meta and cpu";
  }
  SECTION("position_new on the meta device") {
    good.tokens.position_new = good.tokens.position_new.to(at::kMeta);
    message = "position_new must be on the device of k_cache, got meta and cpu";
  }
  SECTION("row_budget on the meta device") {
    good.row_budget = good.row_budget.to(at::kMeta);
    message = "row_budget must be on the device of k_cache, got meta and cpu";
  }
  SECTION("scores_new on the meta device") {
    good.tokens.scores_new = good.tokens.scores_new.to(at::kMeta);
    message = "scores_new must be on the device of k_cache, got meta and cpu";
  }
  CHECK_THAT(refusal([&] { evict_with(good.cache, good.tokens, good.policy, good.row_budget); }),
             Catch::Matchers::StartsWith("Error: h2o_evict: " + message));
}

TEST_CASE("evict needs counts, not ratios", "[evict][cpu]") {
  Good good;
  good.policy = EvictionPolicy({.num_heavy = 2, .recent_ratio = 0.5});
  CHECK_THAT(good.refusal(),
             Catch::Matchers::StartsWith(
                 "std: EvictionPolicy: budget() must be asked of a policy without ratios"));
}
