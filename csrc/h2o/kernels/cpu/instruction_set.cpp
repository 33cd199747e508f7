#include "h2o/kernels/cpu/instruction_set.h"

#include <cstdlib>
#include <string>

namespace h2o::cpu {
namespace {

// The best set that ATEN_CPU_CAPABILITY allows.
InstructionSet limit() {
  const char* const variable = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string name = variable == nullptr ? "" : variable;
  if (name == "default") return InstructionSet::kBaseline;
  if (name == "avx2") return InstructionSet::kAvx2;
  return InstructionSet::kAvx512Bf16;
}

InstructionSet detect() {
  const InstructionSet most = limit();
  for (const InstructionSet set :
       {InstructionSet::kAvx512Bf16, InstructionSet::kAvx512, InstructionSet::kAvx2}) {
    if (set <= most && is_supported(set)) return set;
  }
  return InstructionSet::kBaseline;
}

}  // namespace

const char* name_of(InstructionSet set) {
  switch (set) {
    case InstructionSet::kAvx512Bf16:
      return "avx512_bf16";
    case InstructionSet::kAvx512:
      return "avx512";
    case InstructionSet::kAvx2:
      return "avx2";
    default:
      return "baseline";
  }
}

bool is_supported(InstructionSet set) {
  switch (set) {
#if defined(H2O_X86)
    case InstructionSet::kAvx512Bf16:
      return __builtin_cpu_supports("avx512bf16") && is_supported(InstructionSet::kAvx512);
    case InstructionSet::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             is_supported(InstructionSet::kAvx2);
    case InstructionSet::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
#endif
    default:
      return set == InstructionSet::kBaseline;
  }
}

InstructionSet instruction_set() {
  static const InstructionSet best = detect();
  return best;
}

}  // namespace h2o::cpu
