// The CUDA operators, run by the emulation, against the CPU's and against reference.h. One program
// for each build of the emulation; what sets it up goes through the dispatcher too.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "h2o/eviction_policy.h"
#include "h2o/ops/calls.h"
#include "h2o/ops/cpu/backend.h"
#include "tensors.h"
#include "test_helpers.h"

// Torch keeps memory until the process ends; a sanitizer would report it.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "detect_leaks=0";
}

namespace {

using h2o::Budget;
using h2o::KVCache;

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble};

// ---- The two sides ------------------------------------------------------------------------------

template <typename Signature>
auto operator_of(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").typed<Signature>();
}

void set_seed(int64_t seed) { operator_of<void(int64_t)>("h2o_emulated::set_seed").call(seed); }
void set_device(int64_t multiprocessors = 132, int64_t shared_bytes = 227 * 1024) {
  operator_of<void(int64_t, int64_t)>("h2o_emulated::set_device")
      .call(multiprocessors, shared_bytes);
}
bool is_checked() { return operator_of<bool()>("h2o_emulated::is_checked").call(); }

// Tensors made while one of these lives are device memory.
class DeviceMemory {
 public:
  DeviceMemory() { use(true); }
  ~DeviceMemory() { use(false); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

 private:
  static void use(bool on) { operator_of<void(bool)>("h2o_emulated::device_memory").call(on); }
};

// The same values with the same strides, in memory of its own. Between a view's elements nothing is
// written, so that a kernel that strays there reads what nobody wrote.
at::Tensor moved(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()).copy_(tensor);
}
std::optional<at::Tensor> moved(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(moved(*tensor)) : std::nullopt;
}
KVCache moved(const KVCache& cache) {
  return {moved(cache.k_cache), moved(cache.v_cache), moved(cache.scores), moved(cache.positions)};
}

struct Options {
  Budget budget;
  std::string gqa_reduce = "sum";
  std::optional<double> scale = std::nullopt;
  int64_t chunk = 1;
  std::optional<at::Tensor> alibi_slopes = std::nullopt, row_budget = std::nullopt;
  std::optional<at::Tensor> rope_cos = std::nullopt, rope_sin = std::nullopt;
  h2o::Scoring scoring = {};
  std::optional<at::Tensor> score_new = std::nullopt;

  Options moved() const {
    return {budget,
            gqa_reduce,
            scale,
            chunk,
            ::moved(alibi_slopes),
            ::moved(row_budget),
            ::moved(rope_cos),
            ::moved(rope_sin),
            scoring,
            ::moved(score_new)};
  }
};
struct Tokens {
  at::Tensor query, key, value, position;

  Tokens moved() const { return {::moved(query), ::moved(key), ::moved(value), ::moved(position)}; }
};
using Results = std::vector<at::Tensor>;

// The same values, in another layout.
at::Tensor transposed(const at::Tensor& t) {
  return t.transpose(1, 2).contiguous().transpose(1, 2);
}

// Output, who left, and the keys and values that left, in a layout of their own.
Results decode(const char* name_space, const KVCache& cache, const Tokens& tokens,
               const Options& options) {
  const auto op = operator_of<decltype(h2o::decode_entry<h2o::cpu::attention_decode>)>(
      std::string(name_space) + "::h2o_attention_decode");
  const at::Tensor k_evicted =
      transposed(at::full(tokens.key.sizes(), 7.0, cache.k_cache.options()));
  const at::Tensor v_evicted = k_evicted.clone();
  const auto [output, evicted] =
      op.call(tokens.query, cache.k_cache, cache.v_cache, cache.scores, cache.positions, tokens.key,
              tokens.value, tokens.position, options.budget.num_sink, options.budget.num_heavy,
              options.budget.num_recent, options.gqa_reduce, options.scale, options.chunk,
              options.alibi_slopes, options.row_budget, k_evicted, v_evicted, options.rope_cos,
              options.rope_sin, h2o::to_string(options.scoring.rule), options.scoring.decay,
              options.scoring.seed, options.scoring.num_queries, options.scoring.pool,
              options.score_new, options.scoring.pattern_stride, options.scoring.pattern_columns,
              /*read_slots=*/0, /*read_page=*/1);
  return {output, evicted, k_evicted, v_evicted};
}

Results evict(const char* name_space, const KVCache& cache, const Tokens& tokens,
              const at::Tensor& scores_new, const Options& options) {
  const auto op = operator_of<decltype(h2o::evict_entry<h2o::cpu::evict>)>(std::string(name_space) +
                                                                           "::h2o_evict");
  return {op.call(cache.k_cache, cache.v_cache, cache.scores, cache.positions, tokens.key,
                  tokens.value, scores_new, tokens.position, options.budget.num_sink,
                  options.budget.num_heavy, options.budget.num_recent, options.row_budget,
                  h2o::to_string(options.scoring.rule), options.scoring.pattern_stride,
                  options.scoring.pattern_columns)};
}

Results select(const char* name_space, const Tokens& tokens, const Options& options) {
  const auto op = operator_of<decltype(h2o::select_entry<h2o::cpu::prefill_select>)>(
      std::string(name_space) + "::h2o_prefill_select");
  const auto [selected, scores] =
      op.call(tokens.query, tokens.key, tokens.position, options.budget.num_sink,
              options.budget.num_heavy, options.budget.num_recent, options.gqa_reduce,
              options.scale, options.alibi_slopes, options.row_budget);
  return {selected, scores};
}

// ---- Comparing ----------------------------------------------------------------------------------

// The largest |a - b| / (1 + |b|); infinite where one is NaN and the other is not.
double error_between(const at::Tensor& a, const at::Tensor& b) {
  REQUIRE(a.sizes() == b.sizes());
  REQUIRE(a.scalar_type() == b.scalar_type());
  const std::vector<double> x = doubles(a), y = doubles(b);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]) && std::isnan(y[i])) continue;
    const double error = x[i] == y[i] ? 0.0 : std::abs(x[i] - y[i]) / (1 + std::abs(y[i]));
    worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
  }
  return worst;
}
// Two sums in another order, each rounded to the dtype.
double output_tolerance(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-12 : 2 * rounding_of(dtype) + 2e-5;
}
double score_tolerance(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-12 : 2e-5; }

void check_same_state(const KVCache& actual, const KVCache& expected) {
  CHECK(same_bits(actual.positions, expected.positions));
  const at::Tensor empty = expected.positions.lt(0).unsqueeze(-1);
  CHECK(
      same_bits(actual.k_cache.masked_fill(empty, 0.0), expected.k_cache.masked_fill(empty, 0.0)));
  CHECK(
      same_bits(actual.v_cache.masked_fill(empty, 0.0), expected.v_cache.masked_fill(empty, 0.0)));
  CHECK(error_between(actual.scores, expected.scores) <=
        score_tolerance(expected.k_cache.scalar_type()));
}

// Calls `run(cache, tokens, options)` in device memory, in several orders of threads and blocks,
// and on devices of other sizes; all results must be equal in every bit. Returns those of the last.
template <typename Run>
std::pair<KVCache, Results> emulate(const KVCache& cache, const Tokens& tokens,
                                    const Options& options, const Run& run) {
  std::optional<std::pair<KVCache, Results>> first;
  const int64_t seeds = is_checked() ? 2 : 3;  // a race is found in any order
  for (int64_t seed = 0; seed < seeds; ++seed) {
    CAPTURE(seed);
    set_seed(seed);
    const DeviceMemory device_memory;
    const KVCache own = cache.k_cache.defined() ? moved(cache) : cache;
    const Results results = run(own, tokens.moved(), options.moved());
    if (!first) {
      first = {own, results};
      continue;
    }
    for (size_t i = 0; i < results.size(); ++i) CHECK(same_bits(results[i], first->second[i]));
    if (cache.k_cache.defined()) CHECK(same_state(own, first->first));
  }
  set_seed(0);
  return *first;
}

// Decodes on both sides. `cache` becomes what the CPU made of it.
void compare_decode(const KVCache& cache, const Tokens& tokens, const Options& options) {
  const at::ScalarType dtype = tokens.query.scalar_type();
  const auto [state, results] = emulate(
      cache, tokens, options, [](const KVCache& own, const Tokens& own_tokens, const Options& o) {
        return decode("h2o_emulated", own, own_tokens, o);
      });
  const Results expected = decode("h2o", cache, tokens, options);
  for (size_t i = 1; i < results.size(); ++i) CHECK(same_bits(results[i], expected[i]));
  CHECK(error_between(results[0], expected[0]) <= output_tolerance(dtype));
  check_same_state(state, cache);
}

void compare_evict(const KVCache& cache, const Tokens& tokens, const at::Tensor& scores_new,
                   const Options& options) {
  const auto [state, results] = emulate(
      cache, tokens, options, [&](const KVCache& own, const Tokens& own_tokens, const Options& o) {
        return evict("h2o_emulated", own, own_tokens, moved(scores_new), o);
      });
  const Results expected = evict("h2o", cache, tokens, scores_new, options);
  CHECK(same_bits(results[0], expected[0]));
  check_same_state(state, cache);
}

void compare_select(const Tokens& tokens, const Options& options) {
  const auto [state, results] =
      emulate({}, tokens, options, [](const KVCache&, const Tokens& own_tokens, const Options& o) {
        return select("h2o_emulated", own_tokens, o);
      });
  const Results expected = select("h2o", tokens, options);
  CHECK(same_bits(results[0], expected[0]));
  CHECK(error_between(results[1], expected[1]) <= score_tolerance(tokens.key.scalar_type()));
}

// ---- Inputs -------------------------------------------------------------------------------------

struct Shape {
  int64_t batch = 1, num_kv_heads = 1, group_size = 1, head_dim = 64, capacity = 8, num_new = 1;
  int64_t occupied = 0;  // slots of each (row, KV head), in any order
  at::ScalarType dtype = at::kFloat;
};

std::string describe(const Shape& shape) {
  return std::string(c10::toString(shape.dtype)) + " batch " + std::to_string(shape.batch) +
         " kv_heads " + std::to_string(shape.num_kv_heads) + " group " +
         std::to_string(shape.group_size) + " head_dim " + std::to_string(shape.head_dim) +
         " capacity " + std::to_string(shape.capacity) + " new " + std::to_string(shape.num_new) +
         " occupied " + std::to_string(shape.occupied);
}

// Empty slots hold NaN, which nobody may read; positions are below 1000.
KVCache cache_of(Random& random, const Shape& shape) {
  const auto& [batch, heads, group, head_dim, capacity, num_new, occupied, dtype] = shape;
  const KVCache cache = KVCache::allocate(batch, heads, capacity, head_dim, dtype);
  cache.k_cache.fill_(std::nan(""));
  cache.v_cache.fill_(std::nan(""));
  for (int64_t row = 0; row < batch; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      std::vector<int64_t> slots;
      for (int64_t slot = 0; slot < capacity; ++slot) slots.push_back(slot);
      for (int64_t i = 0; i < occupied; ++i) {
        std::swap(slots[static_cast<size_t>(i)],
                  slots[static_cast<size_t>(i + random.below(capacity - i))]);
        const auto at = [&, slot = slots[static_cast<size_t>(i)]](const at::Tensor& tensor) {
          return tensor.select(0, row).select(0, head).select(0, slot);
        };
        at(cache.k_cache).copy_(random.tensor({head_dim}, dtype));
        at(cache.v_cache).copy_(random.tensor({head_dim}, dtype));
        at(cache.scores).fill_(std::abs(random.normal()));
        at(cache.positions).fill_(i * 1000 / occupied);
      }
    }
  }
  return cache;
}

// Positions go on from 1000.
Tokens tokens_of(Random& random, const Shape& shape) {
  const auto& [batch, heads, group, head_dim, capacity, num_new, occupied, dtype] = shape;
  return {random.queries({batch, heads * group, num_new, head_dim}, dtype),
          random.keys({batch, heads, num_new, head_dim}, dtype),
          random.tensor({batch, heads, num_new, head_dim}, dtype),
          position_range(batch, 1000, num_new)};
}

// Column 0 of row 0 and all of row 1 are padding, full of NaN.
void pad(const Tokens& tokens) {
  tokens.position.select(0, 0).narrow(0, 0, 1).fill_(-1);
  tokens.position.select(0, 1).fill_(-1);
  for (const at::Tensor& tensor : {tokens.query, tokens.key, tokens.value}) {
    tensor.select(0, 0).select(1, 0).fill_(std::nan(""));
    tensor.select(0, 1).fill_(std::nan(""));
  }
}

// Leaves room for as many tokens as occupied slots, so that the new ones evict.
Budget budget_of(const Shape& shape) {
  const int64_t total = std::max<int64_t>(1, std::min(shape.capacity, shape.occupied));
  return {total / 8, total - total / 8 - total / 2, total / 2};
}

// The same values, at every other place.
at::Tensor every_other(const at::Tensor& t) {
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes.back() *= 2;
  return at::full(sizes, std::nan(""), t.options()).slice(t.dim() - 1, 0, sizes.back(), 2).copy_(t);
}

constexpr int64_t kHeadDims[] = {1, 64, 80, 96, 128, 256};
constexpr int64_t kGroupSizes[] = {1, 3, 7, 8};
constexpr int64_t kOccupied[] = {0, 1, 31, 33};

}  // namespace

// ---- Decode -------------------------------------------------------------------------------------

TEST_CASE("decode equals the CPU at every head_dim and group size",
          "[emulated][attention_decode]") {
  const int64_t head_dim = GENERATE(from_range(std::begin(kHeadDims), std::end(kHeadDims)));
  Random random(static_cast<uint32_t>(head_dim));
  int64_t turn = head_dim;  // so that each is combined with others
  for (const int64_t group_size : kGroupSizes) {
    for (const int64_t chunk : {1, 2}) {
      ++turn;
      const int64_t occupied = kOccupied[turn % 4];
      const Shape shape = {1, 2,        group_size,       head_dim, occupied + 2,
                           3, occupied, kDtypes[turn % 3]};
      INFO(describe(shape) + ", chunk " + std::to_string(chunk));
      compare_decode(cache_of(random, shape), tokens_of(random, shape),
                     {.budget = budget_of(shape),
                      .gqa_reduce = turn % 2 == 0 ? "sum" : "max",
                      .chunk = chunk});
    }
  }
}

TEST_CASE("decode equals the CPU by every rule", "[emulated][attention_decode]") {
  using h2o::ScoreRule;
  const auto scoring = GENERATE(values<h2o::Scoring>({
      {.rule = ScoreRule::kDecay, .decay = 0.75},
      {.rule = ScoreRule::kMean},
      {.rule = ScoreRule::kValue},
      {.rule = ScoreRule::kMisses},
      {.rule = ScoreRule::kPrompt, .num_queries = 2, .pool = 3},
      {.rule = ScoreRule::kRandom, .seed = 5},
      {.rule = ScoreRule::kGiven, .pattern_stride = 5, .pattern_columns = 2},
      {.rule = ScoreRule::kSum, .pool = 5, .pattern_stride = 9, .pattern_columns = 1},
  }));
  CAPTURE(h2o::to_string(scoring.rule));
  Random random(11);
  for (const int64_t chunk : {1, 3}) {
    if (chunk > 1 && scoring.rule == ScoreRule::kMisses) continue;
    // Two ranges of slots, so that several blocks share them too.
    const Shape shape = {2, 2, 3, 36, 300, 4, 298, at::kFloat};
    INFO(describe(shape) + ", chunk " + std::to_string(chunk));
    const KVCache cache = cache_of(random, shape);
    const Tokens tokens = tokens_of(random, shape);
    pad(tokens);
    Options options = {.budget = budget_of(shape), .chunk = chunk, .scoring = scoring};
    options.score_new = random.tensor({2, 2, 4}, at::kFloat).abs();
    compare_decode(cache, tokens, options);
  }
}

TEST_CASE("evict equals the CPU by every order", "[emulated][evict]") {
  Random random(12);
  const Shape shape = {2, 2, 1, 36, 40, 5, 38, at::kFloat};
  for (const h2o::Scoring& scoring : {h2o::Scoring{.rule = h2o::ScoreRule::kMean},
                                      h2o::Scoring{.pattern_stride = 5, .pattern_columns = 2}}) {
    const at::Tensor scores_new = random.tensor({2, 2, 5}, at::kFloat).abs();
    compare_evict(cache_of(random, shape), tokens_of(random, shape), scores_new,
                  {.budget = {2, 10, 5}, .scoring = scoring});
  }
}

TEST_CASE("decode equals the CPU at every dtype and occupancy", "[emulated][attention_decode]") {
  const at::ScalarType dtype = GENERATE(from_range(std::begin(kDtypes), std::end(kDtypes)));
  Random random(7);
  for (const int64_t occupied : {0, 1, 31, 32, 33, 300}) {
    const Shape shape = {1, 1, 3, occupied == 300 ? 64 : 80, occupied + 3, 2, occupied, dtype};
    INFO(describe(shape));
    const Options options = {.budget = budget_of(shape)};
    const KVCache cache = cache_of(random, shape);
    const Tokens tokens = tokens_of(random, shape);
    compare_decode(copy_of(cache), tokens, options);
    compare_decode(cache, tokens, {.budget = options.budget, .scale = 0.3, .chunk = 5});
  }
}

TEST_CASE("decode equals the reference, with padding, ALiBi and a budget for each row",
          "[emulated][attention_decode]") {
  const int64_t chunk = GENERATE(1, 3);
  const bool reduce_max = GENERATE(false, true);
  Random random(11);
  const Shape shape = {3, 2, 3, 16, 12, 4, 9, at::kDouble};
  KVCache cache = cache_of(random, shape);
  const Tokens tokens = tokens_of(random, shape);
  pad(tokens);
  const std::vector<int64_t> budgets = {1, 4, 3, 2, 2, 2, 0, 9, 0};
  const Options options = {.budget = {1, 1, 1},
                           .gqa_reduce = reduce_max ? "max" : "sum",
                           .scale = 0.4,
                           .chunk = chunk,
                           .alibi_slopes = random.tensor({6}, at::kDouble).abs().mul(1e-3),
                           .row_budget = integers(budgets, {3, 3})};
  const auto [state, results] = emulate(
      cache, tokens, options, [](const KVCache& own, const Tokens& own_tokens, const Options& o) {
        return decode("h2o_emulated", own, own_tokens, o);
      });
  for (int64_t row = 0; row < shape.batch; ++row) {
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      CAPTURE(row, head);
      const size_t own = static_cast<size_t>(row * 3);
      const reference::Rules rules = {
          .num_sink = budgets[own],
          .num_heavy = budgets[own + 1],
          .num_recent = budgets[own + 2],
          .reduce_max = reduce_max,
          .scale = 0.4,
          .alibi_slopes = doubles(options.alibi_slopes->narrow(0, head * 3, 3))};
      reference::Head expected = head_of(cache, row, head);
      const NewTokens fresh =
          new_tokens_of(tokens.query, tokens.key, tokens.value, tokens.position, row, head);
      std::vector<int64_t> evicted(4, -1);
      for (size_t first = 0; first < fresh.tokens.size(); first += static_cast<size_t>(chunk)) {
        const size_t end = std::min(fresh.tokens.size(), first + static_cast<size_t>(chunk));
        const auto begin = fresh.tokens.begin();
        const reference::StepResult step = expected.step(
            {begin + static_cast<std::ptrdiff_t>(first), begin + static_cast<std::ptrdiff_t>(end)},
            rules);
        for (size_t i = first; i < end; ++i) {
          for (int64_t h = 0; h < 3; ++h) {
            const at::Tensor output = results[0].select(0, row).select(0, head * 3 + h);
            CHECK(error_of(output.select(0, fresh.columns[i]),
                           step.output[i - first][static_cast<size_t>(h)]) < 1e-12);
          }
        }
        for (size_t i = 0; i < step.evicted.size(); ++i) {
          evicted[static_cast<size_t>(fresh.columns[first]) + i] = step.evicted[i];
        }
      }
      CHECK(int64s(results[1].select(0, row).select(0, head)) == evicted);
      CHECK(difference(state, row, head, expected, 1e-12) == "");
    }
  }
  // Row 1 is all padding, and so is column 0 of row 0.
  CHECK(doubles(results[0].select(0, 1).abs().sum()) == std::vector<double>{0});
  CHECK(doubles(results[0].select(0, 0).select(1, 0).abs().sum()) == std::vector<double>{0});
}

TEST_CASE("decode reads strided inputs and writes strided caches", "[emulated][attention_decode]") {
  const at::ScalarType dtype = GENERATE(from_range(std::begin(kDtypes), std::end(kDtypes)));
  const int64_t chunk = GENERATE(1, 2);
  const int64_t head_dim = GENERATE(5, 64);
  Random random(13);
  const Shape shape = {2, 2, 2, head_dim, 7, 3, 5, dtype};
  const KVCache dense = cache_of(random, shape);
  // K and V of a slot side by side, slots of scores and positions apart.
  const at::Tensor both = at::full({2, 2, 7, 2, head_dim}, std::nan(""), dense.k_cache.options());
  const KVCache cache = {both.select(3, 0).copy_(dense.k_cache),
                         both.select(3, 1).copy_(dense.v_cache), transposed(dense.scores),
                         every_other(dense.positions.to(at::kFloat)).to(at::kInt)};
  Tokens tokens = tokens_of(random, shape);
  pad(tokens);
  tokens = {transposed(tokens.query), every_other(tokens.key), transposed(tokens.value),
            tokens.position.t().contiguous().t()};
  compare_decode(cache, tokens, {.budget = budget_of(shape), .chunk = chunk});
}

TEST_CASE("decode works without shared memory for the weights, and on any number of processors",
          "[emulated][attention_decode]") {
  const int64_t multiprocessors = GENERATE(1, 2, 132);
  const int64_t shared_bytes = GENERATE(4 * 1024, 227 * 1024);
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kHalf);
  set_device(multiprocessors, shared_bytes);
  Random random(17);
  const Shape shape = {1, 2, 7, 64, 300, 1, 300, dtype};
  compare_decode(cache_of(random, shape), tokens_of(random, shape), {.budget = {4, 196, 100}});
  const Shape chunked = {1, 1, 7, 64, 90, 4, 90, dtype};
  compare_decode(cache_of(random, chunked), tokens_of(random, chunked),
                 {.budget = {4, 46, 40}, .chunk = 4});
  set_device();
}

TEST_CASE("decode of random cases equals the CPU", "[emulated][attention_decode]") {
  const uint32_t seed = GENERATE(range(0u, 40u));
  CAPTURE(seed);
  Random random(seed);
  Shape shape;
  shape.dtype = kDtypes[random.below(4)];
  shape.batch = 1 + random.below(3);
  shape.num_kv_heads = 1 + random.below(2);
  shape.group_size = kGroupSizes[random.below(4)];
  shape.head_dim = random.below(2) == 0 ? kHeadDims[random.below(5)] : 1 + random.below(140);
  shape.capacity = 1 + random.below(40);
  shape.occupied = random.below(shape.capacity + 1);
  shape.num_new = random.below(6);
  const int64_t total = 1 + random.below(shape.capacity), num_sink = random.below(total + 1),
                num_heavy = random.below(total - num_sink + 1);
  Options options = {.budget = {num_sink, num_heavy, total - num_sink - num_heavy},
                     .gqa_reduce = random.below(2) == 0 ? "sum" : "max",
                     .chunk = 1 + random.below(4)};
  if (random.below(3) == 0) options.scale = 0.5;
  const int64_t heads = shape.num_kv_heads * shape.group_size;
  if (random.below(3) == 0) options.alibi_slopes = random.tensor({heads}).abs().mul(1e-3);
  INFO(describe(shape) + ", chunk " + std::to_string(options.chunk));
  const KVCache cache = cache_of(random, shape);
  const Tokens tokens = tokens_of(random, shape);
  if (shape.batch > 1 && shape.num_new > 0) pad(tokens);
  compare_decode(cache, tokens, options);
}

TEST_CASE("decode with position rolling equals the CPU", "[emulated][attention_decode][rotate]") {
  const at::ScalarType dtype = GENERATE(at::kDouble, at::kFloat);
  const int64_t chunk = GENERATE(1, 3, 8), head_dim = GENERATE(8, 15, 64);
  CAPTURE(dtype, chunk, head_dim);
  Random random(23);
  const Shape shape = {2, 2, 3, head_dim, 9, 6, 6, dtype};
  const at::Tensor angles = random.tensor({15, head_dim / 3}, dtype);
  const KVCache cache = cache_of(random, shape);
  const Tokens tokens = tokens_of(random, shape);
  pad(tokens);
  compare_decode(
      cache, tokens,
      {.budget = {1, 4, 4}, .chunk = chunk, .rope_cos = angles.cos(), .rope_sin = angles.sin()});
}

// ---- Evict --------------------------------------------------------------------------------------

TEST_CASE("evict equals the CPU at every dtype and occupancy", "[emulated][evict]") {
  const at::ScalarType dtype = GENERATE(from_range(std::begin(kDtypes), std::end(kDtypes)));
  Random random(19);
  for (const int64_t occupied : {0, 1, 31, 33, 300}) {
    for (const int64_t num_new : {0, 1, 40}) {
      const Shape shape = {1, 2, 1, 80, occupied + 20, num_new, occupied, dtype};
      INFO(describe(shape));
      const KVCache cache = cache_of(random, shape);
      const Tokens tokens = tokens_of(random, shape);
      const at::Tensor scores_new =
          random.tensor({1, 2, num_new}, dtype == at::kDouble ? at::kDouble : at::kFloat).abs();
      const Budget large = budget_of(shape);
      compare_evict(copy_of(cache), tokens, scores_new, {.budget = large});
      compare_evict(cache, tokens, scores_new, {.budget = {1, 2, 2}});
    }
  }
}

TEST_CASE("evict equals the CPU with padding, ties, NaN, strides and a budget for each row",
          "[emulated][evict]") {
  const at::ScalarType dtype = GENERATE(from_range(std::begin(kDtypes), std::end(kDtypes)));
  Random random(23);
  const Shape shape = {3, 2, 1, 24, 40, 12, 33, dtype};
  const KVCache cache = cache_of(random, shape);
  cache.scores.mul_(4).round_();  // many are equal
  cache.scores.select(2, 3).masked_fill_(cache.positions.select(2, 3).ge(0), std::nan(""));
  Tokens tokens = tokens_of(random, shape);
  pad(tokens);
  tokens.key = every_other(tokens.key);
  tokens.value = transposed(tokens.value);
  const at::Tensor scores_new = transposed(
      random.tensor({3, 2, 12}, dtype == at::kDouble ? at::kDouble : at::kFloat).abs().round());
  compare_evict(cache, tokens, scores_new,
                {.budget = {1, 1, 1},
                 .row_budget = integers({1, 4, 3, 0, 40, 0, 2, 0, 20}, {3, 3}, at::kLong)});
}

TEST_CASE("evict sorts in device memory where shared memory is too small", "[emulated][evict]") {
  set_device(132, 2 * 1024);
  Random random(29);
  const Shape shape = {1, 1, 1, 4, 700, 30, 700, at::kFloat};
  const KVCache cache = cache_of(random, shape);
  compare_evict(cache, tokens_of(random, shape), random.tensor({1, 1, 30}).abs(),
                {.budget = {4, 300, 100}});
  set_device();
}

// ---- Select -------------------------------------------------------------------------------------

TEST_CASE("select equals the CPU at every head_dim, group size and length", "[emulated][select]") {
  const int64_t head_dim = GENERATE(from_range(std::begin(kHeadDims), std::end(kHeadDims)));
  Random random(static_cast<uint32_t>(head_dim));
  int64_t turn = head_dim;
  for (const int64_t group_size : kGroupSizes) {
    ++turn;
    const int64_t seq_len = std::array<int64_t, 4>{1, 17, 33, 40}[turn % 4];
    const Shape shape = {1, 2, group_size, head_dim, 1, seq_len, 0, kDtypes[turn % 4]};
    INFO(describe(shape));
    const int64_t part = seq_len / 4;
    compare_select(tokens_of(random, shape), {.budget = {part / 2, part + 1, part},
                                              .gqa_reduce = turn % 2 == 0 ? "sum" : "max"});
  }
}

TEST_CASE("select equals the CPU with padding, ALiBi, strides and a budget for each row",
          "[emulated][select]") {
  const at::ScalarType dtype = GENERATE(from_range(std::begin(kDtypes), std::end(kDtypes)));
  const bool small = GENERATE(false, true);
  if (small) set_device(1, 4 * 1024);
  Random random(31);
  const Shape shape = {3, 2, 2, 80, 1, small ? 300 : 40, 0, dtype};
  Tokens tokens = tokens_of(random, small ? Shape{2, 1, 1, 8, 1, 300, 0, dtype} : shape);
  pad(tokens);
  tokens.query = transposed(tokens.query);
  tokens.key = every_other(tokens.key);
  Options options = {.budget = {2, 10, 8},
                     .scale = 0.2,
                     .alibi_slopes = random.tensor({tokens.query.size(1)}).abs().mul(1e-2)};
  if (!small) options.row_budget = integers({1, 4, 3, 0, 20, 0, 2, 0, 18}, {3, 3});
  compare_select(tokens, options);
  set_device();
}

TEST_CASE("select equals the reference", "[emulated][select]") {
  Random random(37);
  const Shape shape = {1, 2, 3, 16, 1, 50, 0, at::kDouble};
  Tokens tokens = tokens_of(random, shape);
  tokens.position = position_range(1, 0, 50);
  const Options options = {.budget = {2, 12, 8}};
  const auto [state, results] =
      emulate({}, tokens, options, [](const KVCache&, const Tokens& own_tokens, const Options& o) {
        return select("h2o_emulated", own_tokens, o);
      });
  for (int64_t head = 0; head < 2; ++head) {
    const NewTokens prompt =
        new_tokens_of(tokens.query, tokens.key, at::Tensor(), tokens.position, 0, head);
    const reference::Selection expected = reference::select(
        prompt.tokens, {.num_sink = 2, .num_heavy = 12, .num_recent = 8, .scale = 0.25});
    CHECK(int64s(results[0].select(0, 0).select(0, head)) == expected.kept);
    CHECK(error_of(results[1].select(0, 0).select(0, head), expected.scores) < 1e-12);
  }
}

// ---- The way there ------------------------------------------------------------------------------

TEST_CASE("empty calls launch nothing that fails", "[emulated]") {
  Random random(41);
  for (const int64_t batch : {0, 1}) {
    const Shape shape = {batch, 1, 2, 8, 4, batch == 0 ? 2 : 0, 0, at::kFloat};
    const Tokens tokens = tokens_of(random, shape);
    compare_decode(cache_of(random, shape), tokens, {.budget = {1, 1, 1}});
    compare_evict(cache_of(random, shape), tokens, at::full({batch, 1, shape.num_new}, 1.0),
                  {.budget = {1, 1, 1}});
    compare_select(tokens, {.budget = {1, 1, 1}});
  }
}

TEST_CASE("a kernel that is given host memory is found out by the checked build", "[emulated]") {
  if (!is_checked()) return;
  Random random(43);
  const Shape shape = {1, 1, 1, 8, 4, 1, 2, at::kFloat};
  CHECK_THAT(refusal([&] {
               decode("h2o_emulated", cache_of(random, shape), tokens_of(random, shape),
                      {.budget = {1, 1, 1}});
             }),
             Catch::Matchers::Contains("host memory: "));
}

TEST_CASE("the checked build counts what kernels move", "[emulated]") {
  if (!is_checked()) return;
  using Lines = c10::Dict<std::string, std::vector<int64_t>>;
  operator_of<void()>("h2o_emulated::clear_traffic").call();
  Random random(47);
  const Shape shape = {1, 2, 4, 64, 128, 1, 128, at::kHalf};
  const KVCache cache = cache_of(random, shape);
  const Tokens tokens = tokens_of(random, shape);
  {
    const DeviceMemory device_memory;
    decode("h2o_emulated", moved(cache), tokens.moved(), {.budget = {4, 64, 60}});
  }
  int64_t bytes = 0, sectors = 0;
  for (const auto& line : operator_of<Lines(bool)>("h2o_emulated::traffic").call(false)) {
    CAPTURE(line.key());
    CHECK(line.key().find(':') != std::string::npos);
    const std::vector<int64_t> counts = line.value();
    bytes += counts[1];
    sectors += counts[2];
  }
  // Each of K and V is read once at least.
  CHECK(bytes >= 2 * 2 * 128 * 64 * 2);
  CHECK(sectors * 32 >= 2 * 2 * 128 * 64 * 2);
}
