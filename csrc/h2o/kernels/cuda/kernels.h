#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "h2o/kernels/cuda/views.h"
#include "h2o/kernels/score_rule.h"

// The CUDA kernels as the host calls them: torch-free, on the stream given, without synchronisation
// or allocation. Each launch_* returns what the launch returned. T is double, float, c10::Half or
// c10::BFloat16.
namespace h2o::cuda {

// Slots and new tokens of one (row, KV head) together, and a chunk's tokens times the heads of a
// group: above this indices would not fit into int32.
inline constexpr int64_t kMaxCandidates = int64_t{1} << 29;

// The dynamic shared memory that a block may ask for on the current device, and how many blocks it
// takes to keep every multiprocessor busy.
struct DeviceLimits {
  int shared_bytes = 0, multiprocessors = 0;
};
inline cudaError_t device_limits(DeviceLimits* limits) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                   device);
  }
  if (error == cudaSuccess) {
    error =
        cudaDeviceGetAttribute(&limits->multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  return error;
}

// --- One token of each row: attend, score, evict and store in one launch.

// Slots whose weights share one maximum and whose output is summed apart; what belongs together
// does not depend on how many blocks share the work, and so neither does any bit of the result.
inline constexpr int32_t kSlotRange = 256;

// Where several blocks share one (row, KV head): what each leaves for the last one to arrive.
template <typename A>
struct DecodeParts {
  A* weights = nullptr;          // [batch, num_kv_heads, group_size, ranges * kSlotRange]
  A* maximum = nullptr;          // [batch, num_kv_heads, ranges, group_size]
  A* sum = nullptr;              // likewise
  A* output = nullptr;           // [batch, num_kv_heads, ranges, group_size, head_dim]
  unsigned* arrivals = nullptr;  // [batch, num_kv_heads]; 0 before and after
};

template <typename T>
struct DecodeStep {
  using A = Accumulator<T>;
  Sizes sizes;
  CacheView<T> cache;
  View<const T> query;         // [batch, num_q_heads, num_new] vectors
  View<const T> k_new, v_new;  // [batch, num_kv_heads, num_new] vectors
  IndexView position_new;      // [batch, num_new]
  BudgetView budget;
  GqaReduce gqa_reduce = GqaReduce::kSum;
  LogitTerms<A> terms;
  NamedScoring scoring;
  View<const A> score_new;  // [batch, num_kv_heads, num_new], by column; data null: zeros
  int32_t column = 0;       // the new token whose turn it is
  bool aligned = false;     // each vector of the cache starts at, and is, a multiple of 16 bytes
  int32_t splits = 1;       // blocks of each (row, KV head)
  DecodeParts<A> parts;     // where splits > 1
  // Results.
  View<T> output;  // as query
  int64_t output_dim_stride = 1;
  int32_t* evicted = nullptr;    // [batch, num_kv_heads, num_new]
  View<T> k_evicted, v_evicted;  // as k_new; data null: not wanted
};

inline int64_t slot_ranges(int64_t capacity) { return (capacity + kSlotRange - 1) / kSlotRange; }
// Shared memory of a block.
template <typename T>
int64_t decode_step_shared_bytes(const DecodeStep<T>& step);
template <typename T>
cudaError_t launch_decode_step(const DecodeStep<T>& step, cudaStream_t stream);

// --- Several tokens that join together. They attend, are scored, and then some leave: three
// kernels.

// Lists the real tokens of each row.
cudaError_t launch_list_tokens(const IndexView& position_new, int64_t batch,
                               const TokenList& tokens, cudaStream_t stream);

// Causal attention of a chunk's tokens over the cache and over those of the chunk up to themselves.
template <typename T>
struct ChunkAttention {
  using A = Accumulator<T>;
  Sizes sizes;
  CacheView<T> cache;          // capacity 0: there is none
  View<const T> query;         // [batch, num_q_heads, num_new] vectors
  View<const T> k_new, v_new;  // [batch, num_kv_heads, num_new] vectors; v_new only for the output
  TokenList tokens;
  Chunk chunk;
  GqaReduce gqa_reduce = GqaReduce::kSum;
  LogitTerms<A> terms;
  NamedScoring scoring;
  View<const A> score_new;         // [batch, num_kv_heads, num_new], by column; data null: zeros
  const A* row_factors = nullptr;  // [chunk.size] on what a query gives, by how many of its chunk's
                                   // come after it; null: all 1
  bool aligned = false;            // each query and key starts at, and is, a multiple of 16 bytes
  // Results: softmax weight = exp(logit - maximum) / sum.
  A* maximum = nullptr;  // [batch, num_kv_heads, chunk.size, group_size]
  A* sum = nullptr;      // likewise
  View<T> output;        // as query; data may be null: not wanted
  int64_t output_dim_stride = 1;
  A* new_scores = nullptr;  // [batch, num_kv_heads, num_new], by column
};

// Writes maximum, sum and output.
template <typename T>
cudaError_t launch_chunk_attention(const ChunkAttention<T>& attention, cudaStream_t stream);
// Reads maximum and sum. The scores of the cache grow, new_scores is written.
template <typename T>
cudaError_t launch_chunk_scores(const ChunkAttention<T>& attention, cudaStream_t stream);

// The same for a prompt without a cache, of 16-bit types, by tensor cores: statistics writes
// maximum and sum, scores reads them and writes new_scores.
template <typename T>
bool has_prompt_scores(const Sizes& sizes, int64_t shared_limit);
template <typename T>
cudaError_t launch_prompt_statistics(const ChunkAttention<T>& attention, cudaStream_t stream);
template <typename T>
cudaError_t launch_prompt_scores(const ChunkAttention<T>& attention, cudaStream_t stream);

// Makes the scores of a chunk's tokens means over `pool` neighbours, outside of which there are
// zeros; those of recent tokens stay what they are.
template <typename A>
struct ScorePool {
  int64_t batch = 0, num_kv_heads = 0;
  int32_t num_new = 0, pool = 1;
  TokenList tokens;
  Chunk chunk;
  BudgetView budget;
  const A* scores = nullptr;  // [batch, num_kv_heads, num_new], by column
  A* pooled = nullptr;        // likewise
};
template <typename A>
cudaError_t launch_score_pool(const ScorePool<A>& pool, cudaStream_t stream);

// A token that may leave.
template <typename A>
struct Candidate {
  A score;  // what it is ordered by
  int32_t position;
  int32_t index;  // the slot, or capacity + index within the chunk; -1 = nobody
};

// Chooses who leaves among the cache and new tokens, and stores those that stay. One launch.
template <typename T>
struct Selection {
  using A = Accumulator<T>;
  Sizes sizes;
  CacheView<T> cache;
  View<const T> k_new, v_new;  // [batch, num_kv_heads, num_new] vectors
  View<const A> new_scores;    // [batch, num_kv_heads, num_new], by column
  BudgetView budget;
  NamedScoring scoring;
  // h2o_evict: all of `position_new` join, tokens leave until the budget holds, the window ends at
  // the largest position present, and those that left are written from column 0, then -1.
  // Otherwise, h2o_attention_decode: a chunk of the listed tokens joins, at most as many leave as
  // join, the window ends at the chunk's last token, and those that left are written from the
  // column of the chunk's first over -1.
  bool to_budget = false;
  bool one_for_one = false;  // with to_budget: no more leave than join
  IndexView position_new;
  TokenList tokens;
  Chunk chunk;
  // Workspace of each (row, KV head).
  int32_t* work = nullptr;         // [selection_work()]
  Candidate<A>* sorted = nullptr;  // [sorted_candidates()]; null: in shared memory
  int32_t* evicted = nullptr;      // [batch, num_kv_heads, evicted_width]
  int64_t evicted_width = 0;
  View<T> k_evicted, v_evicted;  // as k_new, not with to_budget; data null: not wanted
};

// Each candidate's fate, each new token's slot, and the columns and positions of the new tokens or
// (not to_budget) who leaves.
H2O_HOST_DEVICE constexpr int64_t selection_work(int64_t capacity, int64_t num_new) {
  return capacity + 4 * num_new;
}

// The one-shot prefill's: no cache, and the result is a list.
template <typename A>
struct PromptSelection {
  Sizes sizes;                // group_size and head_dim are not used
  const A* scores = nullptr;  // [batch, num_kv_heads, num_new], by column
  TokenList tokens;
  BudgetView budget;
  int32_t* fate = nullptr;         // workspace, [num_new] of each (row, KV head)
  Candidate<A>* sorted = nullptr;  // workspace, [sorted_candidates()]; null: in shared memory
  int64_t width = 0;
  int64_t* selected = nullptr;   // [batch, num_kv_heads, width]
  A* selected_scores = nullptr;  // [batch, num_kv_heads, width]
};

// Candidates that are sorted at most, a power of two, for `count` tokens.
H2O_HOST_DEVICE constexpr int64_t sorted_candidates(int64_t count) {
  int64_t size = 1;
  while (size < count) size *= 2;
  return size;
}
// Shared memory of a block that sorts there.
template <typename A>
int64_t selection_shared_bytes(int64_t count);

template <typename T>
cudaError_t launch_selection(const Selection<T>& selection, cudaStream_t stream);
template <typename A>
cudaError_t launch_prompt_selection(const PromptSelection<A>& selection, cudaStream_t stream);

}  // namespace h2o::cuda
