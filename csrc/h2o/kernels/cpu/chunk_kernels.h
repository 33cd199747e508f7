#pragma once

#include "h2o/budget.h"
#include "h2o/kernels/cpu/rows.h"

// The arithmetic of several new tokens that attend together on the CPU, one tile of one (row, KV
// head) at a time. chunk_kernels_isa.cpp is compiled once per instruction set.
namespace h2o::cpu {

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
  const A* row_factors;  // [chunk's tokens] on what each gives to the sums; null: all 1
  A* scratch;            // tile_scratch_size() elements, best aligned to 64 bytes
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
inline constexpr int64_t kKeysPerTileBlock = 48;  // that a tile takes at a time
// Elements of scratch for tiles over `num_keys` cached and new tokens together.
int64_t tile_scratch_size(int64_t group_size, int64_t head_dim, int64_t num_keys);

template <typename T>
struct ChunkKernels {
  void (*attend_tile)(const QueryTile<T>&);
};

// Those for this CPU.
template <typename T>
const ChunkKernels<T>& chunk_kernels();

}  // namespace h2o::cpu
