#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "h2o/kernels/cpu/decode_kernels.h"
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
class HeadEviction {
 public:
  using A = Accumulator<T>;

  HeadEviction(const KVCache& cache, const at::Tensor& k_new, const at::Tensor& v_new,
               const at::Tensor& scores_new, const RowTokens& tokens, const Budget& budget,
               const NamedScoring& scoring, bool one_for_one, int64_t row, int64_t head)
      : tokens_(tokens),
        budget_(budget),
        scoring_(scoring),
        one_for_one_(one_for_one),
        capacity_(cache.capacity()),
        head_dim_(cache.head_dim()),
        num_tokens_(static_cast<int64_t>(tokens.columns.size())),
        k_cache_(rows_of<T>(cache.k_cache, row, head)),
        v_cache_(rows_of<T>(cache.v_cache, row, head)),
        scores_(rows_of<A>(cache.scores, row, head)),
        positions_(rows_of<int32_t>(cache.positions, row, head)),
        k_new_(rows_of<const T>(k_new, row, head)),
        v_new_(rows_of<const T>(v_new, row, head)),
        scores_new_(rows_of<const A>(scores_new, row, head)) {
    for (int64_t slot = 0; slot < capacity_; ++slot) {
      occupied_ += *positions_[slot] >= 0;
      newest_ = std::max(newest_, *positions_[slot]);
    }
    if (num_tokens_ > 0) newest_ = std::max(newest_, tokens.positions.back());
  }

  // Writes the positions that leave to `left`, in the order in which they do.
  void run(int32_t* left) const {
    int64_t excess = occupied_ + num_tokens_ - budget_.total();
    if (one_for_one_) excess = std::min(excess, num_tokens_);
    if (excess == 1) {
      if (const auto victim = only_victim()) return act(std::span(&*victim, 1), left);
    }
    std::vector<Candidate<A>> victims;
    if (excess > 0) {
      victims = candidates();
      choose_victims(victims, excess, newest_, budget_);
      victims.resize(static_cast<size_t>(excess));
    }
    act(victims, left);
  }

 private:
  A own_score(int64_t i) const { return *scores_new_[tokens_.columns[static_cast<size_t>(i)]]; }
  Candidate<A> candidate(A score, int32_t position, int64_t index) const {
    return {scoring_.order_key(score, position, newest_), position, static_cast<int32_t>(index)};
  }
  Candidate<A> token(int64_t i) const {
    return candidate(own_score(i), tokens_.positions[static_cast<size_t>(i)], capacity_ + i);
  }

  // The first to leave of those that may, found without a list of them.
  std::optional<Candidate<A>> only_victim() const {
    std::optional<Candidate<A>> victim;
    const SlotScan<A> scan =
        scoring_.is_paper()
            ? scan_slots_fast<A>(scores_.data, scores_.stride, positions_.data, positions_.stride,
                                 capacity_, newest_, budget_)
            : scan_slots<A>(scores_.data, scores_.stride, positions_.data, positions_.stride,
                            capacity_, newest_, budget_, scoring_);
    if (scan.victim >= 0) {
      victim = {scan.victim_score, scan.victim_position, static_cast<int32_t>(scan.victim)};
    }
    for (int64_t i = 0; i < num_tokens_; ++i) {
      const Candidate<A> other = token(i);
      if (is_protected(other.position, newest_, budget_)) continue;
      if (!victim || leaves_before(other.score, other.position, victim->score, victim->position)) {
        victim = other;
      }
    }
    return victim;
  }

  std::vector<Candidate<A>> candidates() const {
    std::vector<Candidate<A>> all;
    all.reserve(static_cast<size_t>(occupied_ + num_tokens_));
    for (int64_t slot = 0; slot < capacity_; ++slot) {
      if (*positions_[slot] < 0) continue;
      all.push_back(candidate(*scores_[slot], *positions_[slot], slot));
    }
    for (int64_t i = 0; i < num_tokens_; ++i) all.push_back(token(i));
    return all;
  }

  void act(std::span<const Candidate<A>> victims, int32_t* left) const {
    std::vector<bool> leaves(static_cast<size_t>(num_tokens_), false);
    std::vector<int32_t> freed;
    for (const Candidate<A>& victim : victims) {
      *left++ = victim.position;
      if (victim.index >= capacity_) {
        leaves[static_cast<size_t>(victim.index - capacity_)] = true;
        continue;
      }
      freed.push_back(victim.index);
      *positions_[victim.index] = -1;
      *scores_[victim.index] = 0;
    }
    FreeSlots slots(std::move(freed), num_tokens_, positions_.data, positions_.stride);
    for (int64_t i = 0; i < num_tokens_; ++i) {
      if (leaves[static_cast<size_t>(i)]) continue;
      const int64_t slot = slots.next();
      const int64_t column = tokens_.columns[static_cast<size_t>(i)];
      std::copy_n(k_new_[column], head_dim_, k_cache_[slot]);
      std::copy_n(v_new_[column], head_dim_, v_cache_[slot]);
      *scores_[slot] = own_score(i);
      *positions_[slot] = tokens_.positions[static_cast<size_t>(i)];
    }
  }

  const RowTokens& tokens_;
  const Budget& budget_;
  const NamedScoring scoring_;
  const bool one_for_one_;
  const int64_t capacity_, head_dim_, num_tokens_;
  const VectorRows<T> k_cache_, v_cache_;
  const VectorRows<A> scores_;
  const VectorRows<int32_t> positions_;
  const VectorRows<const T> k_new_, v_new_;
  const VectorRows<const A> scores_new_;
  int64_t occupied_ = 0;
  int32_t newest_ = -1;
};

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
  const int64_t width = cache.capacity() + num_new;
  at::Tensor evicted = at::empty({cache.batch(), num_kv_heads, width}, cache.positions.options());
  int32_t* const left = evicted.mutable_data_ptr<int32_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, cache.k_cache.scalar_type(), "h2o_evict", [&] {
        // About 16 Ki slots are worth a second thread.
        const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 14) / (width + 1));
        at::parallel_for(0, cache.batch() * num_kv_heads, grain, [&](int64_t first, int64_t last) {
          std::fill(left + first * width, left + last * width, -1);
          for (int64_t i = first; i < last; ++i) {
            const int64_t row = i / num_kv_heads;
            HeadEviction<scalar_t>(cache, k_new, v_new, scores_new,
                                   tokens[static_cast<size_t>(row)],
                                   budgets[static_cast<size_t>(row)], NamedScoring{call.scoring},
                                   call.one_for_one, row, i % num_kv_heads)
                .run(left + i * width);
          }
        });
      });
  return evicted;
}

static const Registration registration(c10::DispatchKey::CPU, [](torch::Library& m) {
  m.impl("h2o_evict", &evict_entry<evict>);
});

}  // namespace h2o::cpu
