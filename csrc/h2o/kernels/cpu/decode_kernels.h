#pragma once

#include <type_traits>

#include "h2o/budget.h"
#include "h2o/kernels/cpu/rows.h"
#include "h2o/kernels/cpu/slot_selection.h"

// The arithmetic of one decode step on the CPU, one (row, KV head) at a time.
// decode_kernels_isa.cpp is compiled once per instruction set.
namespace h2o::cpu {

// A fixed range of slots of one (row, KV head), attended by one query per head of the group.
template <typename T>
struct SlotRange {
  using A = Accumulator<T>;
  int64_t begin, end;  // slots; at most kSlotsPerRange
  int64_t fetch_end;   // K of the slots from `end` to here is fetched ahead for the next range
  int64_t group_size, head_dim;
  VectorRows<const T> query;  // [group_size]
  VectorRows<const T> k, v;   // [capacity]
  const int32_t* positions;   // of slot 0; -1 = empty, never read further
  int64_t positions_stride;
  int32_t query_position;
  LogitTerms<A> terms;
  // Results, not normalised: weight = exp(logit - maximum).
  A* weights;  // [group_size, weights_stride] by slot; those of empty slots mean nothing
  int64_t weights_stride;
  A* maximum;  // [group_size]; -inf where the range is empty
  A* sum;      // [group_size] of the weights
  A* output;   // [group_size, head_dim] of weight * v
};
inline constexpr int64_t kSlotsPerRange = 128;

// Joins the ranges of one (row, KV head) with the new token: outputs, scores of the slots, its own
// score.
template <typename T>
struct StepMerge {
  using A = Accumulator<T>;
  int64_t num_ranges, capacity;
  int64_t group_size, head_dim;
  GqaReduce gqa_reduce;
  VectorRows<const T> query;  // [group_size]
  const T* k_new;
  const T* v_new;
  LogitTerms<A> terms;
  const A* weights;  // as the ranges left them
  int64_t weights_stride;
  const A* maximum;  // [num_ranges, group_size]
  const A* sum;      // [num_ranges, group_size]
  const A* partial;  // [num_ranges, group_size, head_dim]
  const int32_t* positions;
  int64_t positions_stride;
  A* scratch;  // [group_size * (num_ranges + 1)]
  // Results.
  VectorRows<T> output;  // [group_size]
  A* scores;             // grows where a slot is occupied
  int64_t scores_stride;
  A new_score;  // the new token's own
};

template <typename T>
struct DecodeKernels {
  void (*attend_range)(const SlotRange<T>&);
  void (*merge_step)(StepMerge<T>&);
};

// Those for this CPU.
template <typename T>
const DecodeKernels<T>& decode_kernels();

// scan_slots() of scores and positions that lie side by side, in vectors.
using ScanSlots = SlotScan<float>(const float* scores, const int32_t* positions, int64_t capacity,
                                  int64_t newest, const Budget& budget);
ScanSlots& scan_slots_kernel();

// scan_slots() in the fastest way.
template <typename A>
SlotScan<A> scan_slots_fast(const A* scores, int64_t scores_stride, const int32_t* positions,
                            int64_t positions_stride, int64_t capacity, int64_t newest,
                            const Budget& budget) {
  if constexpr (std::is_same_v<A, float>) {
    if (scores_stride == 1 && positions_stride == 1) {
      return scan_slots_kernel()(scores, positions, capacity, newest, budget);
    }
  }
  return scan_slots<A>(scores, scores_stride, positions, positions_stride, capacity, newest,
                       budget);
}

}  // namespace h2o::cpu
