#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "h2o/kernels/cpu/decode_kernels.h"

// What the parts of a decode step cost: the kernels behind h2o_attention_decode, called one after
// the other as it calls them, on one thread and on float16, bfloat16 or float32.
//   attend  attention alone: the ranges of slots, whose weights are kept
//   scores  the ranges and the new token are joined, the weights are added to the scores
//   evict   the victim is found, its slot is overwritten
namespace {

using h2o::cpu::kSlotsPerRange;
using Clock = std::chrono::steady_clock;

// Together the caches are larger than the processor's, and take turns as a model's layers do.
constexpr int64_t kWorkingSet = int64_t{256} << 20;

struct Sizes {
  int64_t num_kv_heads, group_size, head_dim, capacity, steps;
};

struct Parts {
  double attend = 0, scores = 0, evict = 0;  // microseconds
};

template <typename T>
std::vector<T> normal(std::mt19937& random, int64_t count) {
  std::normal_distribution<float> draw;
  std::vector<T> values(static_cast<size_t>(count));
  std::generate(values.begin(), values.end(), [&] { return static_cast<T>(draw(random)); });
  return values;
}

template <typename T>
std::vector<T> repeated(const std::vector<T>& values, int64_t times) {
  std::vector<T> all;
  all.reserve(values.size() * static_cast<size_t>(times));
  for (int64_t i = 0; i < times; ++i) all.insert(all.end(), values.begin(), values.end());
  return all;
}

// The full caches of several layers, and a token that joins each of their KV heads.
template <typename T>
class Layers {
 public:
  explicit Layers(const Sizes& sizes)
      : sizes_(sizes),
        num_ranges_((sizes.capacity + kSlotsPerRange - 1) / kSlotsPerRange),
        head_elements_(sizes.capacity * sizes.head_dim),
        count_(std::max<int64_t>(2, kWorkingSet / (2 * sizes.num_kv_heads * head_elements_ *
                                                   static_cast<int64_t>(sizeof(T))))),
        budget_{.num_heavy = sizes.capacity / 2,
                .num_recent = sizes.capacity - sizes.capacity / 2} {
    std::mt19937 random(0);
    const int64_t heads = count_ * sizes.num_kv_heads;
    query_ = normal<T>(random, sizes.group_size * sizes.head_dim);
    token_ = normal<T>(random, sizes.head_dim);
    k_ = repeated(normal<T>(random, head_elements_), heads);
    v_ = repeated(normal<T>(random, head_elements_), heads);
    std::vector<float> scores(static_cast<size_t>(sizes.capacity));
    std::uniform_real_distribution<float> draw;
    std::generate(scores.begin(), scores.end(), [&] { return draw(random); });
    scores_ = repeated(scores, heads);
    std::vector<int32_t> positions(static_cast<size_t>(sizes.capacity));
    for (int64_t slot = 0; slot < sizes.capacity; ++slot) {
      positions[static_cast<size_t>(slot)] = static_cast<int32_t>(slot);
    }
    positions_ = repeated(positions, heads);
    const int64_t stats = num_ranges_ * sizes.group_size;
    weights_.resize(static_cast<size_t>(sizes.group_size * sizes.capacity));
    maximum_.resize(static_cast<size_t>(stats));
    sum_.resize(static_cast<size_t>(stats));
    partial_.resize(static_cast<size_t>(stats * sizes.head_dim));
    scratch_.resize(static_cast<size_t>(stats + sizes.group_size));
    output_.resize(query_.size());
  }

  int64_t count() const { return count_; }

  // One token on every KV head of a layer.
  Parts step(int64_t layer, int32_t position) {
    Parts parts;
    for (int64_t head = 0; head < sizes_.num_kv_heads; ++head) {
      const int64_t item = layer * sizes_.num_kv_heads + head;
      const auto begin = Clock::now();
      for (int64_t range = 0; range < num_ranges_; ++range) attend(item, range, position);
      const auto attended = Clock::now();
      const float new_score = merge(item);
      const auto merged = Clock::now();
      evict(item, position, new_score);
      const auto end = Clock::now();
      parts.attend += std::chrono::duration<double, std::micro>(attended - begin).count();
      parts.scores += std::chrono::duration<double, std::micro>(merged - attended).count();
      parts.evict += std::chrono::duration<double, std::micro>(end - merged).count();
    }
    return parts;
  }

  // A step on the first KV head gives its keys as much mass as there are query heads, and its
  // victim is the lowest score of the older half; false where that is not so.
  bool check() {
    std::vector<float> before(scores_.begin(), scores_.begin() + sizes_.capacity);
    for (int64_t range = 0; range < num_ranges_; ++range) {
      attend(0, range, static_cast<int32_t>(sizes_.capacity));
    }
    const float new_score = merge(0);
    double mass = new_score;
    for (int64_t i = 0; i < sizes_.capacity; ++i) mass += scores_[size_t(i)] - before[size_t(i)];
    const auto older_end = scores_.begin() + sizes_.capacity - budget_.num_recent + 1;
    const auto lowest = std::min_element(scores_.begin(), older_end) - scores_.begin();
    const bool victim = evict(0, static_cast<int32_t>(sizes_.capacity), new_score) == lowest;
    return victim && std::abs(mass - static_cast<double>(sizes_.group_size)) < 1e-2;
  }

 private:
  void attend(int64_t item, int64_t range, int32_t position) {
    const int64_t begin = range * kSlotsPerRange, group_size = sizes_.group_size;
    h2o::cpu::decode_kernels<T>().attend_range({
        .begin = begin,
        .end = std::min(sizes_.capacity, begin + kSlotsPerRange),
        .fetch_end = sizes_.capacity,
        .group_size = group_size,
        .head_dim = sizes_.head_dim,
        .query = {query_.data(), sizes_.head_dim},
        .k = {k_.data() + item * head_elements_, sizes_.head_dim},
        .v = {v_.data() + item * head_elements_, sizes_.head_dim},
        .positions = positions_.data() + item * sizes_.capacity,
        .positions_stride = 1,
        .query_position = position,
        .terms = terms(),
        .weights = weights_.data(),
        .weights_stride = sizes_.capacity,
        .maximum = maximum_.data() + range * group_size,
        .sum = sum_.data() + range * group_size,
        .output = partial_.data() + range * group_size * sizes_.head_dim,
    });
  }

  float merge(int64_t item) {
    h2o::cpu::StepMerge<T> step = {
        .num_ranges = num_ranges_,
        .capacity = sizes_.capacity,
        .group_size = sizes_.group_size,
        .head_dim = sizes_.head_dim,
        .gqa_reduce = h2o::GqaReduce::kSum,
        .query = {query_.data(), sizes_.head_dim},
        .k_new = token_.data(),
        .v_new = token_.data(),
        .terms = terms(),
        .weights = weights_.data(),
        .weights_stride = sizes_.capacity,
        .maximum = maximum_.data(),
        .sum = sum_.data(),
        .partial = partial_.data(),
        .positions = positions_.data() + item * sizes_.capacity,
        .positions_stride = 1,
        .scratch = scratch_.data(),
        .output = {output_.data(), sizes_.head_dim},
        .scores = scores_.data() + item * sizes_.capacity,
        .scores_stride = 1,
        .new_score = 0,
    };
    h2o::cpu::decode_kernels<T>().merge_step(step);
    return step.new_score;
  }

  // Returns the slot.
  int64_t evict(int64_t item, int32_t position, float new_score) {
    float* const scores = scores_.data() + item * sizes_.capacity;
    int32_t* const positions = positions_.data() + item * sizes_.capacity;
    const int64_t slot =
        h2o::cpu::scan_slots_kernel()(scores, positions, sizes_.capacity, position, budget_).victim;
    const int64_t first = item * head_elements_ + slot * sizes_.head_dim;
    std::copy(token_.begin(), token_.end(), k_.begin() + first);
    std::copy(token_.begin(), token_.end(), v_.begin() + first);
    scores[slot] = new_score;
    positions[slot] = position;
    return slot;
  }

  h2o::cpu::LogitTerms<float> terms() const {
    return {1 / std::sqrt(static_cast<float>(sizes_.head_dim)), nullptr};
  }

  const Sizes sizes_;
  const int64_t num_ranges_, head_elements_, count_;
  const h2o::Budget budget_;
  std::vector<T> query_, token_, k_, v_, output_;
  std::vector<float> scores_, weights_, maximum_, sum_, partial_, scratch_;
  std::vector<int32_t> positions_;
};

void print(const char* name, const std::vector<Parts>& steps, double Parts::* part, char end) {
  std::printf("\"%s_us\": [", name);
  for (size_t i = 0; i < steps.size(); ++i) std::printf("%s%.3f", i ? ", " : "", steps[i].*part);
  std::printf("]%c ", end);
}

template <typename T>
int run(const Sizes& sizes) {
  Layers<T> layers(sizes);
  if (!layers.check()) {
    std::fprintf(stderr, "h2o_step_parts: the kernels do not make a step\n");
    return 1;
  }
  constexpr int64_t kWarmup = 3;
  std::vector<Parts> steps;
  for (int64_t i = 0; i < kWarmup + sizes.steps; ++i) {
    const auto position = static_cast<int32_t>(sizes.capacity + 1 + i);
    const Parts parts = layers.step((i + 1) % layers.count(), position);
    if (i >= kWarmup) steps.push_back(parts);
  }
  std::printf("{");
  print("attend", steps, &Parts::attend, ',');
  print("scores", steps, &Parts::scores, ',');
  print("evict", steps, &Parts::evict, '}');
  std::printf("\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const char* const usage =
      "usage: h2o_step_parts DTYPE NUM_KV_HEADS GROUP_SIZE HEAD_DIM CAPACITY STEPS\n"
      "Microseconds of each step's parts on one thread, as a line of JSON.\n";
  if (argc == 2 && std::strcmp(argv[1], "--help") == 0) return std::printf("%s", usage) < 0;
  Sizes sizes{};
  int64_t* const fields[] = {&sizes.num_kv_heads, &sizes.group_size, &sizes.head_dim,
                             &sizes.capacity, &sizes.steps};
  bool valid = argc == 7;
  for (int i = 0; valid && i < 5; ++i) {
    *fields[i] = std::atoll(argv[i + 2]);
    valid = *fields[i] > 0;
  }
  if (valid && sizes.capacity > 1) {
    const std::string dtype = argv[1];
    if (dtype == "float32") return run<float>(sizes);
    if (dtype == "bfloat16") return run<at::BFloat16>(sizes);
    if (dtype == "float16") return run<at::Half>(sizes);
  }
  std::fprintf(stderr, "%s", usage);
  return 2;
}
