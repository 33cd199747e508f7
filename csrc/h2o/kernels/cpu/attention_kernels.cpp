#include "h2o/kernels/cpu/attention_kernels.h"

#include <cstdlib>
#include <string>

namespace h2o::cpu {

#define H2O_DECLARE_KERNELS(isa)                            \
  namespace isa {                                           \
  extern const AttentionKernels<float> float_kernels;       \
  extern const AttentionKernels<double> double_kernels;     \
  extern const AttentionKernels<Float16> float16_kernels;   \
  extern const AttentionKernels<BFloat16> bfloat16_kernels; \
  }
H2O_DECLARE_KERNELS(baseline)
#if defined(H2O_X86)
H2O_DECLARE_KERNELS(avx2)
H2O_DECLARE_KERNELS(avx512)
#endif
#undef H2O_DECLARE_KERNELS

namespace {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

// The best set that this CPU has, at most the one that ATEN_CPU_CAPABILITY names, if any: the
// variable by which PyTorch's own kernels are limited too.
InstructionSet detect() {
#if defined(H2O_X86)
  const char* const variable = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string limit = variable == nullptr ? "" : variable;
  if (limit == "default") return InstructionSet::kBaseline;
  if (limit != "avx2" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return InstructionSet::kAvx2;
#endif
  return InstructionSet::kBaseline;
}

InstructionSet best() {
  static const InstructionSet detected = detect();
  return detected;
}

}  // namespace

#if defined(H2O_X86)
#define H2O_CHOOSE_KERNELS(type, name)                      \
  template <>                                               \
  const AttentionKernels<type>& attention_kernels<type>() { \
    switch (best()) {                                       \
      case InstructionSet::kAvx512:                         \
        return avx512::name;                                \
      case InstructionSet::kAvx2:                           \
        return avx2::name;                                  \
      default:                                              \
        return baseline::name;                              \
    }                                                       \
  }
#else
#define H2O_CHOOSE_KERNELS(type, name)                      \
  template <>                                               \
  const AttentionKernels<type>& attention_kernels<type>() { \
    return baseline::name;                                  \
  }
#endif
H2O_CHOOSE_KERNELS(float, float_kernels)
H2O_CHOOSE_KERNELS(double, double_kernels)
H2O_CHOOSE_KERNELS(Float16, float16_kernels)
H2O_CHOOSE_KERNELS(BFloat16, bfloat16_kernels)
#undef H2O_CHOOSE_KERNELS

const char* instruction_set() {
  switch (best()) {
    case InstructionSet::kAvx512:
      return "avx512";
    case InstructionSet::kAvx2:
      return "avx2";
    default:
      return "baseline";
  }
}

int64_t tile_scratch_size(int64_t group_size, int64_t head_dim, int64_t num_keys) {
  // Rounded up for the widest vectors (16 lanes) and blocks of 64 keys; see attend_tile.
  const int64_t rows = group_size * tokens_per_tile(group_size);
  const int64_t padded = (head_dim + 15) / 16 * 16;
  return rows * padded * 2 + padded * 64 + padded + rows * ((num_keys + 63) / 64 * 64);
}

}  // namespace h2o::cpu
