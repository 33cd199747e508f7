// Compiled once per instruction set (CMakeLists.txt sets H2O_ISA, CPU_CAPABILITY and the compiler's
// flags). Whatever is emitted here may use instructions that the CPU lacks, so nothing with
// external linkage may be shared with other files: no standard containers or algorithms, everything
// in an unnamed namespace or in ATen's, which is named after CPU_CAPABILITY. Exported are tables
// alone.
#include "h2o/kernels/cpu/decode_kernels.h"

#include "h2o/kernels/cpu/vector.h"
#include "h2o/kernels/gqa_reduce.h"

namespace h2o::cpu {
namespace {

// Query heads served per pass over the keys, and slots whose rows they meet at once: as many sums
// as there are registers for.
constexpr int kMaxHeads = kManyRegisters ? 8 : 4;
constexpr int slots_at_once(int num_heads) {
  if (kManyRegisters) return num_heads == 1 ? 8 : num_heads <= 4 ? 4 : 2;
  return num_heads == 1 ? 4 : 2;
}

// Rows are fetched so many rows ahead, into the second-level cache: the processor itself does not
// look past a row's end.
constexpr int64_t kRowsAhead = 32;
template <typename T>
inline void prefetch(const T* from, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t d = 0; d < count; d += kLine) __builtin_prefetch(from + d, 0, 2);
}

// ---- q . k of some heads and some slots

// logits[head * stride + slot] of [kHeads, kSlots] vectors of partial sums.
template <int kHeads, int kSlots, typename A>
inline void store_sums(const Vector<A> (&sums)[kHeads * kSlots], A* logits, int64_t stride) {
  A flat[kHeads * kSlots];
  sum_lanes_of_each<A, kHeads * kSlots>(sums, flat);
  for (int h = 0; h < kHeads; ++h) {
    __builtin_memcpy(logits + h * stride, flat + h * kSlots, kSlots * sizeof(A));
  }
}

// What the products take at a time of a query and of a key: pairs of widened numbers,
template <typename T>
struct Product {
  using A = Accumulator<T>;
  using Kept = A;  // as a query is kept
  using Factor = Pair<A>;
  static constexpr int64_t kStep = kPairLanes<A>;

  static Factor load(const T* from) { return load_pair(from); }
  static Factor load(const T* from, int64_t count) { return load_pair(from, count); }
  static void keep(Kept* to, const Factor& factor) { store_pair(to, factor); }
  static Vector<A> add(const Factor& query, const Factor& key, const Vector<A>& sum) {
    return at::vec::fmadd(query.second, key.second, at::vec::fmadd(query.first, key.first, sum));
  }
};
#if defined(__AVX512BF16__)
// or bfloat16 as it is stored: two products a lane, added to a float32 sum. Subnormal numbers count
// as zero.
template <>
struct Product<at::BFloat16> {
  using A = float;
  using Kept = at::BFloat16;
  using Factor = Vector<at::BFloat16>;
  static constexpr int64_t kStep = Factor::size();

  static Factor load(const Kept* from) { return Factor::loadu(from); }
  static Factor load(const Kept* from, int64_t count) { return Factor::loadu(from, count); }
  static void keep(Kept* to, const Factor& factor) { factor.store(to); }
  static Vector<A> add(const Factor& query, const Factor& key, const Vector<A>& sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)(__m512i)query, (__m512bh)(__m512i)key);
  }
};
#endif

// The queries of kHeads heads as the products take them: widened once.
template <typename T, int kHeads>
class Queries {
 public:
  using P = Product<T>;
  using A = Accumulator<T>;

  Queries(const VectorRows<const T>& rows, int64_t first_head, int64_t head_dim)
      : head_dim_(head_dim) {
    for (int h = 0; h < kHeads; ++h) {
      const T* const row = rows[first_head + h];
      for (int64_t d = 0; d < head_dim; d += P::kStep) {
        P::keep(values_[h] + d, P::load(row + d, smaller(head_dim - d, P::kStep)));
      }
    }
  }

  // logits[head * stride + slot] of kSlots keys.
  template <int kSlots>
  void dot(const T* const* keys, A* logits, int64_t stride) const {
    Vector<A> sums[kHeads * kSlots];
    H2O_UNROLL
    for (int i = 0; i < kHeads * kSlots; ++i) sums[i] = Vector<A>(0);
    int64_t d = 0;
    for (; d + P::kStep <= head_dim_; d += P::kStep) {
      typename P::Factor key[kSlots];
      H2O_UNROLL
      for (int s = 0; s < kSlots; ++s) key[s] = P::load(keys[s] + d);
      add<kSlots>(key, d, sums);
    }
    if (d < head_dim_) {
      typename P::Factor key[kSlots];
      H2O_UNROLL
      for (int s = 0; s < kSlots; ++s) key[s] = P::load(keys[s] + d, head_dim_ - d);
      add<kSlots>(key, d, sums);
    }
    store_sums<kHeads, kSlots>(sums, logits, stride);
  }

 private:
  template <int kSlots>
  void add(const typename P::Factor (&key)[kSlots], int64_t d,
           Vector<A> (&sums)[kHeads * kSlots]) const {
    H2O_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const auto query = Product<typename P::Kept>::load(values_[h] + d);
      H2O_UNROLL
      for (int s = 0; s < kSlots; ++s) {
        sums[h * kSlots + s] = P::add(query, key[s], sums[h * kSlots + s]);
      }
    }
  }

  const int64_t head_dim_;
  alignas(64) typename P::Kept values_[kHeads][kMaxHeadDim];
};

// ---- Weights times v of some heads

// sums[head][d...] += weight * v over some slots, kPairs pairs of d at a time.
template <typename T, int kHeads, int kPairs, bool kWhole>
void weigh_columns(const Accumulator<T>* weights, int64_t weights_stride, const T* const* values,
                   int64_t count, int64_t d, int64_t head_dim,
                   Accumulator<T> (*sums)[kMaxHeadDim]) {
  using A = Accumulator<T>;
  Pair<A> sum[kHeads][kPairs];
  H2O_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    H2O_UNROLL
    for (int c = 0; c < kPairs; ++c) {
      sum[h][c] = load_pair(sums[h] + d + c * kPairLanes<A>);
    }
  }
  for (int64_t s = 0; s < count; ++s) {
    prefetch(values[s + kRowsAhead] + d, kPairs * kPairLanes<A>);
    Pair<A> value[kPairs];
    H2O_UNROLL
    for (int c = 0; c < kPairs; ++c) {
      const T* const from = values[s] + d + c * kPairLanes<A>;
      value[c] = kWhole ? load_pair(from) : load_pair(from, head_dim - d);
    }
    H2O_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const Vector<A> weight(weights[h * weights_stride + s]);
      H2O_UNROLL
      for (int c = 0; c < kPairs; ++c) {
        sum[h][c].first = at::vec::fmadd(value[c].first, weight, sum[h][c].first);
        sum[h][c].second = at::vec::fmadd(value[c].second, weight, sum[h][c].second);
      }
    }
  }
  H2O_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    H2O_UNROLL
    for (int c = 0; c < kPairs; ++c) {
      store_pair(sums[h] + d + c * kPairLanes<A>, sum[h][c]);
    }
  }
}

template <typename T, int kHeads>
void weigh(const Accumulator<T>* weights, int64_t weights_stride, const T* const* values,
           int64_t count, int64_t head_dim, Accumulator<T> (*sums)[kMaxHeadDim]) {
  using A = Accumulator<T>;
  constexpr int kPairs = kManyRegisters && kHeads <= 4 ? 2 : 1;
  int64_t d = 0;
  for (; d + kPairs * kPairLanes<A> <= head_dim; d += kPairs * kPairLanes<A>) {
    weigh_columns<T, kHeads, kPairs, true>(weights, weights_stride, values, count, d, head_dim,
                                           sums);
  }
  for (; d + kPairLanes<A> <= head_dim; d += kPairLanes<A>) {
    weigh_columns<T, kHeads, 1, true>(weights, weights_stride, values, count, d, head_dim, sums);
  }
  if (d < head_dim) {
    weigh_columns<T, kHeads, 1, false>(weights, weights_stride, values, count, d, head_dim, sums);
  }
}

// ---- A range of slots

// Turns the logits of `count` slots into weights; the caller's array has room for a whole vector
// more.
template <typename A>
void softmax(A* weights, int64_t count, A* maximum, A* sum) {
  const int64_t whole = round_up(count, kLanes<A>);
  for (int64_t i = count; i < whole; ++i) weights[i] = kMinusInfinity<A>;
  Vector<A> most(kMinusInfinity<A>);
  for (int64_t i = 0; i < whole; i += kLanes<A>) {
    const Vector<A> logit = load(weights + i);
    // A NaN is passed over here and shows in the sum.
    most = Vector<A>::blendv(most, logit, logit > most);
  }
  A lanes[kLanes<A>];
  store(lanes, most);
  *maximum = kMinusInfinity<A>;
  for (const A lane : lanes) *maximum = larger(*maximum, lane);
  const Vector<A> base(*maximum == kMinusInfinity<A> ? A{0} : *maximum);
  Vector<A> total(0);
  for (int64_t i = 0; i < whole; i += kLanes<A>) {
    const Vector<A> weight = exponential(load(weights + i) - base);
    store(weights + i, weight);
    total = total + weight;
  }
  *sum = sum_lanes<A>(total);
}

template <typename T, int kHeads>
void attend_heads(const SlotRange<T>& range, int64_t first_head, const int32_t* slots,
                  int64_t count) {
  using A = Accumulator<T>;
  constexpr int kSlots = slots_at_once(kHeads);
  const int64_t head_dim = range.head_dim;
  const Queries<T, kHeads> queries(range.query, first_head, head_dim);
  // Every row in the order in which it is needed; behind them those of the next range.
  const T* keys[2 * kSlotsPerRange + kRowsAhead];
  const T** const values = keys + count;
  for (int64_t i = 0; i < count; ++i) {
    keys[i] = range.k[slots[i]];
    values[i] = range.v[slots[i]];
  }
  for (int64_t i = 0; i < kRowsAhead; ++i) {
    values[count + i] =
        range.end + i < range.fetch_end ? range.k[range.end + i] : values[count - 1];
  }
  // Where every slot is occupied, a weight's place is its slot's.
  const bool is_full = count == kSlotsPerRange;
  A gathered[kHeads * kSlotsPerRange];
  A* const by_slot = range.weights + first_head * range.weights_stride;
  A* const weights = is_full ? by_slot + range.begin : gathered;
  const int64_t stride = is_full ? range.weights_stride : kSlotsPerRange;

  int64_t i = 0;
  for (; i + kSlots <= count; i += kSlots) {
    H2O_UNROLL
    for (int s = 0; s < kSlots; ++s) prefetch(keys[i + s + kRowsAhead], head_dim);
    queries.template dot<kSlots>(keys + i, weights + i, stride);
  }
  for (; i < count; ++i) queries.template dot<1>(keys + i, weights + i, stride);

  for (int h = 0; h < kHeads; ++h) {
    A* const of_head = weights + h * stride;
    for (int64_t s = 0; s < count; ++s) of_head[s] *= range.terms.scale;
    if (range.terms.alibi_slopes != nullptr) {
      for (int64_t s = 0; s < count; ++s) {
        const int64_t distance =
            int64_t{range.positions[slots[s] * range.positions_stride]} - range.query_position;
        of_head[s] += range.terms.alibi_slopes[first_head + h] * static_cast<A>(distance);
      }
    }
    softmax(of_head, count, range.maximum + first_head + h, range.sum + first_head + h);
    if (is_full) continue;
    for (int64_t s = 0; s < count; ++s) by_slot[h * range.weights_stride + slots[s]] = of_head[s];
  }

  // A block of rows at a time, which stays in the first-level cache for all passes over it.
  constexpr int64_t kBlock = 16;
  A sums[kHeads][kMaxHeadDim];
  for (int h = 0; h < kHeads; ++h) {
    for (int64_t d = 0; d < round_up(head_dim, kPairLanes<A>); ++d) sums[h][d] = 0;
  }
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    weigh<T, kHeads>(weights + begin, stride, values + begin, smaller(count - begin, kBlock),
                     head_dim, sums);
  }
  for (int h = 0; h < kHeads; ++h) {
    A* const output = range.output + (first_head + h) * head_dim;
    for (int64_t d = 0; d < head_dim; d += kPairLanes<A>) {
      store_first<A>(output + d, in_order<T>(load_pair(sums[h] + d)),
                     smaller(head_dim - d, kPairLanes<A>));
    }
  }
}

// attend_heads of `num_heads` heads, at most kMaxHeads.
template <typename T, int kHeads = kMaxHeads>
void attend_some_heads(const SlotRange<T>& range, int64_t first_head, int64_t num_heads,
                       const int32_t* slots, int64_t count) {
  if constexpr (kHeads > 1) {
    if (num_heads < kHeads) {
      attend_some_heads<T, kHeads - 1>(range, first_head, num_heads, slots, count);
      return;
    }
  }
  attend_heads<T, kHeads>(range, first_head, slots, count);
}

template <typename T>
void attend_range(const SlotRange<T>& range) {
  using A = Accumulator<T>;
  int32_t slots[kSlotsPerRange];
  int64_t count = range.end - range.begin;
  int32_t lowest = 0;
  for (int64_t s = range.begin; s < range.end; ++s) {
    const int32_t position = range.positions[s * range.positions_stride];
    lowest = position < lowest ? position : lowest;
    slots[s - range.begin] = static_cast<int32_t>(s);
  }
  if (lowest < 0) {
    count = 0;
    for (int64_t s = range.begin; s < range.end; ++s) {
      slots[count] = static_cast<int32_t>(s);
      count += range.positions[s * range.positions_stride] >= 0;
    }
  }
  if (count == 0) {
    for (int64_t h = 0; h < range.group_size; ++h) {
      range.maximum[h] = kMinusInfinity<A>;
      range.sum[h] = 0;
      for (int64_t d = 0; d < range.head_dim; ++d) range.output[h * range.head_dim + d] = 0;
    }
    return;
  }
  for (int64_t h = 0; h < range.group_size; h += kMaxHeads) {
    attend_some_heads<T>(range, h, smaller(range.group_size - h, kMaxHeads), slots, count);
  }
}

// ---- The ranges and the new token together

// factors[range, head], which turn a range's weights into softmax weights, and behind them
// new_weights[head], the new token's own.
template <typename T>
void normalise(const StepMerge<T>& step, Accumulator<T>* factors, Accumulator<T>* new_weights) {
  using A = Accumulator<T>;
  const int64_t group_size = step.group_size, num_factors = step.num_ranges * group_size;
  for (int64_t h = 0; h < group_size; ++h) {
    const T* const key = step.k_new;
    A logit;
    Queries<T, 1>(step.query, h, step.head_dim).template dot<1>(&key, &logit, 1);
    logit *= step.terms.scale;  // its distance to itself is 0: no ALiBi
    A maximum = larger(kMinusInfinity<A>, logit);
    for (int64_t i = h; i < num_factors; i += group_size) {
      maximum = larger(maximum, step.maximum[i]);
    }
    for (int64_t i = h; i < num_factors; i += group_size) factors[i] = step.maximum[i] - maximum;
    new_weights[h] = logit - maximum;
  }
  // new_weights lies behind the factors.
  int64_t i = 0;
  for (; i + kLanes<A> <= num_factors + group_size; i += kLanes<A>) {
    store(factors + i, exponential(load(factors + i)));
  }
  for (; i < num_factors + group_size; ++i) factors[i] = exponential(factors[i]);
  for (int64_t h = 0; h < group_size; ++h) {
    // An empty range has a sum of 0, and so has one in which every logit is -inf.
    A total = 0;
    for (int64_t r = h; r < num_factors; r += group_size) total += step.sum[r] * factors[r];
    total += new_weights[h];
    for (int64_t r = h; r < num_factors; r += group_size) factors[r] /= total;
    new_weights[h] /= total;
  }
}

template <typename T>
void merge_outputs(const StepMerge<T>& step, const Accumulator<T>* factors,
                   const Accumulator<T>* new_weights) {
  using A = Accumulator<T>;
  const int64_t group_size = step.group_size, head_dim = step.head_dim;
  for (int64_t d = 0; d < head_dim; d += kPairLanes<A>) {
    const int64_t count = smaller(head_dim - d, kPairLanes<A>);
    const Pair<A> value = in_order<T>(load_pair(step.v_new + d, count));
    for (int64_t h = 0; h < group_size; ++h) {
      Pair<A> sum = {Vector<A>(0), Vector<A>(0)};
      const auto add = [&sum](const Pair<A>& pair, A weight) {
        sum.first = at::vec::fmadd(pair.first, Vector<A>(weight), sum.first);
        sum.second = at::vec::fmadd(pair.second, Vector<A>(weight), sum.second);
      };
      for (int64_t r = 0; r < step.num_ranges; ++r) {
        add(load_pair(step.partial + (r * group_size + h) * head_dim + d, count),
            factors[r * group_size + h]);
      }
      add(value, new_weights[h]);
      store_first<T>(step.output[h] + d, sum, count);
    }
  }
}

// Adds the mass of the slots begin..end of one range to their scores. A slot's mass does not depend
// on where the slot lies or how scores and positions do: equal tokens must stay equal.
template <typename T, typename Reduce>
void add_scores(const StepMerge<T>& step, int64_t begin, int64_t end,
                const Accumulator<T>* factors) {
  using A = Accumulator<T>;
  const auto mass_of = [&](int64_t s, int64_t count) {
    Vector<A> mass = Vector<A>::loadu(step.weights + s, count) * Vector<A>(factors[0]);
    for (int64_t h = 1; h < step.group_size; ++h) {
      const auto weight = Vector<A>::loadu(step.weights + h * step.weights_stride + s, count);
      if constexpr (std::is_same_v<Reduce, SumReduce>) {
        mass = at::vec::fmadd(weight, Vector<A>(factors[h]), mass);
      } else {
        mass = combine<Reduce>(mass, weight * Vector<A>(factors[h]));
      }
    }
    return mass;
  };
  const bool side_by_side = step.scores_stride == 1 && step.positions_stride == 1;
  for (int64_t s = begin; s < end; s += kLanes<A>) {
    const int64_t count = smaller(end - s, kLanes<A>);
    const Vector<A> mass = mass_of(s, count);
    if constexpr (std::is_same_v<A, float>) {
      if (side_by_side && count == kLanes<A>) {
        const Vector<A> score = load(step.scores + s);
        const auto is_empty = Vector<int32_t>::loadu(step.positions + s) < Vector<int32_t>(0);
        store(step.scores + s, Vector<A>::blendv(score + mass, score, at::vec::cast<A>(is_empty)));
        continue;
      }
    }
    A masses[kLanes<A>];
    store(masses, mass);
    for (int64_t i = 0; i < count; ++i) {
      if (step.positions[(s + i) * step.positions_stride] < 0) continue;
      step.scores[(s + i) * step.scores_stride] += masses[i];
    }
  }
}

template <typename T, typename Reduce>
void merge_step_with(StepMerge<T>& step) {
  using A = Accumulator<T>;
  A* const factors = step.scratch;
  A* const new_weights = factors + step.num_ranges * step.group_size;
  normalise(step, factors, new_weights);
  merge_outputs(step, factors, new_weights);
  for (int64_t r = 0; r < step.num_ranges; ++r) {
    const int64_t begin = r * kSlotsPerRange;
    add_scores<T, Reduce>(step, begin, smaller(begin + kSlotsPerRange, step.capacity),
                          factors + r * step.group_size);
  }
  A mass = new_weights[0];
  for (int64_t h = 1; h < step.group_size; ++h) mass = combine<Reduce>(mass, new_weights[h]);
  step.new_score = mass;
}

template <typename T>
void merge_step(StepMerge<T>& step) {
  step.gqa_reduce == GqaReduce::kSum ? merge_step_with<T, SumReduce>(step)
                                     : merge_step_with<T, MaxReduce>(step);
}

// ---- Who would leave

// One candidate per lane: whole numbers in the order of slot_order.h's leaves_before().
struct Candidates {
  using V = Vector<int32_t>;
  V key = V(INT32_MAX), position = V(INT32_MAX), slot = V(INT32_MAX);
};

// The bits of a float as a whole number of the same order; NaN is the lowest, -0.0 is 0.0.
inline Vector<int32_t> order_of(const Vector<float>& score) {
  using V = Vector<int32_t>;
  const V bits = at::vec::cast<int32_t>(score + Vector<float>(0.0f));
  const V key = bits ^ ((bits >> V(31)) & V(INT32_MAX));
  return V::blendv(key, V(INT32_MIN), at::vec::cast<int32_t>(score.isnan()));
}

SlotScan<float> scan_slots(const float* scores, const int32_t* positions, int64_t capacity,
                           int64_t newest, const Budget& budget) {
  using V = Vector<int32_t>;
  constexpr int64_t kStep = kLanes<float>;
  static_assert(kLanes<int32_t> == kStep);
  const int64_t last = newest - budget.num_recent;  // a negative one protects everybody
  const V oldest_allowed(static_cast<int32_t>(budget.num_sink));
  const V newest_allowed(static_cast<int32_t>(last < -1 ? -1 : last));
  Candidates best;
  V num_occupied(0), lowest_empty(INT32_MAX), slot = V::arange(0, 1);
  const auto look = [&](const Vector<float>& score, const V& position) {
    const V is_empty = position < V(0);
    num_occupied = num_occupied + V(1) + is_empty;  // true is -1
    lowest_empty = at::vec::minimum(lowest_empty, V::blendv(V(INT32_MAX), slot, is_empty));
    const V may_leave = (position >= oldest_allowed) & (position <= newest_allowed);
    const V key = order_of(score);
    const V leaves_before = (key < best.key) | ((key == best.key) & (position < best.position));
    const V is_better = may_leave & leaves_before;
    best.key = V::blendv(best.key, key, is_better);
    best.position = V::blendv(best.position, position, is_better);
    best.slot = V::blendv(best.slot, slot, is_better);
    slot = slot + V(static_cast<int32_t>(kStep));
  };
  int64_t s = 0;
  for (; s + kStep <= capacity; s += kStep) look(load(scores + s), V::loadu(positions + s));
  int64_t occupied_padding = 0;
  if (s < capacity) {
    // Filled up with the last slot, again and again: its own index is lower and goes first.
    float rest_scores[kStep];
    int32_t rest[kStep];
    for (int64_t i = 0; i < kStep; ++i) {
      const int64_t from = smaller(s + i, capacity - 1);
      rest_scores[i] = scores[from];
      rest[i] = positions[from];
    }
    if (positions[capacity - 1] >= 0) occupied_padding = s + kStep - capacity;
    look(load(rest_scores), V::loadu(rest));
  }
  int32_t keys[kStep], at[kStep], slots[kStep], occupied[kStep], empty[kStep];
  best.key.store(keys);
  best.position.store(at);
  best.slot.store(slots);
  num_occupied.store(occupied);
  lowest_empty.store(empty);
  SlotScan<float> scan;
  scan.occupied = -occupied_padding;
  int32_t first_empty = INT32_MAX;
  int64_t lane = 0;
  for (int64_t i = 0; i < kStep; ++i) {
    scan.occupied += occupied[i];
    if (empty[i] < first_empty) first_empty = empty[i];
    // Where even the position repeats, the lower slot, as everywhere.
    if (keys[i] < keys[lane] || (keys[i] == keys[lane] && at[i] < at[lane]) ||
        (keys[i] == keys[lane] && at[i] == at[lane] && slots[i] < slots[lane])) {
      lane = i;
    }
  }
  if (first_empty != INT32_MAX) scan.lowest_empty = first_empty;
  if (slots[lane] != INT32_MAX) {
    scan.victim = slots[lane];
    scan.victim_score = scores[scan.victim];
    scan.victim_position = at[lane];
  }
  return scan;
}

template <typename T>
constexpr DecodeKernels<T> kDecodeKernels = {attend_range<T>, merge_step<T>};

}  // namespace

namespace H2O_ISA {
template <typename T>
const DecodeKernels<T>& decode_kernels();
template <>
const DecodeKernels<float>& decode_kernels() {
  return kDecodeKernels<float>;
}
template <>
const DecodeKernels<double>& decode_kernels() {
  return kDecodeKernels<double>;
}
template <>
const DecodeKernels<at::Half>& decode_kernels() {
  return kDecodeKernels<at::Half>;
}
template <>
const DecodeKernels<at::BFloat16>& decode_kernels() {
  return kDecodeKernels<at::BFloat16>;
}
ScanSlots& scan_slots_kernel();
ScanSlots& scan_slots_kernel() { return scan_slots; }
}  // namespace H2O_ISA

}  // namespace h2o::cpu
