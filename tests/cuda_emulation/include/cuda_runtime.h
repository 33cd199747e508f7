// Stands in for CUDA's <cuda_runtime.h> where kernels run on the CPU: see ../emulator.h.
#pragma once

#ifdef __CUDACC__
#error "this header is for the host compiler; nvcc must find CUDA's own"
#endif

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../emulator.h"

// ---- The language -------------------------------------------------------------------------------

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// Fits `extern __shared__ T x[]` at namespace scope, which emulator.cpp defines, and nothing else:
// a static shared array, which nothing here would clear or bound, does not compile.
#define __shared__ constinit

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- Barriers and warps -------------------------------------------------------------------------

using EmulatedLocation = cuda_emulation::Location;

inline void __syncthreads(EmulatedLocation location = EmulatedLocation::current()) {
  cuda_emulation::block_barrier(location);
}
inline int __syncthreads_count(int predicate,
                               EmulatedLocation location = EmulatedLocation::current()) {
  return cuda_emulation::block_sum(predicate != 0, location);
}
inline int __syncthreads_or(int predicate,
                            EmulatedLocation location = EmulatedLocation::current()) {
  return __syncthreads_count(predicate, location) != 0;
}
inline int __syncthreads_and(int predicate,
                             EmulatedLocation location = EmulatedLocation::current()) {
  return __syncthreads_count(predicate == 0, location) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       EmulatedLocation location = EmulatedLocation::current()) {
  cuda_emulation::warp_exchange(cuda_emulation::WarpOperation::kBarrier, mask, 0, 0, location);
}

namespace cuda_emulation {

template <typename T>
std::uint64_t bits_of(T value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename T>
T shuffle(unsigned mask, T value, unsigned source, Location location) {
  const std::uint64_t bits =
      warp_exchange(WarpOperation::kShuffle, mask, bits_of(value), source, location);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename T, typename Combine>
T reduce(unsigned mask, T value, Combine combine, Location location) {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned>);
  const unsigned first = static_cast<unsigned>(__builtin_ctz(mask));
  T result = shuffle(mask, value, first, location);
  for (unsigned source = first + 1; source < 32; ++source) {
    if (mask >> source & 1) result = combine(result, shuffle(mask, value, source, location));
  }
  return result;
}

}  // namespace cuda_emulation

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize,
              EmulatedLocation location = EmulatedLocation::current()) {
  const unsigned segment = cuda_emulation::lane() / width * width;
  return cuda_emulation::shuffle(mask, value, segment + static_cast<unsigned>(source) % width,
                                 location);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize,
                  EmulatedLocation location = EmulatedLocation::current()) {
  const unsigned lane = cuda_emulation::lane(), source = lane ^ lane_mask,
                 end = lane / width * width + width;
  return cuda_emulation::shuffle(mask, value, source < end ? source : lane, location);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                   EmulatedLocation location = EmulatedLocation::current()) {
  const unsigned lane = cuda_emulation::lane(), source = lane + delta,
                 end = lane / width * width + width;
  return cuda_emulation::shuffle(mask, value, source < end ? source : lane, location);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                 EmulatedLocation location = EmulatedLocation::current()) {
  const unsigned lane = cuda_emulation::lane(), segment = lane / width * width;
  return cuda_emulation::shuffle(mask, value, lane >= segment + delta ? lane - delta : lane,
                                 location);
}
inline unsigned __ballot_sync(unsigned mask, int predicate,
                              EmulatedLocation location = EmulatedLocation::current()) {
  return static_cast<unsigned>(cuda_emulation::warp_exchange(cuda_emulation::WarpOperation::kBallot,
                                                             mask, predicate != 0, 0, location));
}
inline int __any_sync(unsigned mask, int predicate,
                      EmulatedLocation location = EmulatedLocation::current()) {
  return __ballot_sync(mask, predicate, location) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      EmulatedLocation location = EmulatedLocation::current()) {
  return __ballot_sync(mask, predicate, location) == mask;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value,
                          EmulatedLocation location = EmulatedLocation::current()) {
  return static_cast<unsigned>(cuda_emulation::warp_exchange(
      cuda_emulation::WarpOperation::kMatch, mask, cuda_emulation::bits_of(value), 0, location));
}
template <typename T>
T __reduce_add_sync(unsigned mask, T value,
                    EmulatedLocation location = EmulatedLocation::current()) {
  return cuda_emulation::reduce(mask, value, [](T a, T b) { return a + b; }, location);
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value,
                    EmulatedLocation location = EmulatedLocation::current()) {
  return cuda_emulation::reduce(mask, value, [](T a, T b) { return std::min(a, b); }, location);
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value,
                    EmulatedLocation location = EmulatedLocation::current()) {
  return cuda_emulation::reduce(mask, value, [](T a, T b) { return std::max(a, b); }, location);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value,
                                  EmulatedLocation location = EmulatedLocation::current()) {
  return cuda_emulation::reduce(
      mask, value, [](unsigned a, unsigned b) { return a & b; }, location);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value,
                                 EmulatedLocation location = EmulatedLocation::current()) {
  return cuda_emulation::reduce(
      mask, value, [](unsigned a, unsigned b) { return a | b; }, location);
}

inline void __threadfence() { cuda_emulation::memory_fence(); }
inline void __threadfence_block() {}

// ---- Atomics: threads change only at the barriers above, so each of these is indivisible
// ---------

namespace cuda_emulation {
template <typename T, typename Update>
[[gnu::noinline]] __attribute__((no_sanitize("thread"))) T atomic_update(T* address,
                                                                         Update update) {
  atomic_access(address, sizeof(T), __builtin_return_address(0));
  const T old = *address;
  *address = update(old);
  return old;
}
}  // namespace cuda_emulation

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [=](T old) { return old + value; });
}
template <typename T>
T atomicSub(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [=](T old) { return old - value; });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [=](T old) { return std::min(old, value); });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [=](T old) { return std::max(old, value); });
}
template <typename T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [=](T old) { return old & value; });
}
template <typename T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [=](T old) { return old | value; });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return cuda_emulation::atomic_update(address,
                                       [=](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return cuda_emulation::atomic_update(address,
                                       [=](unsigned old) { return old >= last ? 0 : old + 1; });
}
inline unsigned atomicDec(unsigned* address, unsigned last) {
  return cuda_emulation::atomic_update(
      address, [=](unsigned old) { return old == 0 || old > last ? last : old - 1; });
}

// ---- Arithmetic ---------------------------------------------------------------------------------

using std::max;
using std::min;

inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline double __fma_rn(double x, double y, double z) { return std::fma(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __float_as_int(float x) {
  int bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline unsigned __float_as_uint(float x) { return static_cast<unsigned>(__float_as_int(x)); }
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }
template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}

// ---- The runtime API ----------------------------------------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};
enum cudaSharedCarveout {
  cudaSharedmemCarveoutDefault = -1,
  cudaSharedmemCarveoutMaxL1 = 0,
  cudaSharedmemCarveoutMaxShared = 100,
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
using cudaStream_t = struct CUstream_st*;

inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
  }
  return "unrecognized error code";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return cudaErrorInvalidValue;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = cuda_emulation::device.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = cuda_emulation::device.shared_bytes;
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t cudaMalloc(T** memory, std::size_t bytes) {
  *memory = static_cast<T*>(cuda_emulation::allocate(bytes));
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  cuda_emulation::release(memory);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* destination, const void* source, std::size_t bytes,
                              cudaMemcpyKind) {
  std::memcpy(destination, source, bytes);
  cuda_emulation::host_wrote(destination, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* destination, const void* source, std::size_t bytes,
                                   cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(destination, source, bytes, kind);
}
inline cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  std::memset(memory, value, bytes);
  cuda_emulation::host_wrote(memory, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  return cudaMemset(memory, value, bytes);
}

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute,
                                 int value) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) {
    return value < -1 || value > 100 ? cudaErrorInvalidValue : cudaSuccess;
  }
  if (value < 0 || value > cuda_emulation::device.shared_bytes) return cudaErrorInvalidValue;
  cuda_emulation::allow_shared_bytes(reinterpret_cast<const void*>(kernel),
                                     static_cast<std::size_t>(value));
  return cudaSuccess;
}

struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

// Runs the kernel to its end before it returns.
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const dim3 grid = config->gridDim, block = config->blockDim;
  if (grid.x == 0 || grid.x > 0x7fffffff || grid.y == 0 || grid.y > 65535 || grid.z == 0 ||
      grid.z > 65535 || block.x == 0 || block.y == 0 || block.z == 0 || block.z > 64 ||
      std::uint64_t{block.x} * block.y * block.z > 1024) {
    return cudaErrorInvalidConfiguration;
  }
  const void* const address = reinterpret_cast<const void*>(kernel);
  if (config->dynamicSmemBytes > cuda_emulation::allowed_shared_bytes(address)) {
    return cudaErrorInvalidValue;
  }
  using Call = std::pair<void (*)(Parameters...), std::tuple<Parameters...>>;
  const Call call(kernel, std::tuple<Parameters...>(std::forward<Arguments>(arguments)...));
  const auto body = [](const void* parameters) {
    const Call& call = *static_cast<const Call*>(parameters);
    std::apply(call.first, call.second);
  };
  cuda_emulation::run({address, grid, block, config->dynamicSmemBytes, body, &call, sizeof call});
  return cudaSuccess;
}
