#pragma once

#include <cstdint>

#include "h2o/budget.h"

namespace h2o {

// What a token's score is made of. kSum is H2O's own, the others are named variants and other
// papers' rules.
enum class ScoreRule : int32_t {
  kSum,     // the softmax weights that it received
  kDecay,   // likewise, but every query first shrinks what was there
  kMean,    // likewise, ordered by the mean over the token's age
  kValue,   // likewise, each weight times the sum of |v| of the token's value
  kMisses,  // minus the number of queries that gave it less than an even share
  kPrompt,  // likewise the weights, but only of queries that joined together with others
  kRandom,  // a number drawn when it joins
  kGiven,   // what the caller gives when it joins
};

// How scores come about and what they are compared with. A plain value that kernels take as it is;
// EvictionPolicy is where it comes from and where it is checked.
struct Scoring {
  ScoreRule rule = ScoreRule::kSum;
  double decay = 1;         // kDecay: factor on the score, per query
  int64_t seed = 0;         // kRandom
  int64_t num_queries = 0;  // of tokens that join together, the last ones that are scored; 0 = all
  int64_t pool = 1;  // the score of one that joined with others is the mean over so many neighbours
  // Tokens at the last `pattern_columns` of every `pattern_stride` positions leave after all
  // others; a stride of 0: none do.
  int64_t pattern_stride = 0, pattern_columns = 0;

  friend constexpr bool operator==(const Scoring&, const Scoring&) = default;
};

// What a step attends to, where that is less than what the cache holds.
struct Reading {
  int64_t slots =
      0;             // that each query head reads besides the new token, with a chunk of 1; 0 = all
  int64_t page = 1;  // slots that are read together or not at all

  friend constexpr bool operator==(const Reading&, const Reading&) = default;
};

}  // namespace h2o
