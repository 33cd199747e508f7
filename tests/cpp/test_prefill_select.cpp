#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
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
#include "h2o/ops/prefill_select.h"
#include "tensors.h"
#include "test_helpers.h"

namespace {

using h2o::EvictionPolicy;
using h2o::GqaReduce;
using h2o::prefill_select;
using h2o::PrefillOptions;
using h2o::PrefillSelection;

struct Prompt {
  at::Tensor query, key, position;

  int64_t seq_len() const { return key.size(2); }
};

Prompt random_prompt(Random& random, int64_t batch, int64_t num_kv_heads, int64_t group_size,
                     int64_t seq_len, int64_t head_dim, at::ScalarType dtype = at::kFloat) {
  return {random.queries({batch, num_kv_heads * group_size, seq_len, head_dim}, dtype),
          random.keys({batch, num_kv_heads, seq_len, head_dim}, dtype),
          position_range(batch, 0, seq_len)};
}

// A prompt of one head in which every logit is 0.
Prompt flat_prompt(const std::vector<int64_t>& positions) {
  const int64_t seq_len = static_cast<int64_t>(positions.size());
  return {at::zeros({1, 1, seq_len, 4}), at::zeros({1, 1, seq_len, 4}),
          integers(positions, {1, seq_len})};
}

PrefillSelection select(const Prompt& prompt, const EvictionPolicy& policy,
                        const PrefillOptions& options = {}) {
  return prefill_select(prompt.query, prompt.key, prompt.position, policy, options);
}

bool same_selection(const PrefillSelection& a, const PrefillSelection& b) {
  return same_bits(a.selected, b.selected) && same_bits(a.scores, b.scores);
}

// Compares every row and head with the reference; counts those whose choice was too close for
// float32.
void check_against_reference(const Prompt& prompt, const EvictionPolicy& policy,
                             const PrefillOptions& options, int64_t& undecided) {
  const at::ScalarType dtype = prompt.query.scalar_type();
  const PrefillSelection result = select(prompt, policy, options);
  const int64_t num_kv_heads = prompt.key.size(1), group_size = prompt.query.size(1) / num_kv_heads;
  const int64_t budget = policy.budget().total();
  CHECK(result.selected.sizes() == at::IntArrayRef({prompt.key.size(0), num_kv_heads, budget}));
  CHECK(result.scores.sizes() == result.selected.sizes());
  for (int64_t row = 0; row < prompt.key.size(0); ++row) {
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      CAPTURE(row, head);
      h2o::Budget own = policy.budget();
      if (options.row_budget) {
        const std::vector<int64_t> counts = int64s(options.row_budget->select(0, row));
        own = {counts[0], counts[1], counts[2]};
      }
      reference::Rules rules = {.num_sink = own.num_sink,
                                .num_heavy = own.num_heavy,
                                .num_recent = own.num_recent,
                                .reduce_max = policy.gqa_reduce() == GqaReduce::kMax,
                                .scale = options.scale.value_or(
                                    1.0 / std::sqrt(static_cast<double>(prompt.key.size(3))))};
      if (options.alibi_slopes) {
        rules.alibi_slopes =
            doubles(options.alibi_slopes->narrow(0, head * group_size, group_size));
      }
      const NewTokens tokens =
          new_tokens_of(prompt.query, prompt.key, at::Tensor(), prompt.position, row, head);
      const reference::Selection expected = reference::select(tokens.tokens, rules);
      std::vector<int64_t> selected(static_cast<size_t>(budget), -1);
      reference::Row scores(static_cast<size_t>(budget), 0.0);
      double largest = 1.0;
      for (size_t i = 0; i < expected.kept.size(); ++i) {
        selected[i] = tokens.columns[static_cast<size_t>(expected.kept[i])];
        scores[i] = expected.scores[i];
        largest = std::max(largest, scores[i]);
      }
      const double tolerance = arithmetic_of(dtype) * largest;
      if (expected.margin <= tolerance) {
        ++undecided;
        continue;
      }
      CHECK(int64s(result.selected.select(0, row).select(0, head)) == selected);
      CHECK(error_of(result.scores.select(0, row).select(0, head), scores) < tolerance);
    }
  }
}

}  // namespace

// ---- Worked by hand -----------------------------------------------------------------------------

TEST_CASE("the scores of a flat prompt are causal column sums", "[prefill_select][cpu]") {
  const PrefillSelection result = select(flat_prompt({0, 1, 2, 3, 4, 5}), policy_of(0, 6, 0));
  CHECK(int64s(result.selected) == std::vector<int64_t>{0, 1, 2, 3, 4, 5});
  CHECK(error_of(result.scores, {2.45, 1.45, 0.95, 37.0 / 60, 22.0 / 60, 10.0 / 60}) < 1e-6);
}

TEST_CASE("padding gives and takes no mass and is never selected", "[prefill_select][cpu]") {
  Prompt prompt = flat_prompt({-1, -1, 0, 1, 2, 3});
  for (const at::Tensor& tensor : {prompt.query, prompt.key})
    tensor.narrow(2, 0, 2).fill_(std::nan(""));
  const PrefillSelection result = select(prompt, policy_of(0, 6, 0));
  CHECK(int64s(result.selected) == std::vector<int64_t>{2, 3, 4, 5, -1, -1});
  CHECK(error_of(result.scores, {25.0 / 12, 13.0 / 12, 7.0 / 12, 0.25, 0.0, 0.0}) < 1e-6);
}

TEST_CASE("sinks, heavy hitters and recent tokens are selected, ascending",
          "[prefill_select][cpu]") {
  // Every query favours key 6 (once it is there) and key 3, which has gathered more, being older.
  Prompt prompt = flat_prompt({0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  prompt.query.select(3, 0).fill_(1.0);
  prompt.key.select(2, 3).select(2, 0).fill_(5.0);
  prompt.key.select(2, 6).select(2, 0).fill_(6.0);
  CHECK(int64s(select(prompt, policy_of(1, 2, 2)).selected) == std::vector<int64_t>{0, 3, 6, 8, 9});
  CHECK(int64s(select(prompt, policy_of(0, 0, 3)).selected) == std::vector<int64_t>{7, 8, 9});
  CHECK(int64s(select(prompt, policy_of(2, 0, 0)).selected) == std::vector<int64_t>{0, 1});
  CHECK(int64s(select(prompt, policy_of(0, 1, 0)).selected) == std::vector<int64_t>{3});
  CHECK(int64s(select(prompt, policy_of(0, 1, 1)).selected) == std::vector<int64_t>{3, 9});
}

TEST_CASE("ties keep the larger position", "[prefill_select][cpu]") {
  // One query weighs all 6 keys alike and each key only itself otherwise: give every query but the
  // last a scale under which its own key takes everything.
  Prompt prompt = {at::zeros({1, 1, 6, 6}, at::kDouble), at::zeros({1, 1, 6, 6}, at::kDouble),
                   position_range(1, 0, 6)};
  for (int64_t i = 0; i < 6; ++i) {
    prompt.key.select(2, i).select(2, i).fill_(1.0);
    if (i < 5) prompt.query.select(2, i).select(2, i).fill_(1e6);
  }
  const PrefillSelection result = select(prompt, policy_of(0, 2, 1));
  CHECK(int64s(result.selected) == std::vector<int64_t>{3, 4, 5});
  CHECK(error_of(result.scores, {7.0 / 6, 7.0 / 6, 1.0 / 6}) < 1e-12);
}

TEST_CASE("protected tokens stay when no score can tell them apart", "[prefill_select][cpu]") {
  // NaN logits: every score is NaN.
  Prompt prompt = flat_prompt({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
  prompt.query.fill_(std::nan(""));
  CHECK(int64s(select(prompt, policy_of(2, 2, 4)).selected) ==
        std::vector<int64_t>{0, 1, 10, 11, 12, 13, 14, 15});
}

TEST_CASE("sinks are positions, not columns", "[prefill_select][cpu]") {
  // The prompt starts at position 1, so one of the two sinks is not in it; its place goes to the
  // highest score.
  const PrefillSelection result = select(flat_prompt({1, 2, 3, 4, 5, 6}), policy_of(2, 0, 2));
  CHECK(int64s(result.selected) == std::vector<int64_t>{0, 1, 4, 5});
}

TEST_CASE("a prompt within the budget is kept whole", "[prefill_select][cpu]") {
  const int64_t budget = GENERATE(3, 4, 8);
  const PrefillSelection result = select(flat_prompt({0, 1, 2}), policy_of(0, budget, 0));
  std::vector<int64_t> expected(static_cast<size_t>(budget), -1);
  for (size_t i = 0; i < 3; ++i) expected[i] = static_cast<int64_t>(i);
  CHECK(int64s(result.selected) == expected);
}

// ---- Against the reference ----------------------------------------------------------------------

TEST_CASE("the selection equals the float64 reference", "[prefill_select][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kDouble, at::kFloat, at::kHalf, at::kBFloat16);
  struct Shape {
    int64_t num_kv_heads, group_size, seq_len, head_dim, num_sink, num_heavy, num_recent;
  };
  // Below, at and above a block of 64 keys and a tile of 64 rows.
  const Shape shape = GENERATE(Shape{2, 1, 64, 16, 0, 6, 6}, Shape{1, 4, 65, 17, 4, 8, 0},
                               Shape{1, 3, 130, 1, 0, 0, 9}, Shape{1, 9, 20, 128, 2, 5, 3},
                               Shape{2, 2, 1, 7, 1, 1, 1}, Shape{1, 71, 5, 8, 0, 2, 1},
                               Shape{1, 1, 63, 80, 0, 10, 0});
  const GqaReduce reduce = GENERATE(GqaReduce::kSum, GqaReduce::kMax);
  CAPTURE(dtype, shape.group_size, shape.seq_len, shape.head_dim, reduce == GqaReduce::kMax);
  Random random(41);
  const Prompt prompt = random_prompt(random, 2, shape.num_kv_heads, shape.group_size,
                                      shape.seq_len, shape.head_dim, dtype);
  int64_t undecided = 0;
  check_against_reference(
      prompt, policy_of(shape.num_sink, shape.num_heavy, shape.num_recent, reduce), {}, undecided);
  CHECK(undecided == 0);
}

TEST_CASE("padding, ALiBi, scale and row budgets equal the float64 reference",
          "[prefill_select][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kDouble, at::kFloat);
  Random random(42);
  Prompt prompt = random_prompt(random, 4, 2, 2, 9, 8, dtype);
  prompt.position = integers({0,  1,  2,  3,  4,  5,  6,  7,  8,  //
                              -1, -1, -1, -1, -1, 3,  4,  5,  6,  //
                              -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 2, -7, 3, 5, -1, 8, 9, 11},
                             {4, 9}, at::kLong);
  PrefillOptions options = {.scale = 0.4};
  options.alibi_slopes = tensor_of({0.5, 0.25, 0.125, 0.0625}, {4});
  options.row_budget = integers({0, 3, 2, 0, 2, 1, 1, 1, 1, 3, 1, 1}, {4, 3});
  int64_t undecided = 0;
  check_against_reference(prompt, policy_of(0, 6, 0), options, undecided);
  CHECK(undecided == 0);
}

TEST_CASE("512 column sums equal a dense softmax", "[prefill_select][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  Random random(43);
  const Prompt prompt = random_prompt(random, 1, 1, 2, 512, 64, dtype);
  const PrefillSelection result = select(prompt, policy_of(0, 512, 0));
  const at::Tensor query = prompt.query.to(at::kDouble), key = prompt.key.to(at::kDouble);
  const at::Tensor above =
      at::full({512, 512}, -std::numeric_limits<double>::infinity(), at::kDouble).triu(1);
  const at::Tensor weights = query.matmul(key.transpose(2, 3)).mul(0.125).add(above).softmax(-1);
  const at::Tensor dense = weights.sum(1).sum(1);
  CHECK(error_of(result.scores, doubles(dense)) < 1e-4);
  CHECK(dense.max().item<double>() > 3.0 * dense.median().item<double>());
}

TEST_CASE("a whole prompt in one chunk of decode keeps the same tokens",
          "[prefill_select][attention_decode][cpu]") {
  const GqaReduce reduce = GENERATE(GqaReduce::kSum, GqaReduce::kMax);
  Random random(44);
  const Prompt prompt = random_prompt(random, 2, 2, 3, 90, 16);
  const EvictionPolicy policy = policy_of(2, 10, 8, reduce);
  const PrefillSelection result = select(prompt, policy);
  const h2o::KVCache cache = h2o::KVCache::allocate(2, 2, 20, 16, at::kFloat);
  h2o::attention_decode(prompt.query, cache, prompt.key, prompt.key, prompt.position, policy,
                        {.chunk = 90});
  const auto order = cache.positions.to(at::kLong).argsort(int64_t{-1}, false);
  CHECK(same_bits(cache.positions.to(at::kLong).gather(-1, order), result.selected));
  CHECK(same_bits(cache.scores.gather(-1, order), result.scores));
}

// ---- Equalities bit for bit ---------------------------------------------------------------------

TEST_CASE("rows of very different lengths are each as if alone", "[prefill_select][cpu]") {
  const std::vector<int64_t> lengths = {3, 2000, 17, 1}, heavy = {2, 64, 16, 1};
  Random random(45);
  Prompt prompt = random_prompt(random, 4, 1, 1, 2000, 8);
  std::vector<int64_t> budgets;
  for (int64_t row = 0; row < 4; ++row) {
    const int64_t length = lengths[static_cast<size_t>(row)];
    prompt.position.select(0, row).narrow(0, length, 2000 - length).fill_(-1);
    budgets.insert(budgets.end(), {0, heavy[static_cast<size_t>(row)], 0});
  }
  PrefillOptions options;
  options.row_budget = integers(budgets, {4, 3}, at::kLong);
  const PrefillSelection result = select(prompt, policy_of(0, 64, 0), options);
  for (int64_t row = 0; row < 4; ++row) {
    CAPTURE(row);
    const int64_t length = lengths[static_cast<size_t>(row)],
                  kept = std::min(length, heavy[static_cast<size_t>(row)]);
    const auto own = [&](const at::Tensor& tensor, int64_t dim) {
      return tensor.narrow(0, row, 1).narrow(dim, 0, length);
    };
    const PrefillSelection alone =
        select({own(prompt.query, 2), own(prompt.key, 2), own(prompt.position, 1)},
               policy_of(0, heavy[static_cast<size_t>(row)], 0));
    const at::Tensor selected = result.selected.narrow(0, row, 1),
                     scores = result.scores.narrow(0, row, 1);
    CHECK(same_bits(selected.narrow(2, 0, kept), alone.selected.narrow(2, 0, kept)));
    CHECK(same_bits(scores.narrow(2, 0, kept), alone.scores.narrow(2, 0, kept)));
    CHECK(selected.narrow(2, kept, 64 - kept).eq(-1).all().item<bool>());
    CHECK(scores.narrow(2, kept, 64 - kept).eq(0).all().item<bool>());
  }
}

TEST_CASE("threads, strides and the dtype of positions change no bit", "[prefill_select][cpu]") {
  const int before = at::get_num_threads();
  Random random(46);
  Prompt prompt = random_prompt(random, 2, 2, 2, 300, 16);
  const EvictionPolicy policy = policy_of(4, 40, 20);
  at::set_num_threads(1);
  const PrefillSelection expected = select(prompt, policy);
  const auto transposed = [](const at::Tensor& tensor) {
    return tensor.transpose(1, 2).contiguous().transpose(1, 2);
  };
  SECTION("two threads") { at::set_num_threads(2); }
  SECTION("heads after tokens") {
    prompt = {transposed(prompt.query), transposed(prompt.key), prompt.position};
  }
  SECTION("every second element") {
    for (at::Tensor* tensor : {&prompt.query, &prompt.key}) {
      const at::Tensor wide = at::full({2, tensor->size(1), 300, 32}, std::nan(""));
      *tensor = wide.slice(3, 0, 32, 2).copy_(*tensor);
    }
    prompt.position = prompt.position.t().contiguous().t();
  }
  SECTION("int32 positions") { prompt.position = prompt.position.to(at::kInt); }
  CHECK(same_selection(select(prompt, policy), expected));
  at::set_num_threads(before);
}

TEST_CASE("select reads its inputs and writes nothing, in inference mode too",
          "[prefill_select][cpu]") {
  const c10::InferenceMode guard(GENERATE(false, true));
  Random random(47);
  const Prompt prompt = random_prompt(random, 2, 2, 2, 20, 8);
  PrefillOptions options;
  options.alibi_slopes = tensor_of({.1, .2, .3, .4}, {4});
  options.row_budget = integers({1, 2, 1, 0, 2, 2}, {2, 3});
  const Snapshot before(
      {prompt.query, prompt.key, prompt.position, *options.alibi_slopes, *options.row_budget});
  select(prompt, policy_of(0, 4, 0), options);
  CHECK(before.unchanged());
}

TEST_CASE("select of nothing gives nothing", "[prefill_select][cpu]") {
  Random random(48);
  CHECK(select(random_prompt(random, 0, 2, 2, 5, 8), policy_of(0, 3, 0)).selected.sizes() ==
        at::IntArrayRef({0, 2, 3}));
  const PrefillSelection empty = select(random_prompt(random, 2, 2, 2, 0, 8), policy_of(0, 3, 0));
  CHECK(empty.selected.eq(-1).all().item<bool>());
  CHECK(empty.scores.eq(0).all().item<bool>());
  CHECK(empty.selected.sizes() == at::IntArrayRef({2, 2, 3}));
}

TEST_CASE("select on the meta device gives the sizes and dtypes of the CPU",
          "[prefill_select][meta]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kHalf, at::kBFloat16, at::kDouble);
  Random random(49);
  const Prompt prompt = random_prompt(random, 2, 2, 2, 20, 8, dtype);
  const PrefillSelection real = select(prompt, policy_of(1, 2, 3));
  const PrefillSelection fake =
      select({prompt.query.to(at::kMeta), prompt.key.to(at::kMeta), prompt.position.to(at::kMeta)},
             policy_of(1, 2, 3));
  CHECK(fake.selected.is_meta());
  CHECK(fake.selected.sizes() == real.selected.sizes());
  CHECK(fake.selected.scalar_type() == real.selected.scalar_type());
  CHECK(fake.scores.sizes() == real.scores.sizes());
  CHECK(fake.scores.scalar_type() == real.scores.scalar_type());
  CHECK(real.selected.scalar_type() == at::kLong);
  CHECK(real.scores.scalar_type() == (dtype == at::kDouble ? at::kDouble : at::kFloat));
}

// ---- Errors -------------------------------------------------------------------------------------

namespace {

// A good call of batch 2, 2 KV heads, 4 query heads, 5 tokens, head_dim 8, for one part to be
// spoilt.
struct Good {
  Prompt prompt;
  PrefillOptions options;
  EvictionPolicy policy = policy_of(1, 2, 2);

  Good() {
    Random random(50);
    prompt = random_prompt(random, 2, 2, 2, 5, 8);
    options.alibi_slopes = tensor_of({.1, .2, .3, .4}, {4});
    options.row_budget = integers({1, 2, 2, 0, 3, 2}, {2, 3});
  }
  std::string refusal() const {
    return ::refusal([this] { select(prompt, policy, options); });
  }
};

}  // namespace

TEST_CASE("select refuses tensors that do not fit", "[prefill_select][cpu]") {
  Good good;
  REQUIRE(good.refusal() == "nothing was thrown");
  std::string message;
  SECTION("a query without a batch") {
    good.prompt.query = good.prompt.query.select(0, 0);
    message = "query must be [batch, num_q_heads, seq_len, head_dim], got [4, 5, 8]";
  }
  SECTION("a key without a batch") {
    good.prompt.key = good.prompt.key.select(0, 0);
    message = "key must be [batch, num_kv_heads, seq_len, head_dim], got [2, 5, 8]";
  }
  SECTION("keys of another number of tokens") {
    good.prompt.key = good.prompt.key.narrow(2, 0, 4);
    message =
        "key must be [batch, num_kv_heads, seq_len, head_dim] = [2, 2, 5, 8], got [2, 2, 4, 8]";
  }
  SECTION("positions without a batch") {
    good.prompt.position = good.prompt.position.select(0, 0);
    message = "position must be [batch, seq_len] = [2, 5], got [5]";
  }
  SECTION("a head_dim of none") {
    good.prompt.query = good.prompt.query.narrow(3, 0, 0);
    good.prompt.key = good.prompt.key.narrow(3, 0, 0);
    message = "head_dim must be in 1..512, got 0";
  }
  SECTION("a head_dim that is too large") {
    good.prompt.query = at::zeros({2, 4, 5, 513});
    good.prompt.key = at::zeros({2, 2, 5, 513});
    message = "head_dim must be in 1..512, got 513";
  }
  SECTION("no KV heads") {
    good.prompt.key = good.prompt.key.narrow(1, 0, 0);
    message = "num_kv_heads must be >= 1, got 0";
  }
  SECTION("query heads that are no multiple of the KV heads") {
    good.prompt.query = good.prompt.query.narrow(1, 0, 3);
    message = "num_q_heads must be a multiple of num_kv_heads, got num_q_heads=3, num_kv_heads=2";
  }
  SECTION("more tokens than int32 counts") {
    const at::TensorOptions meta = at::TensorOptions(at::kFloat).device(at::kMeta);
    good.prompt = {at::empty({1, 1, int64_t{1} << 31, 1}, meta),
                   at::empty({1, 1, int64_t{1} << 31, 1}, meta),
                   at::empty({1, int64_t{1} << 31}, meta.dtype(at::kInt))};
    message = "seq_len must be <= 2147483647, got 2147483648";
  }
  SECTION("integers") {
    good.prompt.query = good.prompt.query.to(at::kInt);
    message = "query must be float32, float16, bfloat16 or float64, got Int";
  }
  SECTION("keys of another dtype") {
    good.prompt.key = good.prompt.key.to(at::kHalf);
    message = "key must be float32, got Half";
  }
  SECTION("positions of floats") {
    good.prompt.position = good.prompt.position.to(at::kFloat);
    message = "position must be int32 or int64, got Float";
  }
  SECTION("slopes for the KV heads") {
    good.options.alibi_slopes = tensor_of({.1, .2}, {2});
    message = "alibi_slopes must be [num_q_heads] = [4], got [2]";
  }
  SECTION("budgets of one row") {
    good.options.row_budget = good.options.row_budget->narrow(0, 0, 1);
    message = "row_budget must be [batch, 3] = [2, 3], got [1, 3]";
  }
  SECTION("a key on another device") {
    good.prompt.key = good.prompt.key.to(at::kMeta);
    message = "key must be on the device of query, got meta and cpu";
  }
  SECTION("positions on another device") {
    good.prompt.position = good.prompt.position.to(at::kMeta);
    message = "position must be on the device of query, got meta and cpu";
  }
  SECTION("budgets on another device") {
    good.options.row_budget = good.options.row_budget->to(at::kMeta);
    message = "row_budget must be on the device of query, got meta and cpu";
  }
  CHECK(good.refusal() == "Error: h2o_prefill_select: " + message);
}

TEST_CASE("select refuses numbers out of range", "[prefill_select][cpu]") {
  Good good;
  std::string message;
  SECTION("a scale that is no number") {
    good.options.scale = std::nan("");
    message = "scale must be finite, got nan";
  }
  SECTION("a slope that is NaN") {
    good.options.alibi_slopes = tensor_of({.1, std::nan(""), .3, .4}, {4});
    message = "alibi_slopes must be finite as float32, got nan for query head 1";
  }
  SECTION("positions that fall") {
    good.prompt.position = integers({0, 1, 2, 4, 3, 0, 1, 2, 3, 4}, {2, 5});
    message = "position must increase along a row, got 4 before 3 in row 0, column 4";
  }
  SECTION("a position that int32 does not hold") {
    good.prompt.position = integers({0, 1, 2, 3, 2147483647, 0, 1, 2, 3, 4}, {2, 5}, at::kLong);
    message = "position must be < 2147483647, got 2147483647 in row 0, column 4";
  }
  SECTION("a row's budget above the policy's, which gives the size of the result") {
    good.options.row_budget = integers({1, 2, 2, 0, 4, 2}, {2, 3});
    message =
        "row_budget must have counts >= 0 with a sum in 1..5 in every row, got 0, 4, 2 in row 1";
  }
  CHECK(good.refusal() == "ValueError: h2o_prefill_select: " + message);
}

TEST_CASE("select refuses tensors that are not there and ratios", "[prefill_select][cpu]") {
  Good good;
  std::string message;
  SECTION("query") {
    good.prompt.query = at::Tensor();
    message = "Error: h2o_prefill_select: query must be ";
  }
  SECTION("key") {
    good.prompt.key = at::Tensor();
    message = "Error: h2o_prefill_select: key must be ";
  }
  SECTION("position") {
    good.prompt.position = at::Tensor();
    message = "Error: h2o_prefill_select: position must be ";
  }
  SECTION("a ratio") {
    good.policy = EvictionPolicy({.num_recent = 2, .heavy_ratio = 0.5});
    message = "std: EvictionPolicy: budget() must be asked of a policy without ratios";
  }
  CHECK_THAT(good.refusal(), Catch::Matchers::StartsWith(message));
}
