#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "h2o/budget.h"
#include "h2o/kernels/score_rule.h"
#include "h2o/kernels/slot_order.h"

// Deciding who leaves, on the CPU: these functions return indices and write nothing. The order
// itself is slot_order.h.
namespace h2o::cpu {

// The occupied slots of one (row, KV head) as one step sees them.
template <typename Score>
struct SlotScan {
  int64_t occupied = 0;
  int64_t lowest_empty = -1;  // slot, or -1
  int64_t victim = -1;        // the slot that would leave first, or -1 where every one is protected
  Score victim_score = 0;     // what it is ordered by
  int32_t victim_position = -1;
};

template <typename Score, typename Rule = PaperScoring>
SlotScan<Score> scan_slots(const Score* scores, int64_t scores_stride, const int32_t* positions,
                           int64_t positions_stride, int64_t capacity, int64_t newest,
                           const Budget& budget, const Rule& rule = {}) {
  SlotScan<Score> scan;
  for (int64_t slot = 0; slot < capacity; ++slot) {
    const int32_t position = positions[slot * positions_stride];
    if (position < 0) {
      if (scan.lowest_empty < 0) scan.lowest_empty = slot;
      continue;
    }
    ++scan.occupied;
    if (is_protected(position, newest, budget)) continue;
    const Score score = rule.order_key(scores[slot * scores_stride], position, newest);
    if (scan.victim < 0 ||
        leaves_before(score, position, scan.victim_score, scan.victim_position)) {
      scan.victim = slot;
      scan.victim_score = score;
      scan.victim_position = position;
    }
  }
  return scan;
}

// A token that may stay or leave: one of the cache's or a new one.
template <typename Score>
struct Candidate {
  Score score;  // what it is ordered by
  int32_t position;
  int32_t index;  // the caller's: a slot, a column
};

// Moves to the front the `count` candidates that leave, in the order in which they leave. Sinks and
// recent tokens fit into the budget, so enough others are there unless positions repeat or do not
// increase; then the last candidates follow, the highest index first. Indices are distinct and
// count <= candidates.size().
template <typename Score>
void choose_victims(std::vector<Candidate<Score>>& candidates, int64_t count, int64_t newest,
                    const Budget& budget) {
  if (count <= 0) return;
  const auto first_protected =
      std::partition(candidates.begin(), candidates.end(), [&](const Candidate<Score>& candidate) {
        return !is_protected(candidate.position, newest, budget);
      });
  // Among equals, which takes a position that repeats, the lower index.
  const auto before = [](const Candidate<Score>& a, const Candidate<Score>& b) {
    if (leaves_before(a.score, a.position, b.score, b.position)) return true;
    return a.index < b.index && !leaves_before(b.score, b.position, a.score, a.position);
  };
  const auto end = candidates.begin() + std::min(count, first_protected - candidates.begin());
  if (end != first_protected) std::nth_element(candidates.begin(), end, first_protected, before);
  std::sort(candidates.begin(), end, before);
  if (candidates.begin() + count > end) {
    std::sort(end, candidates.end(), [](const Candidate<Score>& a, const Candidate<Score>& b) {
      return a.index > b.index;
    });
  }
}

// The slots that new tokens take one after the other: freed ones, the lowest first, then the lowest
// empty ones. Each is filled before the next is asked for.
class FreeSlots {
 public:
  // `freed` in any order, of which at most `count` are taken; `positions` of all slots.
  FreeSlots(std::vector<int32_t> freed, int64_t count, const int32_t* positions,
            int64_t positions_stride)
      : freed_(std::move(freed)), positions_(positions), stride_(positions_stride) {
    const int64_t num_freed = static_cast<int64_t>(freed_.size());
    std::partial_sort(freed_.begin(), freed_.begin() + std::min(num_freed, count), freed_.end());
  }

  int64_t next() {
    if (next_freed_ < freed_.size()) return freed_[next_freed_++];
    while (positions_[next_empty_ * stride_] >= 0) ++next_empty_;
    return next_empty_;
  }

 private:
  std::vector<int32_t> freed_;
  const int32_t* positions_;
  int64_t stride_;
  size_t next_freed_ = 0;
  int64_t next_empty_ = 0;
};

}  // namespace h2o::cpu
