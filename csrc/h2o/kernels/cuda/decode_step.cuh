#pragma once

#include "h2o/kernels/cuda/decode_matrices.cuh"
#include "h2o/kernels/cuda/decode_vectors.cuh"

// The kernel of a decode step, and which arithmetic it takes.
namespace h2o::cuda {

// One block per (row, KV head), or several, which take consecutive ranges of slots.
template <typename T, typename Arithmetic>
__global__ void __launch_bounds__(kMaxThreads, 2)
    decode_step(const __grid_constant__ DecodeStep<T> step,
                const __grid_constant__ DecodePlan plan) {
  Arithmetic(step, plan).run();
}

template <typename T>
struct DecodeKernel {
  void (*function)(DecodeStep<T>, DecodePlan);
  DecodePlan plan;
  int64_t shared_bytes;
};

template <typename Arithmetic, typename T>
DecodeKernel<T> decode_kernel(const DecodeStep<T>& step) {
  const DecodePlan plan =
      plan_decode_step(step.sizes, step.cache.capacity, step.splits, Arithmetic::tile(step.sizes));
  return {decode_step<T, Arithmetic>, plan,
          static_cast<int64_t>(sizeof(DecodeShared)) +
              plan.elements * static_cast<int64_t>(sizeof(Accumulator<T>))};
}

// Neither the alignment nor the number of heads that are summed at once changes a bit of the
// result; the size of a vector and the use of tensor cores do, and depend on nothing but the type,
// the group and head_dim.
template <typename T>
DecodeKernel<T> choose_decode_kernel(const DecodeStep<T>& step) {
  constexpr int kWhole = kVectorSize<T>;
  const int32_t group_size = step.sizes.group_size;
  if constexpr (sizeof(T) == 2) {
    // In registers, keys longer than 128 would be read again for every four heads.
    if (group_size > 8 || (group_size > 4 && step.sizes.head_dim > 128)) {
      return decode_kernel<DecodeMatrices<T>>(step);
    }
  }
  if constexpr (!std::is_same_v<T, double>) {
    // Eight heads' sums of eight elements each would not leave enough registers.
    if (group_size > 4) {
      return step.aligned ? decode_kernel<DecodeVectors<T, 4, 8, true>>(step)
                          : decode_kernel<DecodeVectors<T, 4, 4, false>>(step);
    }
    if (group_size == 1 && step.aligned) {
      return decode_kernel<DecodeVectors<T, kWhole, 1, true>>(step);
    }
  }
  return step.aligned ? decode_kernel<DecodeVectors<T, kWhole, 4, true>>(step)
                      : decode_kernel<DecodeVectors<T, kWhole, 4, false>>(step);
}

template <typename T>
int64_t decode_step_shared_bytes(const DecodeStep<T>& step) {
  return choose_decode_kernel(step).shared_bytes;
}

template <typename T>
cudaError_t launch_decode_step(const DecodeStep<T>& step, cudaStream_t stream) {
  const DecodeKernel<T> kernel = choose_decode_kernel(step);
  const int64_t blocks = step.sizes.batch * step.sizes.num_kv_heads * step.splits;
  return launch(kernel.function, blocks, threads_for(step.cache.capacity), kernel.shared_bytes,
                stream, step, kernel.plan);
}

}  // namespace h2o::cuda
