#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "decode_call.h"
#include "h2o/ops/evict.h"
#include "h2o/ops/prefill_select.h"
#include "tensors.h"
#include "test_helpers.h"

// What holds of every call, whatever the shapes, dtypes, strides, budgets, chunks and padding. A
// failure prints its seed; the case of one seed is always the same.
namespace {

using h2o::Budget;
using h2o::DecodeOptions;
using h2o::DecodeResult;
using h2o::KVCache;

// How many seeds a test tries.
constexpr uint32_t kMany = 40, kFew = 10;

at::ScalarType any_dtype(Random& random) {
  const at::ScalarType dtypes[] = {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble};
  return dtypes[random.below(4)];
}

// Each part may be 0, but not all.
Budget any_budget(Random& random) {
  const auto part = [&random] { return random.below(3) == 0 ? 0 : random.below(7); };
  const Budget budget{part(), part(), part()};
  return budget.total() > 0 ? budget : Budget{.num_recent = 1 + random.below(5)};
}

// The same numbers with other strides.
at::Tensor any_layout(Random& random, const at::Tensor& tensor) {
  switch (random.below(3)) {
    case 0:
      return tensor;
    case 1:
      return tensor.transpose(1, 2).contiguous().transpose(1, 2);
    default: {
      const at::Scalar between = tensor.is_floating_point() ? at::Scalar(std::nan("")) : -1;
      at::Tensor larger = at::full({tensor.size(0), tensor.size(1) + 1, 2 * tensor.size(2)},
                                   between, tensor.options());
      if (tensor.dim() == 4) larger = larger.unsqueeze(3).repeat({1, 1, 1, tensor.size(3) + 3});
      at::Tensor view = larger.narrow(1, 1, tensor.size(1)).slice(2, 0, 2 * tensor.size(2), 2);
      if (tensor.dim() == 4) view = view.narrow(3, 2, tensor.size(3));
      return view.copy_(tensor);
    }
  }
}

struct Setup {
  uint32_t seed;
  Random random;
  at::ScalarType dtype;
  int64_t batch, num_kv_heads, group_size, head_dim;
  Budget budget;
  DecodeOptions options;
  KVCache cache;
  std::vector<int64_t> next;  // of each row: the least position that its next token may have

  explicit Setup(uint32_t seed_of_all)
      : seed(seed_of_all),
        random(seed),
        dtype(any_dtype(random)),
        batch(1 + random.below(3)),
        num_kv_heads(1 + random.below(3)),
        group_size(1 + random.below(4)),
        head_dim(1 + random.below(40)),
        budget(any_budget(random)),
        cache(KVCache::allocate(batch, num_kv_heads, budget.total() + random.below(4), head_dim,
                                dtype)),
        next(static_cast<size_t>(batch), 0) {
    cache = {any_layout(random, cache.k_cache), any_layout(random, cache.v_cache),
             any_layout(random, cache.scores), any_layout(random, cache.positions)};
    options.chunk = random.below(2) == 0 ? 1 : 1 + random.below(6);
    if (random.below(3) == 0) options.scale = random.normal();
    if (random.below(4) == 0) options.alibi_slopes = random.tensor({num_kv_heads * group_size});
  }

  h2o::EvictionPolicy policy() {
    return policy_of(budget.num_sink, budget.num_heavy, budget.num_recent,
                     reduce_max_ ? h2o::GqaReduce::kMax : h2o::GqaReduce::kSum);
  }

  // `num_new` columns of which about a fifth are padding; positions skip some now and then.
  Call call(int64_t num_new) {
    Call call = random_call(random, batch, num_kv_heads, group_size, num_new, head_dim, dtype);
    std::vector<int64_t> positions;
    for (int64_t& position : next) {
      for (int64_t column = 0; column < num_new; ++column) {
        if (random.below(5) == 0) {
          positions.push_back(-1 - random.below(3));
          continue;
        }
        position += random.below(8) == 0 ? random.below(9) : 0;
        positions.push_back(position++);
      }
    }
    call.position_new =
        integers(positions, {batch, num_new}, random.below(2) == 0 ? at::kInt : at::kLong);
    call.query = any_layout(random, call.query);
    call.k_new = any_layout(random, call.k_new);
    call.v_new = any_layout(random, call.v_new);
    return call;
  }

 private:
  bool reduce_max_ = random.below(2) == 0;
};

std::vector<int64_t> real_positions(const at::Tensor& positions) {
  std::vector<int64_t> real = int64s(positions);
  std::erase_if(real, [](int64_t position) { return position < 0; });
  return real;
}

// Restores the number of threads.
class Threads {
 public:
  explicit Threads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

}  // namespace

// ---- Who is in the cache ------------------------------------------------------------------------

namespace {

// Follows one (row, KV head) from call to call.
struct Watched {
  std::set<int64_t> kept;
  std::map<int64_t, std::pair<reference::Row, reference::Row>> given;  // K and V by position

  // `left`: who left in this call.
  void check(const reference::Head& head, const std::vector<int64_t>& joined,
             const std::vector<int64_t>& left, const Budget& budget) {
    std::set<int64_t> now;
    for (const reference::Token& token : head.slots()) {
      if (token.position < 0) continue;
      CAPTURE(token.position);
      CHECK(now.insert(token.position).second);
      CHECK(given.at(token.position) == std::pair(token.key, token.value));
    }
    CHECK(std::ssize(now) <= budget.total());

    std::set<int64_t> expected = kept;
    expected.insert(joined.begin(), joined.end());
    for (const int64_t position : left) {
      CAPTURE(position);
      CHECK(expected.erase(position) == 1);
      CHECK(position >= budget.num_sink);
    }
    CHECK(now == expected);
    const int64_t newest = given.empty() ? -1 : given.rbegin()->first;
    for (const auto& [position, tokens] : given) {
      if (position > newest - budget.num_recent) CHECK(now.count(position) == 1);
    }
    kept = now;
  }
};

}  // namespace

TEST_CASE("no call exceeds the budget, loses a protected token or keeps one twice",
          "[properties][attention_decode][cpu]") {
  Setup setup(GENERATE(range(0u, kMany)));
  CAPTURE(setup.seed);
  std::map<std::pair<int64_t, int64_t>, Watched> heads;
  for (int step = 0; step < 8; ++step) {
    const Call call = setup.call(setup.random.below(7));
    const DecodeResult result = decode(setup.cache, call, setup.policy(), setup.options);
    for (int64_t row = 0; row < setup.batch; ++row) {
      for (int64_t head = 0; head < setup.num_kv_heads; ++head) {
        CAPTURE(step, row, head);
        Watched& watched = heads[{row, head}];
        const NewTokens fresh =
            new_tokens_of(call.query, call.k_new, call.v_new, call.position_new, row, head);
        for (const reference::NewToken& token : fresh.tokens) {
          watched.given[token.position] = {token.key, token.value};
        }
        watched.check(head_of(setup.cache, row, head), real_positions(call.position_new[row]),
                      real_positions(result.evicted[row][head]), setup.budget);
      }
    }
  }
}

TEST_CASE("shrinking a cache is a sort", "[properties][evict][cpu]") {
  Setup setup(GENERATE(range(0u, kMany)));
  CAPTURE(setup.seed);
  decode(setup.cache, setup.call(30), setup.policy(), setup.options);
  // Some scores are equal, some are no numbers.
  for (int64_t slot = 0; slot < setup.cache.capacity(); ++slot) {
    const double score = setup.random.below(4) == 0 ? std::nan("") : setup.random.below(3);
    setup.cache.scores.select(2, slot).fill_(score);
  }
  Budget smaller = setup.budget;
  for (int64_t* part : {&smaller.num_sink, &smaller.num_heavy, &smaller.num_recent}) {
    *part = setup.random.below(*part + 1);
  }
  if (smaller.total() == 0) smaller.num_heavy = 1;
  if (smaller.total() > setup.cache.capacity()) return;
  const KVCache before = copy_of(setup.cache);
  const Call none = setup.call(0);
  const at::Tensor evicted = h2o::evict(
      setup.cache, none.k_new, none.v_new, setup.cache.scores.narrow(2, 0, 0), none.position_new,
      policy_of(smaller.num_sink, smaller.num_heavy, smaller.num_recent));
  for (int64_t row = 0; row < setup.batch; ++row) {
    for (int64_t head = 0; head < setup.num_kv_heads; ++head) {
      CAPTURE(row, head);
      std::vector<reference::Token> tokens = head_of(before, row, head).slots();
      int64_t newest = -1, count = 0;
      for (const reference::Token& token : tokens) {
        newest = std::max(newest, token.position);
        count += token.position >= 0;
      }
      std::erase_if(tokens, [&](const reference::Token& token) {
        return token.position < smaller.num_sink || token.position > newest - smaller.num_recent;
      });
      std::sort(tokens.begin(), tokens.end(), reference::leaves_first);
      std::vector<int64_t> expected;
      for (int64_t i = 0; i < count - smaller.total(); ++i) {
        expected.push_back(tokens[static_cast<size_t>(i)].position);
      }
      CHECK(real_positions(evicted[row][head]) == expected);
    }
  }
}

// ---- How the work is split ----------------------------------------------------------------------

TEST_CASE("one call without chunks is as many calls of one token, bit for bit",
          "[properties][attention_decode][cpu]") {
  Setup setup(GENERATE(range(0u, kMany)));
  CAPTURE(setup.seed);
  setup.options.chunk = 1;
  const Call call = setup.call(1 + setup.random.below(20));
  const KVCache single = copy_of(setup.cache);
  const DecodeResult all = decode(setup.cache, call, setup.policy(), setup.options);
  for (int64_t t = 0; t < call.num_new(); ++t) {
    CAPTURE(t);
    const DecodeResult one = decode(single, call.columns(t, 1), setup.policy(), setup.options);
    CHECK(same_bits(one.output, all.output.narrow(2, t, 1)));
    CHECK(same_bits(one.evicted, all.evicted.narrow(2, t, 1)));
  }
  CHECK(same_state(setup.cache, single));
}

TEST_CASE("a row is as if it were alone, whatever the others hold",
          "[properties][attention_decode][cpu]") {
  Setup setup(GENERATE(range(0u, kMany)));
  CAPTURE(setup.seed);
  const Call call = setup.call(1 + setup.random.below(20));
  const KVCache before = copy_of(setup.cache);
  const DecodeResult together = decode(setup.cache, call, setup.policy(), setup.options);
  for (int64_t row = 0; row < setup.batch; ++row) {
    CAPTURE(row);
    const KVCache own = copy_of(row_of(before, row));
    const DecodeResult alone = decode(own, call.row(row), setup.policy(), setup.options);
    CHECK(same_bits(alone.output, together.output.narrow(0, row, 1)));
    CHECK(same_bits(alone.evicted, together.evicted.narrow(0, row, 1)));
    CHECK(same_state(own, row_of(setup.cache, row)));
  }
  // Others that are no numbers.
  const Call spoilt = call.clone();
  for (const at::Tensor& tensor : {spoilt.query, spoilt.k_new, spoilt.v_new}) {
    tensor.narrow(0, 1, setup.batch - 1).fill_(std::nan(""));
  }
  const KVCache again = copy_of(before);
  const DecodeResult result = decode(again, spoilt, setup.policy(), setup.options);
  CHECK(same_bits(result.output.narrow(0, 0, 1), together.output.narrow(0, 0, 1)));
  CHECK(same_state(row_of(again, 0), row_of(setup.cache, 0)));
}

TEST_CASE("no result depends on the number of threads",
          "[properties][attention_decode][evict][prefill_select][cpu]") {
  Setup setup(GENERATE(range(0u, kFew)));
  CAPTURE(setup.seed);
  // Large enough for several threads.
  const int64_t num_tokens = 300 + setup.random.below(200);
  setup.budget = {setup.random.below(5), setup.random.below(200), 1 + setup.random.below(100)};
  setup.options.chunk = setup.random.below(2) == 0 ? 1 : 64;
  setup.cache = KVCache::allocate(setup.batch, setup.num_kv_heads, setup.budget.total(),
                                  setup.head_dim, setup.dtype);
  const Call call = setup.call(num_tokens);
  const h2o::EvictionPolicy policy = setup.policy(), smaller = policy_of(1, 2, 3);
  const KVCache fresh = copy_of(setup.cache);
  struct Results {
    DecodeResult decoded;
    at::Tensor evicted;
    h2o::PrefillSelection selection;
  };
  const auto all_with = [&](int num_threads, const KVCache& cache) {
    const Threads threads(num_threads);
    Results results;
    results.decoded = decode(cache, call, policy, setup.options);
    results.selection = h2o::prefill_select(call.query, call.k_new, call.position_new, policy);
    if (cache.capacity() < 6) return results;
    results.evicted =
        h2o::evict(cache, call.k_new.narrow(2, 0, 0), call.v_new.narrow(2, 0, 0),
                   cache.scores.narrow(2, 0, 0), call.position_new.narrow(1, 0, 0), smaller);
    return results;
  };
  const Results expected = all_with(1, setup.cache);
  for (const int num_threads : {2, 5}) {
    CAPTURE(num_threads);
    const KVCache cache = copy_of(fresh);
    const Results results = all_with(num_threads, cache);
    CHECK(same_result(results.decoded, expected.decoded));
    CHECK(same_bits(results.selection.selected, expected.selection.selected));
    CHECK(same_bits(results.selection.scores, expected.selection.scores));
    CHECK((!results.evicted.defined() || same_bits(results.evicted, expected.evicted)));
    CHECK(same_state(cache, setup.cache));
  }
}

// ---- While nobody has to leave ------------------------------------------------------------------

TEST_CASE("one-shot, streaming and full attention are equal while the budget holds everything",
          "[properties][attention_decode][prefill_select][cpu]") {
  Setup setup(GENERATE(range(0u, kMany)));
  CAPTURE(setup.seed);
  const int64_t num_tokens = 1 + setup.random.below(30);
  setup.budget.num_heavy += num_tokens;
  setup.options.alibi_slopes.reset();
  Call call = setup.call(num_tokens);
  call.position_new = position_range(setup.batch, 0, num_tokens);

  // Full causal attention by torch in float64.
  const auto wide = [](const at::Tensor& tensor) { return tensor.to(at::kDouble).contiguous(); };
  const double scale =
      setup.options.scale.value_or(1.0 / std::sqrt(static_cast<double>(setup.head_dim)));
  const at::Tensor key = wide(call.k_new).repeat_interleave(setup.group_size, 1),
                   value = wide(call.v_new).repeat_interleave(setup.group_size, 1);
  const at::Tensor later = at::ones({num_tokens, num_tokens}, at::kBool).triu(1);
  const at::Tensor weights =
      at::softmax(at::matmul(wide(call.query), key.transpose(2, 3))
                      .mul(scale)
                      .masked_fill(later, -std::numeric_limits<double>::infinity()),
                  -1);
  const at::Tensor by_group =
      weights.view({setup.batch, setup.num_kv_heads, setup.group_size, num_tokens, num_tokens});
  const bool reduce_max = setup.policy().gqa_reduce() == h2o::GqaReduce::kMax;
  const at::Tensor mass = (reduce_max ? by_group.amax(2) : by_group.sum(2)).sum(2);
  const reference::Row output = doubles(at::matmul(weights, value)), scores = doubles(mass);

  const double tolerance =
      arithmetic_of(setup.dtype) * static_cast<double>(num_tokens * setup.group_size);
  for (const int64_t chunk : {int64_t{1}, 1 + setup.random.below(num_tokens), num_tokens}) {
    CAPTURE(chunk);
    const KVCache cache = KVCache::allocate(setup.batch, setup.num_kv_heads, setup.budget.total(),
                                            setup.head_dim, setup.dtype);
    setup.options.chunk = chunk;
    const DecodeResult result = decode(cache, call, setup.policy(), setup.options);
    CHECK(error_of(result.output, output) < tolerance);
    CHECK(error_of(cache.scores.narrow(2, 0, num_tokens), scores) < tolerance);
    CHECK(real_positions(result.evicted).empty());
    CHECK(same_bits(cache.k_cache.narrow(2, 0, num_tokens), call.k_new));
    CHECK(same_bits(cache.v_cache.narrow(2, 0, num_tokens), call.v_new));
  }
  const h2o::PrefillSelection selection = h2o::prefill_select(
      call.query, call.k_new, call.position_new, setup.policy(), {.scale = setup.options.scale});
  const at::Tensor selected = selection.selected.narrow(2, 0, num_tokens);
  CHECK(at::equal(selected, position_range(1, 0, num_tokens).expand_as(selected)));
  CHECK(error_of(selection.scores.narrow(2, 0, num_tokens), scores) < tolerance);
}
