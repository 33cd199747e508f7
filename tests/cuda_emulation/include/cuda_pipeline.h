// Stands in for CUDA's <cuda_pipeline.h>: a copy lands when its thread waits for it, never before.
#pragma once

#include <cuda_runtime.h>

inline void __pipeline_memcpy_async(void* shared, const void* global, std::size_t bytes) {
  cuda_emulation::copy_async(shared, global, bytes);
}
inline void __pipeline_commit() { cuda_emulation::commit_copies(); }
inline void __pipeline_wait_prior(unsigned groups) { cuda_emulation::wait_for_copies(groups); }
