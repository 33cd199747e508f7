#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "h2o/kernels/cpu/decode_kernels.h"
#include "h2o/kernels/cpu/slot_selection.h"
#include "h2o/kernels/score_rule.h"
#include "h2o/ops/checks.h"
#include "h2o/ops/cpu/backend.h"
#include "h2o/ops/cpu/chunk_attention.h"
#include "h2o/ops/cpu/rows.h"
#include "h2o/ops/cpu/share_out.h"
#include "h2o/ops/cpu/workspace.h"
#include "h2o/ops/registration.h"
#include "h2o/ops/rolling.h"
#include "h2o/ops/sparse_reading.h"

namespace h2o::cpu {
namespace {

// Everything of one call, as pointers and strides of one storage type.
template <typename T>
class Decoder {
 public:
  using A = Accumulator<T>;

  Decoder(const DecodeCall& call, const at::Tensor& query, const at::Tensor& k_new,
          const at::Tensor& v_new, const std::optional<at::Tensor>& score_new,
          std::vector<RowTokens> tokens, std::vector<Budget> budgets, const at::Tensor& output,
          const at::Tensor& evicted)
      : call_(call),
        query_(query),
        k_new_(k_new),
        v_new_(v_new),
        score_new_(score_new),
        scoring_{call.scoring},
        is_paper_(scoring_.is_paper() && !score_new),
        tokens_(std::move(tokens)),
        budgets_(std::move(budgets)),
        output_(output),
        evicted_(evicted),
        num_kv_heads_(call.cache.num_kv_heads()),
        capacity_(call.cache.capacity()),
        head_dim_(call.cache.head_dim()),
        group_size_(query.size(1) / num_kv_heads_),
        slopes_(read_slopes<A>("h2o_attention_decode", call.alibi_slopes)) {}

  void run() {
    int64_t longest = 0;
    for (const RowTokens& row : tokens_) {
      longest = std::max(longest, static_cast<int64_t>(row.columns.size()));
    }
    // Rows are in step: the first chunk of every row, then the second. A chunk is `chunk` of the
    // row's own tokens.
    for (int64_t begin = 0; begin < longest; begin += std::min(call_.chunk, longest)) {
      std::vector<int64_t> steps, chunks;  // rows
      for (size_t row = 0; row < tokens_.size(); ++row) {
        const int64_t count =
            std::min(call_.chunk, static_cast<int64_t>(tokens_[row].columns.size()) - begin);
        if (count == 1) steps.push_back(static_cast<int64_t>(row));
        if (count > 1) chunks.push_back(static_cast<int64_t>(row));
      }
      if (!steps.empty()) run_step(steps, begin);
      if (!chunks.empty()) run_chunk(chunks, begin);
    }
  }

 private:
  template <typename U>
  static U* at(const at::Tensor& tensor, int64_t row, int64_t head, int64_t index) {
    return rows_of<U>(tensor, row, head)[index];
  }
  LogitTerms<A> terms(int64_t head) const {
    return {static_cast<A>(call_.scale),
            slopes_.empty() ? nullptr : slopes_.data() + head * group_size_};
  }
  VectorRows<A> scores(int64_t row, int64_t head) const {
    return rows_of<A>(call_.cache.scores, row, head);
  }
  VectorRows<int32_t> positions(int64_t row, int64_t head) const {
    return rows_of<int32_t>(call_.cache.positions, row, head);
  }

  // Hands out what a slot holds, for the token that leaves it at `column`.
  void hand_out(int64_t row, int64_t head, int64_t slot, int64_t column) const {
    if (!call_.k_evicted) return;
    std::copy_n(at<const T>(call_.cache.k_cache, row, head, slot), head_dim_,
                at<T>(*call_.k_evicted, row, head, column));
    std::copy_n(at<const T>(call_.cache.v_cache, row, head, slot), head_dim_,
                at<T>(*call_.v_evicted, row, head, column));
  }

  // Writes a new token into a slot, all of its parts together.
  void overwrite_slot(int64_t row, int64_t head, int64_t slot, int64_t column, A score,
                      int32_t position) const {
    std::copy_n(at<T>(k_new_, row, head, column), head_dim_,
                at<T>(call_.cache.k_cache, row, head, slot));
    std::copy_n(at<T>(v_new_, row, head, column), head_dim_,
                at<T>(call_.cache.v_cache, row, head, slot));
    *scores(row, head)[slot] = score;
    *positions(row, head)[slot] = position;
  }

  // One token of each of `rows`: the paper's step. The slots are split into fixed ranges, which may
  // run on different threads; the thread that ends the last range of a (row, KV head) joins them,
  // in order.
  void run_step(const std::vector<int64_t>& rows, int64_t token) {
    const int64_t num_ranges = this->num_ranges();
    const int64_t num_heads = static_cast<int64_t>(rows.size()) * num_kv_heads_;
    if (workspace_ == nullptr) {
      const int64_t most_heads = static_cast<int64_t>(tokens_.size()) * num_kv_heads_;
      workspace_ = memory_.template get<A>(most_heads * HeadStep::workspace_size(*this));
      ranges_left_.reset(new std::atomic<int64_t>[static_cast<size_t>(most_heads)]);
    }
    for (int64_t item = 0; item < num_heads; ++item) {
      ranges_left_[static_cast<size_t>(item)].store(num_ranges, std::memory_order_relaxed);
    }
    // 16 Ki elements of K and V are worth a second thread.
    const int64_t total = num_heads * num_ranges;
    const int64_t per_thread =
        std::max<int64_t>(1, (int64_t{1} << 14) / (2 * kSlotsPerRange * head_dim_));
    const int64_t num_threads =
        std::min<int64_t>(at::get_num_threads(), (total + per_thread - 1) / per_thread);
    const int64_t at_once = std::clamp<int64_t>(total / (8 * num_threads), 1, 8);
    share_out(total, at_once, num_threads, [&] {
      return [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          const int64_t item = i / num_ranges, range = i % num_ranges;
          const int64_t row = rows[static_cast<size_t>(item / num_kv_heads_)];
          const RowTokens& tokens = tokens_[static_cast<size_t>(row)];
          const HeadStep step(*this, row, item % num_kv_heads_,
                              tokens.columns[static_cast<size_t>(token)],
                              tokens.positions[static_cast<size_t>(token)], item);
          step.attend(range, std::min(num_ranges, range + last - i));
          if (ranges_left_[static_cast<size_t>(item)].fetch_sub(1) == 1) step.finish();
        }
      };
    });
  }

  // The step of one (row, KV head), with its part of the workspace.
  class HeadStep {
   public:
    static int64_t workspace_size(const Decoder& decoder) {
      const int64_t stats = decoder.num_ranges() * decoder.group_size_;
      return decoder.group_size_ * (decoder.capacity_ + 1) + stats * (decoder.head_dim_ + 3) +
             (decoder.is_paper_ ? 0 : decoder.capacity_);
    }

    HeadStep(const Decoder& decoder, int64_t row, int64_t head, int64_t column, int32_t position,
             int64_t item)
        : decoder_(decoder),
          row_(row),
          head_(head),
          column_(column),
          position_(position),
          stats_(decoder.num_ranges() * decoder.group_size_),
          weights_(decoder.workspace_ + item * workspace_size(decoder)),
          maximum_(weights_ + decoder.group_size_ * decoder.capacity_),
          sum_(maximum_ + stats_),
          partial_(sum_ + stats_),
          scratch_(partial_ + stats_ * decoder.head_dim_),
          masses_(scratch_ + stats_ + decoder.group_size_) {}

    // Steps 1-3 as far as a range of slots has a part in them; this thread takes those up to
    // `end_range` too.
    void attend(int64_t range, int64_t end_range) const {
      const KVCache& cache = decoder_.call_.cache;
      const int64_t group_size = decoder_.group_size_, begin = range * kSlotsPerRange;
      // Scores are not needed before the end, positions not before the next range.
      const VectorRows<int32_t> positions = decoder_.positions(row_, head_);
      prefetch(decoder_.scores(row_, head_), begin);
      prefetch(positions, begin + kSlotsPerRange);
      decode_kernels<T>().attend_range({
          .begin = begin,
          .end = std::min(decoder_.capacity_, begin + kSlotsPerRange),
          .fetch_end = std::min(decoder_.capacity_, end_range * kSlotsPerRange),
          .group_size = group_size,
          .head_dim = decoder_.head_dim_,
          .query = query(),
          .k = rows_of<const T>(cache.k_cache, row_, head_),
          .v = rows_of<const T>(cache.v_cache, row_, head_),
          .positions = positions.data,
          .positions_stride = positions.stride,
          .query_position = position_,
          .terms = decoder_.terms(head_),
          .weights = weights_,
          .weights_stride = decoder_.capacity_,
          .maximum = maximum_ + range * group_size,
          .sum = sum_ + range * group_size,
          .output = partial_ + range * group_size * decoder_.head_dim_,
      });
    }

    // What is left once every range has been attended: the output, the scores, steps 4-6.
    void finish() const {
      // Under another rule the weights of each slot are added up apart.
      VectorRows<A> scores = {masses_, 1};
      if (decoder_.is_paper_) {
        scores = decoder_.scores(row_, head_);
      } else {
        std::fill_n(masses_, decoder_.capacity_, A{0});
      }
      const VectorRows<int32_t> positions = decoder_.positions(row_, head_);
      const int64_t first_query = head_ * decoder_.group_size_;
      StepMerge<T> step = {
          .num_ranges = decoder_.num_ranges(),
          .capacity = decoder_.capacity_,
          .group_size = decoder_.group_size_,
          .head_dim = decoder_.head_dim_,
          .gqa_reduce = decoder_.call_.gqa_reduce,
          .query = query(),
          .k_new = decoder_.at<const T>(decoder_.k_new_, row_, head_, column_),
          .v_new = decoder_.at<const T>(decoder_.v_new_, row_, head_, column_),
          .terms = decoder_.terms(head_),
          .weights = weights_,
          .weights_stride = decoder_.capacity_,
          .maximum = maximum_,
          .sum = sum_,
          .partial = partial_,
          .positions = positions.data,
          .positions_stride = positions.stride,
          .scratch = scratch_,
          .output = {decoder_.at<T>(decoder_.output_, row_, first_query, column_),
                     decoder_.output_.stride(1)},
          .scores = scores.data,
          .scores_stride = scores.stride,
          .new_score = 0,
      };
      decode_kernels<T>().merge_step(step);
      const A new_score = decoder_.is_paper_ ? step.new_score
                                             : decoder_.grow_scores(row_, head_, column_, position_,
                                                                    masses_, step.new_score);
      decoder_.place_token(row_, head_, column_, position_, new_score);
    }

   private:
    // Fetches a range's worth of scores or positions ahead, from slot `begin`.
    template <typename U>
    void prefetch(const VectorRows<U>& of_slots, int64_t begin) const {
      const int64_t end = std::min(decoder_.capacity_, begin + kSlotsPerRange);
      for (int64_t slot = begin; slot < end; slot += 64 / int64_t{sizeof(U)}) {
        __builtin_prefetch(of_slots[slot]);
      }
    }
    VectorRows<const T> query() const {
      return {decoder_.at<const T>(decoder_.query_, row_, head_ * decoder_.group_size_, column_),
              decoder_.query_.stride(1)};
    }

    const Decoder& decoder_;
    const int64_t row_, head_, column_;
    const int32_t position_;
    const int64_t stats_;
    A *const weights_, *const maximum_, *const sum_, *const partial_, *const scratch_;
    A* const masses_;  // [capacity], where the rule is not the paper's
  };
  int64_t num_ranges() const { return (capacity_ + kSlotsPerRange - 1) / kSlotsPerRange; }

  // The sum of |v| of a value, in a fixed order.
  A value_norm(const T* value) const {
    constexpr int64_t kLanes = 8;
    A lanes[kLanes] = {};
    for (int64_t d = 0; d < head_dim_; ++d) {
      lanes[d % kLanes] += std::abs(static_cast<A>(value[d]));
    }
    A sum = 0;
    for (const A lane : lanes) sum += lane;
    return sum;
  }
  A value_norm(const at::Tensor& values, int64_t row, int64_t head, int64_t index) const {
    return scoring_.reads_values() ? value_norm(at<const T>(values, row, head, index)) : A{1};
  }
  A given_score(int64_t row, int64_t head, int64_t column) const {
    return score_new_ ? *at<const A>(*score_new_, row, head, column) : A{0};
  }

  // Step 3 by the call's rule, for a step that gave the slots `masses`. Returns the new token's
  // score.
  A grow_scores(int64_t row, int64_t head, int64_t column, int32_t position, const A* masses,
                A new_mass) const {
    const VectorRows<A> of_scores = scores(row, head);
    const VectorRows<int32_t> of_positions = positions(row, head);
    Received<A> received;
    received.kept = scoring_.template kept<A>();
    if (scoring_.counts_misses()) {
      int64_t attended = 1;
      for (int64_t slot = 0; slot < capacity_; ++slot) attended += *of_positions[slot] >= 0;
      received.even_share = even_share(attended);
    }
    for (int64_t slot = 0; slot < capacity_; ++slot) {
      if (*of_positions[slot] < 0) continue;
      received.mass = masses[slot];
      received.value_norm = value_norm(call_.cache.v_cache, row, head, slot);
      *of_scores[slot] = scoring_.grown(*of_scores[slot], received);
    }
    received.mass = new_mass;
    received.value_norm = value_norm(v_new_, row, head, column);
    return scoring_.first(received, head, position) + given_score(row, head, column);
  }
  // Of a group's mass, when `attended` tokens get the same.
  A even_share(int64_t attended) const {
    const A heads = call_.gqa_reduce == GqaReduce::kSum ? static_cast<A>(group_size_) : A{1};
    return heads / static_cast<A>(attended);
  }

  // Steps 4-6 for one new token.
  void place_token(int64_t row, int64_t head, int64_t column, int32_t position, A new_score) const {
    const Budget& budget = budgets_[static_cast<size_t>(row)];
    const VectorRows<A> of_scores = scores(row, head);
    const VectorRows<int32_t> of_positions = positions(row, head);
    const SlotScan<A> slots =
        is_paper_ ? scan_slots_fast<A>(of_scores.data, of_scores.stride, of_positions.data,
                                       of_positions.stride, capacity_, position, budget)
                  : scan_slots<A>(of_scores.data, of_scores.stride, of_positions.data,
                                  of_positions.stride, capacity_, position, budget, scoring_);
    if (slots.occupied + 1 <= budget.total()) {
      overwrite_slot(row, head, slots.lowest_empty, column, new_score, position);
      return;
    }
    int32_t* const left = at<int32_t>(evicted_, row, head, column);
    const bool new_one_leaves =
        slots.victim < 0 || (!is_protected(position, position, budget) &&
                             leaves_before(scoring_.order_key(new_score, position, position),
                                           position, slots.victim_score, slots.victim_position));
    if (new_one_leaves) {
      *left = position;
    } else {
      *left = slots.victim_position;
      hand_out(row, head, slots.victim, column);
      overwrite_slot(row, head, slots.victim, column, new_score, position);
    }
  }

  // Several tokens of each of `rows` together.
  void run_chunk(const std::vector<int64_t>& rows, int64_t begin) {
    std::vector<HeadChunk<T>> chunks;
    chunks.reserve(rows.size() * static_cast<size_t>(num_kv_heads_));
    for (const int64_t row : rows) {
      const RowTokens& tokens = tokens_[static_cast<size_t>(row)];
      for (int64_t head = 0; head < num_kv_heads_; ++head) {
        HeadChunk<T>& chunk = chunks.emplace_back();
        chunk.row = row;
        chunk.head = head;
        chunk.num_tokens =
            std::min(call_.chunk, static_cast<int64_t>(tokens.columns.size()) - begin);
        const VectorRows<int32_t> of_slots = positions(row, head);
        for (int64_t slot = 0; slot < capacity_; ++slot) {
          const int32_t position = *of_slots[slot];
          if (position < 0) continue;
          chunk.slots.push_back(static_cast<int32_t>(slot));
          chunk.cached_positions.push_back(position);
        }
        chunk.row_factors = row_factors(chunk.num_tokens);
        chunk.tile = {
            .first = 0,
            .count = 0,
            .group_size = group_size_,
            .head_dim = head_dim_,
            .gqa_reduce = call_.gqa_reduce,
            .query = rows_of<const T>(query_, row, head * group_size_),
            .query_head_stride = query_.stride(1),
            .k = rows_of<const T>(call_.cache.k_cache, row, head),
            .v = rows_of<const T>(call_.cache.v_cache, row, head),
            .slots = chunk.slots.data(),
            .cached_positions = chunk.cached_positions.data(),
            .num_cached = static_cast<int64_t>(chunk.slots.size()),
            .k_new = rows_of<const T>(k_new_, row, head),
            .v_new = rows_of<const T>(v_new_, row, head),
            .columns = tokens.columns.data() + begin,
            .new_positions = tokens.positions.data() + begin,
            .terms = terms(head),
            .row_factors = chunk.row_factors.empty() ? nullptr : chunk.row_factors.data(),
            .scratch = nullptr,
            .column_sums = nullptr,
            .output = rows_of<T>(output_, row, head * group_size_),
            .output_head_stride = output_.stride(1),
        };
      }
    }
    attend_chunks<T>(chunks,
                     [&](const HeadChunk<T>& chunk, const A* sums) { place_chunk(chunk, sums); });
  }

  // What the weights of each of a chunk's queries count for; empty where that is 1.
  std::vector<A> row_factors(int64_t num_tokens) const {
    const A kept = scoring_.template kept<A>();
    const int64_t num_scored = call_.scoring.num_queries;
    if (kept == 1 && num_scored == 0) return {};
    std::vector<A> factors(static_cast<size_t>(num_tokens));
    A factor = 1;
    for (int64_t i = num_tokens - 1; i >= 0; --i, factor *= kept) {
      const bool is_scored = num_scored == 0 || i >= num_tokens - num_scored;
      factors[static_cast<size_t>(i)] = is_scored ? factor : A{0};
    }
    return factors;
  }

  // Makes the scores of a chunk's tokens that are no longer recent means over `pool` neighbours;
  // outside there are zeros.
  void pool_scores(std::vector<A>& of_tokens, const int32_t* of_positions, int64_t newest,
                   const Budget& budget) const {
    const int64_t reach = call_.scoring.pool / 2;
    if (reach == 0) return;
    int64_t count = 0;
    while (count < static_cast<int64_t>(of_tokens.size()) &&
           of_positions[count] <= newest - budget.num_recent) {
      ++count;
    }
    const std::vector<A> before(of_tokens.begin(), of_tokens.begin() + count);
    for (int64_t i = 0; i < count; ++i) {
      A sum = 0;
      for (int64_t j = std::max<int64_t>(0, i - reach); j <= std::min(count - 1, i + reach); ++j) {
        sum += before[static_cast<size_t>(j)];
      }
      of_tokens[static_cast<size_t>(i)] = sum / static_cast<A>(call_.scoring.pool);
    }
  }

  // Steps 3-6 for a chunk whose queries gave every key the mass `sums`.
  void place_chunk(const HeadChunk<T>& chunk, const A* sums) const {
    const int64_t num_cached = chunk.tile.num_cached;
    const Budget& budget = budgets_[static_cast<size_t>(chunk.row)];
    std::vector<Candidate<A>> candidates;  // index: of the key, cached ones first
    candidates.reserve(static_cast<size_t>(chunk.num_keys()));
    const int64_t newest = chunk.tile.new_positions[chunk.num_tokens - 1];
    const auto add_candidate = [&](A score, int32_t position) {
      candidates.push_back({scoring_.order_key(score, position, newest), position,
                            static_cast<int32_t>(candidates.size())});
    };
    const VectorRows<A> of_slots = scores(chunk.row, chunk.head);
    Received<A> received;
    received.together = true;
    received.kept = std::pow(scoring_.template kept<A>(), static_cast<A>(chunk.num_tokens));
    for (int64_t k = 0; k < num_cached; ++k) {
      const int32_t slot = chunk.slots[static_cast<size_t>(k)];
      received.mass = sums[k];
      received.value_norm = value_norm(call_.cache.v_cache, chunk.row, chunk.head, slot);
      *of_slots[slot] = scoring_.grown(*of_slots[slot], received);
      add_candidate(*of_slots[slot], chunk.cached_positions[static_cast<size_t>(k)]);
    }
    std::vector<A> own_scores;
    for (int64_t i = 0; i < chunk.num_tokens; ++i) {
      const int64_t column = chunk.tile.columns[i];
      received.mass = sums[num_cached + i];
      received.value_norm = value_norm(v_new_, chunk.row, chunk.head, column);
      own_scores.push_back(scoring_.first(received, chunk.head, chunk.tile.new_positions[i]) +
                           given_score(chunk.row, chunk.head, column));
    }
    pool_scores(own_scores, chunk.tile.new_positions, newest, budget);
    for (int64_t i = 0; i < chunk.num_tokens; ++i) {
      add_candidate(own_scores[static_cast<size_t>(i)], chunk.tile.new_positions[i]);
    }
    const int64_t excess = std::min(chunk.num_keys() - budget.total(), chunk.num_tokens);
    choose_victims(candidates, excess, newest, budget);
    std::vector<bool> leaves(static_cast<size_t>(chunk.num_keys()), false);
    int32_t* const left = at<int32_t>(evicted_, chunk.row, chunk.head, chunk.tile.columns[0]);
    std::vector<int32_t> freed;
    for (int64_t i = 0; i < excess; ++i) {
      const Candidate<A>& victim = candidates[static_cast<size_t>(i)];
      leaves[static_cast<size_t>(victim.index)] = true;
      left[i * evicted_.stride(2)] = victim.position;
      if (victim.index >= num_cached) continue;
      freed.push_back(chunk.slots[static_cast<size_t>(victim.index)]);
      hand_out(chunk.row, chunk.head, freed.back(), chunk.tile.columns[0] + i);
    }
    const VectorRows<int32_t> of_positions = positions(chunk.row, chunk.head);
    FreeSlots slots(std::move(freed), chunk.num_tokens, of_positions.data, of_positions.stride);
    for (int64_t i = 0; i < chunk.num_tokens; ++i) {
      if (leaves[static_cast<size_t>(num_cached + i)]) continue;
      overwrite_slot(chunk.row, chunk.head, slots.next(), chunk.tile.columns[i],
                     own_scores[static_cast<size_t>(i)], chunk.tile.new_positions[i]);
    }
  }

  const DecodeCall& call_;
  const at::Tensor &query_, &k_new_, &v_new_;
  const std::optional<at::Tensor>& score_new_;
  const NamedScoring scoring_;
  const bool is_paper_;  // the score is what the kernels add up
  const std::vector<RowTokens> tokens_;
  const std::vector<Budget> budgets_;
  const at::Tensor &output_, &evicted_;
  const int64_t num_kv_heads_, capacity_, head_dim_, group_size_;
  const std::vector<A> slopes_;
  Workspace memory_;
  A* workspace_ = nullptr;                               // of the steps
  std::unique_ptr<std::atomic<int64_t>[]> ranges_left_;  // of each (row, KV head)
};

}  // namespace

DecodeOutputs attention_decode(const DecodeCall& call) {
  if (call.rope_cos)
    return decode_rolling(call, {attention_decode, rank, rotate, /*on_host=*/true});
  constexpr const char* kOp = "h2o_attention_decode";
  std::vector<RowTokens> tokens = read_tokens(kOp, "position_new", call.position_new);
  std::vector<Budget> budgets =
      read_budgets(kOp, call.row_budget, call.budget, call.cache.batch(), call.cache.capacity());
  if (reads_sparsely(call)) return decode_sparsely(call, evict);
  const at::Tensor query = call.readable(call.query), k_new = call.readable(call.k_new),
                   v_new = call.readable(call.v_new);
  std::optional<at::Tensor> score_new;
  if (call.score_new) score_new = call.readable(*call.score_new);
  at::Tensor output = empty_output(call.query);
  const int64_t num_new = call.k_new.size(2);
  bool padded = false;
  for (const RowTokens& row : tokens)
    padded = padded || static_cast<int64_t>(row.columns.size()) < num_new;
  if (padded) output.zero_();
  at::Tensor evicted = at::empty({call.cache.batch(), call.cache.num_kv_heads(), num_new},
                                 call.cache.positions.options());
  std::fill_n(evicted.mutable_data_ptr<int32_t>(), evicted.numel(), -1);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, query.scalar_type(), "h2o_attention_decode", [&] {
        Decoder<scalar_t>(call, query, k_new, v_new, score_new, std::move(tokens),
                          std::move(budgets), output, evicted)
            .run();
      });
  return {output, evicted};
}

static const Registration registration(c10::DispatchKey::CPU, [](torch::Library& m) {
  m.impl("h2o_attention_decode", &decode_entry<attention_decode>);
});

}  // namespace h2o::cpu
