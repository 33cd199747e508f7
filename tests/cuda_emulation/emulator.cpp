#include "emulator.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace h2o {
// What the kernels declare as `extern __shared__ unsigned char dynamic_shared_bytes[]`.
extern unsigned char dynamic_shared_bytes[];
alignas(1024) unsigned char dynamic_shared_bytes[cuda_emulation::kMaxSharedBytes];
}  // namespace h2o

namespace cuda_emulation {

Device device;
Thread* current_thread = nullptr;
bool inside_emulation = false;
AccessChecker* access_checker = nullptr;

namespace {

using h2o::dynamic_shared_bytes;

// The host may launch and allocate from several threads.
std::recursive_mutex one_at_a_time;

constexpr std::size_t kDefaultSharedBytes = 48 * 1024;

std::size_t page_bytes() {
  static const std::size_t bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

void fill_with_poison(void* memory, std::size_t bytes) {
  const std::size_t words = bytes / sizeof kPoison;
  std::fill_n(static_cast<std::uint32_t*>(memory), words, kPoison);
  std::memcpy(static_cast<std::uint32_t*>(memory) + words, &kPoison, bytes % sizeof kPoison);
}

// Whole pages, between two pages that cannot be accessed.
unsigned char* map_guarded(std::size_t bytes) {
  const std::size_t page = page_bytes();
  void* const memory = mmap(nullptr, bytes + 2 * page, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  unsigned char* const usable = static_cast<unsigned char*>(memory) + page;
  if (mprotect(usable, bytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  return usable;
}

// ---- Fibers: the first switch to one goes through ucontext, which takes system calls; later ones
// do not

using Context = void* [5];

// AddressSanitizer would clear its marks on the stack at a call that does not return.
#define NOT_INSTRUMENTED __attribute__((noinline, no_sanitize("address")))

NOT_INSTRUMENTED void jump(Context context) { __builtin_longjmp(context, 1); }

NOT_INSTRUMENTED void switch_context(Context from, Context to) {
  if (__builtin_setjmp(from) == 0) jump(to);
}

NOT_INSTRUMENTED void start_context(Context from, ucontext_t& start, void (*body)(),
                                    unsigned char* stack) {
  if (__builtin_setjmp(from) != 0) return;
  getcontext(&start);
  start.uc_stack.ss_sp = stack;
  start.uc_stack.ss_size = kStackBytes;
  makecontext(&start, body, 0);
  setcontext(&start);
}

enum class State { kRunnable, kAtBlockBarrier, kInWarpOperation, kFinished };

struct Fiber : Thread {
  Context context;
  bool started = false;
  unsigned char* stack_bytes = nullptr;
  ucontext_t start;
  void* asan_stack = nullptr;

  State state;
  Location location;
  int addend;  // of block_sum
  WarpOperation operation;
  unsigned mask, source;
  std::uint64_t value, result;

  struct Copy {
    void* destination;
    const void* source;
    std::size_t bytes;
  };
  std::deque<std::vector<Copy>> copies;  // the last group is not committed yet
};

class Scheduler {
 public:
  void run(const Launch& launch);

  int wait_at_block_barrier(int addend, Location location);
  std::uint64_t wait_in_warp_operation(WarpOperation operation, unsigned mask, std::uint64_t value,
                                       unsigned source, Location location);
  Fiber& current() { return *fibers_[current_thread->id]; }
  // Ends the launch, from within a thread: an exception cannot pass through the hooks of an access.
  [[noreturn]] void abandon_launch(std::exception_ptr error) {
    error_ = std::move(error);
    suspend();
    std::abort();
  }
  std::string describe_position();
  bool ordered_before_now(unsigned other, unsigned clock);

  std::uint64_t seed = 0, switches = 0, launches = 0;
  std::optional<std::vector<Launched>> log;
  std::unordered_map<const void*, std::size_t> shared_limits;

 private:
  void run_block();
  void check_unused_shared(std::size_t end);
  void resume(Fiber& fiber);
  void suspend();
  void make_runnable(Fiber& fiber);
  Fiber& take_runnable();
  void finish_warp_operation(Fiber& last);
  std::string describe_waiting_threads();
  static void fiber_body();

  const Launch* launch_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<unsigned> seen_by_block_;  // each thread's clock at the last barrier of the block
  std::deque<Fiber*> runnable_;
  bool depth_first_ = false;
  std::array<unsigned, 32> waiting_in_warp_ = {};
  unsigned arrived_ = 0;
  int sum_ = 0, last_sum_ = 0;
  Context main_context_;
  std::exception_ptr error_;
  std::mt19937_64 random_;
  const void* asan_main_stack_ = nullptr;
  std::size_t asan_main_bytes_ = 0;
};

Scheduler scheduler;

void Scheduler::fiber_body() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &scheduler.asan_main_stack_,
                                  &scheduler.asan_main_bytes_);
#endif
  for (;;) {
    Fiber& fiber = scheduler.current();
    inside_emulation = false;
    scheduler.launch_->body(scheduler.launch_->parameters);
    fiber.state = State::kFinished;
    scheduler.suspend();
  }
}

void Scheduler::resume(Fiber& fiber) {
  ++switches;
  current_thread = &fiber;
  threadIdx = fiber.index;
#ifdef __SANITIZE_ADDRESS__
  void* main_fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&main_fake_stack, fiber.stack, kStackBytes);
#endif
  if (fiber.started) {
    switch_context(main_context_, fiber.context);
  } else {
    fiber.started = true;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(fiber.stack_bytes, kStackBytes);
#endif
    start_context(main_context_, fiber.start, fiber_body, fiber.stack_bytes);
  }
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(main_fake_stack, nullptr, nullptr);
#endif
  current_thread = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Scheduler::suspend() {
  Fiber& fiber = current();
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&fiber.asan_stack, asan_main_stack_, asan_main_bytes_);
#endif
  switch_context(fiber.context, main_context_);
  inside_emulation = true;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fiber.asan_stack, nullptr, nullptr);
#endif
}

void Scheduler::make_runnable(Fiber& fiber) {
  fiber.state = State::kRunnable;
  runnable_.push_back(&fiber);
}

Fiber& Scheduler::take_runnable() {
  if (seed != 0) {
    // Depth first runs one warp as far as it can go; the rest of the time, any thread goes next.
    if (!depth_first_) std::swap(runnable_.back(), runnable_[random_() % runnable_.size()]);
    Fiber& fiber = *runnable_.back();
    runnable_.pop_back();
    return fiber;
  }
  Fiber& fiber = *runnable_.front();
  runnable_.pop_front();
  return fiber;
}

#ifndef __SANITIZE_ADDRESS__
struct sigaction action_before[2];  // of SIGSEGV and SIGBUS

// Says which thread of which kernel ran into an inaccessible page, before the program dies of it.
void on_fault(int signal, siginfo_t* info, void*) {
  std::fprintf(stderr, "%sbad access to %p (nil where it is misaligned)\n",
               scheduler.describe_position().c_str(), info->si_addr);
  sigaction(signal, &action_before[signal == SIGBUS], nullptr);
}

void report_faults() {
  static unsigned char stack[64 * 1024];
  stack_t alternative = {};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &action_before[0]);
  sigaction(SIGBUS, &action, &action_before[1]);
}
#endif

void Scheduler::run(const Launch& launch) {
#ifndef __SANITIZE_ADDRESS__
  if (fibers_.empty()) report_faults();
#endif
  launch_ = &launch;
  ++launches;
  if (log) {
    log->push_back({describe_code(launch.kernel), launch.grid.x * launch.grid.y * launch.grid.z,
                    launch.block.x * launch.block.y * launch.block.z, launch.shared_bytes});
  }
  gridDim = launch.grid;
  blockDim = launch.block;
  random_.seed(seed);
  const unsigned threads = launch.block.x * launch.block.y * launch.block.z;
  while (fibers_.size() < threads) {
    auto fiber = std::make_unique<Fiber>();
    fiber->stack = fiber->stack_bytes = map_guarded(kStackBytes);
    fibers_.push_back(std::move(fiber));
  }
  seen_by_block_.resize(threads);
  if (access_checker != nullptr) access_checker->launch_begins(launch);

  // Past what the launch asked for, shared memory is out of bounds.
  fill_with_poison(dynamic_shared_bytes, kMaxSharedBytes);
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(dynamic_shared_bytes + launch.shared_bytes,
                              kMaxSharedBytes - launch.shared_bytes);
#endif
  struct AtEnd {
    ~AtEnd() {
      scheduler.launch_ = nullptr;
#ifdef __SANITIZE_ADDRESS__
      __asan_unpoison_memory_region(dynamic_shared_bytes, kMaxSharedBytes);
#endif
    }
  };
  const AtEnd at_end;

  std::vector<unsigned> blocks(std::size_t{launch.grid.x} * launch.grid.y * launch.grid.z);
  for (unsigned i = 0; i < blocks.size(); ++i) blocks[i] = i;
  if (seed != 0) std::shuffle(blocks.begin(), blocks.end(), random_);
  for (const unsigned block : blocks) {
    blockIdx = {block % launch.grid.x, block / launch.grid.x % launch.grid.y,
                block / launch.grid.x / launch.grid.y};
    for (unsigned id = 0; id < threads; ++id) {
      Thread& thread = *fibers_[id];
      thread.index = {id % launch.block.x, id / launch.block.x % launch.block.y,
                      id / launch.block.x / launch.block.y};
      thread.id = id;
      thread.block = block;
    }
    run_block();
  }
  check_unused_shared(kMaxSharedBytes);
}

void Scheduler::run_block() {
  const std::size_t bytes = launch_->shared_bytes;
  fill_with_poison(dynamic_shared_bytes, bytes);
  if (access_checker != nullptr) access_checker->block_begins(dynamic_shared_bytes, bytes);

  arrived_ = 0;
  sum_ = 0;
  waiting_in_warp_.fill(0);
  runnable_.clear();
  depth_first_ = random_() % 2 == 0;
  const unsigned threads = static_cast<unsigned>(seen_by_block_.size());
  for (unsigned id = 0; id < threads; ++id) {
    Fiber& fiber = *fibers_[id];
    fiber.clock = 1;
    fiber.operations = 0;
    fiber.seen.fill(0);
    fiber.fenced = false;
    if (fiber.copies.size() != 1 || !fiber.copies.front().empty()) fiber.copies.assign(1, {});
    seen_by_block_[id] = 0;
    make_runnable(fiber);
  }
  if (seed != 0) std::shuffle(runnable_.begin(), runnable_.end(), random_);
  unsigned finished = 0;
  try {
    while (finished < threads) {
      if (runnable_.empty()) fail("deadlock: " + describe_waiting_threads());
      Fiber& fiber = take_runnable();
      resume(fiber);
      if (fiber.state == State::kFinished) ++finished;
    }
    if (access_checker != nullptr) access_checker->block_ends();
    // Rarely anything strays far: the rest is looked at when the launch ends.
    check_unused_shared(std::min<std::size_t>(bytes + 1024, kMaxSharedBytes));
  } catch (...) {
    // The fibers that did not finish are abandoned where they stand.
    for (unsigned id = 0; id < threads; ++id) {
      if (fibers_[id]->state != State::kFinished) fibers_[id]->started = false;
    }
    throw;
  }
}

void Scheduler::check_unused_shared(std::size_t end) {
#ifdef __SANITIZE_ADDRESS__
  static_cast<void>(end);
#else
  std::array<unsigned char, sizeof kPoison> poison;
  std::memcpy(poison.data(), &kPoison, sizeof kPoison);
  for (std::size_t at = launch_->shared_bytes; at < end; ++at) {
    if (dynamic_shared_bytes[at] != poison[at % sizeof kPoison]) {
      fail("the block wrote past the end of its dynamic shared memory");
    }
  }
#endif
}

int Scheduler::wait_at_block_barrier(int addend, Location location) {
  Fiber& fiber = current();
  fiber.state = State::kAtBlockBarrier;
  fiber.location = location;
  sum_ += addend;
  ++fiber.operations;
  const unsigned threads = static_cast<unsigned>(seen_by_block_.size());
  if (++arrived_ == threads) {
    for (unsigned id = 0; id < threads; ++id) {
      const Location other = fibers_[id]->location;
      if (other.line() != location.line() || other.column() != location.column() ||
          std::strcmp(other.file_name(), location.file_name()) != 0) {
        fail("the block's threads meet at different barriers: " + describe_waiting_threads());
      }
    }
    for (unsigned id = 0; id < threads; ++id) {
      seen_by_block_[id] = fibers_[id]->clock++;
      make_runnable(*fibers_[id]);
    }
    arrived_ = 0;
    last_sum_ = std::exchange(sum_, 0);
  }
  suspend();
  return last_sum_;
}

std::uint64_t Scheduler::wait_in_warp_operation(WarpOperation operation, unsigned mask,
                                                std::uint64_t value, unsigned source,
                                                Location location) {
  Fiber& fiber = current();
  fiber.state = State::kInWarpOperation;
  fiber.location = location;
  fiber.operation = operation;
  fiber.mask = mask;
  fiber.value = value;
  fiber.source = source;
  ++fiber.operations;
  if ((mask >> lane() & 1) == 0) fail("a warp operation's mask leaves out the lane that calls it");
  finish_warp_operation(fiber);
  suspend();
  return fiber.result;
}

void Scheduler::finish_warp_operation(Fiber& last) {
  const unsigned first = last.id / warpSize * warpSize;
  unsigned& waiting = waiting_in_warp_[last.id / warpSize];
  const unsigned expected = static_cast<unsigned>(__builtin_popcount(last.mask));
  if (++waiting < expected) return;
  const auto each_lane = [&](auto visit) {
    for (unsigned lane = 0; lane < warpSize; ++lane) {
      if (last.mask >> lane & 1) visit(*fibers_[first + lane], lane);
    }
  };
  const unsigned lanes =
      std::min<unsigned>(warpSize, static_cast<unsigned>(seen_by_block_.size()) - first);
  if (lanes < warpSize && last.mask >> lanes != 0)
    fail("a warp operation's mask names lanes that the block does not have");
  bool complete = true;
  each_lane([&](const Fiber& fiber, unsigned) {
    complete = complete && fiber.state == State::kInWarpOperation &&
               fiber.operation == last.operation && fiber.mask == last.mask &&
               fiber.location.line() == last.location.line() &&
               fiber.location.column() == last.location.column();
  });
  if (!complete) return;
  waiting -= expected;

  std::uint64_t ballot = 0;
  std::array<unsigned, warpSize> seen = {};
  each_lane([&](const Fiber& fiber, unsigned lane) {
    ballot |= fiber.value << lane;
    if (last.operation != WarpOperation::kBarrier) return;
    for (unsigned i = 0; i < warpSize; ++i) seen[i] = std::max(seen[i], fiber.seen[i]);
    seen[lane] = std::max(seen[lane], fiber.clock);
  });
  each_lane([&](Fiber& fiber, unsigned) {
    switch (last.operation) {
      case WarpOperation::kBarrier:
        fiber.seen = seen;
        break;
      case WarpOperation::kShuffle:
        if ((last.mask >> fiber.source & 1) == 0)
          fail("a shuffle reads a lane that its mask leaves out");
        fiber.result = fibers_[first + fiber.source]->value;
        break;
      case WarpOperation::kBallot:
        fiber.result = ballot;
        break;
      case WarpOperation::kMatch:
        fiber.result = 0;
        each_lane([&](const Fiber& other, unsigned lane) {
          if (other.value == fiber.value) fiber.result |= std::uint64_t{1} << lane;
        });
        break;
    }
  });
  each_lane([&](Fiber& fiber, unsigned) {
    if (last.operation == WarpOperation::kBarrier) ++fiber.clock;
    make_runnable(fiber);
  });
}

bool Scheduler::ordered_before_now(unsigned other, unsigned clock) {
  const Fiber& now = current();
  if (other == now.id || clock <= seen_by_block_[other]) return true;
  return other / warpSize == now.id / warpSize && clock <= now.seen[other % warpSize];
}

std::string Scheduler::describe_position() {
  if (launch_ == nullptr) return {};
  const auto three = [](auto index) {
    return "(" + std::to_string(index.x) + "," + std::to_string(index.y) + "," +
           std::to_string(index.z) + ")";
  };
  std::string position = describe_code(launch_->kernel) + ", block " + three(blockIdx);
  if (current_thread != nullptr) position += ", thread " + three(current_thread->index);
  return position + ": ";
}

std::string Scheduler::describe_waiting_threads() {
  std::map<std::string, std::vector<unsigned>> groups;
  for (unsigned id = 0; id < seen_by_block_.size(); ++id) {
    const Fiber& fiber = *fibers_[id];
    const std::string place =
        std::string(fiber.location.file_name()) + ":" + std::to_string(fiber.location.line());
    char mask[16];
    std::snprintf(mask, sizeof mask, "0x%08x", fiber.mask);
    switch (fiber.state) {
      case State::kAtBlockBarrier:
        groups["wait at the block barrier in " + place].push_back(id);
        break;
      case State::kInWarpOperation:
        groups[std::string("wait for mask ") + mask + " in " + place].push_back(id);
        break;
      case State::kFinished:
        groups["have returned"].push_back(id);
        break;
      case State::kRunnable:
        groups["run"].push_back(id);
        break;
    }
  }
  std::string description;
  for (const auto& [what, ids] : groups) {
    description += (description.empty() ? "threads " : "; threads ");
    for (std::size_t i = 0; i < ids.size(); ++i) {
      std::size_t end = i;
      while (end + 1 < ids.size() && ids[end + 1] == ids[end] + 1) ++end;
      description += (i == 0 ? "" : ",") + std::to_string(ids[i]);
      if (end > i) description += "-" + std::to_string(ids[end]);
      i = end;
    }
    description += " " + what;
  }
  return description;
}

std::map<void*, std::size_t> mapped;  // device buffers, by their first byte

}  // namespace

void set_seed(std::uint64_t seed) { scheduler.seed = seed; }
void run(const Launch& launch) {
  const std::lock_guard lock(one_at_a_time);
  scheduler.run(launch);
}
std::uint64_t launches() { return scheduler.launches; }
void clear_launch_log() { scheduler.log.emplace(); }
const std::vector<Launched>& launch_log() {
  static const std::vector<Launched> none;
  return scheduler.log ? *scheduler.log : none;
}
std::uint64_t thread_switches() { return scheduler.switches; }

void allow_shared_bytes(const void* kernel, std::size_t bytes) {
  const std::lock_guard lock(one_at_a_time);
  scheduler.shared_limits[kernel] = bytes;
}
std::size_t allowed_shared_bytes(const void* kernel) {
  const std::lock_guard lock(one_at_a_time);
  const auto limit = scheduler.shared_limits.find(kernel);
  return limit == scheduler.shared_limits.end() ? kDefaultSharedBytes : limit->second;
}

void block_barrier(Location location) { block_sum(0, location); }
int block_sum(int value, Location location) {
  const InsideEmulation inside;
  return scheduler.wait_at_block_barrier(value, location);
}
std::uint64_t warp_exchange(WarpOperation operation, unsigned mask, std::uint64_t value,
                            unsigned source, Location location) {
  const InsideEmulation inside;
  return scheduler.wait_in_warp_operation(operation, mask, value, source, location);
}
unsigned lane() { return current_thread->id % warpSize; }
unsigned warp() { return current_thread->id / warpSize; }
bool ordered_before_now(unsigned other, unsigned clock) {
  return scheduler.ordered_before_now(other, clock);
}

void copy_async(void* destination, const void* source, std::size_t bytes) {
  const InsideEmulation inside;
  const auto aligned = [&](const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
  };
  if ((bytes != 4 && bytes != 8 && bytes != 16) || !aligned(destination) || !aligned(source)) {
    fail("an asynchronous copy is not of 4, 8 or 16 aligned bytes");
  }
  scheduler.current().copies.back().push_back({destination, source, bytes});
}
void commit_copies() {
  const InsideEmulation inside;
  scheduler.current().copies.emplace_back();
}
void wait_for_copies(unsigned groups_left) {
  const InsideEmulation inside;
  auto& groups = scheduler.current().copies;
  while (groups.size() > groups_left + 1) {
    for (const auto& copy : groups.front()) {
      if (access_checker != nullptr) {
        access_checker->accessed(copy.source, copy.bytes, false, false,
                                 __builtin_return_address(0));
        access_checker->accessed(copy.destination, copy.bytes, true, false,
                                 __builtin_return_address(0));
      }
      std::memcpy(copy.destination, copy.source, copy.bytes);
    }
    groups.pop_front();
  }
}

void memory_fence() { current_thread->fenced = true; }
void atomic_access(const void* address, std::size_t bytes, const void* code) {
  const InsideEmulation inside;
  if (access_checker != nullptr) access_checker->accessed(address, bytes, true, true, code);
}

void* allocate(std::size_t bytes) {
  constexpr std::size_t kAlignment = 256;
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const std::size_t pages = (rounded + page_bytes() - 1) / page_bytes() * page_bytes();
  unsigned char* const memory = map_guarded(pages) + (pages - rounded);
  fill_with_poison(memory, rounded);
  const std::lock_guard lock(one_at_a_time);
  mapped[memory] = bytes;
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(memory - (pages - rounded), pages - rounded);
  __asan_poison_memory_region(memory + bytes, rounded - bytes);
#endif
  if (access_checker != nullptr) access_checker->allocated(memory, bytes);
  return memory;
}

void release(void* memory) {
  const std::lock_guard lock(one_at_a_time);
  const auto buffer = mapped.find(memory);
  if (buffer == mapped.end()) {
    if (memory == nullptr) return;
    fail("cudaFree of what cudaMalloc did not return");
  }
  // The pages stay reserved, so that no later buffer takes their place, and any further access
  // faults.
  if (access_checker != nullptr) access_checker->released(memory);
  const std::uintptr_t first =
      reinterpret_cast<std::uintptr_t>(memory) / page_bytes() * page_bytes();
  const std::size_t bytes = reinterpret_cast<std::uintptr_t>(memory) + buffer->second - first;
  mmap(reinterpret_cast<void*>(first), bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  mapped.erase(buffer);
}

void host_wrote(const void* memory, std::size_t bytes) {
  const std::lock_guard lock(one_at_a_time);
  if (access_checker != nullptr) access_checker->host_wrote(memory, bytes);
}

std::string describe_code(const void* address) {
  Dl_info info;
  if (dladdr(address, &info) == 0) return "?";
  char command[512];
  std::snprintf(command, sizeof command, "addr2line -Cfpse '%s' %p 2>/dev/null", info.dli_fname,
                reinterpret_cast<const void*>(static_cast<const char*>(address) -
                                              static_cast<char*>(info.dli_fbase)));
  std::string line;
  if (FILE* const output = popen(command, "r")) {
    char part[512];
    while (std::fgets(part, sizeof part, output) != nullptr) line += part;
    pclose(output);
  }
  while (!line.empty() && line.back() == '\n') line.pop_back();
  return line;
}

void fail(const std::string& what) {
  const Error error(scheduler.describe_position() + what);
  if (current_thread == nullptr) throw error;
  scheduler.abandon_launch(std::make_exception_ptr(error));
}

}  // namespace cuda_emulation
