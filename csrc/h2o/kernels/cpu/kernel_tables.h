#pragma once

#include "h2o/kernels/cpu/chunk_kernels.h"
#include "h2o/kernels/cpu/decode_kernels.h"
#include "h2o/kernels/cpu/rotate_kernels.h"

// The tables of kernels of every instruction set that was compiled. Only those that is_supported()
// may be called.
#define H2O_DECLARE_TABLES(isa)             \
  namespace h2o::cpu::isa {                 \
  template <typename T>                     \
  const DecodeKernels<T>& decode_kernels(); \
  template <typename T>                     \
  const ChunkKernels<T>& chunk_kernels();   \
  ScanSlots& scan_slots_kernel();           \
  template <typename T>                     \
  Rotate<T>& rotate_kernel();               \
  }
H2O_DECLARE_TABLES(baseline)
#if defined(H2O_X86)
H2O_DECLARE_TABLES(avx2)
H2O_DECLARE_TABLES(avx512)
H2O_DECLARE_TABLES(avx512_bf16)
#endif
#undef H2O_DECLARE_TABLES
