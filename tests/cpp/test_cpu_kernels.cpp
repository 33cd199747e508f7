#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "h2o/kernels/cpu/instruction_set.h"
#include "h2o/kernels/cpu/kernel_tables.h"
#include "reference.h"
#include "test_helpers.h"
#include "vector_functions.h"

// The arithmetic of the CPU, in every version that is compiled and that this CPU can run, against
// plain double loops.

namespace {

using h2o::GqaReduce;
using h2o::cpu::Accumulator;
using h2o::cpu::ChunkKernels;
using h2o::cpu::DecodeKernels;
using h2o::cpu::InstructionSet;
using h2o::cpu::kSlotsPerRange;
using h2o::cpu::QueryTile;
using h2o::cpu::SlotRange;
using h2o::cpu::StepMerge;

// ---- Instruction sets ---------------------------------------------------------------------------

// Those that this CPU has, the best one last.
std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets;
  for (const InstructionSet set : {InstructionSet::kBaseline, InstructionSet::kAvx2,
                                   InstructionSet::kAvx512, InstructionSet::kAvx512Bf16}) {
    if (h2o::cpu::is_supported(set)) sets.push_back(set);
  }
  return sets;
}

// What the namespace of an instruction set holds.
#if defined(H2O_X86)
#define H2O_OF(set, outer, member)       \
  switch (set) {                         \
    case InstructionSet::kAvx512Bf16:    \
      return outer::avx512_bf16::member; \
    case InstructionSet::kAvx512:        \
      return outer::avx512::member;      \
    case InstructionSet::kAvx2:          \
      return outer::avx2::member;        \
    default:                             \
      return outer::baseline::member;    \
  }
#else
#define H2O_OF(set, outer, member) \
  static_cast<void>(set);          \
  return outer::baseline::member
#endif
template <typename T>
const DecodeKernels<T>& decode_kernels_of(InstructionSet set) {
  H2O_OF(set, h2o::cpu, template decode_kernels<T>());
}
template <typename T>
const ChunkKernels<T>& chunk_kernels_of(InstructionSet set) {
  H2O_OF(set, h2o::cpu, template chunk_kernels<T>());
}
h2o::cpu::ScanSlots& scan_slots_of(InstructionSet set) {
  H2O_OF(set, h2o::cpu, scan_slots_kernel());
}
const VectorFunctions& vector_functions_of(InstructionSet set) { H2O_OF(set, , vector_functions); }
#undef H2O_OF

// ---- Storage types, converted as torch does -----------------------------------------------------

template <typename T>
T to_storage(double value) {
  return static_cast<T>(static_cast<Accumulator<T>>(value));
}

template <typename T>
double to_double(T value) {
  return static_cast<Accumulator<T>>(value);
}

// Half a unit in the last place of numbers in [1, 2): what storing a result may cost.
template <typename T>
constexpr double kRounding = std::is_same_v<T, double>     ? 0x1p-53
                             : std::is_same_v<T, float>    ? 0x1p-24
                             : std::is_same_v<T, at::Half> ? 0x1p-11
                                                           : 0x1p-8;
// What the arithmetic before that may be off by, relative to the largest number in it: a few
// hundred roundings.
template <typename T>
constexpr double kArithmetic = std::is_same_v<T, double> ? 1e-13 : 2e-5;

template <typename T>
const T kNan = to_storage<T>(std::nan(""));
template <typename A>
constexpr A kCanary = static_cast<A>(-12345.0);

// The largest amount by which an entry of `actual` is off; infinite for a NaN.
double error_of(double actual, double expected) {
  const double error = std::abs(actual - expected);
  return std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
}

// ---- One (row, KV head) with random contents ----------------------------------------------------

// Rows are further apart than they are long, and what lies between them is NaN.
template <typename T>
struct Rows {
  int64_t head_dim, stride;
  std::vector<T> data;

  Rows(int64_t count, int64_t head_dim_)
      : head_dim(head_dim_),
        stride(head_dim + 3),
        data(static_cast<size_t>(count * stride), kNan<T>) {}

  T* operator[](int64_t row) { return data.data() + row * stride; }
  h2o::cpu::VectorRows<const T> view() const { return {data.data(), stride}; }
  h2o::cpu::VectorRows<T> writable() { return {data.data(), stride}; }
  reference::Row row(int64_t index) const {
    reference::Row values;
    for (int64_t d = 0; d < head_dim; ++d)
      values.push_back(to_double(data[static_cast<size_t>(index * stride + d)]));
    return values;
  }
  template <typename Draw>
  void fill(int64_t index, const Draw& draw) {
    for (int64_t d = 0; d < head_dim; ++d) (*this)[index][d] = to_storage<T>(draw());
  }
};

enum class Occupancy { kEmpty, kTwoThirds, kFull };

template <typename T>
struct Problem {
  using A = Accumulator<T>;
  int64_t group_size, head_dim, capacity, num_new;
  int32_t first_position;  // of the new tokens
  Rows<T> query, k, v, k_new, v_new;
  int64_t positions_stride;
  std::vector<int32_t> positions;  // by slot, positions_stride apart; -1 = empty
  std::vector<A> slopes;
  A scale;

  // Positions 0..capacity-1 in a random order of slots. Full caches have their positions side by
  // side, the others every second element. Logits spread over several units: the weights are far
  // from flat.
  Problem(int64_t group_size_, int64_t head_dim_, int64_t capacity_, int64_t num_new_, bool alibi,
          Occupancy occupancy = Occupancy::kTwoThirds)
      : group_size(group_size_),
        head_dim(head_dim_),
        capacity(capacity_),
        num_new(num_new_),
        first_position(static_cast<int32_t>(capacity) + 5),
        query(group_size * num_new, head_dim),
        k(capacity, head_dim),
        v(capacity, head_dim),
        k_new(num_new, head_dim),
        v_new(num_new, head_dim),
        positions_stride(occupancy == Occupancy::kFull ? 1 : 2),
        scale(static_cast<A>(1.5 / std::sqrt(static_cast<double>(head_dim)))) {
    std::mt19937 random(static_cast<uint32_t>(group_size * 1000003 + head_dim * 1009 + capacity));
    std::normal_distribution<double> normal;
    const auto draw = [&] { return normal(random); };
    std::vector<int32_t> order;
    for (int32_t slot = 0; slot < capacity; ++slot) order.push_back(slot);
    std::shuffle(order.begin(), order.end(), random);
    positions.assign(static_cast<size_t>(positions_stride * capacity), 7777);
    for (int64_t slot = 0; slot < capacity; ++slot) {
      const bool empty = occupancy == Occupancy::kEmpty ||
                         (occupancy == Occupancy::kTwoThirds && capacity > 1 && random() % 3 == 0);
      positions[static_cast<size_t>(positions_stride * slot)] =
          empty ? -1 : order[static_cast<size_t>(slot)];
      if (empty) continue;  // its rows stay NaN
      k.fill(slot, draw);
      v.fill(slot, draw);
    }
    const auto away_from_zero = [&] {
      const double value = draw();
      return value < 0.0 ? value - 1.0 : value + 1.0;
    };
    for (int64_t i = 0; i < group_size * num_new; ++i) query.fill(i, away_from_zero);
    for (int64_t i = 0; i < num_new; ++i) {
      k_new.fill(i, draw);
      v_new.fill(i, draw);
    }
    for (int64_t h = 0; alibi && h < group_size; ++h) {
      slopes.push_back(static_cast<A>(0.05 / static_cast<double>(h + 1)));
    }
  }

  int32_t position(int64_t slot) const {
    return positions[static_cast<size_t>(positions_stride * slot)];
  }
  const A* slopes_or_null() const { return slopes.empty() ? nullptr : slopes.data(); }

  std::vector<reference::Token> tokens() const {
    std::vector<reference::Token> all;
    for (int64_t slot = 0; slot < capacity; ++slot) {
      if (position(slot) < 0) {
        all.push_back({});
      } else {
        all.push_back({position(slot), 0.0, k.row(slot), v.row(slot)});
      }
    }
    return all;
  }
  // Query h of new token i is row h * num_new + i.
  std::vector<reference::NewToken> new_tokens() const {
    std::vector<reference::NewToken> all;
    for (int64_t i = 0; i < num_new; ++i) {
      reference::NewToken token{first_position + i, k_new.row(i), v_new.row(i)};
      for (int64_t h = 0; h < group_size; ++h) token.queries.push_back(query.row(h * num_new + i));
      all.push_back(token);
    }
    return all;
  }
  reference::Rules rules(GqaReduce reduce) const {
    return {.num_heavy = 1 << 20,
            .reduce_max = reduce == GqaReduce::kMax,
            .scale = scale,
            .alibi_slopes = reference::Row(slopes.begin(), slopes.end())};
  }
  // What the reference says, with one slot more than there are tokens for each new one.
  reference::Head attended(GqaReduce reduce, reference::StepResult& result) const {
    std::vector<reference::Token> slots = tokens();
    slots.resize(slots.size() + static_cast<size_t>(num_new));
    reference::Head head(slots);
    result = head.step(new_tokens(), rules(reduce));
    return head;
  }
};

// The ranges of one step, as the operator calls them.
template <typename T>
struct Ranges {
  using A = Accumulator<T>;
  int64_t count, stride;  // stride of the weights
  std::vector<A> weights, maximum, sum, output;

  Ranges(const Problem<T>& problem, const DecodeKernels<T>& kernels)
      : count((problem.capacity + kSlotsPerRange - 1) / kSlotsPerRange),
        stride(problem.capacity + 2),
        weights(static_cast<size_t>(problem.group_size * stride), kCanary<A>),
        maximum(static_cast<size_t>(count * problem.group_size), kCanary<A>),
        sum(maximum),
        output(static_cast<size_t>(count * problem.group_size * problem.head_dim), kCanary<A>) {
    for (int64_t r = 0; r < count; ++r) {
      kernels.attend_range({
          .begin = r * kSlotsPerRange,
          .end = std::min(problem.capacity, (r + 1) * kSlotsPerRange),
          .fetch_end = problem.capacity,
          .group_size = problem.group_size,
          .head_dim = problem.head_dim,
          .query = problem.query.view(),
          .k = problem.k.view(),
          .v = problem.v.view(),
          .positions = problem.positions.data(),
          .positions_stride = problem.positions_stride,
          .query_position = problem.first_position,
          .terms = {problem.scale, problem.slopes_or_null()},
          .weights = weights.data(),
          .weights_stride = stride,
          .maximum = maximum.data() + r * problem.group_size,
          .sum = sum.data() + r * problem.group_size,
          .output = output.data() + r * problem.group_size * problem.head_dim,
      });
    }
  }
};

// One whole step: ranges, then merge. Scores start at 0.25 * slot; they are side by side where
// positions are, else every third element.
template <typename T>
struct Step {
  using A = Accumulator<T>;
  Rows<T> output;
  int64_t scores_stride;
  std::vector<A> scores;
  A new_score = 0;

  Step(const Problem<T>& problem, const DecodeKernels<T>& kernels, GqaReduce reduce)
      : output(problem.group_size, problem.head_dim),
        scores_stride(problem.positions_stride == 1 ? 1 : 3),
        scores(static_cast<size_t>(scores_stride * problem.capacity), kCanary<A>) {
    const Ranges<T> ranges(problem, kernels);
    for (int64_t slot = 0; slot < problem.capacity; ++slot) score(slot) = start(slot);
    std::vector<A> scratch(static_cast<size_t>(problem.group_size * (ranges.count + 1) + 1),
                           kCanary<A>);
    StepMerge<T> merge = {
        .num_ranges = ranges.count,
        .capacity = problem.capacity,
        .group_size = problem.group_size,
        .head_dim = problem.head_dim,
        .gqa_reduce = reduce,
        .query = problem.query.view(),
        .k_new = problem.k_new.view()[0],
        .v_new = problem.v_new.view()[0],
        .terms = {problem.scale, problem.slopes_or_null()},
        .weights = ranges.weights.data(),
        .weights_stride = ranges.stride,
        .maximum = ranges.maximum.data(),
        .sum = ranges.sum.data(),
        .partial = ranges.output.data(),
        .positions = problem.positions.data(),
        .positions_stride = problem.positions_stride,
        .scratch = scratch.data(),
        .output = output.writable(),
        .scores = scores.data(),
        .scores_stride = scores_stride,
        .new_score = -1,
    };
    kernels.merge_step(merge);
    new_score = merge.new_score;
    CHECK(scratch.back() == kCanary<A>);  // no more scratch used than asked for
  }

  A& score(int64_t slot) { return scores[static_cast<size_t>(scores_stride * slot)]; }
  static A start(int64_t slot) { return static_cast<A>(0.25) * static_cast<A>(slot); }
};

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// ---- Whole-array calls of VectorFunctions -------------------------------------------------------

constexpr int64_t kAllBits = 65536;

std::vector<uint16_t> all_bits() {
  std::vector<uint16_t> bits;
  for (int64_t i = 0; i < kAllBits; ++i) bits.push_back(static_cast<uint16_t>(i));
  return bits;
}

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

std::vector<float> exponential(const VectorFunctions& functions, std::vector<float> x) {
  const size_t size = x.size();
  while (x.size() % static_cast<size_t>(functions.lanes) != 0) x.push_back(0.0f);
  std::vector<float> y(x.size());
  functions.exponential(x.data(), static_cast<int64_t>(x.size()), y.data());
  y.resize(size);
  return y;
}

// How far `actual` is from e^x, in units in the last place of the float32 nearest to it.
double exponential_error(float actual, float x) {
  const double exact = std::exp(static_cast<double>(x));
  const double ulp = std::ldexp(1.0, std::max(std::ilogb(exact), -126) - 23);
  return error_of(actual, exact) / ulp;
}

}  // namespace

// ---- vector.h -----------------------------------------------------------------------------------

TEST_CASE("the kernels in use are the best that this CPU has and the environment allows",
          "[vector][cpu]") {
  std::vector<InstructionSet> allowed = instruction_sets();
  const char* const limit = std::getenv("ATEN_CPU_CAPABILITY");
  if (limit != nullptr) {
    REQUIRE((limit == std::string("default") || limit == std::string("avx2")));
    allowed.resize(std::min<size_t>(allowed.size(), *limit == 'd' ? 1 : 2));
  }
  const InstructionSet best = allowed.back();
  CHECK(h2o::cpu::instruction_set() == best);
  CHECK(&h2o::cpu::decode_kernels<float>() == &decode_kernels_of<float>(best));
  CHECK(&h2o::cpu::decode_kernels<double>() == &decode_kernels_of<double>(best));
  CHECK(&h2o::cpu::decode_kernels<at::Half>() == &decode_kernels_of<at::Half>(best));
  CHECK(&h2o::cpu::decode_kernels<at::BFloat16>() == &decode_kernels_of<at::BFloat16>(best));
  CHECK(&h2o::cpu::chunk_kernels<float>() == &chunk_kernels_of<float>(best));
  CHECK(&h2o::cpu::scan_slots_kernel() == &scan_slots_of(best));
  WARN("instruction sets tested: baseline to " << name_of(best));
}

TEST_CASE("every float16 and bfloat16 value widens exactly as in torch", "[vector][cpu]") {
  const InstructionSet set = GENERATE(from_range(instruction_sets()));
  CAPTURE(name_of(set));
  const std::vector<uint16_t> bits = all_bits();
  std::vector<float> half(kAllBits), brain(kAllBits);
  vector_functions_of(set).widen_float16(bits.data(), kAllBits, half.data());
  vector_functions_of(set).widen_bfloat16(bits.data(), kAllBits, brain.data());
  int wrong_half = 0, wrong_brain = 0, nan = 0;
  for (size_t i = 0; i < bits.size(); ++i) {
    const float half_exact = c10::Half(bits[i], c10::Half::from_bits());
    const float brain_exact = c10::BFloat16(bits[i], c10::BFloat16::from_bits());
    nan += std::isnan(half_exact);
    // By bits, since -0.0 == 0.0; which NaN it is does not matter.
    wrong_half +=
        std::isnan(half_exact) ? !std::isnan(half[i]) : bits_of(half[i]) != bits_of(half_exact);
    wrong_brain +=
        std::isnan(brain_exact) ? !std::isnan(brain[i]) : bits_of(brain[i]) != bits_of(brain_exact);
  }
  CHECK(wrong_half == 0);
  CHECK(wrong_brain == 0);
  CHECK(nan == 2046);
}

TEST_CASE("every float16 and bfloat16 value narrows to itself", "[vector][cpu]") {
  const InstructionSet set = GENERATE(from_range(instruction_sets()));
  CAPTURE(name_of(set));
  const std::vector<uint16_t> bits = all_bits();
  std::vector<float> half, brain;
  for (const uint16_t b : bits) {
    half.push_back(c10::Half(b, c10::Half::from_bits()));
    brain.push_back(c10::BFloat16(b, c10::BFloat16::from_bits()));
  }
  std::vector<uint16_t> half_bits(kAllBits), brain_bits(kAllBits);
  vector_functions_of(set).narrow_float16(half.data(), kAllBits, half_bits.data());
  vector_functions_of(set).narrow_bfloat16(brain.data(), kAllBits, brain_bits.data());
  int wrong_half = 0, wrong_brain = 0;
  for (size_t i = 0; i < bits.size(); ++i) {
    wrong_half += std::isnan(half[i]) ? (half_bits[i] & 0x7fff) <= 0x7c00 : half_bits[i] != bits[i];
    wrong_brain +=
        std::isnan(brain[i]) ? (brain_bits[i] & 0x7fff) <= 0x7f80 : brain_bits[i] != bits[i];
  }
  CHECK(wrong_half == 0);
  CHECK(wrong_brain == 0);
}

TEST_CASE("numbers between two 16-bit values round as in torch", "[vector][cpu]") {
  const InstructionSet set = GENERATE(from_range(instruction_sets()));
  CAPTURE(name_of(set));
  // Around every value of either type and every midpoint between two, and every 99,991st float.
  std::vector<float> values;
  const auto add_around = [&values](uint32_t bits) {
    for (const uint32_t b : {bits - 1, bits, bits + 1}) values.push_back(from_bits(b));
  };
  for (const uint16_t b : all_bits()) {
    const uint32_t half = bits_of(c10::Half(b, c10::Half::from_bits()));
    add_around(half);
    add_around(half + 0x1000u);  // half a step of a normal float16
    const float next = c10::Half(static_cast<uint16_t>(b + 1), c10::Half::from_bits());
    add_around(bits_of((from_bits(half) + next) * 0.5f));  // and of a subnormal one
    add_around(uint32_t{b} << 16);
    add_around((uint32_t{b} << 16) + 0x8000u);
  }
  for (uint64_t b = 0; b < (uint64_t{1} << 32); b += 99991)
    values.push_back(from_bits(static_cast<uint32_t>(b)));
  std::vector<uint16_t> half(values.size()), brain(values.size());
  vector_functions_of(set).narrow_float16(values.data(), static_cast<int64_t>(values.size()),
                                          half.data());
  vector_functions_of(set).narrow_bfloat16(values.data(), static_cast<int64_t>(values.size()),
                                           brain.data());
  int wrong_half = 0, wrong_brain = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) {
      wrong_half += (half[i] & 0x7fff) <= 0x7c00;
      wrong_brain += (brain[i] & 0x7fff) <= 0x7f80;
    } else {
      wrong_half += half[i] != c10::Half(values[i]).x;
      wrong_brain += brain[i] != c10::BFloat16(values[i]).x;
    }
  }
  CHECK(values.size() > 1000000);
  CHECK(wrong_half == 0);
  CHECK(wrong_brain == 0);
}

TEST_CASE("the exponential is within 2 units in the last place", "[vector][cpu]") {
  const InstructionSet set = GENERATE(from_range(instruction_sets()));
  CAPTURE(name_of(set));
  // Every 251st float from -0 to near the smallest x whose e^x is not given as 0, and the last
  // 4,096 before it.
  const uint32_t last = bits_of(-86.9899f);
  std::vector<float> x;
  for (uint32_t bits = 0x80000000u; bits <= last; bits += 251) x.push_back(from_bits(bits));
  for (uint32_t bits = last - 4095; bits <= last; ++bits) x.push_back(from_bits(bits));
  const std::vector<float> y = exponential(vector_functions_of(set), x);
  double worst = 0.0;
  float worst_x = 0.0f;
  for (size_t i = 0; i < x.size(); ++i) {
    const double error = exponential_error(y[i], x[i]);
    if (error > worst) {
      worst = error;
      worst_x = x[i];
    }
  }
  CAPTURE(worst, worst_x);
  CHECK(x.size() > 4000000);
  CHECK(worst < 2.0);
  CHECK(worst > 0.25);  // it was measured at all
}

TEST_CASE("the exponential is exact where a softmax relies on it", "[vector][cpu]") {
  const InstructionSet set = GENERATE(from_range(instruction_sets()));
  CAPTURE(name_of(set));
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> y =
      exponential(vector_functions_of(set), {0.0f, -0.0f, -1e-45f, -kInfinity, -3.4e38f, -1000.0f,
                                             -87.0f, -86.9899f, std::nanf(""), -std::nanf("")});
  CHECK(y[0] == 1.0f);
  CHECK(y[1] == 1.0f);
  CHECK(y[2] == 1.0f);
  for (size_t i = 3; i <= 6; ++i)
    CHECK(bits_of(y[i]) == 0u);  // underflow gives +0, not -0, not a subnormal
  CHECK(y[7] >= std::numeric_limits<float>::min());
  CHECK(std::isnan(y[8]));
  CHECK(std::isnan(y[9]));
  // A larger x never gives a much smaller number: neighbours differ by the error at most.
  std::vector<double> x(16), z(16);
  for (size_t i = 0; i < x.size(); ++i) x[i] = -50.0 * static_cast<double>(i);
  vector_functions_of(set).exponential_double(x.data(), 16, z.data());
  for (size_t i = 0; i < x.size(); ++i) CHECK(z[i] == std::exp(x[i]));
}

TEST_CASE("a part of a vector is padded with zeros", "[vector][cpu]") {
  const InstructionSet set = GENERATE(from_range(instruction_sets()));
  CAPTURE(name_of(set));
  const VectorFunctions& functions = vector_functions_of(set);
  const size_t size = static_cast<size_t>(2 * functions.lanes);
  std::vector<float> from;
  std::vector<at::Half> half;
  std::vector<at::BFloat16> brain;
  for (size_t i = 0; i < size; ++i) {
    from.push_back(static_cast<float>(i + 1));
    half.push_back(from.back());
    brain.push_back(from.back());
  }
  for (size_t count = 0; count <= size; ++count) {
    CAPTURE(count);
    std::vector<float> expected(size, 0.0f);
    std::copy_n(from.begin(), count, expected.begin());
    std::vector<float> to(size, -1.0f), to_half(to), to_brain(to);
    const auto first = static_cast<int64_t>(count);
    functions.load_first_float(from.data(), first, to.data());
    functions.load_first_float16(half.data(), first, to_half.data());
    functions.load_first_bfloat16(brain.data(), first, to_brain.data());
    CHECK(to == expected);
    CHECK(to_half == expected);
    CHECK(to_brain == expected);
  }
}

TEST_CASE("neighbouring lanes are summed first", "[vector][cpu]") {
  const InstructionSet set = GENERATE(from_range(instruction_sets()));
  CAPTURE(name_of(set));
  // Added in any other order, the small numbers would be lost beside the large ones.
  const int64_t lanes = vector_functions_of(set).lanes;
  std::vector<float> values;
  for (int64_t i = 0; i < lanes; ++i) {
    values.push_back(i % 4 < 2 ? 0.5f : i % 4 == 2 ? 0x1p30f : -0x1p30f);
  }
  CHECK(vector_functions_of(set).sum_lanes(values.data()) == static_cast<float>(lanes / 4));
}

// ---- attend_range -------------------------------------------------------------------------------

TEMPLATE_TEST_CASE("a range of slots is attended as plain loops do", "[attend_range][cpu]", float,
                   double, at::Half, at::BFloat16) {
  using T = TestType;
  const int64_t group_size = GENERATE(1, 2, 3, 4, 5, 6, 7, 8, 9, 71);
  const int64_t head_dim = GENERATE(1, 7, 16, 17, 64, 80, 128, 512);
  const int64_t capacity = group_size == 71 ? 37 : head_dim % 3 == 0 ? 128 : 127 - head_dim % 5;
  const bool alibi = group_size % 2 == 0;
  const Occupancy occupancy = GENERATE(Occupancy::kTwoThirds, Occupancy::kFull);
  const Problem<T> problem(group_size, head_dim, capacity, 1, alibi, occupancy);
  const std::vector<reference::Token> tokens = problem.tokens();
  for (const InstructionSet& set : instruction_sets()) {
    CAPTURE(name_of(set), group_size, head_dim, capacity, alibi);
    const Ranges<T> ranges(problem, decode_kernels_of<T>(set));
    double maximum_error = 0.0, weight_error = 0.0, sum_error = 0.0, output_error = 0.0;
    int written = 0, spread = 0;
    for (int64_t h = 0; h < group_size; ++h) {
      const reference::Row query = problem.query.row(h);
      reference::Row logits;
      double maximum = -std::numeric_limits<double>::infinity();
      for (const reference::Token& token : tokens) {
        double logit = 0.0;
        for (size_t d = 0; d < token.key.size(); ++d) logit += query[d] * token.key[d];
        logit *= static_cast<double>(problem.scale);
        if (alibi) {
          logit += static_cast<double>(problem.slopes[static_cast<size_t>(h)]) *
                   static_cast<double>(token.position - problem.first_position);
        }
        logits.push_back(logit);
        if (token.position >= 0) maximum = std::max(maximum, logit);
      }
      double sum = 0.0;
      reference::Row output(static_cast<size_t>(head_dim), 0.0);
      for (int64_t slot = 0; slot < capacity; ++slot) {
        const Accumulator<T> actual = ranges.weights[static_cast<size_t>(h * ranges.stride + slot)];
        const reference::Token& token = tokens[static_cast<size_t>(slot)];
        if (token.position < 0) {
          written += actual != kCanary<Accumulator<T>>;
          continue;
        }
        const double weight = std::exp(logits[static_cast<size_t>(slot)] - maximum);
        spread += weight < 0.1;
        sum += weight;
        weight_error = std::max(weight_error, error_of(actual, weight));
        for (size_t d = 0; d < output.size(); ++d) output[d] += weight * token.value[d];
      }
      maximum_error =
          std::max(maximum_error, error_of(ranges.maximum[static_cast<size_t>(h)], maximum));
      sum_error = std::max(sum_error, error_of(ranges.sum[static_cast<size_t>(h)], sum) / sum);
      for (int64_t d = 0; d < head_dim; ++d) {
        const Accumulator<T> actual = ranges.output[static_cast<size_t>(h * head_dim + d)];
        output_error =
            std::max(output_error, error_of(actual, output[static_cast<size_t>(d)]) / sum);
      }
    }
    CHECK(maximum_error < kArithmetic<T>);
    CHECK(weight_error < kArithmetic<T>);
    CHECK(sum_error < kArithmetic<T>);
    CHECK(output_error < kArithmetic<T>);
    CHECK(written == 0);  // weights of empty slots
    CHECK(spread > group_size * capacity / 10);
  }
}

TEMPLATE_TEST_CASE("a range without tokens has no weight", "[attend_range][cpu]", float, double,
                   at::Half, at::BFloat16) {
  using T = TestType;
  const int64_t group_size = GENERATE(1, 3, 9), capacity = GENERATE(1, 128);
  const Problem<T> problem(group_size, 17, capacity, 1, true, Occupancy::kEmpty);
  for (const InstructionSet& set : instruction_sets()) {
    CAPTURE(name_of(set), group_size, capacity);
    const Ranges<T> ranges(problem, decode_kernels_of<T>(set));
    using A = Accumulator<T>;
    CHECK(ranges.maximum ==
          std::vector<A>(static_cast<size_t>(group_size), -std::numeric_limits<A>::infinity()));
    CHECK(ranges.sum == std::vector<A>(static_cast<size_t>(group_size), 0));
    CHECK(ranges.output == std::vector<A>(static_cast<size_t>(group_size * 17), 0));
    CHECK(ranges.weights == std::vector<A>(ranges.weights.size(), kCanary<A>));
  }
}

TEST_CASE("equal keys have equal weights wherever they lie", "[attend_range][cpu]") {
  // Slots are taken several at a time, the rest singly: the way must not show in the bits, or ties
  // would break.
  const int64_t group_size = GENERATE(1, 2, 3, 4, 5, 8), head_dim = GENERATE(7, 64, 80);
  Problem<float> problem(group_size, head_dim, 127, 1, false);
  std::vector<float> key(problem.k_new[0], problem.k_new[0] + head_dim);
  for (int64_t slot = 0; slot < 127; ++slot) std::copy(key.begin(), key.end(), problem.k[slot]);
  for (const InstructionSet& set : instruction_sets()) {
    CAPTURE(name_of(set), group_size, head_dim);
    const Ranges<float> ranges(problem, decode_kernels_of<float>(set));
    int unequal = 0;
    for (int64_t h = 0; h < group_size; ++h) {
      for (int64_t slot = 0; slot < 127; ++slot) {
        if (problem.position(slot) < 0) continue;
        unequal += ranges.weights[static_cast<size_t>(h * ranges.stride + slot)] != 1.0f;
      }
    }
    CHECK(unequal == 0);
  }
}

// ---- merge_step ---------------------------------------------------------------------------------

TEMPLATE_TEST_CASE("ranges and the new token join into one softmax", "[merge_step][cpu]", float,
                   double, at::Half, at::BFloat16) {
  using T = TestType;
  // One range to three, full and partly filled; every group size and head_dim once more.
  struct Shape {
    int64_t group_size, head_dim, capacity;
  };
  const Shape shape =
      GENERATE(Shape{1, 1, 1}, Shape{1, 64, 127}, Shape{2, 7, 128}, Shape{3, 16, 129},
               Shape{4, 17, 256}, Shape{5, 80, 257}, Shape{6, 64, 300}, Shape{7, 128, 140},
               Shape{8, 512, 200}, Shape{9, 64, 384}, Shape{71, 17, 150});
  const GqaReduce reduce = GENERATE(GqaReduce::kSum, GqaReduce::kMax);
  const bool alibi = shape.group_size % 3 != 0;
  const Occupancy occupancy = GENERATE(Occupancy::kTwoThirds, Occupancy::kFull);
  const Problem<T> problem(shape.group_size, shape.head_dim, shape.capacity, 1, alibi, occupancy);
  reference::StepResult expected;
  const reference::Head head = problem.attended(reduce, expected);
  for (const InstructionSet& set : instruction_sets()) {
    CAPTURE(name_of(set), shape.group_size, shape.head_dim, shape.capacity, alibi,
            reduce == GqaReduce::kMax);
    Step<T> step(problem, decode_kernels_of<T>(set), reduce);
    double output_error = 0.0, score_error = 0.0, total = static_cast<double>(step.new_score);
    for (int64_t h = 0; h < shape.group_size; ++h) {
      for (int64_t d = 0; d < shape.head_dim; ++d) {
        const double exact = expected.output[0][static_cast<size_t>(h)][static_cast<size_t>(d)];
        const double rounding = kRounding<T> * std::max(std::abs(exact), 0x1p-14);
        const double error = error_of(to_double(step.output[h][d]), exact);
        output_error = std::max(output_error, error - rounding);
      }
    }
    int untouched = 0, new_ones = 0;
    for (int64_t slot = 0; slot < static_cast<int64_t>(head.slots().size()); ++slot) {
      const reference::Token& token = head.slots()[static_cast<size_t>(slot)];
      if (token.position == problem.first_position) {
        score_error = std::max(score_error, error_of(step.new_score, token.score));
        ++new_ones;
      }
      if (slot >= shape.capacity || problem.position(slot) < 0) continue;
      const double grown =
          static_cast<double>(step.score(slot)) - static_cast<double>(step.start(slot));
      // A score near 100 has that much less room behind the point.
      score_error = std::max(score_error, error_of(grown, token.score) - 0x1p-24 * 100);
      total += grown;
    }
    for (int64_t slot = 0; slot < shape.capacity; ++slot) {
      if (problem.position(slot) < 0) untouched += step.score(slot) == step.start(slot);
      if (problem.position(slot) < 0) --untouched;
    }
    CHECK(new_ones == 1);
    CHECK(output_error < kArithmetic<T>);
    CHECK(score_error < kArithmetic<T> * static_cast<double>(shape.group_size));
    CHECK(untouched == 0);  // scores of empty slots
    if (reduce == GqaReduce::kSum) {
      CHECK(error_of(total, static_cast<double>(shape.group_size)) <
            1e-4 * static_cast<double>(shape.group_size));
    }
  }
}

TEMPLATE_TEST_CASE("a token alone has all the weight", "[merge_step][cpu]", float, double, at::Half,
                   at::BFloat16) {
  using T = TestType;
  const int64_t group_size = GENERATE(1, 4, 9), capacity = GENERATE(1, 300);
  const GqaReduce reduce = GENERATE(GqaReduce::kSum, GqaReduce::kMax);
  Problem<T> problem(group_size, 17, capacity, 1, true, Occupancy::kEmpty);
  for (const InstructionSet& set : instruction_sets()) {
    CAPTURE(name_of(set), group_size, capacity);
    Step<T> step(problem, decode_kernels_of<T>(set), reduce);
    CHECK(step.new_score ==
          (reduce == GqaReduce::kSum ? static_cast<Accumulator<T>>(group_size) : 1));
    for (int64_t h = 0; h < group_size; ++h) {
      CHECK(std::memcmp(step.output[h], problem.v_new[0], 17 * sizeof(T)) == 0);
    }
  }
}

TEST_CASE("a step repeats bit for bit", "[merge_step][cpu]") {
  const int64_t capacity = GENERATE(1, 17, 128, 300);
  const Problem<float> problem(3, 80, capacity, 1, true);
  for (const InstructionSet& set : instruction_sets()) {
    CAPTURE(name_of(set), capacity);
    Step<float> first(problem, decode_kernels_of<float>(set), GqaReduce::kSum);
    int different = 0;
    for (int repeat = 0; repeat < 100; ++repeat) {
      Step<float> again(problem, decode_kernels_of<float>(set), GqaReduce::kSum);
      different += !same_bits(first.output.data, again.output.data) ||
                   !same_bits(first.scores, again.scores) || first.new_score != again.new_score;
    }
    CHECK(different == 0);
  }
}

TEMPLATE_TEST_CASE("logits far apart neither overflow nor vanish", "[merge_step][cpu]", float,
                   double, at::Half, at::BFloat16) {
  using T = TestType;
  // head_dim 80, query 60s, keys 60s and -60s: q . k is 288,000, out of float16's range; scaled it
  // is 32,199.
  Problem<T> problem(1, 80, 2, 1, false);
  problem.scale = static_cast<Accumulator<T>>(1.0 / std::sqrt(80.0));
  problem.positions = {0, 7777, 1, 7777};
  const auto fill = [](T* row, double value) { std::fill_n(row, 80, to_storage<T>(value)); };
  fill(problem.query[0], 60.0);
  fill(problem.k[0], 60.0);
  fill(problem.v[0], 2.0);
  fill(problem.k[1], -60.0);
  fill(problem.v[1], 100.0);
  fill(problem.k_new[0], 60.0);
  fill(problem.v_new[0], 4.0);
  for (const InstructionSet& set : instruction_sets()) {
    CAPTURE(name_of(set));
    Step<T> step(problem, decode_kernels_of<T>(set), GqaReduce::kSum);
    for (int64_t d = 0; d < 80; ++d) CHECK(to_double(step.output[0][d]) == 3.0);
    CHECK(step.score(0) == 0.5);
    CHECK(step.score(1) == 0.25);  // as it was: a weight of exactly 0
    CHECK(step.new_score == 0.5);
  }
}

TEMPLATE_TEST_CASE("any range may hold all of the mass", "[merge_step][cpu]", float, double,
                   at::Half, at::BFloat16) {
  using T = TestType;
  // Logits of 0 everywhere but in one slot, or for the new token, whose weight e^900 overflows both
  // float32 and float64 unless the largest logit of all is taken away first.
  const int64_t slot = GENERATE(0, 127, 128, 255, 256, 299, -1);
  Problem<T> problem(1, 16, 300, 1, false);
  problem.scale = 1;
  for (int32_t s = 0; s < 300; ++s) {
    problem.positions[static_cast<size_t>(2 * s)] = s;
    std::fill_n(problem.k[s], 16, to_storage<T>(0.0));
    std::fill_n(problem.v[s], 16, to_storage<T>(s == slot ? 3.0 : 1.0));
  }
  std::fill_n(problem.query[0], 16, to_storage<T>(7.5));
  std::fill_n(problem.k_new[0], 16, to_storage<T>(slot < 0 ? 7.5 : 0.0));
  std::fill_n(problem.v_new[0], 16, to_storage<T>(slot < 0 ? 3.0 : 1.0));
  if (slot >= 0) std::fill_n(problem.k[slot], 16, to_storage<T>(7.5));
  for (const InstructionSet& set : instruction_sets()) {
    CAPTURE(name_of(set), slot);
    Step<T> step(problem, decode_kernels_of<T>(set), GqaReduce::kSum);
    int wrong = 0;
    for (int64_t d = 0; d < 16; ++d) wrong += to_double(step.output[0][d]) != 3.0;
    for (int64_t s = 0; s < 300; ++s) {
      wrong += step.score(s) != step.start(s) + (s == slot ? 1 : 0);
    }
    CHECK(wrong == 0);
    CHECK(error_of(step.new_score, slot < 0 ? 1.0 : 0.0) < 1e-300);
  }
}

// ---- scan_slots

TEST_CASE("a scan in vectors finds what the scan slot by slot does", "[scan_slots][cpu]") {
  const InstructionSet set = GENERATE(from_range(instruction_sets()));
  CAPTURE(name_of(set));
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> few = {0.0f,           -0.0f,      1.0f,      std::nanf(""),
                                  -std::nanf(""), -kInfinity, kInfinity, 1e-42f,
                                  -1e-42f,        -3.0f,      0x1p-126f};
  std::mt19937 random(11);
  const auto below = [&random](int64_t bound) {
    return static_cast<int64_t>(random() % static_cast<uint32_t>(bound));
  };
  int different = 0, victims = 0, ties = 0, nobody = 0, with_room = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    const int64_t capacity = below(trial % 100 == 0 ? 3000 : 70);
    const int64_t distinct = 1 + below(12);  // values among the scores: ties, often
    const int64_t empty = below(3) == 0 ? 1 + below(10) : 0;
    // Now and then at the end of what a position can be.
    const bool is_last = trial % 13 == 0;
    const int64_t newest = is_last ? INT32_MAX : below(90);
    std::vector<float> scores;
    std::vector<int32_t> positions;
    for (int64_t slot = 0; slot < capacity; ++slot) {
      const bool is_empty = empty != 0 && below(10) < empty;
      scores.push_back(distinct > 11 ? static_cast<float>(random()) * 1e-9f
                                     : few[static_cast<size_t>(below(distinct))]);
      // Positions may repeat and lie ahead of the newest: whatever a caller's tensor holds.
      positions.push_back(is_empty  ? -1 - static_cast<int32_t>(below(2)) * 7
                          : is_last ? INT32_MAX - static_cast<int32_t>(below(3))
                                    : static_cast<int32_t>(below(trial % 7 == 0 ? 5 : 100)));
    }
    const h2o::Budget budget = {
        .num_sink = below(5), .num_heavy = below(10), .num_recent = below(2) * below(100)};
    const auto expected = h2o::cpu::scan_slots<float>(scores.data(), 1, positions.data(), 1,
                                                      capacity, newest, budget);
    const auto actual =
        scan_slots_of(set)(scores.data(), positions.data(), capacity, newest, budget);
    const bool same_score = std::memcmp(&actual.victim_score, &expected.victim_score, 4) == 0;
    different += actual.occupied != expected.occupied ||
                 actual.lowest_empty != expected.lowest_empty || actual.victim != expected.victim ||
                 actual.victim_position != expected.victim_position || !same_score;
    victims += expected.victim >= 0;
    nobody += expected.victim < 0 && expected.occupied > 0;
    with_room += expected.lowest_empty >= 0;
    for (int64_t slot = 0; slot < capacity; ++slot) {
      ties += slot != expected.victim && expected.victim >= 0 &&
              scores[static_cast<size_t>(slot)] == expected.victim_score;
    }
  }
  CHECK(different == 0);
  CHECK(victims > 5000);
  CHECK(nobody > 1000);
  CHECK(with_room > 2000);
  CHECK(ties > 5000);
}

// ---- attend_tile --------------------------------------------------------------------------------

namespace {

// A chunk attended tile by tile. Its tokens are columns 1, 3, 4, 6, 7, ... of a call: those between
// are padding.
template <typename T>
struct Tiles {
  using A = Accumulator<T>;
  std::vector<int32_t> columns, slots, cached_positions, new_positions;
  Rows<T> query, k_new, v_new, output;
  std::vector<A> column_sums;

  Tiles(const Problem<T>& problem, const ChunkKernels<T>& kernels, GqaReduce reduce,
        bool with_output)
      : query(problem.group_size * width(problem), problem.head_dim),
        k_new(width(problem), problem.head_dim),
        v_new(width(problem), problem.head_dim),
        output(problem.group_size * width(problem), problem.head_dim) {
    const auto copy = [&problem](const Rows<T>& from, int64_t from_row, Rows<T>& to,
                                 int64_t to_row) {
      std::copy_n(from.view()[from_row], problem.head_dim, to[to_row]);
    };
    for (int64_t i = 0; i < problem.num_new; ++i) {
      columns.push_back(static_cast<int32_t>(1 + i + (i + 1) / 2));
      new_positions.push_back(problem.first_position + static_cast<int32_t>(i));
      copy(problem.k_new, i, k_new, columns.back());
      copy(problem.v_new, i, v_new, columns.back());
      for (int64_t h = 0; h < problem.group_size; ++h) {
        copy(problem.query, h * problem.num_new + i, query, h * width(problem) + columns.back());
      }
    }
    for (int64_t slot = 0; slot < problem.capacity; ++slot) {
      if (problem.position(slot) < 0) continue;
      slots.push_back(static_cast<int32_t>(slot));
      cached_positions.push_back(problem.position(slot));
    }
    const int64_t num_cached = static_cast<int64_t>(slots.size());
    const int64_t num_keys = num_cached + problem.num_new;
    column_sums.assign(static_cast<size_t>(num_keys), start());
    const int64_t scratch_size =
        h2o::cpu::tile_scratch_size(problem.group_size, problem.head_dim, num_keys);
    std::vector<A> scratch(static_cast<size_t>(scratch_size + 1), kCanary<A>);
    const int64_t per_tile = h2o::cpu::tokens_per_tile(problem.group_size);
    QueryTile<T> tile = {
        .first = 0,
        .count = 0,
        .group_size = problem.group_size,
        .head_dim = problem.head_dim,
        .gqa_reduce = reduce,
        .query = query.view(),
        .query_head_stride = width(problem) * query.stride,
        .k = problem.k.view(),
        .v = problem.v.view(),
        .slots = slots.data(),
        .cached_positions = cached_positions.data(),
        .num_cached = num_cached,
        .k_new = k_new.view(),
        .v_new = v_new.view(),
        .columns = columns.data(),
        .new_positions = new_positions.data(),
        .terms = {problem.scale, problem.slopes_or_null()},
        .row_factors = nullptr,
        .scratch = scratch.data(),
        .column_sums = column_sums.data(),
        .output = with_output ? output.writable() : h2o::cpu::VectorRows<T>{},
        .output_head_stride = width(problem) * output.stride,
    };
    for (int64_t first = 0; first < problem.num_new; first += per_tile) {
      tile.first = first;
      tile.count = std::min(per_tile, problem.num_new - first);
      kernels.attend_tile(tile);
    }
    CHECK(scratch.back() == kCanary<A>);  // tile_scratch_size() is enough
  }

  static int64_t width(const Problem<T>& problem) {
    return 2 + problem.num_new + problem.num_new / 2;
  }
  static A start() { return static_cast<A>(0.125); }
};

}  // namespace

TEMPLATE_TEST_CASE("a chunk attends causally as plain loops do", "[attend_tile][cpu]", float,
                   double, at::Half, at::BFloat16) {
  using T = TestType;
  // Below, at and above a block of 64 keys and a tile of 64 rows.
  struct Shape {
    int64_t group_size, head_dim, capacity, num_new;
  };
  const Shape shape = GENERATE(Shape{1, 1, 0, 1}, Shape{1, 64, 0, 130}, Shape{1, 80, 96, 70},
                               Shape{2, 7, 10, 33}, Shape{3, 16, 100, 22}, Shape{4, 17, 95, 17},
                               Shape{5, 128, 30, 13}, Shape{6, 64, 1, 11}, Shape{7, 512, 20, 10},
                               Shape{8, 64, 200, 9}, Shape{9, 80, 40, 15}, Shape{71, 17, 25, 3});
  const GqaReduce reduce = GENERATE(GqaReduce::kSum, GqaReduce::kMax);
  const bool alibi = shape.group_size % 2 == 1;
  const Problem<T> problem(shape.group_size, shape.head_dim, shape.capacity, shape.num_new, alibi);
  reference::StepResult expected;
  const reference::Head head = problem.attended(reduce, expected);
  for (const InstructionSet& set : instruction_sets()) {
    CAPTURE(name_of(set), shape.group_size, shape.head_dim, shape.capacity, shape.num_new,
            reduce == GqaReduce::kMax);
    Tiles<T> tiles(problem, chunk_kernels_of<T>(set), reduce, true);
    double output_error = 0.0, sum_error = 0.0;
    for (int64_t i = 0; i < shape.num_new; ++i) {
      for (int64_t h = 0; h < shape.group_size; ++h) {
        const T* const row =
            tiles.output[h * tiles.width(problem) + tiles.columns[static_cast<size_t>(i)]];
        for (int64_t d = 0; d < shape.head_dim; ++d) {
          const double exact =
              expected
                  .output[static_cast<size_t>(i)][static_cast<size_t>(h)][static_cast<size_t>(d)];
          const double rounding = kRounding<T> * std::max(std::abs(exact), 0x1p-14);
          output_error = std::max(output_error, error_of(to_double(row[d]), exact) - rounding);
        }
      }
    }
    for (size_t key = 0; key < tiles.column_sums.size(); ++key) {
      const bool cached = key < tiles.slots.size();
      const int32_t position =
          cached ? tiles.cached_positions[key] : tiles.new_positions[key - tiles.slots.size()];
      const double grown =
          static_cast<double>(tiles.column_sums[key]) - static_cast<double>(tiles.start());
      for (const reference::Token& token : head.slots()) {
        if (token.position == position)
          sum_error = std::max(sum_error, error_of(grown, token.score));
      }
    }
    CHECK(output_error < kArithmetic<T>);
    CHECK(sum_error < kArithmetic<T> * static_cast<double>(shape.group_size * shape.num_new));
    // Columns of padding are not written.
    int written = 0;
    for (int64_t h = 0; h < shape.group_size; ++h) {
      for (const double value : tiles.output.row(h * tiles.width(problem)))
        written += !std::isnan(value);
      if (shape.num_new > 1) {
        for (const double value : tiles.output.row(h * tiles.width(problem) + 2))
          written += !std::isnan(value);
      }
    }
    CHECK(written == 0);
    // Without a place for the output the sums are the same.
    const Tiles<T> sums_only(problem, chunk_kernels_of<T>(set), reduce, false);
    CHECK(same_bits(sums_only.column_sums, tiles.column_sums));
  }
}

TEMPLATE_TEST_CASE("a token's output does not depend on the tokens after it", "[attend_tile][cpu]",
                   float, double, at::Half, at::BFloat16) {
  using T = TestType;
  // Tokens 0 to 63 or 0 to 15 share a tile.
  const double later = GENERATE(std::nan(""), std::numeric_limits<double>::infinity(), 1e30);
  const int64_t group_size = GENERATE(1, 4), head_dim = GENERATE(16, 17);
  const int64_t from = GENERATE(9, 68);
  const Problem<T> problem(group_size, head_dim, 10, 70, false);
  Problem<T> changed = problem, one_value = problem;
  for (int64_t i = from; i < 70; ++i) {
    std::fill_n(changed.k_new[i], head_dim, to_storage<T>(later));
    std::fill_n(changed.v_new[i], head_dim, to_storage<T>(later));
  }
  one_value.v_new[from][3] = to_storage<T>(later);
  for (const InstructionSet& set : instruction_sets()) {
    CAPTURE(name_of(set), later, group_size, head_dim, from);
    const auto tiles = [&set](const Problem<T>& of) {
      return Tiles<T>(of, chunk_kernels_of<T>(set), GqaReduce::kSum, true);
    };
    const Tiles<T> before = tiles(problem), after = tiles(changed), other = tiles(one_value);
    int different = 0, reached = 0;
    double error = 0.0;
    for (int64_t h = 0; h < group_size; ++h) {
      for (int64_t i = 0; i < 70; ++i) {
        const int64_t row = h * before.width(problem) + before.columns[static_cast<size_t>(i)];
        const reference::Row old = before.output.row(row), now = other.output.row(row);
        if (i < from) {
          different += old != after.output.row(row);
          different += old != now;
        } else {
          // Of a value that it does see, a token gets that dimension alone.
          reached += !(std::abs(now[3]) < 1e4);
          for (size_t d = 0; d < now.size(); ++d) {
            if (d != 3) error = std::max(error, error_of(now[d], old[d]));
          }
        }
      }
    }
    CHECK(different == 0);
    CHECK(reached == group_size * (70 - from));
    CHECK(error < 4 * kRounding<T> + kArithmetic<T>);
  }
}

TEMPLATE_TEST_CASE("a query that is no number spoils its own output and the keys it sees",
                   "[attend_tile][cpu]", float, double, at::Half, at::BFloat16) {
  using T = TestType;
  const int64_t group_size = GENERATE(1, 3), spoilt = GENERATE(0, 20, 69);
  const GqaReduce reduce = GENERATE(GqaReduce::kSum, GqaReduce::kMax);
  const double no_number = GENERATE(std::nan(""), -std::numeric_limits<double>::infinity());
  const Problem<T> problem(group_size, 16, 10, 70, false);
  Problem<T> changed = problem;
  std::fill_n(changed.query[(group_size - 1) * 70 + spoilt], 16, to_storage<T>(no_number));
  for (const InstructionSet& set : instruction_sets()) {
    CAPTURE(name_of(set), group_size, spoilt, reduce == GqaReduce::kMax, no_number);
    const Tiles<T> before(problem, chunk_kernels_of<T>(set), reduce, true);
    const Tiles<T> after(changed, chunk_kernels_of<T>(set), reduce, true);
    int wrong = 0;
    for (int64_t h = 0; h < group_size; ++h) {
      for (int64_t i = 0; i < 70; ++i) {
        const int64_t row = h * before.width(problem) + before.columns[static_cast<size_t>(i)];
        const reference::Row now = after.output.row(row);
        if (h == group_size - 1 && i == spoilt) {
          for (const double value : now) wrong += !std::isnan(value);
        } else {
          wrong += now != before.output.row(row);
        }
      }
    }
    CHECK(wrong == 0);
    for (size_t key = 0; key < after.column_sums.size(); ++key) {
      const bool is_seen = key <= after.slots.size() + static_cast<size_t>(spoilt);
      wrong += std::isnan(after.column_sums[key]) != is_seen;
    }
    CHECK(wrong == 0);
  }
}
