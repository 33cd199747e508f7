# Finds the LibTorch that lies in LibTorch_ROOT or, without that, the one that Python imports.
#
# Torch's own package file (find_package(Torch)) is not used: with a CUDA build of torch it demands a full CUDA
# toolkit, even to build code for the CPU alone, and takes CUDA's flags out of the project's hands.
#
# Defines LibTorch_VERSION, LibTorch_CUDA_VERSION (empty for a CPU build), LibTorch_LIBRARY_DIR, the target
# LibTorch::LibTorch and, where torch was built with CUDA, LibTorch::CUDA, which has the CUDA runtime that torch's wheel
# brings, LibTorch_CUDA_RUNTIME (another, older one in the process could fail torch). LibTorch::OpenMP is what
# at::parallel_for in torch's headers is made of: the runtime that lies beside torch where its wheel brings one (a second
# one in the process would not obey torch.set_num_threads), else the compiler's; a compiler without OpenMP leaves it out.
if(LibTorch_ROOT)
  set(libtorch_asked "Looked into LibTorch_ROOT, ${LibTorch_ROOT}.")
elseif(DEFINED ENV{LibTorch_ROOT})
  set(libtorch_asked "Looked into LibTorch_ROOT of the environment, $ENV{LibTorch_ROOT}.")
else()
  set(libtorch_asked "There is no Python to ask for its torch.")
  find_package(Python COMPONENTS Interpreter QUIET)
  if(Python_FOUND)
    # The second place is where torch lies if pip builds in isolation, which hides it from import.
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c [[
import importlib.util, pathlib, sysconfig
spec = importlib.util.find_spec("torch")
print(pathlib.Path(spec.origin).parent if spec else pathlib.Path(sysconfig.get_path("purelib"), "torch"))]]
      OUTPUT_VARIABLE libtorch_of_python OUTPUT_STRIP_TRAILING_WHITESPACE)
    set(libtorch_asked "Asked ${Python_EXECUTABLE}, whose torch would be ${libtorch_of_python}.")
  endif()
endif()

find_path(LibTorch_INCLUDE_DIR torch/library.h HINTS ${libtorch_of_python} PATH_SUFFIXES include)
find_path(LibTorch_API_INCLUDE_DIR torch/torch.h
  HINTS ${libtorch_of_python} PATH_SUFFIXES include/torch/csrc/api/include)
foreach(library c10 torch torch_cpu c10_cuda torch_cuda)
  find_library(LibTorch_${library}_LIBRARY ${library} HINTS ${libtorch_of_python} PATH_SUFFIXES lib)
  mark_as_advanced(LibTorch_${library}_LIBRARY)
endforeach()
mark_as_advanced(LibTorch_INCLUDE_DIR LibTorch_API_INCLUDE_DIR)

if(LibTorch_INCLUDE_DIR)
  file(STRINGS ${LibTorch_INCLUDE_DIR}/torch/headeronly/version.h LibTorch_VERSION REGEX "_(MAJOR|MINOR|PATCH) [0-9]+")
  string(REGEX REPLACE "[^;]* ([0-9]+)" "\\1" LibTorch_VERSION "${LibTorch_VERSION}")
  list(JOIN LibTorch_VERSION . LibTorch_VERSION)
  # What torch itself says of its CUDA; a LibTorch without Python does not have the file.
  set(LibTorch_CUDA_VERSION "")
  if(EXISTS ${LibTorch_INCLUDE_DIR}/../version.py)
    file(STRINGS ${LibTorch_INCLUDE_DIR}/../version.py cuda_line REGEX "^cuda[ :=]")
    if(cuda_line MATCHES "'([0-9.]+)'")
      set(LibTorch_CUDA_VERSION ${CMAKE_MATCH_1})
    endif()
  endif()
endif()

if(LibTorch_FIND_VERSION_EXACT)  # as the installed package of h2o asks
  set(libtorch_advice "h2o was built with torch ${LibTorch_FIND_VERSION}: activate the environment that has it, or set LibTorch_ROOT to its folder.")
else()
  set(libtorch_advice "Install torch, then build with `pip install --no-build-isolation`, or set LibTorch_ROOT.")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_torch_LIBRARY LibTorch_torch_cpu_LIBRARY LibTorch_c10_LIBRARY LibTorch_INCLUDE_DIR
                LibTorch_API_INCLUDE_DIR
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "${libtorch_asked} ${libtorch_advice}")
unset(libtorch_asked)
unset(libtorch_advice)

if(LibTorch_FOUND)
  get_filename_component(LibTorch_LIBRARY_DIR ${LibTorch_torch_LIBRARY} DIRECTORY)
endif()
if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  add_library(LibTorch::LibTorch INTERFACE IMPORTED)
  target_include_directories(LibTorch::LibTorch SYSTEM INTERFACE ${LibTorch_INCLUDE_DIR} ${LibTorch_API_INCLUDE_DIR})
  target_link_libraries(LibTorch::LibTorch INTERFACE
    ${LibTorch_torch_LIBRARY} ${LibTorch_torch_cpu_LIBRARY} ${LibTorch_c10_LIBRARY})
  # It has no symbols and brings torch's CUDA where there is one; a linker that drops what is not named would drop it.
  target_link_options(LibTorch::LibTorch INTERFACE
    "LINKER:--push-state,--no-as-needed,${LibTorch_torch_LIBRARY},--pop-state")
  target_compile_features(LibTorch::LibTorch INTERFACE cxx_std_20)
  if(LibTorch_c10_cuda_LIBRARY AND LibTorch_torch_cuda_LIBRARY)
    add_library(LibTorch::CUDA INTERFACE IMPORTED)
    target_link_libraries(LibTorch::CUDA INTERFACE
      LibTorch::LibTorch ${LibTorch_torch_cuda_LIBRARY} ${LibTorch_c10_cuda_LIBRARY})
  endif()
endif()
if(TARGET LibTorch::CUDA AND NOT DEFINED LibTorch_CUDA_RUNTIME)
  get_filename_component(bundled_cudart ${LibTorch_LIBRARY_DIR}/../../nvidia ABSOLUTE)
  string(REGEX MATCH "^[0-9]+" cuda_major "${LibTorch_CUDA_VERSION}")
  file(GLOB bundled_cudart ${bundled_cudart}/*/lib/libcudart.so.${cuda_major})
  set(LibTorch_CUDA_RUNTIME "")
  if(bundled_cudart)
    list(GET bundled_cudart 0 LibTorch_CUDA_RUNTIME)
    target_link_libraries(LibTorch::CUDA INTERFACE ${LibTorch_CUDA_RUNTIME})
  endif()
endif()
if(LibTorch_FOUND AND NOT TARGET LibTorch::OpenMP)
  find_package(OpenMP QUIET COMPONENTS CXX)
endif()
if(OpenMP_CXX_FOUND AND NOT TARGET LibTorch::OpenMP)
  file(GLOB bundled_openmp ${LibTorch_LIBRARY_DIR}/libgomp*.so*)
  if(bundled_openmp)
    list(GET bundled_openmp 0 bundled_openmp)
    add_library(LibTorch::OpenMP INTERFACE IMPORTED)
    target_compile_options(LibTorch::OpenMP INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${OpenMP_CXX_FLAGS}>)
    target_link_libraries(LibTorch::OpenMP INTERFACE ${bundled_openmp})
  else()
    add_library(LibTorch::OpenMP ALIAS OpenMP::OpenMP_CXX)
  endif()
endif()
