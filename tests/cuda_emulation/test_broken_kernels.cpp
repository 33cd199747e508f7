// Kernels that are broken on purpose: which build of the emulation notices each defect, and that
// correct kernels are left alone. Each run is a process of its own, since some end it.
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "device_buffer.h"

namespace h2o {
extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
}

namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 128;
constexpr int kSeeds = 10;

enum Defect {
  kNone,
  kNoBlockBarrier,
  kNoLoopBarrier,
  kNoWarpBarrier,
  kDivergentBarrier,
  kTwoBarriers,
  kEarlyReturn,
  kDivergentShuffle,
  kWrongMask,
  kSharedWriteOverrun,
  kSharedReadOverrun,
  kGlobalWriteOverrun,
  kGlobalReadOverrun,
  kGlobalUnderrun,
  kUseAfterFree,
  kUninitialisedShared,
  kUninitialisedGlobal,
  kMisaligned,
  kNoCopyWait,
  kNoBarrierAfterCopy,
  kBlockRace,
  kAtomicMixed,
  kLostUpdate,
  kHostMemory,
  kLastBlockNoFence,
  kLastBlock,
};

// What becomes of a run.
enum Outcome {
  kSilent,     // the right result
  kWrong,      // a wrong result
  kSometimes,  // a wrong result, for some seeds
  kError,      // an exception that says what is wrong, and where
  kStops,      // a sanitizer's report, or a fault
};
const char* const kOutcomes[] = {"silent", "wrong", "wrong for some seeds", "error", "stops"};

struct Case {
  Defect defect;
  const char* name;
  Outcome plain, checked, asan;
};
constexpr Case kCases[] = {
    {kNone, "none (control)", kSilent, kSilent, kSilent},
    {kLastBlock, "last-block sum, correct (control)", kSilent, kSilent, kSilent},
    {kNoBlockBarrier, "missing __syncthreads", kWrong, kError, kWrong},
    {kNoLoopBarrier, "missing __syncthreads at a loop's end", kWrong, kError, kWrong},
    {kNoWarpBarrier, "missing __syncwarp", kWrong, kError, kWrong},
    {kDivergentBarrier, "__syncthreads in half the block", kError, kError, kError},
    {kTwoBarriers, "two different __syncthreads meet", kError, kError, kError},
    {kEarlyReturn, "threads return before a barrier", kError, kError, kError},
    {kDivergentShuffle, "shuffle in half the warp", kError, kError, kError},
    {kWrongMask, "shuffle reads a lane outside its mask", kError, kError, kError},
    {kSharedWriteOverrun, "shared write overrun", kError, kError, kStops},
    {kSharedReadOverrun, "shared read overrun", kWrong, kError, kStops},
    {kGlobalWriteOverrun, "global write overrun", kStops, kError, kStops},
    {kGlobalReadOverrun, "global read overrun", kStops, kError, kStops},
    {kGlobalUnderrun, "global read underrun", kSilent, kError, kStops},
    {kUseAfterFree, "use after cudaFree", kStops, kError, kStops},
    {kUninitialisedShared, "uninitialised shared read", kWrong, kError, kWrong},
    {kUninitialisedGlobal, "uninitialised global read", kWrong, kError, kWrong},
    {kMisaligned, "misaligned float4 load", kStops, kSilent, kStops},
    {kNoCopyWait, "missing pipeline wait", kWrong, kError, kWrong},
    {kNoBarrierAfterCopy, "missing barrier after a pipeline wait", kWrong, kError, kWrong},
    {kBlockRace, "two blocks write one place", kSometimes, kError, kSometimes},
    {kAtomicMixed, "atomic and plain access mixed", kSilent, kError, kSilent},
    {kLostUpdate, "unsynchronised read-modify-write", kSilent, kError, kSilent},
    {kHostMemory, "host memory read", kSilent, kError, kSilent},
    {kLastBlockNoFence, "last-block sum without a fence", kSilent, kError, kSilent},
};

Outcome expected(const Case& c) {
#if defined(H2O_EMULATION_CHECKED)
  return c.checked;
#elif defined(H2O_EMULATION_ASAN)
  return c.asan;
#else
  return c.plain;
#endif
}

// Reverses its 128 inputs through shared memory; each defect is a way to get that wrong.
__global__ void reverse(const float* in, float* out, int* counter, Defect defect) {
  float* const shared = reinterpret_cast<float*>(h2o::dynamic_shared_bytes);
  const int t = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  const int lane = t % 32;
  switch (defect) {
    case kNone:
      shared[t] = in[t];
      __syncthreads();
      out[t] = shared[kThreads - 1 - t];
      break;
    case kNoBlockBarrier:
      shared[t] = in[t];
      out[t] = shared[kThreads - 1 - t];
      break;
    case kNoLoopBarrier: {
      float value = in[t];
      for (int i = 0; i < 3; ++i) {
        shared[t] = value;
        __syncthreads();
        value = shared[kThreads - 1 - t];
      }
      out[t] = value;
      break;
    }
    case kNoWarpBarrier:
      shared[t] = in[kThreads - 1 - (t ^ 31)];
      out[t] = shared[t ^ 31];
      break;
    case kDivergentBarrier:
      shared[t] = in[t];
      if (t < 64) __syncthreads();
      out[t] = shared[t];
      break;
    case kTwoBarriers:
      shared[t] = in[t];
      if (t < 64) {
        __syncthreads();
      } else {
        __syncthreads();
      }
      out[t] = shared[kThreads - 1 - t];
      break;
    case kEarlyReturn:
      if (t >= 120) return;
      shared[t] = in[t];
      __syncthreads();
      out[t] = shared[kThreads - 1 - t];
      break;
    case kDivergentShuffle:
      out[t] = in[kThreads - 1 - t];
      if (lane < 16) out[t] += 0 * __shfl_xor_sync(kAllLanes, 1.0f, 1);
      break;
    case kWrongMask:
      if (lane < 16) out[t] = in[kThreads - 1 - t] + 0 * __shfl_down_sync(0xffffu, 1.0f, 8);
      if (lane >= 16) out[t] = in[kThreads - 1 - t];
      break;
    case kSharedWriteOverrun:
      shared[t] = in[t];
      if (t == 0) shared[kThreads] = 1;
      __syncthreads();
      out[t] = shared[kThreads - 1 - t];
      break;
    case kSharedReadOverrun:
      shared[t] = in[t];
      __syncthreads();
      out[t] = shared[kThreads - t];
      break;
    case kGlobalWriteOverrun:
      out[t] = in[kThreads - 1 - t];
      if (t == 0) out[kThreads] = 1;
      break;
    case kGlobalReadOverrun:
      out[t] = in[kThreads - 1 - t] + 0 * in[t + 1];
      break;
    case kGlobalUnderrun:
      out[t] = in[kThreads - 1 - t] + 0 * in[t - 1];
      break;
    case kUninitialisedShared:
      if (t < 127) shared[t] = in[t];
      __syncthreads();
      out[t] = shared[kThreads - 1 - t];
      break;
    case kUninitialisedGlobal:
      out[t] += in[kThreads - 1 - t];
      break;
    case kMisaligned: {
      const float4 four = *reinterpret_cast<const float4*>(in + t / 4 * 4 + (t == 8));
      const float values[4] = {four.x, four.y, four.z, four.w};
      shared[t] = t == 8 ? in[8] : values[t % 4];
      __syncthreads();
      out[t] = shared[kThreads - 1 - t];
      break;
    }
    case kNoCopyWait:
      __pipeline_memcpy_async(shared + t, in + t, 4);
      __pipeline_commit();
      __syncthreads();
      out[t] = shared[kThreads - 1 - t];
      __pipeline_wait_prior(0);
      break;
    case kNoBarrierAfterCopy:
      __pipeline_memcpy_async(shared + t, in + t, 4);
      __pipeline_commit();
      __pipeline_wait_prior(0);
      out[t] = shared[kThreads - 1 - t];
      break;
    case kBlockRace:
      out[t] = in[(kThreads - 1 - t + block) % kThreads];
      break;
    case kAtomicMixed:
      out[t] = in[kThreads - 1 - t];
      atomicAdd(counter, 1);
      if (t == 0) out[0] += 0 * static_cast<float>(*counter);
      break;
    case kLostUpdate:
      shared[t] = 0;
      __syncthreads();
      shared[0] = shared[0] + 1;
      __syncthreads();
      out[t] = in[kThreads - 1 - t] + shared[0] - kThreads;
      break;
    case kLastBlock:
    case kLastBlockNoFence: {
      // Each of two blocks leaves its half in `out`; the last to finish reverses the whole.
      int* const last = reinterpret_cast<int*>(shared);
      if (t / 64 == block) out[t] = in[t];
      if (defect == kLastBlock) __threadfence();
      __syncthreads();
      if (t == 0) *last = atomicAdd(counter, 1) == 1;
      __syncthreads();
      if (*last == 0) return;
      const float value = out[kThreads - 1 - t];
      __syncthreads();
      out[t] = value;
      break;
    }
    case kHostMemory:
    case kUseAfterFree:
      out[t] = in[kThreads - 1 - t];
      break;
  }
}

// Whether the result was right.
bool run(Defect defect, unsigned seed) {
  cuda_emulation::set_seed(seed);
  std::vector<float> host(kThreads);
  for (int i = 0; i < kThreads; ++i) host[i] = static_cast<float>(i + 1);
  DeviceBuffer<float> in(host), out(kThreads);
  DeviceBuffer<int> counter(std::vector<int>{0});
  const bool two_blocks =
      defect == kBlockRace || defect == kLastBlock || defect == kLastBlockNoFence;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3{two_blocks ? 2u : 1u, 1, 1};
  config.blockDim = dim3{kThreads, 1, 1};
  config.dynamicSmemBytes = kThreads * sizeof(float);
  const float* from = defect == kHostMemory ? host.data() : in.data();
  if (defect == kUseAfterFree) from = DeviceBuffer<float>(host).data();
  check(cudaLaunchKernelEx(&config, reverse, from, out.data(), counter.data(), defect));
  const std::vector<float> result = out.host();
  for (int i = 0; i < kThreads; ++i) {
    if (result[i] != host[kThreads - 1 - i]) return false;
  }
  return true;
}

constexpr int kRight = 40, kNotRight = 41, kThrew = 42;  // exit codes, which no sanitizer has

// Runs it in a process of its own; what that printed goes to `message`.
Outcome run_apart(Defect defect, unsigned seed, std::string& message) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("pipe");
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    try {
      _exit(run(defect, seed) ? kRight : kNotRight);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      _exit(kThrew);
    }
  }
  close(ends[1]);
  char buffer[4096];
  message.clear();
  for (ssize_t size; (size = read(ends[0], buffer, sizeof buffer)) > 0;) {
    message.append(buffer, static_cast<std::size_t>(size));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status)) return kStops;
  switch (WEXITSTATUS(status)) {
    case kRight:
      return kSilent;
    case kNotRight:
      return kWrong;
    case kThrew:
      return kError;
    default:
      return kStops;
  }
}

// That of all seeds together; kSometimes where there are right and wrong results.
Outcome outcome_of(Defect defect, std::string& message) {
  int counts[5] = {};
  for (unsigned seed = 0; seed < kSeeds; ++seed) ++counts[run_apart(defect, seed, message)];
  for (const Outcome outcome : {kSilent, kWrong, kError, kStops}) {
    if (counts[outcome] == kSeeds) return outcome;
  }
  if (counts[kSilent] + counts[kWrong] == kSeeds) return kSometimes;
  throw std::runtime_error("the outcome depends on the seed: " + message);
}

}  // namespace

int main() {
  int surprises = 0;
  for (const Case& c : kCases) {
    std::string message;
    const Outcome outcome = outcome_of(c.defect, message);
    const bool as_expected = outcome == expected(c);
    surprises += !as_expected;
    std::printf("%-42s %s", c.name, kOutcomes[outcome]);
    if (!as_expected) std::printf(" INSTEAD OF %s", kOutcomes[expected(c)]);
    std::printf("\n");
    if (outcome >= kError) std::printf("    %s\n", message.substr(0, 400).c_str());
    const bool named = message.find("thread (") != std::string::npos ||
                       message.find("threads ") != std::string::npos ||
                       message.find("dynamic shared") != std::string::npos;
    if (outcome == kError && !named) {
      ++surprises;
      std::printf("    DOES NOT SAY WHICH THREAD\n");
    }
    const bool found = c.plain != kSilent || c.checked != kSilent || c.asan != kSilent;
    const bool control = c.defect == kNone || c.defect == kLastBlock;
    if (found == control) {
      ++surprises;
      std::printf("    NO BUILD FINDS IT\n");
    }
  }
  std::printf("%d surprises\n", surprises);
  return surprises != 0;
}
