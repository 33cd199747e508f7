// The fast kernels against the simple ones: through the CUDA runtime API alone, without torch.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "simple_kernels.cuh"

namespace {

using namespace h2o::cuda;

int failures = 0, comparisons = 0;

void expect(bool holds, const std::string& what) {
  ++comparisons;
  if (holds) return;
  ++failures;
  std::printf("does not hold: %s\n", what.c_str());
}

template <typename T>
bool close(const std::vector<T>& a, const std::vector<T>& b, float tolerance) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!(std::abs(static_cast<float>(a[i]) - static_cast<float>(b[i])) <= tolerance)) return false;
  }
  return true;
}

struct Shape {
  int64_t batch = 2, num_kv_heads = 2;
  int32_t group_size = 1, head_dim = 64, capacity = 32, empty_of_10 = 0;
};

// The tensors of one call, full of random numbers; NaN where a slot is empty.
template <typename T>
struct Problem {
  Shape shape;
  std::vector<T> k, v, query, k_new, v_new;
  std::vector<float> scores;
  std::vector<int32_t> positions, position_new;

  Problem(const Shape& shape, unsigned seed) : shape(shape) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const int64_t heads = shape.batch * shape.num_kv_heads, slots = heads * shape.capacity;
    const auto fill = [&](std::vector<T>& values, int64_t vectors) {
      for (int64_t i = 0; i < vectors * shape.head_dim; ++i) {
        values.push_back(static_cast<T>(normal(random)));
      }
    };
    fill(k, slots);
    fill(v, slots);
    fill(query, heads * shape.group_size);
    fill(k_new, heads);
    fill(v_new, heads);
    for (int64_t slot = 0; slot < slots; ++slot) {
      const bool empty = static_cast<int32_t>(random() % 10) < shape.empty_of_10;
      // Each head's positions in an order of its own.
      positions.push_back(empty ? -1 : static_cast<int32_t>((slot * 7) % shape.capacity));
      scores.push_back(empty ? 0 : static_cast<float>(random() % 1000) / 100);
      for (int32_t d = 0; empty && d < shape.head_dim; ++d) {
        k[slot * shape.head_dim + d] = v[slot * shape.head_dim + d] = static_cast<T>(std::nanf(""));
      }
    }
    position_new.assign(static_cast<std::size_t>(shape.batch), shape.capacity);
  }
};

template <typename T>
struct OnDevice {
  Problem<T> problem;
  DeviceBuffer<T> k, v, query, k_new, v_new, output, k_evicted, v_evicted;
  DeviceBuffer<float> scores;
  DeviceBuffer<int32_t> positions, position_new, evicted;

  explicit OnDevice(const Problem<T>& from)
      : problem(from),
        k(from.k),
        v(from.v),
        query(from.query),
        k_new(from.k_new),
        v_new(from.v_new),
        output(from.query.size()),
        k_evicted(from.k_new),
        v_evicted(from.v_new),
        scores(from.scores),
        positions(from.positions),
        position_new(from.position_new),
        evicted(from.positions.size()) {}

  template <typename U>
  View<U> view(U* data, int64_t heads, int64_t tokens, int64_t size) const {
    return {data, heads * tokens * size, tokens * size, size};
  }
  Sizes sizes() const {
    const Shape& s = problem.shape;
    return {s.batch, s.num_kv_heads, s.group_size, s.head_dim, 1};
  }
  CacheView<T> cache() {
    const Shape& s = problem.shape;
    return {view(k.data(), s.num_kv_heads, s.capacity, s.head_dim),
            view(v.data(), s.num_kv_heads, s.capacity, s.head_dim),
            view(scores.data(), s.num_kv_heads, s.capacity, 1),
            view(positions.data(), s.num_kv_heads, s.capacity, 1), s.capacity};
  }
  DecodeStep<T> step(const h2o::Budget& budget) {
    const Shape& s = problem.shape;
    const int64_t q_heads = s.num_kv_heads * s.group_size;
    DecodeStep<T> step = {};
    step.sizes = sizes();
    step.cache = cache();
    step.query = view<const T>(query.data(), q_heads, 1, s.head_dim);
    step.k_new = view<const T>(k_new.data(), s.num_kv_heads, 1, s.head_dim);
    step.v_new = view<const T>(v_new.data(), s.num_kv_heads, 1, s.head_dim);
    step.position_new = {position_new.data(), false, 1, 1};
    step.budget.common = budget;
    step.terms.scale = 1 / std::sqrt(static_cast<float>(s.head_dim));
    step.output = view(output.data(), q_heads, 1, s.head_dim);
    step.evicted = evicted.data();
    step.k_evicted = view(k_evicted.data(), s.num_kv_heads, 1, s.head_dim);
    step.v_evicted = view(v_evicted.data(), s.num_kv_heads, 1, s.head_dim);
    step.aligned = s.head_dim * sizeof(T) % 16 == 0;
    return step;
  }
};

template <typename T>
void compare_steps(const Shape& shape, int32_t splits, unsigned seed, float tolerance) {
  const Problem<T> problem(shape, seed);
  const h2o::Budget budget = {2, shape.capacity - 12, 10};
  OnDevice<T> fast(problem), simple(problem);
  DecodeStep<T> step = fast.step(budget);
  const std::size_t heads = static_cast<std::size_t>(shape.batch * shape.num_kv_heads),
                    groups = heads * shape.group_size,
                    ranges = static_cast<std::size_t>(slot_ranges(shape.capacity));
  DeviceBuffer<float> weights(groups * ranges * kSlotRange), maximum(groups * ranges),
      sum(groups * ranges), output(groups * ranges * shape.head_dim);
  DeviceBuffer<unsigned> arrivals(std::vector<unsigned>(heads, 0));
  step.splits = splits;
  step.parts = {weights.data(), maximum.data(), sum.data(), output.data(), arrivals.data()};
  check(launch_decode_step(step, nullptr));
  DeviceBuffer<float> simple_weights(heads * (shape.capacity + 1));
  check(launch(simple_decode_step<T>, static_cast<int64_t>(heads), 1, 0, nullptr,
               simple.step(budget), simple_weights.data()));

  const std::string what = "step of " + std::to_string(sizeof(T)) + " bytes, group " +
                           std::to_string(shape.group_size) + ", head_dim " +
                           std::to_string(shape.head_dim) + ", capacity " +
                           std::to_string(shape.capacity) + ", splits " + std::to_string(splits);
  std::vector<int32_t> left = fast.evicted.host(), simple_left = simple.evicted.host();
  left.resize(heads);
  simple_left.resize(heads);
  expect(left == simple_left, what + ": the same leave");
  expect(fast.positions.host() == simple.positions.host(), what + ": positions");
  expect(close(fast.k_evicted.host(), simple.k_evicted.host(), 0), what + ": the keys that leave");
  expect(close(fast.v_evicted.host(), simple.v_evicted.host(), 0), what + ": their values");
  expect(close(fast.scores.host(), simple.scores.host(), 2e-5f), what + ": scores");
  expect(close(fast.output.host(), simple.output.host(), tolerance), what + ": output");
  expect(arrivals.host() == std::vector<unsigned>(heads, 0), what + ": arrivals are 0 again");
}

template <typename T>
void compare_shrinking(const Shape& shape, const h2o::Budget& budget, unsigned seed) {
  const Problem<T> problem(shape, seed);
  OnDevice<T> fast(problem), simple(problem);
  const auto selection = [&](OnDevice<T>& on, int32_t* work) {
    Selection<T> p = {};
    p.sizes = on.sizes();
    p.sizes.num_new = 0;
    p.cache = on.cache();
    p.budget.common = budget;
    p.to_budget = true;
    p.work = work;
    p.evicted = on.evicted.data();
    p.evicted_width = shape.capacity;
    return p;
  };
  const int64_t heads = shape.batch * shape.num_kv_heads;
  DeviceBuffer<int32_t> work(static_cast<std::size_t>(heads * selection_work(shape.capacity, 0)));
  check(launch_selection(selection(fast, work.data()), nullptr));
  check(launch(simple_shrink<T>, heads, 1, 0, nullptr, selection(simple, nullptr)));
  const std::string what =
      "shrinking " + std::to_string(shape.capacity) + " slots to " + std::to_string(budget.total());
  expect(fast.evicted.host() == simple.evicted.host(), what + ": the same leave, in order");
  expect(fast.positions.host() == simple.positions.host(), what + ": positions");
  expect(fast.scores.host() == simple.scores.host(), what + ": scores");
}

}  // namespace

int main() {
  unsigned seed = 0;
  for (const int32_t group_size : {1, 3, 8, 12}) {
    for (const int32_t head_dim : {24, 64}) {
      for (const int32_t splits : {1, 2}) {
        const Shape shape = {.group_size = group_size,
                             .head_dim = head_dim,
                             .capacity = 300,
                             .empty_of_10 = static_cast<int32_t>(seed % 3)};
        cuda_emulation::set_seed(++seed);
        compare_steps<float>(shape, splits, seed, 2e-6f);
        compare_steps<c10::Half>(shape, splits, seed, 2e-3f);
        compare_steps<c10::BFloat16>(shape, splits, seed, 1.6e-2f);
      }
    }
  }
  for (const int32_t capacity : {12, 33, 257}) {
    for (const int64_t heavy : {0, 3}) {
      compare_shrinking<float>({.capacity = capacity, .empty_of_10 = 2}, {1, heavy, 4}, ++seed);
      compare_shrinking<c10::Half>({.capacity = capacity}, {0, 1 + heavy, 0}, ++seed);
    }
  }
  std::printf("%d comparisons, %d failed\n", comparisons, failures);
  return failures == 0 ? 0 : 1;
}
