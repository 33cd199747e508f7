#include "h2o/ops/sparse_reading.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/take_along_dim.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "h2o/eviction_policy.h"
#include "h2o/ops/checks.h"

namespace h2o {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// The `count` greatest of each row of `values`, [..., n], as a mask; among equals those of greater
// `position`.
at::Tensor greatest(const at::Tensor& values, const at::Tensor& position, int64_t count) {
  const at::Tensor newest_first =
      at::argsort(position, /*stable=*/true, /*dim=*/-1, /*descending=*/true).expand_as(values);
  const at::Tensor order = newest_first.gather(
      -1, at::argsort(values.gather(-1, newest_first), /*stable=*/true, -1, /*descending=*/true));
  const at::Tensor chosen = at::zeros_like(values, at::kBool);
  return chosen.scatter_(-1, order.narrow(-1, 0, std::min(count, values.size(-1))), true);
}

// One column of a call, everything in the dtype of the scores. Slots are the cache's and, at the
// end, the new token.
class SparseStep {
 public:
  SparseStep(const DecodeCall& call, int64_t column)
      : call_(call),
        column_(column),
        dtype_(call.cache.scores.scalar_type()),
        capacity_(call.cache.capacity()),
        group_size_(call.query.size(1) / call.k_new.size(1)),
        position_new_(call.position_new.narrow(1, column, 1)) {
    const KVCache& cache = call.cache;
    const at::Tensor own =
        position_new_.clamp(-1, kMaxTokens).to(at::kInt).unsqueeze(1).expand({-1, heads(), 1});
    positions_ = at::cat({cache.positions, own}, 2);
    present_ = positions_.ge(0);
    keys_ = with_new(cache.k_cache, call.k_new);
    values_ = with_new(cache.v_cache, call.v_new);
    query_ =
        of_column(call.query).to(dtype_).view({batch(), heads(), group_size_, call.query.size(3)});
  }

  // Writes the output and grows the scores; returns the new token's own, [batch, heads, 1].
  at::Tensor attend(const at::Tensor& output) const {
    const at::Tensor logits = this->logits();
    const at::Tensor read =
        at::cat({chosen(logits),
                 present_.narrow(2, capacity_, 1).unsqueeze(2).expand({-1, -1, group_size_, 1})},
                3);
    // A row of padding reads nothing; its NaN goes nowhere.
    const at::Tensor is_real = position_new_.ge(0).view({batch(), 1, 1, 1});
    const at::Tensor weights =
        at::softmax(logits.masked_fill(read.logical_not(), kMinusInfinity), -1)
            .masked_fill(is_real.logical_not(), 0);
    // Nor does an infinite value at a weight of 0.
    const at::Tensor attended = at::matmul(weights, values_).masked_fill(is_real.logical_not(), 0);
    output.narrow(2, column_, 1)
        .copy_(attended.view({batch(), heads() * group_size_, 1, values_.size(3)}));
    const at::Tensor mass = call_.gqa_reduce == GqaReduce::kSum ? weights.sum(2) : weights.amax(2);
    call_.cache.scores.add_(
        mass.narrow(2, 0, capacity_).masked_fill(call_.cache.positions.lt(0), 0));
    return mass.narrow(2, capacity_, 1);
  }

 private:
  int64_t batch() const { return call_.k_new.size(0); }
  int64_t heads() const { return call_.k_new.size(1); }
  at::Tensor of_column(const at::Tensor& tensor) const { return tensor.narrow(2, column_, 1); }
  // [batch, heads, capacity + 1, head_dim]; what is not there is 0, whatever the memory holds.
  at::Tensor with_new(const at::Tensor& cached, const at::Tensor& fresh) const {
    return at::cat({cached, of_column(fresh)}, 2)
        .to(dtype_)
        .masked_fill(present_.logical_not().unsqueeze(3), 0);
  }

  // [batch, heads, group_size, capacity + 1]
  at::Tensor logits() const {
    at::Tensor logits = at::matmul(query_, keys_.transpose(2, 3)) * call_.scale;
    if (call_.alibi_slopes) {
      const at::Tensor slopes = call_.alibi_slopes->to(dtype_).view({1, heads(), group_size_, 1});
      const at::Tensor distance = positions_ - positions_.narrow(2, capacity_, 1);
      logits = logits + slopes * distance.to(dtype_).unsqueeze(2);
    }
    return logits.masked_fill(present_.logical_not().unsqueeze(2), kMinusInfinity);
  }

  // Which slots of the cache are read, [batch, heads, group_size, capacity].
  at::Tensor chosen(const at::Tensor& logits) const {
    const at::Tensor cached = positions_.narrow(2, 0, capacity_);
    const int64_t page = call_.reading.page;
    const at::Tensor there = cached.ge(0).unsqueeze(2);
    if (page == 1) {
      return greatest(logits.narrow(3, 0, capacity_), cached.unsqueeze(2), call_.reading.slots)
          .logical_and(there);
    }
    const int64_t pages = (capacity_ + page - 1) / page;
    const at::Tensor newest = paged(cached.unsqueeze(3), pages, -1).amax(3).squeeze(3);
    // The page of the newest token is always read, as in Quest.
    const at::Tensor is_current = newest.eq(newest.amax(2, /*keepdim=*/true));
    const at::Tensor bounds = page_bounds(pages)
                                  .masked_fill(is_current.unsqueeze(2), -kMinusInfinity)
                                  .masked_fill(newest.lt(0).unsqueeze(2), kMinusInfinity);
    const int64_t count = (call_.reading.slots + page - 1) / page;
    return greatest(bounds, newest.unsqueeze(2), count)
        .repeat_interleave(page, 3)
        .narrow(3, 0, capacity_)
        .logical_and(there);
  }
  // The most that q . k can be in each page, [batch, heads, group_size, pages].
  at::Tensor page_bounds(int64_t pages) const {
    const at::Tensor keys = keys_.narrow(2, 0, capacity_);
    const at::Tensor absent = present_.narrow(2, 0, capacity_).logical_not().unsqueeze(3);
    const at::Tensor least =
        paged(keys.masked_fill(absent, -kMinusInfinity), pages, -kMinusInfinity).amin(3);
    const at::Tensor most =
        paged(keys.masked_fill(absent, kMinusInfinity), pages, kMinusInfinity).amax(3);
    const at::Tensor query = query_.unsqueeze(3);
    return at::maximum(query * least.unsqueeze(2), query * most.unsqueeze(2)).sum(4);
  }
  // [batch, heads, capacity, n] by pages, [batch, heads, pages, page, n]; filled up with `rest`.
  at::Tensor paged(const at::Tensor& slots, int64_t pages, double rest) const {
    const int64_t page = call_.reading.page, n = slots.size(3);
    const at::Tensor fill =
        slots.new_full({batch(), heads(), pages * page - capacity_, n}, at::Scalar(rest));
    return at::cat({slots, fill}, 2).view({batch(), heads(), pages, page, n});
  }

  const DecodeCall& call_;
  const int64_t column_;
  const at::ScalarType dtype_;
  const int64_t capacity_, group_size_;
  const at::Tensor position_new_;
  at::Tensor positions_, present_;  // [batch, heads, capacity + 1]
  at::Tensor keys_, values_;        // [batch, heads, capacity + 1, head_dim]
  at::Tensor query_;                // [batch, heads, group_size, head_dim]
};

// Puts the key and the value of who will leave at `column` where the caller wants them.
void hand_out(const DecodeCall& call, EvictCall placing, int64_t column,
              at::Tensor (*evict)(const EvictCall&)) {
  const KVCache& cache = call.cache;
  // The same eviction of vectors of one element tells who it is.
  placing.cache.k_cache = cache.k_cache.narrow(3, 0, 1).clone();
  placing.cache.v_cache = placing.cache.k_cache.clone();
  placing.cache.scores = cache.scores.clone();
  placing.cache.positions = cache.positions.clone();
  placing.k_new = placing.k_new.narrow(3, 0, 1);
  placing.v_new = placing.v_new.narrow(3, 0, 1);
  const at::Tensor victim = evict(placing).narrow(2, 0, 1);
  const at::Tensor is_victim = cache.positions.eq(victim).logical_and(victim.ge(0));
  const at::Tensor slot = is_victim.to(at::kByte).argmax(2, /*keepdim=*/true).unsqueeze(3);
  const at::Tensor was_stored = is_victim.any(2, /*keepdim=*/true).unsqueeze(3);
  for (const auto& [from, to] :
       {std::pair(&cache.k_cache, &*call.k_evicted), {&cache.v_cache, &*call.v_evicted}}) {
    const at::Tensor room = to->narrow(2, column, 1);
    room.copy_(at::where(was_stored, at::take_along_dim(*from, slot, 2), room));
  }
}

}  // namespace

bool reads_sparsely(const DecodeCall& call) { return call.reading.slots > 0 && call.chunk == 1; }

DecodeOutputs decode_sparsely(const DecodeCall& given, at::Tensor (*evict)(const EvictCall&)) {
  DecodeCall call = given;
  for (at::Tensor* tensor : {&call.query, &call.k_new, &call.v_new, &call.position_new}) {
    *tensor = given.readable(*tensor);
  }
  for (std::optional<at::Tensor>* tensor :
       {&call.alibi_slopes, &call.row_budget, &call.score_new}) {
    if (*tensor) *tensor = given.readable(**tensor);
  }
  const at::Tensor output = empty_output(call.query);
  const at::Tensor evicted = at::empty({call.k_new.size(0), call.k_new.size(1), call.k_new.size(2)},
                                       call.cache.positions.options());
  for (int64_t column = 0; column < call.k_new.size(2); ++column) {
    at::Tensor own_score = SparseStep(call, column).attend(output);
    if (call.score_new) own_score = own_score + call.score_new->narrow(2, column, 1);
    const EvictCall placing = {call.cache,
                               call.k_new.narrow(2, column, 1),
                               call.v_new.narrow(2, column, 1),
                               own_score,
                               call.position_new.narrow(1, column, 1),
                               call.budget,
                               call.row_budget,
                               call.scoring,
                               /*one_for_one=*/true};
    if (call.k_evicted) hand_out(call, placing, column, evict);
    evicted.narrow(2, column, 1).copy_(evict(placing).narrow(2, 0, 1));
  }
  return {output, evicted};
}

}  // namespace h2o
