#include "h2o/ops/rotate.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "decode_call.h"
#include "tensors.h"
#include "test_helpers.h"

namespace {

using h2o::attention_decode;
using h2o::DecodeOptions;
using h2o::DecodeResult;
using h2o::EvictionPolicy;
using h2o::KVCache;
using h2o::rotate;

// Of `num` positions, at frequencies from 1 down.
at::Tensor turns(int64_t num, int64_t pairs, at::ScalarType dtype = at::kFloat) {
  std::vector<double> angles;
  for (int64_t i = 0; i < num * pairs; ++i) {
    angles.push_back(static_cast<double>(i / pairs) *
                     std::pow(100.0, -static_cast<double>(i % pairs) / static_cast<double>(pairs)));
  }
  return tensor_of(angles, {num, pairs}, dtype);
}

TEST_CASE("each pair is turned by the angle that the index names", "[rotate][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kDouble, at::kFloat, at::kHalf, at::kBFloat16);
  const int64_t head_dim = GENERATE(2, 9, 64, 129), pairs = GENERATE(1, 4, 32);
  if (2 * pairs > head_dim) return;  // No room for so many.
  CAPTURE(dtype, head_dim, pairs);
  Random random(1);
  const at::Tensor input = random.tensor({2, 2, 3, head_dim}, dtype);
  const at::Tensor angles = turns(7, pairs, dtype == at::kDouble ? at::kDouble : at::kFloat);
  const std::vector<int64_t> index = {6, 0, -1, 2, 2, 5};
  const at::Tensor output = rotate(input, integers(index, {2, 1, 3}), angles.cos(), angles.sin());
  CHECK(output.scalar_type() == dtype);
  const double tolerance = dtype == at::kDouble  ? 1e-14
                           : dtype == at::kFloat ? 1e-6
                           : dtype == at::kHalf  ? 2e-3
                                                 : 2e-2;
  const std::vector<double> from = doubles(input), to = doubles(output), angle = doubles(angles);
  for (int64_t row = 0; row < 12; ++row) {
    const int64_t by = index[static_cast<size_t>(row / 6 * 3 + row % 3)];
    for (int64_t d = 0; d < head_dim; ++d) {
      const auto at = [&](int64_t i) { return from[static_cast<size_t>(row * head_dim + i)]; };
      double expected = by < 0 ? 0 : at(d);
      if (by >= 0 && d < 2 * pairs) {
        const double turn = angle[static_cast<size_t>(by * pairs + d % pairs)];
        const double x = at(d % pairs), y = at(d % pairs + pairs);
        expected = d < pairs ? x * std::cos(turn) - y * std::sin(turn)
                             : y * std::cos(turn) + x * std::sin(turn);
      }
      CAPTURE(row, d);
      CHECK(std::abs(to[static_cast<size_t>(row * head_dim + d)] - expected) <= tolerance);
    }
  }
}

TEST_CASE("a rotation does not depend on threads", "[rotate][cpu]") {
  Random random(2);
  const at::Tensor input = random.tensor({3, 5, 700, 20}), angles = turns(50, 10);
  const at::Tensor index = random.tensor({3, 5, 700}).abs().mul(10).clamp(0, 49).to(at::kInt);
  at::set_num_threads(1);
  const at::Tensor alone = rotate(input, index, angles.cos(), angles.sin());
  at::set_num_threads(4);
  CHECK(same_bits(alone, rotate(input, index, angles.cos(), angles.sin())));
  at::set_num_threads(1);
}

TEST_CASE("while nothing has left, rolling is the step on keys rotated by position",
          "[rotate][attention_decode][cpu]") {
  const int64_t chunk = GENERATE(1, 4);
  Random random(3);
  const EvictionPolicy policy({.num_heavy = 4, .num_recent = 4, .num_sink = 2});
  const KVCache rolling = KVCache::allocate(1, 2, 10, 16, at::kDouble),
                plain = KVCache::allocate(1, 2, 10, 16, at::kDouble);
  const at::Tensor query = random.tensor({1, 4, 10, 16}, at::kDouble),
                   key = random.tensor({1, 2, 10, 16}, at::kDouble),
                   value = random.tensor({1, 2, 10, 16}, at::kDouble);
  const at::Tensor angles = turns(10, 8, at::kDouble), index = position_range(1, 0, 10)[0];
  const at::Tensor cos = angles.cos(), sin = angles.sin(), by = index.view({1, 1, 10});
  const at::Tensor position = position_range(1, 0, 10);
  const DecodeResult result = attention_decode(query, rolling, key, value, position, policy,
                                               {.chunk = chunk, .rope_cos = cos, .rope_sin = sin});
  const DecodeResult expected =
      attention_decode(rotate(query, by, cos, sin), plain, rotate(key, by, cos, sin), value,
                       position, policy, {.chunk = chunk});
  CHECK(doubles((result.output - expected.output).abs().max())[0] < 1e-12);
  CHECK(doubles((rolling.scores - plain.scores).abs().max())[0] < 1e-12);
  CHECK(same_bits(rolling.k_cache, key));
}

TEST_CASE("rolling goes on where positions have left the angles behind",
          "[rotate][attention_decode][cpu]") {
  Random random(4);
  const EvictionPolicy policy({.num_heavy = 3, .num_recent = 3, .num_sink = 1});
  const KVCache near = KVCache::allocate(1, 1, 7, 8, at::kDouble),
                far = KVCache::allocate(1, 1, 7, 8, at::kDouble);
  const at::Tensor angles = turns(8, 4, at::kDouble);
  const DecodeOptions options = {.rope_cos = angles.cos(), .rope_sin = angles.sin()};
  for (int64_t i = 0; i < 60; ++i) {
    const at::Tensor query = random.tensor({1, 2, 1, 8}, at::kDouble),
                     key = random.tensor({1, 1, 1, 8}, at::kDouble),
                     value = random.tensor({1, 1, 1, 8}, at::kDouble);
    // The first token is a sink in both; later ones a million further on in one of them.
    const int64_t shift = i == 0 ? 0 : 1'000'000;
    const DecodeResult a =
        attention_decode(query, near, key, value, position_range(1, i, 1), policy, options);
    const DecodeResult b =
        attention_decode(query, far, key, value, position_range(1, i + shift, 1), policy, options);
    CHECK(same_bits(a.output, b.output));
  }
  CHECK(same_bits(near.k_cache, far.k_cache));
}

// A good rotation, for one part to be spoilt.
struct GoodRotation {
  at::Tensor input = at::ones({2, 3, 4, 8}), index = at::zeros({2, 1, 4}, at::kInt),
             cos = turns(5, 4), sin = turns(5, 4);

  std::string refusal() const {
    return ::refusal([this] { rotate(input, index, cos, sin); });
  }
};

TEST_CASE("rotate refuses what does not fit", "[rotate][cpu]") {
  GoodRotation good;
  REQUIRE(good.refusal() == "nothing was thrown");
  std::string message;
  SECTION("vectors without a batch") {
    good.input = good.input[0];
    message = "input must be [batch, heads, n, head_dim], got [3, 4, 8]";
  }
  SECTION("integers") {
    good.input = good.input.to(at::kInt);
    message = "input must be float32, float16, bfloat16 or float64, got Int";
  }
  SECTION("vectors of nothing") {
    good.input = good.input.narrow(3, 0, 0);
    message = "head_dim must be in 1..512, got 0";
  }
  SECTION("vectors that are too long") {
    good.input = at::ones({2, 3, 4, 513});
    message = "head_dim must be in 1..512, got 513";
  }
  SECTION("an index without heads") {
    good.index = good.index.select(1, 0);
    message = "index must be [batch or 1, heads or 1, n], got [2, 4]";
  }
  SECTION("an index of two heads for three") {
    good.index = at::zeros({2, 2, 4}, at::kInt);
    message = "index must be [batch or 1, heads or 1, n] = [2, 3, 4], got [2, 2, 4]";
  }
  SECTION("an index for another number of vectors") {
    good.index = at::zeros({1, 1, 3}, at::kInt);
    message = "index must be [batch or 1, heads or 1, n] = [1, 1, 4], got [1, 1, 3]";
  }
  SECTION("an index of floats") {
    good.index = good.index.to(at::kFloat);
    message = "index must be int32 or int64, got Float";
  }
  SECTION("an index on another device") {
    good.index = good.index.to(at::kMeta);
    message = "index must be on the device of input, got meta and cpu";
  }
  SECTION("an index behind the last angle") {
    good.index = integers({0, 5, -1, 1}, {1, 1, 4}, at::kLong);
    message = "index must be < the rows of cos = 5, got 5";
  }
  SECTION("an index that int32 does not hold") {
    good.index = integers({0, int64_t{1} << 32, -1, 1}, {1, 1, 4}, at::kLong);
    message = "index must be < the rows of cos = 5, got 4294967296";
  }
  SECTION("angles per head") {
    good.cos = good.cos.unsqueeze(0);
    message = "cos must be [num_angles, pairs], got [1, 5, 4]";
  }
  SECTION("sines for other angles than cosines") {
    good.sin = good.sin.narrow(0, 0, 4);
    message = "sin must be [num_angles, pairs] = [5, 4], got [4, 4]";
  }
  SECTION("sines of fewer pairs") {
    good.sin = good.sin.narrow(1, 0, 3);
    message = "sin must be [num_angles, pairs] = [5, 4], got [5, 3]";
  }
  SECTION("angles of the vectors' dtype, which is too coarse") {
    good.input = good.input.to(at::kHalf);
    good.cos = good.cos.to(at::kHalf);
    message = "cos must be float32, got Half";
  }
  SECTION("angles of float32 for float64") {
    good.input = good.input.to(at::kDouble);
    message = "cos must be float64, got Float";
  }
  SECTION("sines of another dtype") {
    good.sin = good.sin.to(at::kDouble);
    message = "sin must be float32, got Double";
  }
  SECTION("angles on another device") {
    good.sin = good.sin.to(at::kMeta);
    message = "sin must be on the device of input, got meta and cpu";
  }
  SECTION("no angles") {
    good.cos = good.sin = turns(0, 4);
    message = "cos must have at least one row, got 0";
  }
  SECTION("no pairs") {
    good.cos = good.sin = turns(5, 0);
    message = "cos must have 1..head_dim / 2 pairs, got 0 with head_dim=8";
  }
  SECTION("more pairs than head_dim has") {
    good.cos = good.sin = turns(5, 5);
    message = "cos must have 1..head_dim / 2 pairs, got 5 with head_dim=8";
  }
  CHECK(good.refusal() == "Error: h2o_rotate: " + message);
}

TEST_CASE("rolling refuses angles that do not fit, before it writes",
          "[rotate][attention_decode][cpu]") {
  Random random(5);
  const KVCache cache = KVCache::allocate(2, 1, 4, 8, at::kFloat);
  const EvictionPolicy policy = policy_of(0, 2, 2);
  decode(cache, random_call(random, 2, 1, 1, 2, 8), policy);
  const Call call = random_call(random, 2, 1, 1, 3, 8, at::kFloat, 2);
  DecodeOptions options = {.rope_cos = turns(5, 4), .rope_sin = turns(5, 4)};
  std::string message;
  SECTION("cosines alone") {
    options.rope_sin.reset();
    message = "rope_cos and rope_sin must be given together, got rope_cos alone";
  }
  SECTION("sines alone") {
    options.rope_cos.reset();
    message = "rope_cos and rope_sin must be given together, got rope_sin alone";
  }
  SECTION("with ALiBi") {
    options.alibi_slopes = tensor_of({0.5}, {1});
    message =
        "rope_cos and alibi_slopes must not be given together: ALiBi's bias is of original "
        "positions";
  }
  SECTION("angles of one dimension") {
    options.rope_cos = (*options.rope_cos)[0];
    message = "rope_cos must be [num_angles, pairs], got [4]";
  }
  SECTION("sines for fewer ranks") {
    options.rope_sin = options.rope_sin->narrow(0, 0, 4);
    message = "rope_sin must be [num_angles, pairs] = [5, 4], got [4, 4]";
  }
  SECTION("angles of float64 for a float32 cache") {
    options.rope_cos = options.rope_cos->to(at::kDouble);
    message = "rope_cos must be float32, got Double";
  }
  SECTION("angles on another device") {
    options.rope_sin = options.rope_sin->to(at::kMeta);
    message = "rope_sin must be on the device of k_cache, got meta and cpu";
  }
  SECTION("no angles") {
    options.rope_cos = options.rope_sin = turns(0, 4);
    message = "rope_cos must have at least one row, got 0";
  }
  SECTION("more pairs than head_dim has") {
    options.rope_cos = options.rope_sin = turns(5, 5);
    message = "rope_cos must have 1..head_dim / 2 pairs, got 5 with head_dim=8";
  }
  SECTION("fewer angles than ranks") {
    options.rope_cos = options.rope_sin = turns(4, 4);
    options.chunk = 3;
    message =
        "rope_cos must have an angle for each rank, got 4 rows for 2 tokens kept and 3 new ones "
        "in row 0, chunk=3";
  }
  const Snapshot before(cache, {call.query, call.k_new, call.v_new, call.position_new});
  CHECK(refusal([&] { decode(cache, call, policy, options); }) ==
        "Error: h2o_attention_decode: " + message);
  CHECK(before.unchanged());
}

}  // namespace
