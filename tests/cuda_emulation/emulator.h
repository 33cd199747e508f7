// Runs CUDA kernels on the CPU, for tests: one fiber for each CUDA thread, blocks one after
// another.
//
// Kernel sources include <cuda_runtime.h> as ever; with include/ first on the include path, g++
// finds the header of that name there, which maps the CUDA language and the part of the runtime API
// that this project uses onto the functions below. README.md says what the emulation finds and what
// not.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace cuda_emulation {

using Location = std::source_location;

// A defect of the kernel that ran: a barrier that not all threads reach, a bad access, a race.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// ---- Settings and counters ----------------------------------------------------------------------

// What the device says of itself. The defaults are an H100's.
constexpr int kMaxSharedBytes = 227 * 1024;
struct Device {
  int multiprocessors = 132;
  int shared_bytes = kMaxSharedBytes;  // that a block may ask for; at most kMaxSharedBytes
};
extern Device device;

// The order in which threads and blocks run: 0 takes them in turn, any other number shuffles them,
// the same way each time. A correct kernel gives the same results for every seed, up to the order
// of its atomic additions of floating-point numbers.
void set_seed(std::uint64_t seed);

// Since the program began: kernels launched, and how often a thread was resumed.
std::uint64_t launches();
std::uint64_t thread_switches();

// Each launch since clear_launch_log() was called, in order; none before it was called once.
struct Launched {
  std::string kernel;  // as describe_code() has it
  unsigned blocks, threads;
  std::size_t shared_bytes;
};
void clear_launch_log();
const std::vector<Launched>& launch_log();

// ---- Device memory ------------------------------------------------------------------------------

// Filled with NaN, between two pages that cannot be accessed, and ending (rounded up to 256 bytes)
// where the second begins.
void* allocate(std::size_t bytes);
void release(void* memory);
// To be called after the host wrote device memory through the runtime API.
void host_wrote(const void* memory, std::size_t bytes);

// ---- Launching ----------------------------------------------------------------------------------

struct Launch {
  const void* kernel;
  dim3 grid, block;
  std::size_t shared_bytes;
  void (*body)(const void* parameters);  // runs one thread
  const void* parameters;
  std::size_t parameter_bytes;
};
// Runs every thread of every block of the launch. Throws Error.
void run(const Launch& launch);

// The dynamic shared memory a kernel may ask for: 48 KiB, or what the host allowed it.
void allow_shared_bytes(const void* kernel, std::size_t bytes);
std::size_t allowed_shared_bytes(const void* kernel);

// ---- What a running thread can do; at barriers and warp operations other threads run
// -------------

void block_barrier(Location location);
// A barrier that also sums `value` over the block's threads.
int block_sum(int value, Location location);

enum class WarpOperation { kBarrier, kShuffle, kBallot, kMatch };
// Exchanges `value` among the lanes of `mask`, all of which must call this from the same place.
// Returns what the operation gives this lane; `source` is the lane that a shuffle reads.
std::uint64_t warp_exchange(WarpOperation operation, unsigned mask, std::uint64_t value,
                            unsigned source, Location location);
unsigned lane();  // within the warp
unsigned warp();  // within the block

// Copies when the thread waits for it, as cp.async may.
void copy_async(void* destination, const void* source, std::size_t bytes);
void commit_copies();
void wait_for_copies(unsigned groups_left);

void memory_fence();
// To be called on each atomic access; two of these do not race.
void atomic_access(const void* address, std::size_t bytes, const void* code);

// ---- For the access checker ---------------------------------------------------------------------

// The running thread; null where no kernel runs.
struct Thread {
  uint3 index;
  unsigned id;                    // within the block
  unsigned block;                 // within the grid
  unsigned clock;                 // counts the barriers that this thread passed
  unsigned operations;            // counts its barriers and warp operations
  std::array<unsigned, 32> seen;  // the clock of each lane of its warp that is ordered before now
  bool fenced;
  const unsigned char* stack;
};
extern Thread* current_thread;
// Whether what runs on the thread's stack is the emulation: it shares the standard library's inline
// functions with the kernels, whose copies of them call the hooks.
extern bool inside_emulation;
struct InsideEmulation {
  InsideEmulation() { inside_emulation = true; }
  ~InsideEmulation() { inside_emulation = false; }
};
constexpr std::size_t kStackBytes = 256 * 1024;

// Whether what thread `other` of this block did at `clock` comes before what this thread does now.
bool ordered_before_now(unsigned other, unsigned clock);
// "function at file:line"
std::string describe_code(const void* address);
[[noreturn]] void fail(const std::string& what);

// What a line of a kernel's code moved to or from device memory.
struct Traffic {
  std::uint64_t requests = 0;  // by warps: the lanes' accesses go together
  std::uint64_t bytes = 0;     // that lanes asked for
  std::uint64_t sectors = 0;   // of 32 bytes, that the requests touched: the fewer, the better
};

// The hooks of the access checker, and its counters; null where it is not linked in.
struct AccessChecker {
  virtual ~AccessChecker() = default;
  virtual void allocated(void* memory, std::size_t bytes) = 0;
  virtual void released(void* memory) = 0;
  virtual void host_wrote(const void* memory, std::size_t bytes) = 0;
  virtual void launch_begins(const Launch& launch) = 0;
  virtual void block_begins(unsigned char* dynamic_shared, std::size_t bytes) = 0;
  virtual void block_ends() = 0;
  virtual void accessed(const void* address, std::size_t bytes, bool write, bool atomic,
                        const void* code) = 0;
  // Counting begins with the first call of clear_traffic().
  virtual void clear_traffic() = 0;
  virtual std::map<std::string, Traffic> traffic_by_line(bool writes) const = 0;  // "file:line"
};
extern AccessChecker* access_checker;

// What memory holds that nobody has written: a NaN in every floating-point type, an absurdly large
// number as an integer.
constexpr std::uint32_t kPoison = 0x7fff7fff;

}  // namespace cuda_emulation
