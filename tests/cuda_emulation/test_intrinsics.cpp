// What the headers in include/ offer besides barriers: warp functions, atomics, asynchronous
// copies, tensor cores, and the limits of a launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "device_buffer.h"

namespace h2o {
extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
}

namespace {

namespace wmma = nvcuda::wmma;

int failures = 0;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::printf("does not hold: %s\n", what.c_str());
}

cudaLaunchConfig_t grid_of(unsigned blocks, unsigned threads, std::size_t shared_bytes = 0) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3{blocks, 1, 1};
  config.blockDim = dim3{threads, 1, 1};
  config.dynamicSmemBytes = shared_bytes;
  return config;
}

// ---- Warps --------------------------------------------------------------------------------------

constexpr int kWarpResults = 14;

__global__ void warp_functions(int* out) {
  const unsigned all = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x);
  int* const own = out + lane * kWarpResults;
  own[0] = __shfl_sync(all, lane, 5);
  own[1] = __shfl_xor_sync(all, lane, 4);
  own[2] = __shfl_down_sync(all, lane, 3);
  own[3] = __shfl_up_sync(all, lane, 3);
  own[4] = __shfl_xor_sync(all, lane, 8, 8);  // reads earlier segments, but no later ones
  own[5] = static_cast<int>(__ballot_sync(all, lane % 3 == 0));
  own[6] = static_cast<int>(__match_any_sync(all, lane / 10));
  own[7] = __reduce_add_sync(all, lane);
  own[8] = __reduce_min_sync(all, 40 - lane);
  own[9] = __reduce_max_sync(all, lane % 7);
  own[10] = __any_sync(all, lane == 31) + 2 * __all_sync(all, lane < 31);
  own[11] = static_cast<int>(__shfl_sync(all, 1.5 * lane, 2));
  own[12] = static_cast<int>(__reduce_or_sync(all, 1u << lane % 4));
  own[13] = lane < 8 ? __shfl_xor_sync(0xffu, lane, 1) : 0;
}

void test_warp_functions() {
  DeviceBuffer<int> out(32 * kWarpResults);
  const cudaLaunchConfig_t config = grid_of(1, 32);
  check(cudaLaunchKernelEx(&config, warp_functions, out.data()));
  const std::vector<int> results = out.host();
  for (int lane = 0; lane < 32; ++lane) {
    unsigned thirds = 0, same = 0;
    for (int i = 0; i < 32; ++i) {
      thirds |= unsigned{i % 3 == 0} << i;
      same |= unsigned{i / 10 == lane / 10} << i;
    }
    const int expected[kWarpResults] = {5,
                                        lane ^ 4,
                                        lane < 29 ? lane + 3 : lane,
                                        lane >= 3 ? lane - 3 : lane,
                                        lane & 8 ? lane ^ 8 : lane,
                                        static_cast<int>(thirds),
                                        static_cast<int>(same),
                                        31 * 16,
                                        9,
                                        6,
                                        1,
                                        3,
                                        15,
                                        lane < 8 ? lane ^ 1 : 0};
    for (int i = 0; i < kWarpResults; ++i) {
      expect(results[lane * kWarpResults + i] == expected[i],
             "warp function " + std::to_string(i) + " in lane " + std::to_string(lane) + ": " +
                 std::to_string(results[lane * kWarpResults + i]));
    }
  }
}

// ---- Atomics ------------------------------------------------------------------------------------

// The last block to finish, told by a counter that wraps to 0, adds up what all have left.
__global__ void last_block_sums(const float* in, float* parts, unsigned* counter, float* sum) {
  int* const is_last = reinterpret_cast<int*>(h2o::dynamic_shared_bytes);
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = in[blockIdx.x] * 2;
    __threadfence();
    *is_last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (*is_last == 0) return;
  __threadfence();
  if (threadIdx.x == 0) {
    float total = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) total += parts[i];
    *sum = total;
  }
}

void test_last_block() {
  DeviceBuffer<float> in(std::vector<float>{1, 2, 3, 4, 5}), parts(5), sum(1);
  DeviceBuffer<unsigned> counter(1);
  check(cudaMemsetAsync(counter.data(), 0, sizeof(unsigned), nullptr));
  const cudaLaunchConfig_t config = grid_of(5, 64, 16);
  for (unsigned seed = 0; seed < 5; ++seed) {
    cuda_emulation::set_seed(seed);
    check(cudaLaunchKernelEx(&config, last_block_sums, static_cast<const float*>(in.data()),
                             parts.data(), counter.data(), sum.data()));
    expect(sum.host()[0] == 30, "the last block's sum");
    expect(counter.host()[0] == 0, "atomicInc wraps to 0");
  }
  cuda_emulation::set_seed(0);
}

// ---- Asynchronous copies and arithmetic ---------------------------------------------------------

__global__ void copy_and_compute(const float4* in, float* out) {
  float4* const shared = reinterpret_cast<float4*>(h2o::dynamic_shared_bytes);
  const unsigned t = threadIdx.x;
  __pipeline_memcpy_async(shared + t, in + t, 16);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();
  const float4 four = shared[blockDim.x - 1 - t];
  out[t] = __fmaf_rn(four.x, four.y, four.z) + __ldg(&in[0].w) + min(four.x, 0.0f);
}

void test_copies() {
  std::vector<float4> in;
  for (int i = 0; i < 64; ++i) in.push_back(make_float4(static_cast<float>(i), 2, 3, 4));
  DeviceBuffer<float4> in_d(in);
  DeviceBuffer<float> out(64);
  const cudaLaunchConfig_t config = grid_of(1, 64, 64 * sizeof(float4));
  check(cudaLaunchKernelEx(&config, copy_and_compute, static_cast<const float4*>(in_d.data()),
                           out.data()));
  const std::vector<float> results = out.host();
  for (int i = 0; i < 64; ++i) {
    expect(results[i] == static_cast<float>(63 - i) * 2 + 7, "an asynchronous copy's element");
  }
}

// ---- Tensor cores -------------------------------------------------------------------------------

constexpr int kDimension = 64;

// Logits of 16 query rows for 16 keys.
template <typename T>
__global__ void logits(const T* queries, const T* keys, float* out) {
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
  wmma::fill_fragment(sum, 0.0f);
  for (int d = 0; d < kDimension; d += 16) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> a;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major> b;
    wmma::load_matrix_sync(a, queries + d, kDimension);
    wmma::load_matrix_sync(b, keys + d, kDimension);
    wmma::mma_sync(sum, a, b, sum);
  }
  wmma::store_matrix_sync(out, sum, 16, wmma::mem_row_major);
}

template <typename T>
void test_tensor_cores(const char* name) {
  std::vector<T> queries(16 * kDimension), keys(16 * kDimension);
  for (int i = 0; i < 16 * kDimension; ++i) {
    queries[i] = std::sin(0.7f * static_cast<float>(i));
    keys[i] = std::cos(0.3f * static_cast<float>(i));
  }
  DeviceBuffer<T> queries_d(queries), keys_d(keys);
  DeviceBuffer<float> out(256);
  const cudaLaunchConfig_t config = grid_of(1, 32);
  check(cudaLaunchKernelEx(&config, logits<T>, static_cast<const T*>(queries_d.data()),
                           static_cast<const T*>(keys_d.data()), out.data()));
  const std::vector<float> results = out.host();
  double worst = 0;
  for (int i = 0; i < 256; ++i) {
    double expected = 0;
    for (int d = 0; d < kDimension; ++d) {
      expected += static_cast<double>(queries[i / 16 * kDimension + d]) *
                  static_cast<double>(keys[i % 16 * kDimension + d]);
    }
    worst = std::max(worst, std::abs(results[i] - expected));
  }
  std::printf("wmma of %s: worst error %.1e\n", name, worst);
  expect(worst < 1e-5, std::string("wmma of ") + name);
}

// ---- Launches -----------------------------------------------------------------------------------

__global__ void nothing() {}
// As many instructions, but another function.
__global__ void something(int* out) { *out = 1; }

void test_limits() {
  cudaLaunchConfig_t config = grid_of(1, 32, 48 * 1024);
  expect(cudaLaunchKernelEx(&config, nothing) == cudaSuccess, "48 KiB of shared memory");
  config.dynamicSmemBytes += 1;
  expect(cudaLaunchKernelEx(&config, nothing) == cudaErrorInvalidValue, "no more without asking");
  expect(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              cuda_emulation::kMaxSharedBytes + 1) == cudaErrorInvalidValue,
         "no more than there is");
  check(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 * 1024));
  check(cudaFuncSetAttribute(nothing, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared));
  expect(cudaLaunchKernelEx(&config, nothing) == cudaSuccess, "more after asking");
  config = grid_of(1, 1025);
  expect(cudaLaunchKernelEx(&config, nothing) == cudaErrorInvalidConfiguration, "1024 threads");
  config = grid_of(0, 32);
  expect(cudaLaunchKernelEx(&config, nothing) == cudaErrorInvalidConfiguration, "no empty grid");

  const std::uint64_t launches = cuda_emulation::launches();
  DeviceBuffer<int> out(1);
  config = grid_of(1, 1);
  check(cudaLaunchKernelEx(&config, something, out.data()));
  expect(out.host()[0] == 1 && cuda_emulation::launches() == launches + 1, "launches are counted");

  int value = 0;
  check(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
  expect(value == 132, "132 multiprocessors");
  cuda_emulation::device.multiprocessors = 7;
  check(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
  expect(value == 7, "as many multiprocessors as were set");
}

// What nobody wrote is NaN as a floating-point number of any size.
void test_poison() {
  DeviceBuffer<float> floats(1);
  DeviceBuffer<double> doubles(1);
  DeviceBuffer<half> halves(2);
  DeviceBuffer<nv_bfloat16> bfloats(2);
  expect(std::isnan(floats.host()[0]), "uninitialised float is NaN");
  expect(std::isnan(doubles.host()[0]), "uninitialised double is NaN");
  expect(std::isnan(static_cast<float>(halves.host()[0])), "uninitialised half is NaN");
  expect(std::isnan(static_cast<float>(bfloats.host()[1])), "uninitialised bfloat16 is NaN");
}

}  // namespace

int main() {
  test_warp_functions();
  test_last_block();
  test_copies();
  test_tensor_cores<half>("half");
  test_tensor_cores<nv_bfloat16>("bfloat16");
  test_limits();
  test_poison();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
