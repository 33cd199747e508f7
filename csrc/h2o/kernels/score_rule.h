#pragma once

#include <cstdint>
#include <limits>

#include "h2o/scoring.h"

// THE definition of how a token's score grows and what is compared when one must leave; a kernel
// takes one of these as a type. The CPU and the CUDA kernels include this one file.
namespace h2o {

// What the queries of one step gave to one token.
template <typename A>
struct Received {
  A mass = 0;        // softmax weights, reduced over the group
  A value_norm = 1;  // sum of |v|; looked at if reads_values()
  A even_share = 0;  // what a token of as many as were attended would have got; if counts_misses()
  A kept = 1;        // what is left of an older score
  bool together = false;  // the queries were several that joined together
};

// H2O's own, for which nothing but the weight is needed.
struct PaperScoring {
  H2O_HOST_DEVICE constexpr bool reads_values() const { return false; }
  H2O_HOST_DEVICE constexpr bool counts_misses() const { return false; }
  template <typename A>
  H2O_HOST_DEVICE constexpr A kept() const {
    return 1;
  }
  template <typename A>
  H2O_HOST_DEVICE constexpr A grown(A score, const Received<A>& received) const {
    return score + received.mass;
  }
  template <typename A>
  H2O_HOST_DEVICE constexpr A first(const Received<A>& received, int64_t, int32_t) const {
    return received.mass;
  }
  template <typename A>
  H2O_HOST_DEVICE constexpr A order_key(A score, int32_t, int64_t) const {
    return score;
  }
};

// Any rule, by its name.
struct NamedScoring {
  Scoring scoring;

  H2O_HOST_DEVICE constexpr bool is_paper() const {
    return scoring.rule == ScoreRule::kSum && scoring.pattern_stride == 0 &&
           scoring.num_queries == 0 && scoring.pool == 1;
  }
  H2O_HOST_DEVICE constexpr bool reads_values() const { return scoring.rule == ScoreRule::kValue; }
  H2O_HOST_DEVICE constexpr bool counts_misses() const {
    return scoring.rule == ScoreRule::kMisses;
  }
  // What a single query leaves of a score.
  template <typename A>
  H2O_HOST_DEVICE constexpr A kept() const {
    return scoring.rule == ScoreRule::kDecay ? static_cast<A>(scoring.decay) : A{1};
  }

  // The score of a token that was there before the step.
  template <typename A>
  H2O_HOST_DEVICE constexpr A grown(A score, const Received<A>& received) const {
    switch (scoring.rule) {
      case ScoreRule::kSum:
      case ScoreRule::kMean:
        return score + received.mass;
      case ScoreRule::kDecay:
        return score * received.kept + received.mass;
      case ScoreRule::kValue:
        return score + received.mass * received.value_norm;
      case ScoreRule::kMisses:
        return received.mass < received.even_share ? score - 1 : score;
      case ScoreRule::kPrompt:
        return received.together ? score + received.mass : score;
      case ScoreRule::kRandom:
      case ScoreRule::kGiven:
        break;
    }
    return score;
  }
  // Of a token that joins in it, before what the caller adds.
  template <typename A>
  H2O_HOST_DEVICE constexpr A first(const Received<A>& received, int64_t head,
                                    int32_t position) const {
    if (scoring.rule == ScoreRule::kRandom) return drawn<A>(head, position);
    return grown(A{0}, received);
  }

  // What is compared in place of the score while the newest token is at `newest`.
  template <typename A>
  H2O_HOST_DEVICE constexpr A order_key(A score, int32_t position, int64_t newest) const {
    if (in_pattern(position)) return std::numeric_limits<A>::infinity();
    if (scoring.rule != ScoreRule::kMean) return score;
    // No age is below 1, even where positions do not increase.
    return score / static_cast<A>(newest > position ? newest - position + 1 : 1);
  }

 private:
  H2O_HOST_DEVICE constexpr bool in_pattern(int32_t position) const {
    return scoring.pattern_stride > 0 &&
           position % scoring.pattern_stride >= scoring.pattern_stride - scoring.pattern_columns;
  }
  // SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of seed, head and position, in [0, 1).
  template <typename A>
  H2O_HOST_DEVICE constexpr A drawn(int64_t head, int32_t position) const {
    uint64_t bits = 0;
    for (const uint64_t word : {static_cast<uint64_t>(scoring.seed), static_cast<uint64_t>(head),
                                static_cast<uint64_t>(position)}) {
      bits = (bits ^ word) + 0x9e3779b97f4a7c15u;
      bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
      bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
      bits ^= bits >> 31;
    }
    return static_cast<A>(bits >> 40) / static_cast<A>(uint64_t{1} << 24);
  }
};

}  // namespace h2o
