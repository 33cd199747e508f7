#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <vector>

#include "h2o/kernels/cpu/rows.h"
#include "h2o/kernels/cpu/slot_selection.h"
#include "h2o/ops/checks.h"
#include "h2o/ops/cpu/backend.h"
#include "h2o/ops/cpu/rows.h"
#include "h2o/ops/registration.h"

namespace h2o::cpu {
namespace {

// One (row, KV head). A candidate's index is its slot, or capacity + its place among the row's new
// tokens.
template <typename T>
void evict_head(const KVCache& cache, const at::Tensor& k_new, const at::Tensor& v_new,
                const at::Tensor& scores_new, const RowTokens& tokens, const Budget& budget,
                int64_t row, int64_t head, int32_t* left) {
  using A = Accumulator<T>;
  const int64_t capacity = cache.capacity(), head_dim = cache.head_dim();
  const auto at = [row, head]<typename U>(const at::Tensor& tensor, U*, int64_t index) {
    return data_of<U>(tensor) + row * tensor.stride(0) + head * tensor.stride(1) +
           index * tensor.stride(2);
  };
  const auto score_at = [&](int64_t slot) {
    return at(cache.scores, static_cast<A*>(nullptr), slot);
  };
  const auto position_at = [&](int64_t slot) {
    return at(cache.positions, static_cast<int32_t*>(nullptr), slot);
  };

  std::vector<Candidate<A>> candidates;
  std::vector<int32_t> empty;
  for (int64_t slot = 0; slot < capacity; ++slot) {
    const int32_t position = *position_at(slot);
    if (position < 0) {
      empty.push_back(static_cast<int32_t>(slot));
    } else {
      candidates.push_back({*score_at(slot), position, static_cast<int32_t>(slot)});
    }
  }
  const int64_t num_tokens = static_cast<int64_t>(tokens.columns.size());
  std::vector<A> fresh;
  for (int64_t i = 0; i < num_tokens; ++i) {
    fresh.push_back(
        *at(scores_new, static_cast<const A*>(nullptr), tokens.columns[static_cast<size_t>(i)]));
    candidates.push_back({fresh.back(), tokens.positions[static_cast<size_t>(i)],
                          static_cast<int32_t>(capacity + i)});
  }
  int64_t newest = -1;
  for (const Candidate<A>& candidate : candidates)
    newest = std::max<int64_t>(newest, candidate.position);

  const int64_t excess = static_cast<int64_t>(candidates.size()) - budget.total();
  choose_victims(candidates, excess, newest, budget);
  std::vector<bool> leaves(static_cast<size_t>(num_tokens), false);
  std::vector<int32_t> freed;
  for (int64_t i = 0; i < excess; ++i) {
    const Candidate<A>& victim = candidates[static_cast<size_t>(i)];
    left[i] = victim.position;
    if (victim.index < capacity) {
      freed.push_back(victim.index);
    } else {
      leaves[static_cast<size_t>(victim.index - capacity)] = true;
    }
  }
  std::sort(freed.begin(), freed.end());
  for (const int32_t slot : freed) {
    *position_at(slot) = -1;
    *score_at(slot) = 0;
  }
  size_t next = 0;
  for (int64_t i = 0; i < num_tokens; ++i) {
    if (leaves[static_cast<size_t>(i)]) continue;
    const int64_t slot = next < freed.size() ? freed[next] : empty[next - freed.size()];
    ++next;
    const int64_t column = tokens.columns[static_cast<size_t>(i)];
    std::copy_n(at(k_new, static_cast<const T*>(nullptr), column), head_dim,
                at(cache.k_cache, static_cast<T*>(nullptr), slot));
    std::copy_n(at(v_new, static_cast<const T*>(nullptr), column), head_dim,
                at(cache.v_cache, static_cast<T*>(nullptr), slot));
    *score_at(slot) = fresh[static_cast<size_t>(i)];
    *position_at(slot) = tokens.positions[static_cast<size_t>(i)];
  }
}

}  // namespace

at::Tensor evict(const EvictCall& call) {
  constexpr const char* kOp = "h2o_evict";
  const KVCache& cache = call.cache;
  const int64_t num_kv_heads = cache.num_kv_heads(), num_new = call.k_new.size(2);
  const std::vector<RowTokens> tokens = read_tokens(kOp, "position_new", call.position_new);
  const std::vector<Budget> budgets =
      read_budgets(kOp, call.row_budget, call.budget, cache.batch(), cache.capacity());
  const auto input = [&cache](const at::Tensor& tensor) {
    return readable_input(tensor,
                          {&cache.k_cache, &cache.v_cache, &cache.scores, &cache.positions});
  };
  const at::Tensor k_new = input(call.k_new), v_new = input(call.v_new),
                   scores_new = input(call.scores_new);
  at::Tensor evicted = at::full({cache.batch(), num_kv_heads, cache.capacity() + num_new}, -1,
                                cache.positions.options());
  int32_t* const left = evicted.mutable_data_ptr<int32_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, cache.k_cache.scalar_type(), "h2o_evict", [&] {
        const int64_t grain = std::max<int64_t>(1, 4096 / (cache.capacity() + num_new + 1));
        at::parallel_for(0, cache.batch() * num_kv_heads, grain, [&](int64_t first, int64_t last) {
          for (int64_t i = first; i < last; ++i) {
            const int64_t row = i / num_kv_heads;
            evict_head<scalar_t>(cache, k_new, v_new, scores_new, tokens[static_cast<size_t>(row)],
                                 budgets[static_cast<size_t>(row)], row, i % num_kv_heads,
                                 left + i * (cache.capacity() + num_new));
          }
        });
      });
  return evicted;
}

static const Registration registration(c10::DispatchKey::CPU, [](torch::Library& m) {
  m.impl("h2o_evict", &evict_entry<evict>);
});

}  // namespace h2o::cpu
