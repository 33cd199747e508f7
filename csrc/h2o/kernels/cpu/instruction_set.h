#pragma once

// Which of the versions of the CPU kernels runs. Each file named *_isa.cpp is compiled once per
// instruction set, in a namespace of its name.
namespace h2o::cpu {

enum class InstructionSet { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

// What the kernels were compiled for, as CMakeLists.txt and the namespaces call it.
const char* name_of(InstructionSet set);

// Whether this build has the set's kernels and this CPU can run them.
bool is_supported(InstructionSet set);

// The best supported one; ATEN_CPU_CAPABILITY (default, avx2, avx512), by which PyTorch's own
// kernels are limited too, asks for a lower one. Read once.
InstructionSet instruction_set();

}  // namespace h2o::cpu
