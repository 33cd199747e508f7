#include "h2o/ops/calls.h"

#include <ATen/ops/empty_like.h>

#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <utility>

#include "h2o/eviction_policy.h"
#include "h2o/ops/checks.h"

namespace h2o {
namespace {

constexpr const char* kNewTokens = "[batch, num_kv_heads, num_new, head_dim]";

// What `check` returns; where it refuses in the policy's way, the same sentence as a ValueError.
template <typename Check>
auto checked(const Check& check) {
  try {
    return check();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

GqaReduce checked_reduce(const char* op, std::string_view name) {
  return checked([&] { return parse_gqa_reduce(op, name); });
}

double checked_scale(const char* op, std::optional<double> scale, const at::Tensor& query) {
  TORCH_CHECK_VALUE(!scale || std::isfinite(*scale), op, ": scale must be finite, got ", *scale);
  // The kernels take it in the type that they add up in.
  TORCH_CHECK_VALUE(!scale || score_dtype(query.scalar_type()) == at::kDouble ||
                        std::abs(*scale) <= std::numeric_limits<float>::max(),
                    op, ": scale must be within float32's range, got ", *scale);
  if (scale) return *scale;
  const double head_dim = static_cast<double>(query.sym_size(3).guard_int(__FILE__, __LINE__));
  return 1.0 / std::sqrt(head_dim);
}

void check_new_tokens(const char* op, const KVCache& cache, const at::Tensor& k_new,
                      const at::Tensor& v_new, const at::Tensor& position_new) {
  check_dim(op, "k_new", k_new, kNewTokens, 4);
  const c10::SymInt num_new = k_new.sym_size(2);
  const c10::SymInt batch = cache.k_cache.sym_size(0), heads = cache.k_cache.sym_size(1),
                    head_dim = cache.k_cache.sym_size(3);
  check_sizes(op, "k_new", k_new, kNewTokens, {batch, heads, num_new, head_dim});
  check_sizes(op, "v_new", v_new, kNewTokens, {batch, heads, num_new, head_dim});
  check_sizes(op, "position_new", position_new, "[batch, num_new]", {batch, num_new});
  check_dtype(op, "k_new", k_new, cache.k_cache.scalar_type());
  check_dtype(op, "v_new", v_new, cache.k_cache.scalar_type());
  check_index_dtype(op, "position_new", position_new);
  check_device(op, "k_new", k_new, "k_cache", cache.k_cache);
  check_device(op, "v_new", v_new, "k_cache", cache.k_cache);
  check_device(op, "position_new", position_new, "k_cache", cache.k_cache);
}

// Room for what leaves: like the new tokens, but written in place.
void check_evicted(const char* op, const KVCache& cache, const at::Tensor& k_new,
                   const std::optional<at::Tensor>& k_evicted,
                   const std::optional<at::Tensor>& v_evicted) {
  TORCH_CHECK(k_evicted.has_value() == v_evicted.has_value(), op,
              ": k_evicted and v_evicted must be given together, got ",
              k_evicted ? "k_evicted" : "v_evicted", " alone");
  if (!k_evicted) return;
  for (const auto& [name, tensor] :
       {std::pair("k_evicted", &*k_evicted), {"v_evicted", &*v_evicted}}) {
    check_sizes(op, name, *tensor, kNewTokens,
                {k_new.sym_size(0), k_new.sym_size(1), k_new.sym_size(2), k_new.sym_size(3)});
    check_dtype(op, name, *tensor, cache.k_cache.scalar_type());
    check_device(op, name, *tensor, "k_cache", cache.k_cache);
    if (cache.k_cache.is_meta()) continue;
    check_written(op, name, *tensor);
    for (const auto& [other_name, other] : {std::pair("k_cache", &cache.k_cache),
                                            {"v_cache", &cache.v_cache},
                                            {"scores", &cache.scores},
                                            {"positions", &cache.positions}}) {
      check_apart(op, name, *tensor, other_name, *other);
    }
  }
  if (!cache.k_cache.is_meta()) check_apart(op, "v_evicted", *v_evicted, "k_evicted", *k_evicted);
}

ScoreRule checked_rule(const char* op, std::string_view name) {
  return checked([&] { return parse_score_rule(op, name); });
}

Scoring checked_scoring(const char* op, const Scoring& scoring) {
  checked([&] { check_scoring(std::string(op) + ": ", scoring); });
  return scoring;
}

Reading checked_reading(const char* op, const Reading& reading, const Scoring& scoring,
                        bool has_alibi) {
  checked([&] { check_reading(std::string(op) + ": ", reading, scoring); });
  TORCH_CHECK_VALUE(reading.page == 1 || !has_alibi, op,
                    ": read_page must be 1 with alibi_slopes, whose bias a page's bound leaves "
                    "out, got ",
                    reading.page);
  return reading;
}

// Angles to turn the pairs of `vectors` by, [..., head_dim].
void check_angles(const char* op, const std::array<const char*, 2>& names, const at::Tensor& cos,
                  const at::Tensor& sin, const char* vectors_name, const at::Tensor& vectors) {
  constexpr const char* kAngles = "[num_angles, pairs]";
  check_dim(op, names[0], cos, kAngles, 2);
  check_sizes(op, names[1], sin, kAngles, {cos.sym_size(0), cos.sym_size(1)});
  for (const auto& [name, tensor] : {std::pair(names[0], &cos), {names[1], &sin}}) {
    check_dtype(op, name, *tensor, score_dtype(vectors.scalar_type()));
    check_device(op, name, *tensor, vectors_name, vectors);
  }
  TORCH_CHECK(cos.sym_size(0) >= 1, op, ": ", names[0], " must have at least one row, got 0");
  TORCH_CHECK(cos.sym_size(1) >= 1 && cos.sym_size(1) * 2 <= vectors.sym_size(3), op, ": ",
              names[0], " must have 1..head_dim / 2 pairs, got ", cos.sym_size(1),
              " with head_dim=", vectors.sym_size(3));
}

}  // namespace

at::Tensor DecodeCall::readable(const at::Tensor& input) const {
  const std::initializer_list<const at::Tensor*> state = {&cache.k_cache, &cache.v_cache,
                                                          &cache.scores, &cache.positions};
  const at::Tensor read = readable_input(input, state);
  return k_evicted ? readable_input(read, {&*k_evicted, &*v_evicted}) : read;
}

void DecodeCall::mark_written() const {
  cache.mark_written();
  if (!k_evicted) return;
  h2o::mark_written(*k_evicted);
  h2o::mark_written(*v_evicted);
}

DecodeCall DecodeCall::check(
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
  constexpr const char* kOp = "h2o_attention_decode";
  constexpr const char* kQuery = "[batch, num_q_heads, num_new, head_dim]";
  const KVCache cache = KVCache::from(kOp, k_cache, v_cache, scores, positions);
  check_new_tokens(kOp, cache, k_new, v_new, position_new);
  check_dim(kOp, "query", query, kQuery, 4);
  check_group(kOp, query.sym_size(1), k_cache.sym_size(1));
  check_sizes(kOp, "query", query, kQuery,
              {k_cache.sym_size(0), query.sym_size(1), k_new.sym_size(2), k_cache.sym_size(3)});
  check_dtype(kOp, "query", query, k_cache.scalar_type());
  check_device(kOp, "query", query, "k_cache", k_cache);
  const Budget budget{num_sink, num_heavy, num_recent};
  check_budget(kOp, budget, k_cache.sym_size(2));
  TORCH_CHECK_VALUE(chunk >= 1, kOp, ": chunk must be >= 1, got ", chunk);
  check_alibi_slopes(kOp, alibi_slopes, query);
  check_row_budget(kOp, row_budget, "k_cache", k_cache);
  check_evicted(kOp, cache, k_new, k_evicted, v_evicted);
  TORCH_CHECK(rope_cos.has_value() == rope_sin.has_value(), kOp,
              ": rope_cos and rope_sin must be given together, got ",
              rope_cos ? "rope_cos" : "rope_sin", " alone");
  if (rope_cos) {
    TORCH_CHECK(
        !alibi_slopes, kOp,
        ": rope_cos and alibi_slopes must not be given together: ALiBi's bias is of original "
        "positions");
    check_angles(kOp, {"rope_cos", "rope_sin"}, *rope_cos, *rope_sin, "k_cache", k_cache);
  }
  const Scoring scoring = checked_scoring(kOp, {.rule = checked_rule(kOp, score_rule),
                                                .decay = score_decay,
                                                .seed = score_seed,
                                                .num_queries = score_queries,
                                                .pool = score_pool,
                                                .pattern_stride = pattern_stride,
                                                .pattern_columns = pattern_columns});
  if (scoring.rule == ScoreRule::kMisses && chunk > 1) {
    TORCH_CHECK_VALUE(
        k_new.sym_size(2) <= 1, kOp,
        ": chunk must be 1 with score_rule \"misses\", which looks at every query, got ", chunk);
  }
  if (score_new) {
    check_sizes(kOp, "score_new", *score_new, "[batch, num_kv_heads, num_new]",
                {k_cache.sym_size(0), k_cache.sym_size(1), k_new.sym_size(2)});
    check_dtype(kOp, "score_new", *score_new, scores.scalar_type());
    check_device(kOp, "score_new", *score_new, "k_cache", k_cache);
  }
  return {query,
          cache,
          k_new,
          v_new,
          position_new,
          budget,
          checked_reduce(kOp, gqa_reduce),
          checked_scale(kOp, scale, query),
          chunk,
          alibi_slopes,
          row_budget,
          k_evicted,
          v_evicted,
          rope_cos,
          rope_sin,
          scoring,
          score_new,
          checked_reading(kOp, {read_slots, read_page}, scoring, alibi_slopes.has_value())};
}

EvictCall EvictCall::check(const at::Tensor& k_cache, const at::Tensor& v_cache,
                           const at::Tensor& scores, const at::Tensor& positions,
                           const at::Tensor& k_new, const at::Tensor& v_new,
                           const at::Tensor& scores_new, const at::Tensor& position_new,
                           int64_t num_sink, int64_t num_heavy, int64_t num_recent,
                           const std::optional<at::Tensor>& row_budget, std::string_view score_rule,
                           int64_t pattern_stride, int64_t pattern_columns) {
  constexpr const char* kOp = "h2o_evict";
  const KVCache cache = KVCache::from(kOp, k_cache, v_cache, scores, positions);
  check_new_tokens(kOp, cache, k_new, v_new, position_new);
  check_sizes(kOp, "scores_new", scores_new, "[batch, num_kv_heads, num_new]",
              {k_cache.sym_size(0), k_cache.sym_size(1), k_new.sym_size(2)});
  check_dtype(kOp, "scores_new", scores_new, scores.scalar_type());
  check_device(kOp, "scores_new", scores_new, "k_cache", k_cache);
  const Budget budget{num_sink, num_heavy, num_recent};
  check_budget(kOp, budget, k_cache.sym_size(2));
  check_row_budget(kOp, row_budget, "k_cache", k_cache);
  const Scoring scoring = checked_scoring(kOp, {.rule = checked_rule(kOp, score_rule),
                                                .pattern_stride = pattern_stride,
                                                .pattern_columns = pattern_columns});
  return {cache, k_new, v_new, scores_new, position_new, budget, row_budget, scoring};
}

SelectCall SelectCall::check(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& position, int64_t num_sink, int64_t num_heavy,
                             int64_t num_recent, std::string_view gqa_reduce,
                             std::optional<double> scale,
                             const std::optional<at::Tensor>& alibi_slopes,
                             const std::optional<at::Tensor>& row_budget) {
  constexpr const char* kOp = "h2o_prefill_select";
  constexpr const char* kQuery = "[batch, num_q_heads, seq_len, head_dim]";
  constexpr const char* kKey = "[batch, num_kv_heads, seq_len, head_dim]";
  check_dim(kOp, "query", query, kQuery, 4);
  check_dim(kOp, "key", key, kKey, 4);
  check_sizes(kOp, "key", key, kKey,
              {query.sym_size(0), key.sym_size(1), query.sym_size(2), query.sym_size(3)});
  check_sizes(kOp, "position", position, "[batch, seq_len]",
              {query.sym_size(0), query.sym_size(2)});
  check_head_dim(kOp, query.sym_size(3));
  check_group(kOp, query.sym_size(1), key.sym_size(1));
  TORCH_CHECK(query.sym_size(2) <= INT32_MAX, kOp, ": seq_len must be <= ", INT32_MAX, ", got ",
              query.sym_size(2));
  check_floating_dtype(kOp, "query", query);
  check_dtype(kOp, "key", key, query.scalar_type());
  check_index_dtype(kOp, "position", position);
  check_device(kOp, "key", key, "query", query);
  check_device(kOp, "position", position, "query", query);
  const Budget budget{num_sink, num_heavy, num_recent};
  check_budget(kOp, budget, std::nullopt);
  check_alibi_slopes(kOp, alibi_slopes, query);
  check_row_budget(kOp, row_budget, "query", query);
  return {query,
          key,
          position,
          budget,
          checked_reduce(kOp, gqa_reduce),
          checked_scale(kOp, scale, query),
          alibi_slopes,
          row_budget};
}

RotateCall RotateCall::check(const at::Tensor& input, const at::Tensor& index,
                             const at::Tensor& cos, const at::Tensor& sin) {
  constexpr const char* kOp = "h2o_rotate";
  constexpr const char* kIndex = "[batch or 1, heads or 1, n]";
  check_dim(kOp, "input", input, "[batch, heads, n, head_dim]", 4);
  check_floating_dtype(kOp, "input", input);
  check_head_dim(kOp, input.sym_size(3));
  check_dim(kOp, "index", index, kIndex, 3);
  const auto batch = index.sym_size(0) == 1 ? c10::SymInt(1) : input.sym_size(0);
  const auto heads = index.sym_size(1) == 1 ? c10::SymInt(1) : input.sym_size(1);
  check_sizes(kOp, "index", index, kIndex, {batch, heads, input.sym_size(2)});
  check_index_dtype(kOp, "index", index);
  check_device(kOp, "index", index, "input", input);
  check_angles(kOp, {"cos", "sin"}, cos, sin, "input", input);
  return {input, index, cos, sin};
}

at::Tensor empty_output(const at::Tensor& query) {
  at::Tensor output = at::empty_like(query);
  if (output.sym_size(3) == 1 || output.sym_stride(3) == 1) return output;
  return at::empty_like(query, query.options(), at::MemoryFormat::Contiguous);
}

}  // namespace h2o
