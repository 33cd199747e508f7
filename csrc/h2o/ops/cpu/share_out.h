#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace h2o::cpu {

// Runs 0..total in parts of `at_once` on up to `num_threads` threads, which take the next part as
// they come to it: one that the machine slows down holds up nobody. Each thread makes itself a
// worker, called as worker(first, last) for every part.
template <typename MakeWorker>
void share_out(int64_t total, int64_t at_once, int64_t num_threads, const MakeWorker& make_worker) {
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    const auto worker = make_worker();
    for (int64_t first = next.fetch_add(at_once); first < total; first = next.fetch_add(at_once)) {
      worker(first, std::min(total, first + at_once));
    }
  });
}

}  // namespace h2o::cpu
