#pragma once

#include <cstdint>

// Code that the CPU and the CUDA kernels share is marked with this; nothing else differs between
// them.
#if defined(__CUDACC__)
#define H2O_HOST_DEVICE __host__ __device__
#else
#define H2O_HOST_DEVICE
#endif

namespace h2o {

// How many tokens of one (row, KV head) stay, by the reason for which they stay. A plain value that
// kernels take as it is; EvictionPolicy is where it comes from and where it is checked.
struct Budget {
  int64_t num_sink = 0;    // the first positions of the sequence, never evicted
  int64_t num_heavy = 0;   // kept for their score
  int64_t num_recent = 0;  // the newest positions, never evicted

  H2O_HOST_DEVICE constexpr int64_t total() const { return num_sink + num_heavy + num_recent; }
  friend constexpr bool operator==(const Budget&, const Budget&) = default;
};

// How the softmax weights of the query heads that share a KV head become one score.
enum class GqaReduce : int32_t { kSum, kMax };

}  // namespace h2o
