#pragma once

#include "h2o/kernels/cuda/decode_block.cuh"

// A decode step's arithmetic for any type: neighbouring lanes share one vector of K or V and keep
// sums in their registers.
namespace h2o::cuda {

inline constexpr int kUnrolledSlots = 4;  // vectors that a thread has under way at once
inline constexpr int kJoinedHeads = 4;    // at most, whose sums go through shared memory at once

// How many lanes share a vector: a power of two.
constexpr int32_t lanes_of_vector(int32_t head_dim, int32_t vector_size) {
  int32_t lanes = 1;
  while (lanes < kWarpSize && lanes * vector_size < head_dim) lanes *= 2;
  return lanes;
}

// kVector elements are loaded at once, by one instruction where the cache is aligned; the sums of
// kHeads query heads are in a thread's registers at once.
template <typename T, int kVector, int kHeads, bool kAligned>
struct DecodeVectors : DecodeBlock<T, DecodeVectors<T, kVector, kHeads, kAligned>> {
  using Block = DecodeBlock<T, DecodeVectors>;
  using A = Accumulator<T>;
  using Block::group_size, Block::head_dim, Block::head, Block::lane, Block::memory,
      Block::new_position, Block::plan, Block::q_head, Block::row, Block::step,
      Block::weighted_slots, Block::weights;
  static constexpr int kHeadTile = kHeads;
  static constexpr int kJoined = kHeads < kJoinedHeads ? kHeads : kJoinedHeads;

  static DecodeTile tile(const Sizes& sizes) {
    const int32_t lanes = lanes_of_vector(sizes.head_dim, kVector);
    return {lanes, lanes * kVector, kHeads, int64_t{kMaxWarps} * kJoined * lanes * kVector};
  }

  const int32_t group_of_lanes, lane_of_group;

  __device__ DecodeVectors(const DecodeStep<T>& step, const DecodePlan& plan)
      : Block(step, plan), group_of_lanes(lane / plan.lanes), lane_of_group(lane % plan.lanes) {}

  __device__ void load_own_queries() const {}

  // The thread's part of the vectors of `count` slots, from turn `first`; 0 where a slot is empty,
  // whose contents may be anything.
  template <int count>
  __device__ void load_slots(const View<T>& cache, const WarpSlots& slots, int32_t first,
                             int32_t round, Vector<T, kVector> (&loaded)[count]) const {
    const int32_t d = round * plan.width + lane_of_group * kVector;
#pragma unroll
    for (int32_t u = 0; u < count; ++u) {
      const int32_t i = slot_of_warp(first + u);
      loaded[u] = {};
      if (i >= kWarpSize || (slots.occupied >> i & 1u) == 0 || d >= head_dim()) continue;
      load_vector(loaded[u], cache.at(row, head, slots.first + i) + d, kAligned, head_dim() - d);
    }
  }
  // The slot, among the warp's 32, that a group of lanes looks at in its `turn`.
  __device__ int32_t slot_of_warp(int32_t turn) const {
    return turn * (kWarpSize / plan.lanes) + group_of_lanes;
  }

  __device__ void write_logits(const WarpSlots& slots, int32_t own_position) const {
    constexpr int kTile = kJoined;
    for (int32_t turn = 0; turn < plan.lanes; turn += kUnrolledSlots) {
      Vector<T, kVector> keys[kUnrolledSlots];
      if (plan.rounds == 1) load_slots(step.cache.k, slots, turn, 0, keys);
      for (int32_t first = 0; first < group_size(); first += kTile) {
        A dot[kUnrolledSlots][kTile] = {};
        for (int32_t round = 0; round < plan.rounds; ++round) {
          if (plan.rounds > 1) load_slots(step.cache.k, slots, turn, round, keys);
          const A* const queries =
              memory + first * plan.padded_dim + round * plan.width + lane_of_group * kVector;
#pragma unroll
          for (int32_t h = 0; h < kTile; ++h) {
#pragma unroll
            for (int32_t x = 0; x < kVector; ++x) {
              const A element = queries[h * plan.padded_dim + x];
#pragma unroll
              for (int32_t u = 0; u < kUnrolledSlots; ++u) {
                dot[u][h] += element * static_cast<A>(keys[u].elements[x]);
              }
            }
          }
        }
        for (int32_t distance = plan.lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
          for (int32_t u = 0; u < kUnrolledSlots; ++u) {
#pragma unroll
            for (int32_t h = 0; h < kTile; ++h) dot[u][h] += shuffle_xor(dot[u][h], distance);
          }
        }
#pragma unroll
        for (int32_t u = 0; u < kUnrolledSlots; ++u) {
          const int32_t i = slot_of_warp(turn + u);
          const int32_t slot_position = __shfl_sync(kAllLanes, own_position, i % kWarpSize);
          if (lane_of_group != 0 || i >= kWarpSize || slot_position < 0) continue;
#pragma unroll
          for (int32_t h = 0; h < kTile; ++h) {
            const int32_t g = first + h;
            if (g >= group_size()) continue;
            weights(g)[slots.index + i] =
                step.terms.logit(dot[u][h], q_head(g), slot_position, new_position);
          }
        }
      }
    }
  }

  template <typename Emit>
  __device__ void weigh_values(int32_t range, Emit emit) const {
    const WarpSlots slots = weighted_slots(range);
    A* const join = memory + plan.work;
#pragma unroll 1
    for (int32_t round = 0; round < plan.rounds; ++round) {
#pragma unroll 1
      for (int32_t first = 0; first < group_size(); first += kHeads) {
        A sum[kHeads][kVector] = {};
#pragma unroll 1
        for (int32_t turn = 0; slots.occupied != 0 && turn < plan.lanes; turn += kUnrolledSlots) {
          Vector<T, kVector> values[kUnrolledSlots];
          load_slots(step.cache.v, slots, turn, round, values);
#pragma unroll
          for (int32_t u = 0; u < kUnrolledSlots; ++u) {
            // Where no value was loaded there are zeros, whatever the weight; a tile's heads past
            // the last are summed in vain.
            const int32_t i = slots.index + slot_of_warp(turn + u) % kWarpSize;
#pragma unroll
            for (int32_t h = 0; h < kHeads; ++h) {
              const A weight = weights(Smallest()(first + h, group_size() - 1))[i];
#pragma unroll
              for (int32_t x = 0; x < kVector; ++x) {
                sum[h][x] += weight * static_cast<A>(values[u].elements[x]);
              }
            }
          }
        }
        for (int32_t distance = plan.lanes; distance < kWarpSize; distance *= 2) {
#pragma unroll
          for (int32_t h = 0; h < kHeads; ++h) {
#pragma unroll
            for (int32_t x = 0; x < kVector; ++x) sum[h][x] += shuffle_xor(sum[h][x], distance);
          }
        }
#pragma unroll
        for (int32_t slice = 0; slice < kHeads; slice += kJoined) {
          if (group_of_lanes == 0) {
            A* const of_warp =
                join + threadIdx.x / kWarpSize * (kJoined * plan.width) + lane_of_group * kVector;
#pragma unroll
            for (int32_t h = 0; h < kJoined; ++h) {
#pragma unroll
              for (int32_t x = 0; x < kVector; ++x) {
                of_warp[h * plan.width + x] = sum[slice + h][x];
              }
            }
          }
          __syncthreads();
#pragma unroll 1
          for (int32_t i = threadIdx.x; i < kJoined * plan.width; i += blockDim.x) {
            const int32_t g = first + slice + i / plan.width;
            const int32_t d = round * plan.width + i % plan.width;
            if (g >= group_size() || d >= head_dim()) continue;
            A of_block = join[i];
#pragma unroll 1
            for (unsigned warp = 1; warp < blockDim.x / kWarpSize; ++warp) {
              of_block += join[warp * (kJoined * plan.width) + i];
            }
            emit(g, d, of_block);
          }
          __syncthreads();
        }
      }
    }
  }
};

}  // namespace h2o::cuda
