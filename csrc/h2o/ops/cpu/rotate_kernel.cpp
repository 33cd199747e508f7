#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <vector>

#include "h2o/kernels/cpu/rotate_kernels.h"
#include "h2o/ops/checks.h"
#include "h2o/ops/cpu/backend.h"
#include "h2o/ops/cpu/rows.h"
#include "h2o/ops/registration.h"

namespace h2o::cpu {
namespace {

constexpr int64_t kRowsPerTask = 128;

template <typename T>
void rotate_rows(const at::Tensor& input, const at::Tensor& index, const at::Tensor& cos,
                 const at::Tensor& sin, const at::Tensor& output) {
  using A = Accumulator<T>;
  const int64_t heads = input.size(1), count = input.size(2);
  const int64_t tasks_per_head = (count + kRowsPerTask - 1) / kRowsPerTask;
  const auto angles = [](const at::Tensor& table) {
    return VectorRows<const A>{table.const_data_ptr<A>(), table.stride(0)};
  };
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / tasks_per_head % heads, row = task / tasks_per_head / heads;
      const int64_t first = task % tasks_per_head * kRowsPerTask;
      rotate_kernel<T>()({
          .begin = first,
          .end = std::min(first + kRowsPerTask, count),
          .pairs = cos.size(1),
          .head_dim = input.size(3),
          .from = rows_of<const T>(input, row, head),
          .to = rows_of<T>(output, row, head),
          .index = index.const_data_ptr<int32_t>() +
                   (index.size(0) == 1 ? 0 : row * index.stride(0)) +
                   (index.size(1) == 1 ? 0 : head * index.stride(1)),
          .cos = angles(cos),
          .sin = angles(sin),
      });
    }
  };
  at::parallel_for(0, input.size(0) * heads * tasks_per_head, 2, run);
}

}  // namespace

at::Tensor rotate(const RotateCall& call) {
  const at::Tensor input = readable_input(call.input, {});
  const at::Tensor index = call.index.to(at::kInt).contiguous();
  const at::Tensor cos = call.cos.contiguous(), sin = call.sin.contiguous();
  at::Tensor output = at::empty(call.input.sizes(), call.input.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "h2o_rotate",
                                  [&] { rotate_rows<scalar_t>(input, index, cos, sin, output); });
  return output;
}

at::Tensor rank(const at::Tensor& positions) {
  const int64_t capacity = positions.size(2);
  at::Tensor result = at::empty(positions.sizes(), positions.options());
  const int64_t num_heads = positions.size(0) * positions.size(1);
  at::parallel_for(0, num_heads, 1, [&](int64_t begin, int64_t end) {
    struct Kept {
      uint32_t position;
      int32_t slot;
    };
    std::vector<Kept> kept, next;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / positions.size(1), head = i % positions.size(1);
      const int32_t* const from = positions.const_data_ptr<int32_t>() + row * positions.stride(0) +
                                  head * positions.stride(1);
      int32_t* const to = result.mutable_data_ptr<int32_t>() + i * capacity;
      kept.clear();
      uint32_t largest = 0;
      for (int64_t slot = 0; slot < capacity; ++slot) {
        const int32_t position = from[slot * positions.stride(2)];
        to[slot] = -1;
        if (position < 0) continue;
        kept.push_back({static_cast<uint32_t>(position), static_cast<int32_t>(slot)});
        largest = std::max(largest, kept.back().position);
      }
      // Radix sort: as many passes as the largest position has digits.
      constexpr int kBits = 11;
      next.resize(kept.size());
      for (int shift = 0; shift < 32 && largest >> shift > 0; shift += kBits) {
        std::array<uint32_t, 1 << kBits> ends{};
        const auto digit = [&](const Kept& one) {
          return (one.position >> shift) & ((1u << kBits) - 1);
        };
        for (const Kept& one : kept) ++ends[digit(one)];
        uint32_t sum = 0;
        for (uint32_t& end_of : ends) sum = end_of += sum;
        for (auto one = kept.rbegin(); one != kept.rend(); ++one) next[--ends[digit(*one)]] = *one;
        kept.swap(next);
      }
      for (size_t r = 0; r < kept.size(); ++r) to[kept[r].slot] = static_cast<int32_t>(r);
    }
  });
  return result;
}

// What is called from outside: decode_rolling has looked at its ranks before.
static at::Tensor rotate_checked(const RotateCall& call) {
  if (call.index.numel() > 0) {
    const auto largest = call.index.max().item<int64_t>();
    TORCH_CHECK(largest < call.cos.size(0),
                "h2o_rotate: index must be < the rows of cos = ", call.cos.size(0), ", got ",
                largest);
  }
  return rotate(call);
}

static const Registration registration(c10::DispatchKey::CPU, [](torch::Library& m) {
  m.impl("h2o_rotate", &rotate_entry<rotate_checked>);
});

}  // namespace h2o::cpu
