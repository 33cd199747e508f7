#include "h2o/ops/rotate.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "h2o/ops/attention_decode.h"
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

TEST_CASE("angles that do not fit are refused before anything is written",
          "[rotate][attention_decode][cpu]") {
  Random random(5);
  const at::Tensor input = random.tensor({1, 1, 2, 8}), angles = turns(3, 4);
  const auto refused = [&](const at::Tensor& index, const at::Tensor& cos, const at::Tensor& sin) {
    return refusal([&] { rotate(input, index, cos, sin); });
  };
  const at::Tensor index = integers({0, 2}, {1, 1, 2});
  CHECK_NOTHROW(rotate(input, index, angles, angles));
  CHECK(refused(integers({0, 3}, {1, 1, 2}), angles, angles) ==
        "Error: h2o_rotate: index must be < the rows of cos = 3, got 3");
  CHECK(refused(index, angles, angles.narrow(1, 0, 3)) ==
        "Error: h2o_rotate: sin must be [num_angles, pairs] = [3, 4], got [3, 3]");
  CHECK(refused(index, turns(3, 5), turns(3, 5)) ==
        "Error: h2o_rotate: cos must have 1..head_dim / 2 pairs, got 5 with head_dim=8");

  const KVCache cache = KVCache::allocate(1, 1, 4, 8, at::kFloat);
  const EvictionPolicy policy({.num_heavy = 2, .num_recent = 2});
  const auto decode_refused = [&](const DecodeOptions& options) {
    return refusal([&] {
      attention_decode(input, cache, input, input, position_range(1, 0, 2), policy, options);
    });
  };
  CHECK(decode_refused({.rope_cos = angles}) ==
        "Error: h2o_attention_decode: rope_cos and rope_sin must be given together, got rope_cos "
        "alone");
  CHECK(decode_refused({.rope_cos = angles.narrow(0, 0, 1), .rope_sin = angles.narrow(0, 0, 1)}) ==
        "Error: h2o_attention_decode: rope_cos must have an angle for each rank, got 1 rows for 0 "
        "tokens "
        "kept and 2 new ones in row 0, chunk=1");
  CHECK(int64s(cache.positions) == std::vector<int64_t>{-1, -1, -1, -1});
}

}  // namespace
