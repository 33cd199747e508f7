#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "h2o/kernels/cuda/kernels.h"
#include "h2o/kernels/slot_order.h"

// What the kernels share: launching, shared memory, and reductions by a fixed tree.
namespace h2o {

// The only shared memory: each kernel's layout is one struct in it, followed by what has no fixed
// size.
extern __shared__ __align__(32) unsigned char dynamic_shared_bytes[];

}  // namespace h2o

namespace h2o::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kWarpSize = 32;
inline constexpr int kMaxThreads = 256;
inline constexpr int kMaxWarps = kMaxThreads / kWarpSize;

template <typename Layout>
__device__ __forceinline__ Layout& dynamic_shared() {
  return *reinterpret_cast<Layout*>(dynamic_shared_bytes);
}
// What follows the layout.
template <typename T, typename Layout>
__device__ __forceinline__ T* after(Layout& layout) {
  static_assert(sizeof(Layout) % 16 == 0);
  return reinterpret_cast<T*>(&layout + 1);
}

// `count` elements that are loaded by one instruction.
template <typename T, int count>
struct alignas(sizeof(T) * count) Vector {
  T elements[count];
};
template <typename T>
inline constexpr int kVectorSize = 16 / sizeof(T);
// The first `present` elements, then zeros: by one instruction where the source is aligned and
// holds all of them, else one at a time.
template <int count, typename T>
__device__ __forceinline__ void load_vector(Vector<T, count>& loaded, const T* source, bool aligned,
                                            int32_t present) {
  if (aligned) {
    loaded = *reinterpret_cast<const Vector<T, count>*>(source);
    return;
  }
#pragma unroll
  for (int32_t x = 0; x < count; ++x) {
    loaded.elements[x] = x < present ? source[x] : static_cast<T>(0.0f);
  }
}

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// a * b + c, rounded once: what two places must compute to the same bit.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
  return fma(a, b, c);
}

// What is subtracted before exp(): the maximum, but 0 where no logit is above -inf, lest -inf -
// -inf make a NaN of what a later, higher logit makes a 0.
template <typename A>
__device__ __forceinline__ A finite_or_zero(A maximum) {
  return maximum == -std::numeric_limits<A>::infinity() ? A{0} : maximum;
}

struct Sum {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a + b;
  }
};
struct Largest {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};
struct Smallest {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a < b ? a : b;
  }
};

// The sum of |v| of a value.
template <typename A, typename T>
__device__ __forceinline__ A value_norm_of(const T* value, int32_t head_dim) {
  A sum = 0;
  for (int32_t d = 0; d < head_dim; ++d) {
    const A element = static_cast<A>(value[d]);
    sum += element < 0 ? -element : element;
  }
  return sum;
}

// The order of eviction, slot_order.h's; among equals, which takes a position that repeats, the
// lower index. Nobody comes last.
template <typename A>
__device__ __forceinline__ bool goes_first(const Candidate<A>& a, const Candidate<A>& b) {
  if (a.index < 0 || b.index < 0) return a.index >= 0 && b.index < 0;
  if (leaves_before(a.score, a.position, b.score, b.position)) return true;
  return a.index < b.index && !leaves_before(b.score, b.position, a.score, a.position);
}
struct First {
  template <typename A>
  __device__ Candidate<A> operator()(const Candidate<A>& a, const Candidate<A>& b) const {
    return goes_first(b, a) ? b : a;
  }
};

template <typename V>
__device__ __forceinline__ V shuffle_xor(V value, int step) {
  return __shfl_xor_sync(kAllLanes, value, step);
}
template <typename A>
__device__ __forceinline__ Candidate<A> shuffle_xor(const Candidate<A>& value, int step) {
  return {shuffle_xor(value.score, step), shuffle_xor(value.position, step),
          shuffle_xor(value.index, step)};
}

// Over `lanes` neighbouring lanes, a power of two.
template <int lanes = kWarpSize, typename V, typename Combine>
__device__ __forceinline__ V warp_reduce(V value, Combine combine) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) value = combine(value, shuffle_xor(value, step));
  return value;
}

struct BlockScratch {
  alignas(16) unsigned char bytes[kMaxWarps * 16];
};

// Over the block; every thread gets the same result. Warps beyond those that the block has would
// add a neutral value, so that the result does not depend on how many there are.
template <typename V, typename Combine>
__device__ V block_reduce(V value, Combine combine, BlockScratch& scratch) {
  static_assert(sizeof(V) <= 16);
  V* const of_warp = reinterpret_cast<V*>(scratch.bytes);
  value = warp_reduce(value, combine);
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  V result = of_warp[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarpSize; ++warp)
    result = combine(result, of_warp[warp]);
  __syncthreads();
  return result;
}

struct Rank {
  int32_t before;  // threads below this one with the flag
  int32_t total;   // of the block
};

__device__ inline Rank block_rank(bool flag, BlockScratch& scratch) {
  int32_t* const of_warp = reinterpret_cast<int32_t*>(scratch.bytes);
  const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const unsigned flags = __ballot_sync(kAllLanes, flag);
  if (lane == 0) of_warp[warp] = __popc(flags);
  __syncthreads();
  Rank rank = {__popc(flags & ((1u << lane) - 1u)), 0};
  for (unsigned i = 0; i < blockDim.x / kWarpSize; ++i) {
    if (i < warp) rank.before += of_warp[i];
    rank.total += of_warp[i];
  }
  __syncthreads();
  return rank;
}

// As many threads as there is work for, in whole warps.
inline int threads_for(int64_t work) {
  const int64_t threads = (work + kWarpSize - 1) / kWarpSize * kWarpSize;
  return static_cast<int>(threads < kWarpSize     ? kWarpSize
                          : threads > kMaxThreads ? kMaxThreads
                                                  : threads);
}

// All blocks lie in the grid's x, the one dimension that may exceed 65,535.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes,
                   cudaStream_t stream, const Arguments&... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks < 0 || blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (shared_bytes > 48 * 1024) {
    // Always the most that there is: the attribute belongs to the kernel, and another thread may be
    // about to launch the same one with another size.
    DeviceLimits limits;
    cudaError_t error = device_limits(&limits);
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   limits.shared_bytes);
    }
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3{static_cast<unsigned>(blocks), 1, 1};
  config.blockDim = dim3{static_cast<unsigned>(threads), 1, 1};
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace h2o::cuda
