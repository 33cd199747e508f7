#pragma once

#include <c10/core/CPUAllocator.h>

#include <cstdint>

namespace h2o::cpu {

// Memory for the intermediate results of one call, not initialised, aligned for vectors. A thread
// keeps it from call to call, up to a limit: a decode step then neither asks the system for memory
// nor touches fresh pages. A thread may hold one at a time.
class Workspace {
 public:
  template <typename A>
  A* get(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(A);
    if (bytes > kMostKept) {
      own_ = c10::GetCPUAllocator()->allocate(bytes);
      return static_cast<A*>(own_.get());
    }
    Kept& kept = kept_of_thread();
    if (bytes > kept.bytes) {
      kept = {};
      kept = {c10::GetCPUAllocator()->allocate(bytes), bytes};
    }
    return static_cast<A*>(kept.memory.get());
  }

 private:
  static constexpr size_t kMostKept = size_t{64} << 20;
  struct Kept {
    c10::DataPtr memory;
    size_t bytes = 0;
  };
  static Kept& kept_of_thread() {
    static thread_local Kept kept;
    return kept;
  }

  c10::DataPtr own_;  // of a call that needs more than is kept
};

}  // namespace h2o::cpu
