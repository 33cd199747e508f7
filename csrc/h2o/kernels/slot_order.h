#pragma once

#include <cstdint>

#include "h2o/budget.h"

// THE definition of who may leave and who leaves first. The CPU and the CUDA kernels include this
// one file, so that given the same scores they evict the same tokens.
namespace h2o {

// Whether the token at `position` is exempt from eviction when the newest token is at `newest`:
// a sink (position < num_sink) or inside the recent window (position > newest - num_recent).
H2O_HOST_DEVICE constexpr bool is_protected(int64_t position, int64_t newest,
                                            const Budget& budget) {
  return position < budget.num_sink || position > newest - budget.num_recent;
}

// Strict order of eviction: the lower score leaves first. NaN is lower than every number, -0.0
// equals 0.0, and among equal scores the smaller position (the older token) leaves first.
template <typename Score>
H2O_HOST_DEVICE constexpr bool leaves_before(Score score, int32_t position, Score other_score,
                                             int32_t other_position) {
  const bool is_nan = score != score;
  const bool other_is_nan = other_score != other_score;
  if (is_nan != other_is_nan) return is_nan;
  if (!is_nan && score != other_score) return score < other_score;
  return position < other_position;
}

}  // namespace h2o
