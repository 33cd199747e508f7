# The fuzzers of tests/fuzz, and a short run of each in CTest; `make fuzz` runs them for longer.
#
# They are compiled by clang for libFuzzer where clang and its runtime are installed, else by the compiler of the rest
# for tests/fuzz/replay.cpp, which takes the same arguments.
include(ExternalProject)
set(fuzzers fuzz_config fuzz_llm_config fuzz_policy fuzz_safetensors fuzz_token_file)
set(fuzz_source_dir ${PROJECT_SOURCE_DIR}/tests/fuzz)
set(fuzz_dir ${PROJECT_BINARY_DIR}/tests/fuzz)

if(CMAKE_CXX_COMPILER_ID STREQUAL Clang)
  set(H2O_CLANG ${CMAKE_CXX_COMPILER} CACHE FILEPATH "clang++ with libFuzzer")
else()
  find_program(H2O_CLANG clang++ DOC "clang++ with libFuzzer")
endif()
mark_as_advanced(H2O_CLANG)
set(no_libfuzzer TRUE)
if(H2O_CLANG)
  file(WRITE ${fuzz_dir}/probe.cpp
    "extern \"C\" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n")
  execute_process(COMMAND ${H2O_CLANG} -fsanitize=fuzzer,address,undefined probe.cpp -o probe
    WORKING_DIRECTORY ${fuzz_dir} RESULT_VARIABLE no_libfuzzer OUTPUT_QUIET ERROR_QUIET)
endif()
if(no_libfuzzer)
  set(fuzz_engine replay)
  set(fuzz_compiler ${CMAKE_CXX_COMPILER})
  message(STATUS "h2o: no clang++ with libFuzzer: the fuzzers replay their corpus (Debian: clang, libclang-rt-dev)")
else()
  set(fuzz_engine libfuzzer)
  set(fuzz_compiler ${H2O_CLANG})
endif()

list(JOIN fuzzers | fuzzers_argument)
ExternalProject_Add(h2o_fuzzers
  PREFIX ${fuzz_dir}/project
  SOURCE_DIR ${fuzz_source_dir}
  BINARY_DIR ${fuzz_dir}/${fuzz_engine}
  LIST_SEPARATOR |
  CMAKE_ARGS
    -DCMAKE_CXX_COMPILER=${fuzz_compiler}
    -DH2O_FUZZ_ENGINE=${fuzz_engine}
    -DH2O_FUZZERS=${fuzzers_argument}
    -DH2O_JSON_INCLUDE_DIR=${H2O_JSON_INCLUDE_DIR}
  BUILD_ALWAYS ON
  INSTALL_COMMAND "")

foreach(fuzzer ${fuzzers})
  string(REPLACE fuzz_ "" corpus ${fuzzer})
  file(GLOB seeds CONFIGURE_DEPENDS ${fuzz_source_dir}/corpus/${corpus}/*)
  list(JOIN seeds , seeds)  # named one by one: libFuzzer writes into a folder that it is given
  add_test(NAME ${fuzzer} COMMAND ${fuzz_dir}/${fuzz_engine}/${fuzzer}
    -seed=1 -runs=10000 -seed_inputs=${seeds} -dict=${fuzz_source_dir}/${corpus}.dict
    -artifact_prefix=${fuzz_dir}/${fuzzer}-)
  set_tests_properties(${fuzzer} PROPERTIES TIMEOUT 120)
endforeach()
