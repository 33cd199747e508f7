#pragma once

#include "h2o/kernels/cuda/block.cuh"
#include "h2o/kernels/gqa_reduce.h"
#include "h2o/kernels/score_rule.h"

// One token of each row, in one launch: attend, score, evict and store. K and V of the cache are
// read once, for all query heads of a group together; how, is for those to say who know the
// threads' arithmetic: decode_vectors.cuh and decode_matrices.cuh.
namespace h2o::cuda {

// How a block divides its work, and where in shared memory it keeps what (in elements).
struct DecodePlan {
  int32_t lanes, width, rounds;  // DecodeTile's
  int32_t padded_dim;            // of a query in shared memory
  int32_t ranges;                // of kSlotRange slots, in the capacity
  int32_t ranges_per_split;      // for each block
  int32_t slots;                 // that a block keeps weights of, a multiple of kWarpSize
  int32_t positions, weights, maximum, sum, factor, share, new_factor, total, output, work;
  int64_t elements;  // in all
};

H2O_HOST_DEVICE constexpr int32_t rounded_up(int32_t count, int32_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// What the arithmetic asks for.
struct DecodeTile {
  int32_t lanes;          // that share a vector of head_dim
  int32_t width;          // elements of it that they take at once
  int32_t heads;          // to a multiple of which the query heads are padded with zeros
  int64_t work_elements;  // shared memory of its own
};

inline DecodePlan plan_decode_step(const Sizes& sizes, int32_t capacity, int32_t splits,
                                   const DecodeTile& tile) {
  DecodePlan plan = {};
  plan.lanes = tile.lanes;
  plan.width = tile.width;
  plan.rounds = (sizes.head_dim + tile.width - 1) / tile.width;
  plan.padded_dim = plan.rounds * tile.width;
  plan.ranges = static_cast<int32_t>(slot_ranges(capacity));
  plan.ranges_per_split = (plan.ranges + splits - 1) / splits;
  plan.slots = plan.ranges_per_split * kSlotRange;
  if (plan.slots > capacity) plan.slots = rounded_up(capacity, kWarpSize);
  const int32_t group_size = sizes.group_size;
  int64_t next = 0;
  const auto take = [&next](int64_t elements) {
    const int64_t first = next;
    next += (elements + 7) / 8 * 8;
    return static_cast<int32_t>(first);
  };
  take(int64_t{rounded_up(group_size, tile.heads)} * plan.padded_dim);  // the queries
  plan.positions = take(plan.slots);
  plan.weights = take(int64_t{group_size} * plan.slots);
  plan.maximum = take(int64_t{plan.ranges_per_split} * group_size);
  plan.sum = take(int64_t{plan.ranges_per_split} * group_size);
  plan.factor = take(int64_t{plan.ranges} * group_size);
  plan.share = take(int64_t{plan.ranges} * group_size);
  plan.new_factor = take(group_size);
  plan.total = take(group_size);
  plan.output = take(int64_t{group_size} * sizes.head_dim);
  plan.work = take(tile.work_elements);
  plan.elements = next;
  return plan;
}

struct DecodeShared {
  BlockScratch scratch;
  int32_t arrived_last;
  int32_t padding[7];
};

// What the decision needs to know.
template <typename A>
struct StepScan {
  Candidate<A> victim = {A{0}, -1, -1};  // index: the slot, or capacity for the new token; -1:
                                         // everyone is protected
  int32_t occupied = 0;                  // candidates, the new token among them
  int32_t lowest_empty = INT32_MAX;      // slot
};

// 32 slots of a range, a warp's.
struct WarpSlots {
  int32_t first;      // slot
  int32_t index;      // of the first, among those of the block
  unsigned occupied;  // a bit each
};

// A block at work on one token of one (row, KV head). Warp w has the slots 32 w .. 32 w + 31 of
// each range. The new token stays out of the cache to the end: it is the candidate after the last
// slot.
//
// Weights are normalised late: a slot's is exp(logit - maximum of its range), and a range's factor
// exp(maximum of the range - maximum of all).
//
// Derived, the arithmetic, has
//   kHeadTile                   to a multiple of which the query heads are padded
//   load_own_queries()          in whatever other form it wants them
//   write_logits(slots, own)    for the warp's slots that are occupied; own is the position of the
//                               slot that has the lane's number
//   weigh_values(range, emit)   sums weight times value over the slots of a range and calls
//                               emit(query head of the group, element, sum), always by the same
//                               thread for the same element; called by the block
template <typename T, typename Derived>
struct DecodeBlock {
  using A = Accumulator<T>;

  const DecodeStep<T>& step;
  const DecodePlan& plan;
  DecodeShared& shared;
  A* const memory;  // shared, as the plan divides it
  int32_t row, head;
  int32_t first_range, end_range;  // of this block
  int32_t lane, new_position;

  __device__ DecodeBlock(const DecodeStep<T>& step, const DecodePlan& plan)
      : step(step),
        plan(plan),
        shared(dynamic_shared<DecodeShared>()),
        memory(after<A>(shared)),
        lane(threadIdx.x % kWarpSize) {
    const int32_t row_head = static_cast<int32_t>(blockIdx.x) / step.splits;
    row = row_head / static_cast<int32_t>(step.sizes.num_kv_heads);
    head = row_head % static_cast<int32_t>(step.sizes.num_kv_heads);
    first_range = static_cast<int32_t>(blockIdx.x % step.splits) * plan.ranges_per_split;
    end_range = Smallest()(first_range + plan.ranges_per_split, plan.ranges);
    new_position = step.position_new.at(row, step.column);
  }

  __device__ int32_t group_size() const { return step.sizes.group_size; }
  __device__ int32_t head_dim() const { return step.sizes.head_dim; }
  __device__ int32_t capacity() const { return step.cache.capacity; }
  __device__ int64_t row_head() const { return row * step.sizes.num_kv_heads + head; }
  __device__ int32_t& evicted() const {
    return step.evicted[row_head() * step.sizes.num_new + step.column];
  }
  __device__ int64_t q_head(int32_t g) const { return head * group_size() + g; }
  __device__ int32_t position(int32_t slot) const {
    return slot < capacity() ? *step.cache.positions.at(row, head, slot) : -1;
  }
  // Of the block's slots; -1 for an empty one.
  __device__ int32_t* positions() const {
    return reinterpret_cast<int32_t*>(memory + plan.positions);
  }
  // The block's weights of a query head; index 0 is the first slot of its first range.
  __device__ A* weights(int32_t g) const { return memory + plan.weights + g * plan.slots; }

  __device__ const Derived& derived() const { return static_cast<const Derived&>(*this); }

  __device__ void load_queries() const {
    const int32_t elements = rounded_up(group_size(), Derived::kHeadTile) * plan.padded_dim;
    for (int32_t i = threadIdx.x; i < elements; i += blockDim.x) {
      const int32_t g = i / plan.padded_dim, d = i % plan.padded_dim;
      const bool present = g < group_size() && d < head_dim();
      memory[i] = present ? static_cast<A>(step.query.at(row, q_head(g), step.column)[d]) : A{0};
    }
    derived().load_own_queries();
  }

  // The warp's 32 slots of a range.
  __device__ WarpSlots warp_slots(int32_t range) const {
    const int32_t first = range * kSlotRange + static_cast<int32_t>(threadIdx.x) - lane;
    return {first, first - first_range * kSlotRange, 0};
  }
  __device__ void find_logits(int32_t range) const {
    WarpSlots slots = warp_slots(range);
    if (slots.index >= plan.slots) return;
    const int32_t own_position = position(slots.first + lane);
    slots.occupied = __ballot_sync(kAllLanes, own_position >= 0);
    positions()[slots.index + lane] = own_position;
    if (own_position < 0) {
      for (int32_t g = 0; g < group_size(); ++g) {
        weights(g)[slots.index + lane] = -std::numeric_limits<A>::infinity();
      }
    }
    if (slots.occupied != 0) derived().write_logits(slots, own_position);
  }
  // To be called after a barrier.
  __device__ WarpSlots weighted_slots(int32_t range) const {
    WarpSlots slots = warp_slots(range);
    slots.occupied =
        __ballot_sync(kAllLanes, slots.index < plan.slots && positions()[slots.index + lane] >= 0);
    return slots;
  }

  // Logits become weights; maximum and sum of each range and query head are written. A warp takes
  // one of them at a time.
  __device__ void exponentiate() const {
    const int32_t pairs = (end_range - first_range) * group_size();
    for (int32_t pair = threadIdx.x / kWarpSize; pair < pairs; pair += blockDim.x / kWarpSize) {
      const int32_t first = pair / group_size() * kSlotRange;
      const int32_t end = Smallest()(kSlotRange, plan.slots - first);
      A* const of_range = weights(pair % group_size()) + first;
      A maximum = -std::numeric_limits<A>::infinity();
      for (int32_t i = lane; i < end; i += kWarpSize) maximum = Largest()(maximum, of_range[i]);
      maximum = warp_reduce(maximum, Largest());
      const A subtracted = finite_or_zero(maximum);
      A sum = 0;
      for (int32_t i = lane; i < end; i += kWarpSize) {
        of_range[i] = exponential(of_range[i] - subtracted);
        sum += of_range[i];
      }
      sum = warp_reduce(sum, Sum());
      if (lane != 0) continue;
      memory[plan.maximum + pair] = maximum;
      memory[plan.sum + pair] = sum;
    }
  }

  // From maximum and sum of all ranges and the new token's logit: factor, share (factor / total),
  // new_factor and total of each query head. One warp a head.
  __device__ void share_out(const A* maximum, const A* sum) const {
    const T* const key = step.k_new.at(row, head, step.column);
    for (int32_t g = threadIdx.x / kWarpSize; g < group_size(); g += blockDim.x / kWarpSize) {
      A dot = 0;
      for (int32_t d = lane; d < head_dim(); d += kWarpSize) {
        dot += memory[g * plan.padded_dim + d] * static_cast<A>(key[d]);
      }
      const A logit =
          step.terms.logit(warp_reduce(dot, Sum()), q_head(g), new_position, new_position);
      A largest = logit;
      for (int32_t range = lane; range < plan.ranges; range += kWarpSize) {
        largest = Largest()(largest, maximum[range * group_size() + g]);
      }
      largest = finite_or_zero(warp_reduce(largest, Largest()));
      A total = 0;
      for (int32_t range = lane; range < plan.ranges; range += kWarpSize) {
        const int32_t i = range * group_size() + g;
        const A factor = exponential(maximum[i] - largest);
        memory[plan.factor + i] = factor;
        total = multiply_add(sum[i], factor, total);
      }
      const A new_factor = exponential(logit - largest);
      total = warp_reduce(total, Sum()) + new_factor;
      for (int32_t range = lane; range < plan.ranges; range += kWarpSize) {
        const int32_t i = range * group_size() + g;
        memory[plan.share + i] = memory[plan.factor + i] / total;
      }
      if (lane != 0) continue;
      memory[plan.new_factor + g] = new_factor;
      memory[plan.total + g] = total;
    }
  }

  __device__ A of_new_token(int32_t g, int32_t d) const {
    return memory[plan.new_factor + g] * static_cast<A>(step.v_new.at(row, head, step.column)[d]);
  }
  // The output times total: of the new token, then of each range.
  __device__ void add_values() const {
    A* const sums = memory + plan.output;
    for (int32_t i = threadIdx.x; i < group_size() * head_dim(); i += blockDim.x) {
      sums[i] = of_new_token(i / head_dim(), i % head_dim());
    }
    __syncthreads();
    for (int32_t range = 0; range < plan.ranges; ++range) {
      const A* const factor = memory + plan.factor + range * group_size();
      derived().weigh_values(range, [&](int32_t g, int32_t d, A sum) {
        A& to = sums[g * head_dim() + d];
        to = multiply_add(factor[g], sum, to);
      });
    }
    __syncthreads();
  }
  // The same, to the bit, from what all blocks left.
  __device__ void add_parts(const A* parts) const {
    for (int32_t i = threadIdx.x; i < group_size() * head_dim(); i += blockDim.x) {
      const int32_t g = i / head_dim();
      A sum = of_new_token(g, i % head_dim());
      for (int32_t range = 0; range < plan.ranges; ++range) {
        const A of_range = parts[int64_t{range} * group_size() * head_dim() + i];
        sum = multiply_add(memory[plan.factor + range * group_size() + g], of_range, sum);
      }
      memory[plan.output + i] = sum;
    }
  }

  // Adds the weights of a query head at `slot` (head_weights[g * stride + slot]) to the scores, and
  // finds who would leave.
  template <typename Rule>
  __device__ StepScan<A> add_scores(const A* head_weights, int64_t stride, A new_score,
                                    const Budget& budget, const Rule& rule,
                                    Received<A> received) const {
    StepScan<A> scan;
    const bool is_sum = step.gqa_reduce == GqaReduce::kSum;
#pragma unroll 1
    for (int32_t slot = threadIdx.x; slot < capacity(); slot += blockDim.x) {
      const int32_t slot_position = step.splits == 1 ? positions()[slot] : position(slot);
      if (slot_position < 0) {
        scan.lowest_empty = Smallest()(scan.lowest_empty, slot);
        continue;
      }
      ++scan.occupied;
      const A* const share = memory + plan.share + slot / kSlotRange * group_size();
      A score = head_weights[slot] * share[0];
      for (int32_t g = 1; g < group_size(); ++g) {
        const A weight = head_weights[g * stride + slot] * share[g];
        score = is_sum ? SumReduce::combine(score, weight) : MaxReduce::combine(score, weight);
      }
      received.mass = score;
      if (rule.reads_values()) {
        received.value_norm = value_norm_of<A>(step.cache.v.at(row, head, slot), head_dim());
      }
      A* const stored = step.cache.scores.at(row, head, slot);
      score = rule.grown(*stored, received);
      *stored = score;
      if (!is_protected(slot_position, new_position, budget)) {
        const A key = rule.order_key(score, slot_position, new_position);
        scan.victim = First()(scan.victim, Candidate<A>{key, slot_position, slot});
      }
    }
    if (threadIdx.x == 0) {
      ++scan.occupied;
      if (!is_protected(new_position, new_position, budget)) {
        const A key = rule.order_key(new_score, new_position, new_position);
        scan.victim = First()(scan.victim, Candidate<A>{key, new_position, capacity()});
      }
    }
    scan.victim = block_reduce(scan.victim, First(), shared.scratch);
    scan.occupied = block_reduce(scan.occupied, Sum(), shared.scratch);
    scan.lowest_empty = block_reduce(scan.lowest_empty, Smallest(), shared.scratch);
    return scan;
  }

  // Of a group's mass, when every token that is attended gets the same.
  __device__ A even_share() const {
    int32_t attended = threadIdx.x == 0 ? 1 : 0;
    for (int32_t slot = threadIdx.x; slot < capacity(); slot += blockDim.x) {
      attended += position(slot) >= 0;
    }
    attended = block_reduce(attended, Sum(), shared.scratch);
    const A heads = step.gqa_reduce == GqaReduce::kSum ? static_cast<A>(group_size()) : A{1};
    return heads / static_cast<A>(attended);
  }
  // Scores by any rule, then who leaves.
  __device__ void score_and_store(const A* head_weights, int64_t stride,
                                  const Budget& budget) const {
    const A mass = new_mass();
    if (step.scoring.is_paper() && step.score_new.data == nullptr) {
      evict_and_store(add_scores(head_weights, stride, mass, budget, PaperScoring(), {}), budget,
                      mass);
      return;
    }
    const NamedScoring& rule = step.scoring;
    Received<A> received;
    received.kept = rule.template kept<A>();
    if (rule.counts_misses()) received.even_share = even_share();
    Received<A> own = received;
    own.mass = mass;
    if (rule.reads_values())
      own.value_norm = value_norm_of<A>(step.v_new.at(row, head, step.column), head_dim());
    A score = rule.first(own, head, new_position);
    if (step.score_new.data != nullptr) score += *step.score_new.at(row, head, step.column);
    evict_and_store(add_scores(head_weights, stride, score, budget, rule, received), budget, score);
  }

  // What the new token gave to itself.
  __device__ A new_mass() const {
    A score = memory[plan.new_factor] / memory[plan.total];
    for (int32_t g = 1; g < group_size(); ++g) {
      const A weight = memory[plan.new_factor + g] / memory[plan.total + g];
      score = step.gqa_reduce == GqaReduce::kSum ? SumReduce::combine(score, weight)
                                                 : MaxReduce::combine(score, weight);
    }
    return score;
  }

  // Calls write(element of output, its query head of the group, its index in head_dim).
  template <typename Write>
  __device__ void for_each_output(Write write) const {
    for (int32_t i = threadIdx.x; i < group_size() * head_dim(); i += blockDim.x) {
      const int32_t g = i / head_dim(), d = i % head_dim();
      write(step.output.at(row, q_head(g), step.column)[d * step.output_dim_stride], g, d);
    }
  }

  // One leaves where the budget is exceeded; where everyone is protected, which takes positions
  // that do not increase, the new token does. The new one goes into the slot that is free.
  __device__ void evict_and_store(const StepScan<A>& scan, const Budget& budget, A score) const {
    // A row's own budget may not have been checked; more than the capacity can never stay.
    const bool evicts = scan.occupied > Smallest()(budget.total(), int64_t{capacity()});
    const int32_t leaving = scan.victim.index < 0 ? capacity() : scan.victim.index;
    const int32_t slot = evicts ? leaving : scan.lowest_empty;
    const bool stays = slot < capacity();
    if (threadIdx.x == 0) {
      evicted() = !evicts ? -1 : stays ? position(slot) : new_position;
      if (stays) {
        *step.cache.positions.at(row, head, slot) = new_position;
        *step.cache.scores.at(row, head, slot) = score;
      }
    }
    if (!stays) return;
    const bool hands_out = evicts && step.k_evicted.data != nullptr;
    for (int32_t d = threadIdx.x; d < head_dim(); d += blockDim.x) {
      T& key = step.cache.k.at(row, head, slot)[d];
      T& value = step.cache.v.at(row, head, slot)[d];
      if (hands_out) {
        step.k_evicted.at(row, head, step.column)[d] = key;
        step.v_evicted.at(row, head, step.column)[d] = value;
      }
      key = step.k_new.at(row, head, step.column)[d];
      value = step.v_new.at(row, head, step.column)[d];
    }
  }

  // What the block found out about its ranges, for the last block.
  __device__ void leave_parts() const {
    const int64_t stride = int64_t{plan.ranges} * kSlotRange;
    const int32_t first_slot = first_range * kSlotRange;
    const int32_t end_slot = Smallest()(end_range * kSlotRange, capacity());
    for (int32_t g = 0; g < group_size(); ++g) {
      A* const to = step.parts.weights + (row_head() * group_size() + g) * stride;
      for (int32_t slot = first_slot + threadIdx.x; slot < end_slot; slot += blockDim.x) {
        to[slot] = weights(g)[slot - first_slot];
      }
    }
    const int64_t first = (row_head() * plan.ranges + first_range) * group_size();
    for (int32_t i = threadIdx.x; i < (end_range - first_range) * group_size(); i += blockDim.x) {
      step.parts.maximum[first + i] = memory[plan.maximum + i];
      step.parts.sum[first + i] = memory[plan.sum + i];
    }
    A* const output = step.parts.output + first * head_dim();
    for (int32_t range = first_range; range < end_range; ++range) {
      derived().weigh_values(range, [&](int32_t g, int32_t d, A sum) {
        output[(int64_t{range - first_range} * group_size() + g) * head_dim() + d] = sum;
      });
    }
  }

  // Whether all other blocks of this (row, KV head) have left their parts, which this one then
  // sees.
  __device__ bool is_last() const {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned* const arrivals = step.parts.arrivals + row_head();
      const bool last = atomicAdd(arrivals, 1u) + 1u == static_cast<unsigned>(step.splits);
      if (last) atomicExch(arrivals, 0u);  // for the next launch
      shared.arrived_last = last ? 1 : 0;
    }
    __syncthreads();
    __threadfence();
    return shared.arrived_last != 0;
  }

  __device__ void run() {
    if (new_position < 0) {  // padding
      if (first_range > 0) return;
      for_each_output([](T& output, int32_t, int32_t) { output = static_cast<T>(0.0f); });
      if (threadIdx.x == 0) evicted() = -1;
      return;
    }
    load_queries();
    __syncthreads();
    for (int32_t range = first_range; range < end_range; ++range) find_logits(range);
    __syncthreads();
    exponentiate();
    __syncthreads();
    const bool alone = step.splits == 1;
    if (!alone) {
      leave_parts();
      if (!is_last()) return;
    }
    const int64_t first_part = row_head() * plan.ranges * group_size();
    share_out(alone ? memory + plan.maximum : step.parts.maximum + first_part,
              alone ? memory + plan.sum : step.parts.sum + first_part);
    __syncthreads();
    if (alone) {
      add_values();
    } else {
      add_parts(step.parts.output + first_part * head_dim());
    }
    for_each_output([&](T& output, int32_t g, int32_t d) {
      output = static_cast<T>(memory[plan.output + g * head_dim() + d] / memory[plan.total + g]);
    });

    const Budget budget = step.budget.at(row);
    const int64_t stride = alone ? plan.slots : int64_t{plan.ranges} * kSlotRange;
    const A* const head_weights =
        alone ? weights(0) : step.parts.weights + row_head() * group_size() * stride;
    score_and_store(head_weights, stride, budget);
  }
};

}  // namespace h2o::cuda
