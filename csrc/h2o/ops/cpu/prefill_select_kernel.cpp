#include <ATen/Dispatch.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "h2o/kernels/cpu/slot_selection.h"
#include "h2o/ops/checks.h"
#include "h2o/ops/cpu/backend.h"
#include "h2o/ops/cpu/chunk_attention.h"
#include "h2o/ops/cpu/rows.h"
#include "h2o/ops/registration.h"

namespace h2o::cpu {
namespace {

template <typename T>
void select_tokens(const SelectCall& call, const at::Tensor& query, const at::Tensor& key,
                   const std::vector<RowTokens>& rows, const std::vector<Budget>& budgets,
                   const at::Tensor& selected, const at::Tensor& scores) {
  using A = Accumulator<T>;
  const int64_t num_kv_heads = key.size(1), group_size = query.size(1) / num_kv_heads;
  const std::vector<A> slopes = read_slopes<A>("h2o_prefill_select", call.alibi_slopes);
  std::vector<HeadChunk<T>> chunks;
  for (int64_t row = 0; row < query.size(0); ++row) {
    const RowTokens& tokens = rows[static_cast<size_t>(row)];
    if (tokens.columns.empty()) continue;
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      HeadChunk<T>& chunk = chunks.emplace_back();
      chunk.row = row;
      chunk.head = head;
      chunk.num_tokens = static_cast<int64_t>(tokens.columns.size());
      chunk.tile = {
          .first = 0,
          .count = 0,
          .group_size = group_size,
          .head_dim = query.size(3),
          .gqa_reduce = call.gqa_reduce,
          .query = rows_of<const T>(query, row, head * group_size),
          .query_head_stride = query.stride(1),
          .k = {},
          .v = {},
          .slots = nullptr,
          .cached_positions = nullptr,
          .num_cached = 0,
          .k_new = rows_of<const T>(key, row, head),
          .v_new = {},
          .columns = tokens.columns.data(),
          .new_positions = tokens.positions.data(),
          .terms = {static_cast<A>(call.scale),
                    slopes.empty() ? nullptr : slopes.data() + head * group_size},
          .row_factors = nullptr,
          .scratch = nullptr,
          .column_sums = nullptr,
          .output = {},
          .output_head_stride = 0,
      };
    }
  }
  attend_chunks<T>(chunks, [&](const HeadChunk<T>& chunk, const A* sums) {
    std::vector<Candidate<A>> candidates;
    candidates.reserve(static_cast<size_t>(chunk.num_tokens));
    for (int64_t i = 0; i < chunk.num_tokens; ++i) {
      candidates.push_back({sums[i], chunk.tile.new_positions[i], static_cast<int32_t>(i)});
    }
    const Budget& budget = budgets[static_cast<size_t>(chunk.row)];
    const int64_t leaving = std::max<int64_t>(0, chunk.num_tokens - budget.total());
    choose_victims(candidates, leaving, chunk.tile.new_positions[chunk.num_tokens - 1], budget);
    std::vector<int32_t> kept;
    for (auto it = candidates.begin() + leaving; it != candidates.end(); ++it)
      kept.push_back(it->index);
    std::sort(kept.begin(), kept.end());
    const int64_t first = (chunk.row * selected.size(1) + chunk.head) * selected.size(2);
    for (size_t i = 0; i < kept.size(); ++i) {
      selected.mutable_data_ptr<int64_t>()[first + static_cast<int64_t>(i)] =
          chunk.tile.columns[kept[i]];
      scores.mutable_data_ptr<A>()[first + static_cast<int64_t>(i)] = sums[kept[i]];
    }
  });
}

}  // namespace

SelectOutputs prefill_select(const SelectCall& call) {
  constexpr const char* kOp = "h2o_prefill_select";
  const int64_t batch = call.key.size(0), num_kv_heads = call.key.size(1),
                budget = call.budget.total();
  const std::vector<RowTokens> rows = read_tokens(kOp, "position", call.position);
  const std::vector<Budget> budgets =
      read_budgets(kOp, call.row_budget, call.budget, batch, budget);
  const at::Tensor query = readable_input(call.query, {}), key = readable_input(call.key, {});
  const auto options = call.query.options();
  at::Tensor selected = at::full({batch, num_kv_heads, budget}, -1, options.dtype(at::kLong));
  at::Tensor scores =
      at::zeros({batch, num_kv_heads, budget}, options.dtype(score_dtype(query.scalar_type())));
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, query.scalar_type(), "h2o_prefill_select",
      [&] { select_tokens<scalar_t>(call, query, key, rows, budgets, selected, scores); });
  return {selected, scores};
}

static const Registration registration(c10::DispatchKey::CPU, [](torch::Library& m) {
  m.impl("h2o_prefill_select", &select_entry<prefill_select>);
});

}  // namespace h2o::cpu
