#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

// Stands in for torch's header of this name in builds under ThreadSanitizer, which does not see the
// barriers of OpenMP's runtimes and would take the end of every parallel loop for a race: the parts
// of a loop are the same, their threads are std::threads, which it knows.
#define INTRA_OP_PARALLEL

namespace at::internal {

template <typename F>
void invoke_parallel(int64_t begin, int64_t end, int64_t grain_size, const F& f) {
  int64_t num_threads = at::get_num_threads();
  if (grain_size > 0) num_threads = std::min(num_threads, divup(end - begin, grain_size));
  const int64_t part = divup(end - begin, num_threads);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(num_threads));
  const auto run = [&](int64_t thread) {
    const int64_t first = begin + thread * part;
    if (first >= end) return;
    try {
      const ThreadIdGuard guard(static_cast<int>(thread));
      f(first, std::min(end, first + part));
    } catch (...) {
      errors[static_cast<size_t>(thread)] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (int64_t thread = 1; thread < num_threads; ++thread) threads.emplace_back(run, thread);
  run(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace at::internal
