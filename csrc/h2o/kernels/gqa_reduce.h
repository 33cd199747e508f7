#pragma once

#include "h2o/budget.h"

// The two ways in which the weights of a group of query heads become the score of their KV head.
// A kernel takes one of these as a type, chosen once per launch.
namespace h2o {

struct SumReduce {
  template <typename T>
  static H2O_HOST_DEVICE constexpr T combine(T a, T b) {
    return a + b;
  }
};

struct MaxReduce {
  template <typename T>
  static H2O_HOST_DEVICE constexpr T combine(T a, T b) {
    // A NaN weight must show in the score, as it does in the sum.
    return a != a || a > b ? a : b;
  }
};

}  // namespace h2o
