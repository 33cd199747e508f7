#include "h2o/kernels/cpu/kernel_tables.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "h2o/kernels/cpu/instruction_set.h"

namespace h2o::cpu {

#if defined(H2O_X86)
#define H2O_CHOOSE(function)          \
  switch (instruction_set()) {        \
    case InstructionSet::kAvx512Bf16: \
      return avx512_bf16::function;   \
    case InstructionSet::kAvx512:     \
      return avx512::function;        \
    case InstructionSet::kAvx2:       \
      return avx2::function;          \
    default:                          \
      return baseline::function;      \
  }
#else
#define H2O_CHOOSE(function) return baseline::function
#endif

template <typename T>
const DecodeKernels<T>& decode_kernels() {
  H2O_CHOOSE(template decode_kernels<T>());
}
template <typename T>
const ChunkKernels<T>& chunk_kernels() {
  H2O_CHOOSE(template chunk_kernels<T>());
}
template <typename T>
Rotate<T>& rotate_kernel() {
  H2O_CHOOSE(template rotate_kernel<T>());
}
ScanSlots& scan_slots_kernel() { H2O_CHOOSE(scan_slots_kernel()); }
#undef H2O_CHOOSE

#define H2O_INSTANTIATE(type)                           \
  template const DecodeKernels<type>& decode_kernels(); \
  template const ChunkKernels<type>& chunk_kernels();   \
  template Rotate<type>& rotate_kernel();
H2O_INSTANTIATE(float)
H2O_INSTANTIATE(double)
H2O_INSTANTIATE(at::Half)
H2O_INSTANTIATE(at::BFloat16)
#undef H2O_INSTANTIATE

int64_t tile_scratch_size(int64_t group_size, int64_t head_dim, int64_t num_keys) {
  // As TileAttention lays it out, for vectors of up to 16 lanes.
  const int64_t width = (group_size * tokens_per_tile(group_size) + 15) / 16 * 16;
  const int64_t padded = (head_dim + 31) / 32 * 32;
  return width * (2 * head_dim + 4 + num_keys) + padded * (kKeysPerTileBlock + 1);
}

}  // namespace h2o::cpu
