# Decides whether the CUDA operators are built, and enables CUDA if so.
#
# Sets H2O_BUILD_CUDA (ON or OFF), H2O_BUILD_CUDA_VERSION (nvcc's, or empty) and H2O_BUILD_CUDA_ARCHITECTURES, and says
# in one line what was decided and why.
set(H2O_BUILD_CUDA OFF)
set(H2O_BUILD_CUDA_VERSION "")
set(H2O_BUILD_CUDA_ARCHITECTURES "")
set(reason "")
if(H2O_CUDA STREQUAL AUTO OR H2O_CUDA)
  if(NOT TARGET LibTorch::CUDA)
    set(reason "torch ${LibTorch_VERSION} is built without CUDA")
  else()
    include(CheckLanguage)
    check_language(CUDA)
    if(NOT CMAKE_CUDA_COMPILER)
      set(reason "torch ${LibTorch_VERSION} is built with CUDA ${LibTorch_CUDA_VERSION}, but there is no nvcc on PATH (or set CUDACXX)")
    else()
      execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE nvcc_version)
      string(REGEX MATCH "release ([0-9]+)\\.[0-9]+" nvcc_version "${nvcc_version}")
      set(nvcc_major "${CMAKE_MATCH_1}")
      string(REGEX MATCH "^[0-9]+" torch_cuda_major "${LibTorch_CUDA_VERSION}")
      # Two major versions would put two CUDA runtimes into one process.
      if(torch_cuda_major AND nvcc_major AND NOT torch_cuda_major STREQUAL nvcc_major)
        set(reason "torch ${LibTorch_VERSION} is built with CUDA ${LibTorch_CUDA_VERSION}, but nvcc is of ${nvcc_major}")
      endif()
    endif()
  endif()
  if(reason STREQUAL "")
    set(H2O_BUILD_CUDA ON)
  elseif(NOT H2O_CUDA STREQUAL AUTO)
    message(FATAL_ERROR "h2o: H2O_CUDA=${H2O_CUDA}, but ${reason}")
  endif()
else()
  set(reason "H2O_CUDA=${H2O_CUDA}")
endif()

if(H2O_BUILD_CUDA)
  if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90)  # the PTX of 90 serves what is newer
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # torch's own
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  # LibTorch::CUDA's runtime, or nvcc's.
  if(LibTorch_CUDA_RUNTIME)
    set(h2o_cuda_libraries LibTorch::CUDA)
    cmake_path(GET LibTorch_CUDA_RUNTIME PARENT_PATH h2o_cuda_runtime_dir)
  else()
    set(h2o_cuda_libraries LibTorch::CUDA CUDA::cudart)
    set(h2o_cuda_runtime_dir ${CUDAToolkit_LIBRARY_DIR})
  endif()
  set(H2O_BUILD_CUDA_VERSION ${CMAKE_CUDA_COMPILER_VERSION})
  list(JOIN CMAKE_CUDA_ARCHITECTURES " " H2O_BUILD_CUDA_ARCHITECTURES)
  message(STATUS "h2o: CUDA operators: ON (nvcc ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${H2O_BUILD_CUDA_ARCHITECTURES})")
else()
  message(STATUS "h2o: CUDA operators: OFF (${reason})")
endif()

# The CUDA operators; tests/cuda_emulation compiles the same files for the CPU.
set(h2o_cuda_sources
  csrc/h2o/ops/cuda/attention_decode_kernel.cpp
  csrc/h2o/ops/cuda/chunk_attention_bfloat16.cu
  csrc/h2o/ops/cuda/chunk_attention_float16.cu
  csrc/h2o/ops/cuda/chunk_attention_float32.cu
  csrc/h2o/ops/cuda/chunk_attention_float64.cu
  csrc/h2o/ops/cuda/decode_step_bfloat16.cu
  csrc/h2o/ops/cuda/decode_step_float16.cu
  csrc/h2o/ops/cuda/decode_step_float32.cu
  csrc/h2o/ops/cuda/decode_step_float64.cu
  csrc/h2o/ops/cuda/evict_kernel.cpp
  csrc/h2o/ops/cuda/prefill_select_kernel.cpp
  csrc/h2o/ops/cuda/prompt_scores_bfloat16.cu
  csrc/h2o/ops/cuda/prompt_scores_float16.cu
  csrc/h2o/ops/cuda/rotate_kernel.cpp
  csrc/h2o/ops/cuda/selection.cu)

# Adds them to `target`.
function(h2o_add_cuda_sources target)
  target_sources(${target} PRIVATE ${h2o_cuda_sources})
  set(host_warnings -Wall,-Wextra,-Wno-psabi$<$<BOOL:${H2O_WERROR}>:,-Werror>)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-O3 --expt-relaxed-constexpr -Xcompiler=${host_warnings}>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${H2O_WERROR}>>:--Werror=all-warnings>)
  target_link_libraries(${target} PRIVATE LibTorch::CUDA CUDA::cudart)
  set_target_properties(${target} PROPERTIES CUDA_VISIBILITY_PRESET hidden)
endfunction()
