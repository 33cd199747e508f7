#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "h2o/kernels/cpu/slot_selection.h"
#include "reference.h"
#include "test_helpers.h"

namespace {

using h2o::Budget;
using h2o::cpu::Candidate;
using h2o::cpu::choose_victims;
using h2o::cpu::FreeSlots;
using h2o::cpu::scan_slots;
using h2o::cpu::SlotScan;

SlotScan<float> scan(const std::vector<float>& scores, const std::vector<int32_t>& positions,
                     int64_t newest, const Budget& budget) {
  return scan_slots<float>(scores.data(), 1, positions.data(), 1,
                           static_cast<int64_t>(positions.size()), newest, budget);
}

// Tokens 0, 1, 2, ... with these scores.
std::vector<Candidate<float>> tokens(const std::vector<float>& scores) {
  std::vector<Candidate<float>> all;
  for (size_t i = 0; i < scores.size(); ++i) {
    all.push_back({scores[i], static_cast<int32_t>(i), static_cast<int32_t>(i)});
  }
  return all;
}

// The indices of those that leave, in the order they do.
template <typename Score>
std::vector<int32_t> victims(std::vector<Candidate<Score>> candidates, int64_t count,
                             int64_t newest, const Budget& budget) {
  const size_t size = candidates.size();
  choose_victims(candidates, count, newest, budget);
  REQUIRE(candidates.size() == size);
  std::vector<int32_t> indices;
  for (int64_t i = 0; i < count; ++i) indices.push_back(candidates[static_cast<size_t>(i)].index);
  return indices;
}

}  // namespace

TEST_CASE("a scan finds the occupancy, the lowest empty slot and the victim",
          "[slot_selection][cpu]") {
  // Position 11 arrives: 9 and 10 are recent, 1 is a sink, 8 has the lowest score of the rest.
  const std::vector<float> scores = {9.0f, 0.0f, 1.7f, 0.0f, 0.2f, 0.0f, 0.3f, 1.2f};
  const std::vector<int32_t> positions = {3, 1, 5, -1, 9, -1, 8, 4};
  const SlotScan<float> found =
      scan(scores, positions, 11, {.num_sink = 2, .num_heavy = 2, .num_recent = 3});
  CHECK(found.occupied == 6);
  CHECK(found.lowest_empty == 3);
  CHECK(found.victim == 6);
  CHECK(found.victim_score == 0.3f);
  CHECK(found.victim_position == 8);
}

TEST_CASE("an empty cache has no victim and a full one no empty slot", "[slot_selection][cpu]") {
  const SlotScan<float> empty = scan({0, 0, 0}, {-1, -1, -1}, 0, {.num_heavy = 3});
  CHECK(empty.occupied == 0);
  CHECK(empty.lowest_empty == 0);
  CHECK(empty.victim == -1);
  const SlotScan<float> full = scan({3, 1, 2}, {0, 1, 2}, 3, {.num_heavy = 3});
  CHECK(full.occupied == 3);
  CHECK(full.lowest_empty == -1);
  CHECK(full.victim == 1);
  const SlotScan<float> none = scan_slots<float>(nullptr, 1, nullptr, 1, 0, 5, {.num_heavy = 3});
  CHECK(none.occupied == 0);
  CHECK(none.lowest_empty == -1);
}

TEST_CASE("where every slot is protected a scan has no victim", "[slot_selection][cpu]") {
  const Budget budget = GENERATE(Budget{.num_sink = 3}, Budget{.num_recent = 4},
                                 Budget{.num_sink = 1, .num_recent = 3});
  CAPTURE(budget.num_sink, budget.num_recent);
  const SlotScan<float> found = scan({0, 0, 0}, {0, 1, 2}, 3, budget);
  CHECK(found.occupied == 3);
  CHECK(found.victim == -1);
}

TEST_CASE("a score in an empty slot is never looked at", "[slot_selection][cpu]") {
  const float stale = GENERATE(std::nanf(""), -std::numeric_limits<float>::infinity(), -5.0f);
  CAPTURE(stale);
  CHECK(scan({stale, 2.0f, 1.0f}, {-1, 0, 1}, 2, {.num_heavy = 2}).victim == 2);
  CHECK(scan({stale, 2.0f, 1.0f}, {-7, 0, 1}, 2, {.num_heavy = 2}).lowest_empty == 0);
}

TEST_CASE("a scan breaks ties by position, not by slot", "[slot_selection][cpu]") {
  CHECK(scan({1, 1, 1, 1}, {7, 4, 6, 5}, 8, {.num_heavy = 4}).victim == 1);
  CHECK(scan({0.0f, -0.0f, 0.0f}, {7, 6, 5}, 8, {.num_heavy = 3}).victim == 2);
  CHECK(scan({1.0f, std::nanf(""), std::nanf("")}, {1, 6, 5}, 8, {.num_heavy = 3}).victim == 2);
}

TEST_CASE("a scan follows the strides of scores and positions", "[slot_selection][cpu]") {
  const std::vector<float> scores = {5, -1, -1, 3, -1, -1, 4, -1, -1};
  const std::vector<int32_t> positions = {0, 99, 1, 99, 2, 99};
  const SlotScan<float> found =
      scan_slots<float>(scores.data(), 3, positions.data(), 2, 3, 9, {.num_heavy = 3});
  CHECK(found.victim == 1);
  CHECK(found.victim_score == 3.0f);
}

TEST_CASE("recent tokens stay when all scores are equal", "[slot_selection][cpu]") {
  // 16 equal scores, 8 kept, 4 of them recent.
  const float score =
      GENERATE(0.0f, 1.0f, 3e38f, std::numeric_limits<float>::infinity(), std::nanf(""));
  CAPTURE(score);
  const std::vector<Candidate<float>> all = tokens(std::vector<float>(16, score));
  CHECK(victims(all, 8, 15, {.num_heavy = 4, .num_recent = 4}) ==
        std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(victims(all, 8, 15, {.num_sink = 2, .num_heavy = 2, .num_recent = 4}) ==
        std::vector<int32_t>{2, 3, 4, 5, 6, 7, 8, 9});
}

TEST_CASE("victims come lowest score first", "[slot_selection][cpu]") {
  const std::vector<Candidate<float>> all = tokens({0.5f, 0.1f, 0.4f, 0.2f, 0.3f, 0.0f});
  CHECK(victims(all, 3, 5, {.num_heavy = 2, .num_recent = 1}) == std::vector<int32_t>{1, 3, 4});
  CHECK(victims(all, 3, 5, {.num_heavy = 3}) == std::vector<int32_t>{5, 1, 3});
}

TEST_CASE("none leave where none need to", "[slot_selection][cpu]") {
  const std::vector<Candidate<float>> all = tokens({0.5f, 0.1f, 0.4f, 0.2f});
  const Budget budget{.num_sink = 1, .num_recent = 1};
  CHECK(victims(all, 0, 3, budget).empty());
  CHECK(victims(all, -3, 3, budget).empty());
  CHECK(victims<float>({}, 0, 3, budget).empty());
}

TEST_CASE("where more must leave than may, the last candidates follow", "[slot_selection][cpu]") {
  const std::vector<Candidate<float>> all = tokens({0.5f, 0.1f, 0.4f, 0.2f});
  const Budget budget{.num_sink = 1, .num_recent = 1};
  CHECK(victims(all, 3, 3, budget) == std::vector<int32_t>{1, 2, 3});
  CHECK(victims(all, 4, 3, budget) == std::vector<int32_t>{1, 2, 3, 0});
  CHECK(victims(all, 2, 3, {.num_recent = 4}) == std::vector<int32_t>{3, 2});
}

TEST_CASE("victims of random candidates are those of a plain sort", "[slot_selection][cpu]") {
  std::mt19937 random(20231206);
  const auto below = [&random](int64_t bound) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(bound));
  };
  int mismatches = 0, with_ties = 0, with_nan = 0, short_of = 0;
  for (int repeat = 0; repeat < 2000; ++repeat) {
    const int64_t size = below(40), newest = size + below(3);
    const Budget budget{.num_sink = below(4), .num_heavy = below(8), .num_recent = below(6)};
    std::vector<Candidate<double>> candidates;
    std::vector<reference::Token> open;
    for (int32_t i = 0; i < size; ++i) {
      // Few different scores, so that there are ties; some NaN, both zeros.
      const int64_t kind = below(8);
      const double score = kind == 0   ? std::nan("")
                           : kind == 1 ? -0.0
                                       : static_cast<double>(kind - 2);
      candidates.push_back({score, i, 1000 + i});
      if (i >= budget.num_sink && i <= newest - budget.num_recent) open.push_back({i, score});
      with_nan += std::isnan(score);
    }
    std::shuffle(candidates.begin(), candidates.end(), random);
    std::sort(open.begin(), open.end(), reference::leaves_first);
    const int64_t count = below(size + 1);
    std::vector<int32_t> expected;
    for (size_t i = 0; i < open.size() && static_cast<int64_t>(i) < count; ++i) {
      expected.push_back(1000 + static_cast<int32_t>(open[i].position));
      with_ties += i > 0 && open[i].score == open[i - 1].score;
    }
    short_of += static_cast<int64_t>(expected.size()) < count;
    for (int32_t i = static_cast<int32_t>(size) - 1; i >= 0; --i) {
      const bool is_open = i >= budget.num_sink && i <= newest - budget.num_recent;
      if (!is_open && static_cast<int64_t>(expected.size()) < count) expected.push_back(1000 + i);
    }
    mismatches += victims(candidates, count, newest, budget) != expected;
  }
  CHECK(mismatches == 0);
  CHECK(with_ties > 1000);
  CHECK(with_nan > 1000);
  CHECK(short_of > 100);
}

TEST_CASE("a scan and a choice of one name the same victim", "[slot_selection][cpu]") {
  std::mt19937 random(7);
  int mismatches = 0, without = 0;
  for (int repeat = 0; repeat < 1000; ++repeat) {
    std::vector<float> scores;
    std::vector<int32_t> positions;
    std::vector<Candidate<float>> candidates;
    for (int32_t slot = 0; slot < 12; ++slot) {
      scores.push_back(static_cast<float>(random() % 4));
      positions.push_back(random() % 4 == 0 ? -1 : 11 - slot);
      if (positions.back() >= 0) candidates.push_back({scores.back(), positions.back(), slot});
    }
    const Budget budget{.num_sink = static_cast<int64_t>(random() % 8),
                        .num_recent = static_cast<int64_t>(random() % 8)};
    const int64_t victim = scan(scores, positions, 12, budget).victim;
    if (victim < 0) {
      ++without;
    } else {
      mismatches += victims(candidates, 1, 12, budget)[0] != victim;
    }
  }
  CHECK(mismatches == 0);
  CHECK(without > 0);
  CHECK(without < 1000);
}

TEST_CASE("new tokens take the freed slots from the lowest on, then the empty ones",
          "[slot_selection][cpu]") {
  // By slot, every second element: slots 1 and 4 are empty, 5, 0 and 3 are freed.
  std::vector<int32_t> positions = {7, 99, -1, 99, 8, 99, 9, 99, -1, 99, 6, 99};
  FreeSlots slots({5, 0, 3}, 5, positions.data(), 2);
  std::vector<int64_t> taken;
  for (int32_t token = 20; token < 25; ++token) {
    taken.push_back(slots.next());
    positions[static_cast<size_t>(2 * taken.back())] = token;
  }
  CHECK(taken == std::vector<int64_t>{0, 3, 5, 1, 4});
  // Where fewer are asked for than were freed, they are still the lowest.
  FreeSlots lowest({9, 2, 7, 4}, 2, positions.data(), 2);
  const int64_t first = lowest.next(), second = lowest.next();
  CHECK(first == 2);
  CHECK(second == 4);
}
