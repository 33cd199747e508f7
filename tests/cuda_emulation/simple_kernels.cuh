// The decode step and the eviction as one reads them in docs/algorithm.md, one thread for each
// (row, KV head): what the fast kernels are checked against. They take the same parameters.
#pragma once

#include <limits>

#include "h2o/kernels/cuda/block.cuh"
#include "h2o/kernels/gqa_reduce.h"

namespace h2o::cuda {

template <typename T>
__device__ float simple_logit(const DecodeStep<T>& step, const T* key, int64_t row, int64_t q_head,
                              int32_t key_position, int32_t query_position) {
  const T* const query = step.query.at(row, q_head, step.column);
  float dot = 0;
  for (int32_t d = 0; d < step.sizes.head_dim; ++d) {
    dot += static_cast<float>(query[d]) * static_cast<float>(key[d]);
  }
  return step.terms.logit(dot, q_head, key_position, query_position);
}

// For T of 32 bits or fewer, sums over the group. all_weights is [batch, num_kv_heads, capacity +
// 1].
template <typename T>
__global__ void simple_decode_step(const __grid_constant__ DecodeStep<T> step, float* all_weights) {
  const int64_t row = blockIdx.x / step.sizes.num_kv_heads;
  const int64_t head = blockIdx.x % step.sizes.num_kv_heads;
  const int32_t capacity = step.cache.capacity;
  const int32_t position = step.position_new.at(row, step.column);
  const T* const k_new = step.k_new.at(row, head, step.column);
  const T* const v_new = step.v_new.at(row, head, step.column);
  float* const weights = all_weights + blockIdx.x * (int64_t{capacity} + 1);
  // The new token is the candidate after the last slot.
  const auto position_of = [&](int32_t i) {
    return i == capacity ? position : *step.cache.positions.at(row, head, i);
  };

  float new_score = 0;
  for (int32_t g = 0; g < step.sizes.group_size; ++g) {
    const int64_t q_head = head * step.sizes.group_size + g;
    float maximum = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int32_t i = 0; i <= capacity; ++i) {
      if (position_of(i) < 0) continue;
      const T* const key = i == capacity ? k_new : step.cache.k.at(row, head, i);
      weights[i] = simple_logit(step, key, row, q_head, position_of(i), position);
      maximum = Largest()(maximum, weights[i]);
    }
    for (int32_t i = 0; i <= capacity; ++i) {
      if (position_of(i) < 0) continue;
      weights[i] = exponential(weights[i] - maximum);
      sum += weights[i];
    }
    for (int32_t i = 0; i <= capacity; ++i) {
      if (position_of(i) < 0) continue;
      weights[i] /= sum;
      float& score = i == capacity ? new_score : *step.cache.scores.at(row, head, i);
      score += weights[i];
    }
    for (int32_t d = 0; d < step.sizes.head_dim; ++d) {
      float output = 0;
      for (int32_t i = 0; i <= capacity; ++i) {
        if (position_of(i) < 0) continue;
        const T* const value = i == capacity ? v_new : step.cache.v.at(row, head, i);
        output += weights[i] * static_cast<float>(value[d]);
      }
      step.output.at(row, q_head, step.column)[d * step.output_dim_stride] = static_cast<T>(output);
    }
  }

  const Budget budget = step.budget.at(row);
  Candidate<float> victim = {0, -1, -1};
  int32_t present = 0, empty = capacity;
  for (int32_t i = capacity; i >= 0; --i) {
    if (position_of(i) < 0) {
      empty = i;
      continue;
    }
    ++present;
    const float score = i == capacity ? new_score : *step.cache.scores.at(row, head, i);
    if (!is_protected(position_of(i), position, budget)) {
      victim = First()(victim, Candidate<float>{score, position_of(i), i});
    }
  }
  const bool evicts = present > budget.total();
  const int32_t slot = !evicts ? empty : victim.index < 0 ? capacity : victim.index;
  step.evicted[blockIdx.x * step.sizes.num_new + step.column] = evicts ? position_of(slot) : -1;
  if (slot == capacity) return;
  *step.cache.positions.at(row, head, slot) = position;
  *step.cache.scores.at(row, head, slot) = new_score;
  for (int32_t d = 0; d < step.sizes.head_dim; ++d) {
    T& key = step.cache.k.at(row, head, slot)[d];
    T& value = step.cache.v.at(row, head, slot)[d];
    if (evicts) {
      step.k_evicted.at(row, head, step.column)[d] = key;
      step.v_evicted.at(row, head, step.column)[d] = value;
    }
    key = k_new[d];
    value = v_new[d];
  }
}

// h2o_evict without new tokens: the lowest leaves until the budget holds.
template <typename T>
__global__ void simple_shrink(const __grid_constant__ Selection<T> p) {
  using A = Accumulator<T>;
  const int64_t row = blockIdx.x / p.sizes.num_kv_heads, head = blockIdx.x % p.sizes.num_kv_heads;
  const Budget budget = p.budget.at(row);
  int32_t newest = -1, present = 0;
  for (int32_t i = 0; i < p.cache.capacity; ++i) {
    const int32_t position = *p.cache.positions.at(row, head, i);
    newest = Largest()(newest, position);
    present += position >= 0;
  }
  int32_t* const evicted = p.evicted + blockIdx.x * p.evicted_width;
  for (int64_t i = 0; i < p.evicted_width; ++i) {
    Candidate<A> victim = {0, -1, -1};
    for (int32_t slot = 0; present > budget.total() && slot < p.cache.capacity; ++slot) {
      const int32_t position = *p.cache.positions.at(row, head, slot);
      if (position < 0 || is_protected(position, newest, budget)) continue;
      const A score = *p.cache.scores.at(row, head, slot);
      victim = First()(victim, Candidate<A>{score, position, slot});
    }
    evicted[i] = victim.position;
    if (victim.index < 0) continue;
    *p.cache.positions.at(row, head, victim.index) = -1;
    *p.cache.scores.at(row, head, victim.index) = 0;
    --present;
  }
}

}  // namespace h2o::cuda
