#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "h2o/budget.h"
#include "h2o/kv_cache.h"
#include "h2o/scoring.h"

// The checked arguments of each operator. check() is the only way to make one, so CPU, CUDA and
// Meta kernels, which take nothing else, cannot be reached with arguments that were not checked,
// and all say the same sentences.
namespace h2o {

struct DecodeCall {
  at::Tensor query;  // [batch, num_q_heads, num_new, head_dim]
  KVCache cache;
  at::Tensor k_new, v_new;  // [batch, num_kv_heads, num_new, head_dim]
  at::Tensor position_new;  // [batch, num_new]
  Budget budget;
  GqaReduce gqa_reduce;
  double scale;
  int64_t chunk;
  std::optional<at::Tensor> alibi_slopes;          // [num_q_heads]
  std::optional<at::Tensor> row_budget;            // [batch, 3]
  std::optional<at::Tensor> k_evicted, v_evicted;  // as k_new, written; both or neither
  std::optional<at::Tensor> rope_cos, rope_sin;    // [num_ranks, pairs]; both or neither
  Scoring scoring;
  std::optional<at::Tensor> score_new;  // [batch, num_kv_heads, num_new]
  Reading reading;

  // `input` as readable_input() has it beside all that this call writes.
  at::Tensor readable(const at::Tensor& input) const;
  // Tells autograd of it.
  void mark_written() const;

  static DecodeCall check(
      const at::Tensor& query, const at::Tensor& k_cache, const at::Tensor& v_cache,
      const at::Tensor& scores, const at::Tensor& positions, const at::Tensor& k_new,
      const at::Tensor& v_new, const at::Tensor& position_new, int64_t num_sink, int64_t num_heavy,
      int64_t num_recent, std::string_view gqa_reduce, std::optional<double> scale, int64_t chunk,
      const std::optional<at::Tensor>& alibi_slopes, const std::optional<at::Tensor>& row_budget,
      const std::optional<at::Tensor>& k_evicted, const std::optional<at::Tensor>& v_evicted,
      const std::optional<at::Tensor>& rope_cos, const std::optional<at::Tensor>& rope_sin,
      std::string_view score_rule, double score_decay, int64_t score_seed, int64_t score_queries,
      int64_t score_pool, const std::optional<at::Tensor>& score_new, int64_t pattern_stride,
      int64_t pattern_columns, int64_t read_slots, int64_t read_page);
};

struct EvictCall {
  KVCache cache;
  at::Tensor k_new, v_new;  // [batch, num_kv_heads, num_new, head_dim]
  at::Tensor scores_new;    // [batch, num_kv_heads, num_new]
  at::Tensor position_new;  // [batch, num_new]
  Budget budget;
  std::optional<at::Tensor> row_budget;  // [batch, 3]
  Scoring scoring;                       // as far as it orders
  bool one_for_one = false;              // no more leave than join, as in a step

  static EvictCall check(const at::Tensor& k_cache, const at::Tensor& v_cache,
                         const at::Tensor& scores, const at::Tensor& positions,
                         const at::Tensor& k_new, const at::Tensor& v_new,
                         const at::Tensor& scores_new, const at::Tensor& position_new,
                         int64_t num_sink, int64_t num_heavy, int64_t num_recent,
                         const std::optional<at::Tensor>& row_budget, std::string_view score_rule,
                         int64_t pattern_stride, int64_t pattern_columns);
};

struct SelectCall {
  at::Tensor query;     // [batch, num_q_heads, seq_len, head_dim]
  at::Tensor key;       // [batch, num_kv_heads, seq_len, head_dim]
  at::Tensor position;  // [batch, seq_len]
  Budget budget;
  GqaReduce gqa_reduce;
  double scale;
  std::optional<at::Tensor> alibi_slopes;  // [num_q_heads]
  std::optional<at::Tensor> row_budget;    // [batch, 3]

  static SelectCall check(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& position, int64_t num_sink, int64_t num_heavy,
                          int64_t num_recent, std::string_view gqa_reduce,
                          std::optional<double> scale,
                          const std::optional<at::Tensor>& alibi_slopes,
                          const std::optional<at::Tensor>& row_budget);
};

struct RotateCall {
  at::Tensor input;     // [batch, heads, n, head_dim]
  at::Tensor index;     // [batch or 1, heads or 1, n]
  at::Tensor cos, sin;  // [num_angles, pairs]

  static RotateCall check(const at::Tensor& input, const at::Tensor& index, const at::Tensor& cos,
                          const at::Tensor& sin);
};

// An output for `query`: its sizes and its layout, but head_dim always with stride 1, since the
// kernels write so.
at::Tensor empty_output(const at::Tensor& query);

using DecodeOutputs = std::tuple<at::Tensor, at::Tensor>;  // output, evicted
using SelectOutputs = std::tuple<at::Tensor, at::Tensor>;  // selected, scores

// What the dispatcher calls for one device: checks, then `kernel`, then word of what was written.
template <DecodeOutputs (*kernel)(const DecodeCall&)>
DecodeOutputs decode_entry(
    const at::Tensor& query, const at::Tensor& k_cache, const at::Tensor& v_cache,
    const at::Tensor& scores, const at::Tensor& positions, const at::Tensor& k_new,
    const at::Tensor& v_new, const at::Tensor& position_new, int64_t num_sink, int64_t num_heavy,
    int64_t num_recent, std::string_view gqa_reduce, std::optional<double> scale, int64_t chunk,
    const std::optional<at::Tensor>& alibi_slopes, const std::optional<at::Tensor>& row_budget,
    const std::optional<at::Tensor>& k_evicted, const std::optional<at::Tensor>& v_evicted,
    const std::optional<at::Tensor>& rope_cos, const std::optional<at::Tensor>& rope_sin,
    std::string_view score_rule, double score_decay, int64_t score_seed, int64_t score_queries,
    int64_t score_pool, const std::optional<at::Tensor>& score_new, int64_t pattern_stride,
    int64_t pattern_columns, int64_t read_slots, int64_t read_page) {
  const DecodeCall call = DecodeCall::check(
      query, k_cache, v_cache, scores, positions, k_new, v_new, position_new, num_sink, num_heavy,
      num_recent, gqa_reduce, scale, chunk, alibi_slopes, row_budget, k_evicted, v_evicted,
      rope_cos, rope_sin, score_rule, score_decay, score_seed, score_queries, score_pool, score_new,
      pattern_stride, pattern_columns, read_slots, read_page);
  auto result = kernel(call);
  call.mark_written();
  return result;
}

template <at::Tensor (*kernel)(const EvictCall&)>
at::Tensor evict_entry(const at::Tensor& k_cache, const at::Tensor& v_cache,
                       const at::Tensor& scores, const at::Tensor& positions,
                       const at::Tensor& k_new, const at::Tensor& v_new,
                       const at::Tensor& scores_new, const at::Tensor& position_new,
                       int64_t num_sink, int64_t num_heavy, int64_t num_recent,
                       const std::optional<at::Tensor>& row_budget, std::string_view score_rule,
                       int64_t pattern_stride, int64_t pattern_columns) {
  const EvictCall call = EvictCall::check(k_cache, v_cache, scores, positions, k_new, v_new,
                                          scores_new, position_new, num_sink, num_heavy, num_recent,
                                          row_budget, score_rule, pattern_stride, pattern_columns);
  auto result = kernel(call);
  call.cache.mark_written();
  return result;
}

template <SelectOutputs (*kernel)(const SelectCall&)>
SelectOutputs select_entry(const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& position, int64_t num_sink, int64_t num_heavy,
                           int64_t num_recent, std::string_view gqa_reduce,
                           std::optional<double> scale,
                           const std::optional<at::Tensor>& alibi_slopes,
                           const std::optional<at::Tensor>& row_budget) {
  return kernel(SelectCall::check(query, key, position, num_sink, num_heavy, num_recent, gqa_reduce,
                                  scale, alibi_slopes, row_budget));
}

template <at::Tensor (*kernel)(const RotateCall&)>
at::Tensor rotate_entry(const at::Tensor& input, const at::Tensor& index, const at::Tensor& cos,
                        const at::Tensor& sin) {
  return kernel(RotateCall::check(input, index, cos, sin));
}

}  // namespace h2o
