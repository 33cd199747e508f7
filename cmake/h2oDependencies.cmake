# nlohmann_json as the target h2o_json; pybind11 for H2O_PYTHON; Catch2 for H2O_TESTS. Each is taken from the system
# (CMake packages) or from the Python environment (PyPI's nlohmann-json and pybind11); none is copied or downloaded.
if(NOT Python_EXECUTABLE)
  find_package(Python COMPONENTS Interpreter QUIET)
endif()

# What `code` prints in the Python that is used, or an empty string.
function(h2o_ask_python code result)
  set(answer "")
  if(Python_EXECUTABLE)
    execute_process(COMMAND ${Python_EXECUTABLE} -c "${code}" OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_QUIET)
  endif()
  set(${result} "${answer}" PARENT_SCOPE)
endfunction()

add_library(h2o_json INTERFACE)
if(TARGET nlohmann_json::nlohmann_json)  # of a project that this one was added to
  target_link_libraries(h2o_json INTERFACE nlohmann_json::nlohmann_json)
else()
  h2o_ask_python("import nlohmann_json, pathlib; print(pathlib.Path(nlohmann_json.__file__).parent / 'include')" json_hint)
  find_path(H2O_JSON_INCLUDE_DIR nlohmann/json.hpp HINTS ${json_hint})
  mark_as_advanced(H2O_JSON_INCLUDE_DIR)
  if(NOT H2O_JSON_INCLUDE_DIR)
    message(FATAL_ERROR "h2o: nlohmann/json.hpp was not found: `pip install nlohmann-json`, or install your system's "
      "package (Debian: nlohmann-json3-dev)")
  endif()
  target_include_directories(h2o_json SYSTEM INTERFACE ${H2O_JSON_INCLUDE_DIR})
endif()

if(H2O_PYTHON)
  h2o_ask_python("import pybind11; print(pybind11.get_cmake_dir())" pybind11_hint)
  find_package(Python COMPONENTS Interpreter Development.Module REQUIRED)
  find_package(pybind11 CONFIG REQUIRED HINTS ${pybind11_hint})
endif()

if(H2O_TESTS)
  find_package(Catch2 CONFIG)
  if(NOT Catch2_FOUND)
    message(FATAL_ERROR "h2o: the C++ tests need Catch2 (2.13 or 3.x): install your system's package (Debian: catch2), "
      "or set CMAKE_PREFIX_PATH to where it lies")
  endif()
endif()
