#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "h2o/kernels/gqa_reduce.h"
#include "h2o/kernels/slot_order.h"
#include "test_helpers.h"

namespace {

using h2o::Budget;
using h2o::is_protected;
using h2o::leaves_before;

// Usable where a kernel needs it at compile time.
static_assert(leaves_before(0.25f, 7, 0.5f, 3));
static_assert(is_protected(0, 100, Budget{.num_sink = 1}));

struct Entry {
  float score;
  int32_t position;
};

bool before(const Entry& a, const Entry& b) {
  return leaves_before(a.score, a.position, b.score, b.position);
}

std::vector<Entry> entries() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<Entry> all;
  for (const float score : {std::nanf(""), -std::nanf(""), -kInfinity, -1.0f, -1e-45f, -0.0f, 0.0f,
                            1e-45f, 1.0f, std::nextafterf(1.0f, 2.0f), 3e38f, kInfinity}) {
    for (const int32_t position : {0, 1, 5, std::numeric_limits<int32_t>::max() - 1})
      all.push_back({score, position});
  }
  return all;
}

}  // namespace

TEST_CASE("sinks and the recent window are protected, nothing else is", "[slot_order]") {
  // Two sinks and a window of three at position 9: 0, 1 and 7, 8, 9.
  const Budget budget{.num_sink = 2, .num_heavy = 4, .num_recent = 3};
  std::vector<int32_t> open;
  for (int32_t position = 0; position <= 9; ++position) {
    if (!is_protected(position, 9, budget)) open.push_back(position);
  }
  CHECK(open == std::vector<int32_t>{2, 3, 4, 5, 6});
}

TEST_CASE("a window of none protects not even the newest token", "[slot_order]") {
  const int64_t newest = GENERATE(1, 2, 1000, std::numeric_limits<int32_t>::max() - 1);
  CAPTURE(newest);
  CHECK_FALSE(is_protected(newest, newest, Budget{.num_heavy = 4}));
  CHECK(is_protected(newest, newest, Budget{.num_recent = 1}));
  CHECK_FALSE(is_protected(newest - 1, newest, Budget{.num_recent = 1}));
}

TEST_CASE("a window longer than the sequence protects all of it", "[slot_order]") {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t position = GENERATE(0, 1, 2);
  CAPTURE(position);
  CHECK(is_protected(position, 2, Budget{.num_recent = kMost}));
  CHECK(is_protected(position, 2, Budget{.num_sink = kMost}));
  CHECK_FALSE(is_protected(position, 2, Budget{.num_heavy = kMost}));
}

TEST_CASE("the lower score leaves first", "[slot_order]") {
  CHECK(leaves_before(0.1f, 9, 0.2f, 1));
  CHECK_FALSE(leaves_before(0.2f, 1, 0.1f, 9));
  // float64 scores are not compared as float32.
  CHECK(leaves_before(1.0, 9, 1.0 + 1e-15, 1));
}

TEST_CASE("among equal scores the older token leaves first", "[slot_order]") {
  const float score = GENERATE(0.0f, 0.5f, std::numeric_limits<float>::infinity(), std::nanf(""));
  CAPTURE(score);
  CHECK(leaves_before(score, 3, score, 4));
  CHECK_FALSE(leaves_before(score, 4, score, 3));
  // The two zeros are equal, whichever way round.
  CHECK(leaves_before(0.0f, 3, -0.0f, 4));
  CHECK(leaves_before(-0.0f, 3, 0.0f, 4));
  CHECK_FALSE(leaves_before(-0.0f, 4, 0.0f, 3));
}

TEST_CASE("a NaN score leaves before every number", "[slot_order]") {
  const float number = GENERATE(-std::numeric_limits<float>::infinity(), -1.0f, 0.0f, 1.0f);
  CAPTURE(number);
  CHECK(leaves_before(std::nanf(""), 9, number, 1));
  CHECK_FALSE(leaves_before(number, 1, std::nanf(""), 9));
}

TEST_CASE("the order of eviction is strict and total", "[slot_order]") {
  const std::vector<Entry> all = entries();
  int reflexive = 0, undecided = 0, both = 0, intransitive = 0;
  for (const Entry& a : all) {
    reflexive += before(a, a);
    for (const Entry& b : all) {
      // Only tokens at one position can be equal, which does not happen within one cache.
      undecided += a.position != b.position && !before(a, b) && !before(b, a);
      both += before(a, b) && before(b, a);
      for (const Entry& c : all) intransitive += before(a, b) && before(b, c) && !before(a, c);
    }
  }
  CHECK(reflexive == 0);
  CHECK(undecided == 0);
  CHECK(both == 0);
  CHECK(intransitive == 0);
}

TEST_CASE("the weights of a group become one score by sum or by max", "[gqa_reduce]") {
  CHECK(h2o::SumReduce::combine(0.25f, 0.5f) == 0.75f);
  CHECK(h2o::MaxReduce::combine(0.25f, 0.5f) == 0.5f);
  CHECK(h2o::MaxReduce::combine(0.5f, 0.25f) == 0.5f);
}

TEST_CASE("a NaN weight shows in the score of either reduction", "[gqa_reduce]") {
  const double number = GENERATE(0.0, 1.0);
  CHECK(std::isnan(h2o::SumReduce::combine(std::nan(""), number)));
  CHECK(std::isnan(h2o::SumReduce::combine(number, std::nan(""))));
  CHECK(std::isnan(h2o::MaxReduce::combine(std::nan(""), number)));
  CHECK(std::isnan(h2o::MaxReduce::combine(number, std::nan(""))));
}
