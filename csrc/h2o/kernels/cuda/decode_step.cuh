#pragma once

#include "h2o/kernels/cuda/block.cuh"
#include "h2o/kernels/gqa_reduce.h"

// One token at a time: attend, score, evict and store in one launch.
namespace h2o::cuda {

inline constexpr int kHeadTile = 4;  // query heads whose sums a thread keeps in registers at once
inline constexpr int kDimTile = 4;   // elements of each, kWarpSize apart

template <typename A>
struct DecodeStepShared {
  // Each warp's part of a tile of the output.
  A partial[kMaxWarps][kHeadTile][kDimTile * kWarpSize];
  BlockScratch scratch;
};

// What one token of one (row, KV head) may look at: itself, candidate 0, and slot i, candidate 1 +
// i. With the token in a fixed place, how the candidates are divided among threads does not depend
// on the capacity.
template <typename T>
struct StepCandidates {
  using A = Accumulator<T>;
  const T *k_new, *v_new;
  T *k, *v;
  int64_t k_stride, v_stride;
  A* scores;
  int64_t scores_stride;
  int32_t* positions;
  int64_t positions_stride;
  int32_t new_position;
  int32_t count;  // 1 + capacity

  __device__ const T* key(int32_t i) const { return i == 0 ? k_new : k + (i - 1) * k_stride; }
  __device__ const T* value(int32_t i) const { return i == 0 ? v_new : v + (i - 1) * v_stride; }
  __device__ int32_t position(int32_t i) const {
    return i == 0 ? new_position : positions[(i - 1) * positions_stride];
  }
};

// Calls visit(candidate, its position) for every occupied candidate of this warp: 32 in a row of
// every blockDim.x. All lanes of the warp visit together.
template <typename T, typename Visit>
__device__ __forceinline__ void for_each_of_warp(const StepCandidates<T>& candidates, Visit visit) {
  const int32_t lane = threadIdx.x % kWarpSize;
  for (int32_t first = threadIdx.x - lane; first < candidates.count; first += blockDim.x) {
    const int32_t position =
        first + lane < candidates.count ? candidates.position(first + lane) : -1;
    for (unsigned left = __ballot_sync(kAllLanes, position >= 0); left != 0; left &= left - 1) {
      const int32_t i = __ffs(static_cast<int>(left)) - 1;
      visit(first + i, __shfl_sync(kAllLanes, position, i));
    }
  }
}

// The token whose turn it is.
struct StepToken {
  int64_t row, q_head;  // the group's first
  int32_t column, position;
};

// weights[g][candidate] = logit of the group's head g, for every occupied candidate.
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ void write_logits(const DecodeStep<T>& step, const StepToken& token,
                                             const StepCandidates<T>& candidates, A* weights) {
  const int32_t group_size = step.sizes.group_size, lane = threadIdx.x % kWarpSize;
  for_each_of_warp(candidates, [&](int32_t i, int32_t position) {
    const T* const key = candidates.key(i);
    for (int32_t first = 0; first < group_size; first += kHeadTile) {
      A dot[kHeadTile] = {};
      for (int32_t d = lane; d < step.sizes.head_dim; d += kWarpSize) {
        const A element = static_cast<A>(key[d]);
#pragma unroll
        for (int32_t g = 0; g < kHeadTile; ++g) {
          if (first + g >= group_size) continue;
          const T* const query = step.query.at(token.row, token.q_head + first + g, token.column);
          dot[g] += static_cast<A>(query[d]) * element;
        }
      }
#pragma unroll
      for (int32_t g = 0; g < kHeadTile; ++g) {
        if (first + g >= group_size) continue;
        const A total = warp_reduce(dot[g], Sum());
        if (lane != 0) continue;
        weights[int64_t{first + g} * candidates.count + i] =
            step.terms.logit(total, token.q_head + first + g, position, token.position);
      }
    }
  });
}

// Logits become softmax weights, in place. Each thread leaves those of its own candidates, every
// blockDim.x-th.
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ void normalise(const StepCandidates<T>& candidates, int32_t group_size,
                                          A* weights, BlockScratch& scratch) {
  const int32_t count = candidates.count;
  for (int32_t g = 0; g < group_size; ++g) {
    A* const of_head = weights + int64_t{g} * count;
    A maximum = -std::numeric_limits<A>::infinity();
    for (int32_t i = threadIdx.x; i < count; i += blockDim.x) {
      if (candidates.position(i) >= 0) maximum = Largest()(maximum, of_head[i]);
    }
    maximum = finite_or_zero(block_reduce(maximum, Largest(), scratch));
    A sum = 0;
    for (int32_t i = threadIdx.x; i < count; i += blockDim.x) {
      if (candidates.position(i) < 0) continue;
      const A weight = exponential(of_head[i] - maximum);
      of_head[i] = weight;
      sum += weight;
    }
    sum = block_reduce(sum, Sum(), scratch);
    for (int32_t i = threadIdx.x; i < count; i += blockDim.x) {
      if (candidates.position(i) >= 0) of_head[i] /= sum;
    }
  }
}

// What the decision needs to know.
template <typename A>
struct StepScan {
  Candidate<A> victim = {A{0}, -1, -1};  // index -1: everyone is protected
  int32_t occupied = 0;                  // candidates, the new token among them
  int32_t lowest_empty = INT32_MAX;      // slot
  A new_score = 0;                       // the new token's own; only in thread 0
};

// Adds the weights to the scores. Reads only weights that this thread left.
template <typename Reduce, typename T, typename A = Accumulator<T>>
__device__ __forceinline__ StepScan<A> add_scores(const StepCandidates<T>& candidates,
                                                  int32_t group_size, const Budget& budget,
                                                  const A* weights, BlockScratch& scratch) {
  StepScan<A> scan;
  for (int32_t i = threadIdx.x; i < candidates.count; i += blockDim.x) {
    const int32_t position = candidates.position(i);
    if (position < 0) {
      scan.lowest_empty = Smallest()(scan.lowest_empty, i - 1);
      continue;
    }
    ++scan.occupied;
    A score = weights[i];
    for (int32_t g = 1; g < group_size; ++g) {
      score = Reduce::combine(score, weights[int64_t{g} * candidates.count + i]);
    }
    if (i == 0) {
      scan.new_score = score;
    } else {
      A& stored = candidates.scores[(i - 1) * candidates.scores_stride];
      stored += score;
      score = stored;
    }
    if (!is_protected(position, candidates.new_position, budget)) {
      scan.victim = First()(scan.victim, Candidate<A>{score, position, i});
    }
  }
  scan.victim = block_reduce(scan.victim, First(), scratch);
  scan.occupied = block_reduce(scan.occupied, Sum(), scratch);
  scan.lowest_empty = block_reduce(scan.lowest_empty, Smallest(), scratch);
  return scan;
}

// Over all candidates, also the one that leaves. A barrier must lie between the weights and this.
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ void write_output(const DecodeStep<T>& step, const StepToken& token,
                                             const StepCandidates<T>& candidates, const A* weights,
                                             DecodeStepShared<A>& shared) {
  constexpr int32_t kTileDims = kDimTile * kWarpSize;
  const int32_t group_size = step.sizes.group_size, head_dim = step.sizes.head_dim;
  const int32_t lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int32_t first = 0; first < group_size; first += kHeadTile) {
    for (int32_t first_dim = 0; first_dim < head_dim; first_dim += kTileDims) {
      A sum[kHeadTile][kDimTile] = {};
      for_each_of_warp(candidates, [&](int32_t i, int32_t) {
        const T* const value = candidates.value(i) + first_dim;
        A elements[kDimTile];
#pragma unroll
        for (int32_t j = 0; j < kDimTile; ++j) {
          const int32_t d = lane + j * kWarpSize;
          elements[j] = first_dim + d < head_dim ? static_cast<A>(value[d]) : A{0};
        }
#pragma unroll
        for (int32_t g = 0; g < kHeadTile; ++g) {
          if (first + g >= group_size) continue;
          const A weight = weights[int64_t{first + g} * candidates.count + i];
#pragma unroll
          for (int32_t j = 0; j < kDimTile; ++j) sum[g][j] += weight * elements[j];
        }
      });
#pragma unroll
      for (int32_t g = 0; g < kHeadTile; ++g) {
#pragma unroll
        for (int32_t j = 0; j < kDimTile; ++j) {
          shared.partial[warp][g][lane + j * kWarpSize] = sum[g][j];
        }
      }
      __syncthreads();
      for (int32_t element = threadIdx.x; element < kHeadTile * kTileDims; element += blockDim.x) {
        const int32_t g = element / kTileDims, d = first_dim + element % kTileDims;
        if (first + g >= group_size || d >= head_dim) continue;
        A total = 0;
        for (unsigned w = 0; w < blockDim.x / kWarpSize; ++w) {
          total += shared.partial[w][g][d - first_dim];
        }
        T* const output = step.output.at(token.row, token.q_head + first + g, token.column);
        output[d * step.output_dim_stride] = static_cast<T>(total);
      }
      __syncthreads();
    }
  }
}

template <typename T>
__device__ __forceinline__ void write_zeros(const DecodeStep<T>& step, const StepToken& token) {
  const int32_t elements = step.sizes.group_size * step.sizes.head_dim;
  for (int32_t element = threadIdx.x; element < elements; element += blockDim.x) {
    const int32_t g = element / step.sizes.head_dim, d = element % step.sizes.head_dim;
    T* const output = step.output.at(token.row, token.q_head + g, token.column);
    output[d * step.output_dim_stride] = static_cast<T>(0.0f);
  }
}

// The new token goes into `slot`, whole.
template <typename T, typename A = Accumulator<T>>
__device__ __forceinline__ void store(const StepCandidates<T>& candidates, int32_t head_dim,
                                      int32_t slot, A new_score) {
  if (threadIdx.x == 0) {
    candidates.positions[slot * candidates.positions_stride] = candidates.new_position;
    candidates.scores[slot * candidates.scores_stride] = new_score;
  }
  for (int32_t d = threadIdx.x; d < head_dim; d += blockDim.x) {
    candidates.k[slot * candidates.k_stride + d] = candidates.k_new[d];
    candidates.v[slot * candidates.v_stride + d] = candidates.v_new[d];
  }
}

// One block per (row, KV head), which takes the new tokens in turn. A warp takes one candidate at a
// time and its lanes divide head_dim; for softmax, scores and victim a thread takes every
// blockDim.x-th candidate. Shared memory holds the weights of the group's heads for all candidates,
// where they fit.
template <typename T, typename Reduce>
__global__ void __launch_bounds__(kMaxThreads, 2)
    decode_step(const __grid_constant__ DecodeStep<T> step) {
  using A = Accumulator<T>;
  auto& shared = dynamic_shared<DecodeStepShared<A>>();
  const int64_t row = blockIdx.x / step.sizes.num_kv_heads;
  const int64_t head = blockIdx.x % step.sizes.num_kv_heads;
  const int32_t group_size = step.sizes.group_size;

  StepCandidates<T> candidates = {};
  candidates.k = step.cache.k.at(row, head);
  candidates.v = step.cache.v.at(row, head);
  candidates.k_stride = step.cache.k.token_stride;
  candidates.v_stride = step.cache.v.token_stride;
  candidates.scores = step.cache.scores.at(row, head);
  candidates.scores_stride = step.cache.scores.token_stride;
  candidates.positions = step.cache.positions.at(row, head);
  candidates.positions_stride = step.cache.positions.token_stride;
  candidates.count = step.cache.capacity + 1;
  A* const weights = step.weights == nullptr
                         ? after<A>(shared)
                         : step.weights + blockIdx.x * (int64_t{group_size} * candidates.count);
  int32_t* const evicted = step.evicted + int64_t{blockIdx.x} * step.sizes.num_new;
  const Budget budget = step.budget.at(row);
  // A row's own budget may not have been checked; more than the capacity can never stay.
  const int64_t most = Smallest()(budget.total(), int64_t{step.cache.capacity});

  for (int32_t column = 0; column < step.sizes.num_new; ++column) {
    const StepToken token = {row, head * group_size, column, step.position_new.at(row, column)};
    if (token.position < 0) {  // padding
      write_zeros(step, token);
      if (threadIdx.x == 0) evicted[column] = -1;
      continue;
    }
    candidates.new_position = token.position;
    candidates.k_new = step.k_new.at(row, head, column);
    candidates.v_new = step.v_new.at(row, head, column);
    write_logits(step, token, candidates, weights);
    __syncthreads();
    normalise(candidates, group_size, weights, shared.scratch);
    const StepScan<A> scan =
        add_scores<Reduce>(candidates, group_size, budget, weights, shared.scratch);
    write_output(step, token, candidates, weights, shared);

    // One leaves where the budget is exceeded; where everyone is protected, which takes positions
    // that do not increase, the new token does.
    const bool evicts = scan.occupied > most;
    const int32_t leaving = scan.victim.index < 0 ? 0 : scan.victim.index;
    const int32_t slot = evicts ? leaving - 1 : scan.lowest_empty;  // -1: it is not stored
    if (threadIdx.x == 0) evicted[column] = evicts ? candidates.position(leaving) : -1;
    if (slot >= 0) store(candidates, step.sizes.head_dim, slot, scan.new_score);
    __syncthreads();
  }
}

template <typename T>
int64_t decode_step_shared_bytes(const Sizes& sizes, int32_t capacity) {
  using A = Accumulator<T>;
  return static_cast<int64_t>(sizeof(DecodeStepShared<A>)) +
         decode_step_weights(sizes, capacity) * static_cast<int64_t>(sizeof(A));
}

template <typename T>
cudaError_t launch_decode_step(const DecodeStep<T>& step, cudaStream_t stream) {
  const auto kernel =
      step.gqa_reduce == GqaReduce::kSum ? decode_step<T, SumReduce> : decode_step<T, MaxReduce>;
  const int64_t shared_bytes = step.weights == nullptr
                                   ? decode_step_shared_bytes<T>(step.sizes, step.cache.capacity)
                                   : static_cast<int64_t>(sizeof(DecodeStepShared<Accumulator<T>>));
  return launch(kernel, step.sizes.batch * step.sizes.num_kv_heads,
                threads_for(int64_t{step.cache.capacity} + 1), shared_bytes, stream, step);
}

}  // namespace h2o::cuda
