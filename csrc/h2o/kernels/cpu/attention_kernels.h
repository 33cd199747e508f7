#pragma once

#include <cstdint>

#include "h2o/budget.h"
#include "h2o/kernels/cpu/vector.h"

// The arithmetic of attention on the CPU, one (row, KV head) at a time, torch-free. The file behind
// it is compiled once per instruction set; attention_kernels() returns the best that this CPU has.
// Who is evicted is decided elsewhere (slot_selection.h): nothing here knows a budget.
namespace h2o::cpu {

// `count` vectors of head_dim elements each, the elements of one side by side.
template <typename T>
struct VectorRows {
  T* data = nullptr;
  int64_t stride = 0;  // in elements, from one row to the next

  T* operator[](int64_t row) const { return data + row * stride; }
};

// What a logit is made of besides q . k.
template <typename A>
struct LogitTerms {
  A scale;
  const A* alibi_slopes;  // [group_size], or null: adds slope * (key position - query position)
};

// A fixed range of slots of one (row, KV head), attended by one query per head of the group.
template <typename T>
struct SlotRange {
  using A = Accumulator<T>;
  int64_t begin, end;  // slots; at most kSlotsPerRange
  int64_t group_size, head_dim;
  VectorRows<const T> query;  // [group_size]
  VectorRows<const T> k, v;   // [capacity]
  const int32_t* positions;   // of slot 0; -1 = empty, never read further
  int64_t positions_stride;
  int32_t query_position;
  LogitTerms<A> terms;
  // Results, not normalised: weight = exp(logit - maximum).
  A* weights;  // [group_size, weights_stride] by slot; empty slots are not written
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
  A* scratch;  // [group_size * (num_ranges + 1) + head_dim]
  // Results.
  VectorRows<T> output;  // [group_size]
  A* scores;             // grows where a slot is occupied
  int64_t scores_stride;
  A new_score;  // the new token's own
};

// Some consecutive new tokens of a chunk attend causally: over the cached tokens and the chunk's
// tokens up to themselves.
template <typename T>
struct QueryTile {
  using A = Accumulator<T>;
  int64_t first, count;  // the tile's tokens within the chunk
  int64_t group_size, head_dim;
  GqaReduce gqa_reduce;
  VectorRows<const T> query;  // of head 0 of the group, by column
  int64_t query_head_stride;
  VectorRows<const T> k, v;         // cache, by slot
  const int32_t* slots;             // [num_cached] the occupied ones
  const int32_t* cached_positions;  // [num_cached] of those slots
  int64_t num_cached;
  VectorRows<const T> k_new, v_new;  // by column
  const int32_t* columns;            // [chunk's tokens] column of each
  const int32_t* new_positions;      // [chunk's tokens]
  LogitTerms<A> terms;
  A* scratch;  // tile_scratch_size() elements
  // Results.
  A* column_sums;  // [num_cached + chunk's tokens], grows: the mass that the tile's queries give
                   // each
  VectorRows<T> output;  // of head 0 of the group, by column; not written where data is null
  int64_t output_head_stride;
};
// Tokens of a tile, so that its rows (tokens x heads) are about as many for every group size.
constexpr int64_t tokens_per_tile(int64_t group_size) {
  return group_size >= 64 ? 1 : 64 / group_size;
}
// Elements of scratch for tiles over `num_keys` cached and new tokens together.
int64_t tile_scratch_size(int64_t group_size, int64_t head_dim, int64_t num_keys);

template <typename T>
struct AttentionKernels {
  void (*attend_range)(const SlotRange<T>&);
  void (*merge_step)(StepMerge<T>&);
  void (*attend_tile)(const QueryTile<T>&);
};

template <typename T>
const AttentionKernels<T>& attention_kernels();

// "avx512", "avx2" or "baseline": which of the compiled versions runs here. The environment
// variable ATEN_CPU_CAPABILITY (default, avx2), read once, asks for a lower one.
const char* instruction_set();

}  // namespace h2o::cpu
