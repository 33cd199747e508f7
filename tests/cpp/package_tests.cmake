# The library as other projects get it. Everything happens in a folder outside of this tree, `outside`.
if(NOT H2O_SHARED OR NOT H2O_INSTALL)
  message(STATUS "h2o: the tests of the package need H2O_SHARED and H2O_INSTALL, and are left out")
  return()
endif()
set(temporary /tmp)
if(DEFINED ENV{TMPDIR})
  set(temporary $ENV{TMPDIR})
endif()
string(SHA256 folder ${PROJECT_BINARY_DIR})
string(SUBSTRING ${folder} 0 12 folder)
set(outside ${temporary}/h2o_package_${folder})
set(prefix ${outside}/prefix)
set(library ${CMAKE_INSTALL_LIBDIR}/libh2o.so)
set(of_this_build
  -Dh2o_ROOT=${prefix}
  -DLibTorch_ROOT=${LibTorch_LIBRARY_DIR}/..
  -DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}
  -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
  -DCMAKE_BUILD_TYPE=${CMAKE_BUILD_TYPE})

add_test(NAME "the cpp component installs"
  COMMAND ${CMAKE_COMMAND} -Dbuild_dir=${PROJECT_BINARY_DIR} -Doutside=${outside} -Dlibrary=${library}
    -P ${CMAKE_CURRENT_SOURCE_DIR}/install_package.cmake)
add_test(NAME "the folder of the installed package goes away" COMMAND ${CMAKE_COMMAND} -E rm -rf ${outside})
set_tests_properties("the cpp component installs" PROPERTIES FIXTURES_SETUP h2o_package TIMEOUT 60)
set_tests_properties("the folder of the installed package goes away" PROPERTIES FIXTURES_CLEANUP h2o_package TIMEOUT 60)

# A project in `outside`, built against the package; the fixture `fixture` for what runs it.
function(h2o_add_project_test name project fixture)
  add_test(NAME ${name}
    COMMAND ${CMAKE_CTEST_COMMAND}
      --build-and-test ${outside}/${project} ${outside}/build/${project}
      --build-generator ${CMAKE_GENERATOR} --build-makeprogram ${CMAKE_MAKE_PROGRAM}
      --build-options ${of_this_build} ${ARGN})
  set_tests_properties(${name} PROPERTIES FIXTURES_REQUIRED h2o_package FIXTURES_SETUP ${fixture} TIMEOUT 300)
endfunction()

# A program of such a project, by its path in `outside`; `command` has its arguments.
function(h2o_add_program_test name fixture expected unexpected command)
  add_test(NAME ${name}
    COMMAND ${CMAKE_COMMAND} "-Dcommand=${command}" "-Dexpected=${expected}" "-Dunexpected=${unexpected}"
      -P ${CMAKE_CURRENT_SOURCE_DIR}/expect_output.cmake)
  set_tests_properties(${name} PROPERTIES
    FIXTURES_REQUIRED "h2o_package;${fixture}" TIMEOUT 60 ENVIRONMENT OMP_NUM_THREADS=1)
endfunction()

# ---- What libh2o.so exports ----------------------------------------------------------------------------------------
add_test(NAME "libh2o.so exports the API alone"
  COMMAND ${CMAKE_COMMAND} -Dnm=${CMAKE_NM} -Dreadelf=${CMAKE_READELF} -Dlibrary=$<TARGET_FILE:h2o>
    -Dsoname=libh2o.so.${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
    -P ${CMAKE_CURRENT_SOURCE_DIR}/check_exports.cmake)
set_tests_properties("libh2o.so exports the API alone" PROPERTIES TIMEOUT 60)

# ---- The example ---------------------------------------------------------------------------------------------------
h2o_add_project_test("the C++ example builds against the installed package" examples h2o_example)
set(example ${outside}/build/examples/h2o_example)
h2o_add_program_test("the C++ example fills its budget and no more" h2o_example
  "token 19: head 0 holds 20 of 32 .*token 99: head 0 holds 32 of 32 slots and evicts [0-9]+\n" "" ${example})
find_program(h2o_ldd ldd)
if(h2o_ldd)
  h2o_add_program_test("the C++ example has no Python in its process" h2o_example
    "${prefix}/${library}\\.[0-9.]+ .*libtorch_cpu" "libpython|libtorch_python|not found|${PROJECT_BINARY_DIR}"
    "${h2o_ldd};${example}")
endif()

# Where there is no torch, the message says where it was looked for and which one is needed.
function(h2o_add_missing_torch_test variable value)
  add_test(NAME "a missing torch is told with ${variable}"
    COMMAND ${CMAKE_COMMAND} -S ${outside}/examples -B ${outside}/build/without_torch --fresh
      -G ${CMAKE_GENERATOR} -Dh2o_ROOT=${prefix} -D${variable}=${value}
      -DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER})
  set_tests_properties("a missing torch is told with ${variable}" PROPERTIES
    FIXTURES_REQUIRED h2o_package
    RESOURCE_LOCK example_without_torch
    TIMEOUT 60
    ENVIRONMENT_MODIFICATION LibTorch_ROOT=unset:
    PASS_REGULAR_EXPRESSION "${value}[^a-z].*built[ \n]+with[ \n]+torch[ \n]+${LibTorch_VERSION}")
endfunction()
h2o_add_missing_torch_test(LibTorch_ROOT /nowhere/torch)
# This machine's Python, but for the question after its torch.
set(python_without_torch ${CMAKE_CURRENT_BINARY_DIR}/python_without_torch)
file(WRITE ${python_without_torch}
  "#!/bin/sh\ncase \"$*\" in *find_spec*) echo /nowhere/torch;; *) exec ${Python_EXECUTABLE} \"$@\";; esac\n")
file(CHMOD ${python_without_torch} PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
h2o_add_missing_torch_test(Python_EXECUTABLE ${python_without_torch})

# ---- Registration by linking or loading alone ----------------------------------------------------------------------
set(linkers "")
foreach(linker bfd gold lld)
  find_program(h2o_ld_${linker} ld.${linker})
  if(h2o_ld_${linker})
    list(APPEND linkers ${linker})
  endif()
endforeach()
list(JOIN linkers , linkers_with_commas)
h2o_add_project_test("programs that link the package in other ways build" package h2o_programs
  -Dlinkers=${linkers_with_commas})
set(programs ${outside}/build/package)
set(works "the operators are there and work")
set(second_copy "another copy of the library has registered torch.ops.h2o in this process. this copy, [0-9.]+ in /")
foreach(kind ${linkers} between)
  foreach(link h2o h2o_static)
    h2o_add_program_test("a program that names nothing of ${link} has the operators [${kind}]" h2o_programs
      ${works} ${second_copy} ${programs}/find_operators_${link}_${kind})
  endforeach()
endforeach()
foreach(link h2o h2o_static)
  h2o_add_program_test("errors of ${link} arrive by their types" h2o_programs "arrive by their types" ""
    ${programs}/use_api_${link})
endforeach()
set(first ${prefix}/${library})
h2o_add_program_test("a program that links LibTorch alone loads libh2o.so" h2o_programs
  ${works} ${second_copy} "${programs}/find_operators;${first}")
h2o_add_program_test("libh2o.so is unloaded and loaded again" h2o_programs
  ${works} ${second_copy} "${programs}/find_operators;${first};--close;${first}")
h2o_add_program_test("libh2o.so under two names is one copy" h2o_programs
  ${works} ${second_copy} "${programs}/find_operators;${first};${first}.${PROJECT_VERSION}")

# ---- A second copy in the process registers nothing, says so, and harms nothing ------------------------------------
set(second ${outside}/second_libh2o.so)
set(plugin ${programs}/libplugin_h2o)
function(h2o_add_second_copy_test name command)
  h2o_add_program_test("a second copy is refused: ${name}" h2o_programs "${second_copy}.*${works}" "" "${command}")
endfunction()
h2o_add_second_copy_test("two files" "${programs}/find_operators;${first};${second}")
h2o_add_second_copy_test("two files that see each other" "${programs}/find_operators;--global;${first};${second}")
h2o_add_second_copy_test("beside a linked one" "${programs}/find_operators_h2o_between;${second}")
h2o_add_second_copy_test("a file beside a static one" "${programs}/find_operators_h2o_static_between;${first}")
h2o_add_second_copy_test("a file beside a static one that it sees"
  "${programs}/find_operators_h2o_static_exporting;--global;${first}")
h2o_add_second_copy_test("a static one beside a file" "${programs}/find_operators;${first};${plugin}_static.so")
h2o_add_second_copy_test("two static ones" "${programs}/find_operators_h2o_static_between;${plugin}_static.so")
h2o_add_second_copy_test("a plugin's file beside a static one" "${programs}/find_operators_h2o_static_between;${plugin}.so")

# ---- pkg-config ----------------------------------------------------------------------------------------------------
find_program(h2o_pkg_config pkg-config)
if(h2o_pkg_config)
  add_test(NAME "pkg-config says how to compile and link"
    COMMAND ${CMAKE_COMMAND} -Doutside=${outside} -Dlibdir=${CMAKE_INSTALL_LIBDIR} -Dpkg_config=${h2o_pkg_config}
      -Dcompiler=${CMAKE_CXX_COMPILER} -Dexpected_version=${PROJECT_VERSION}
      -Dobject=${programs}/CMakeFiles/find_operators_object.dir/find_operators.cpp${CMAKE_CXX_OUTPUT_EXTENSION}
      -P ${CMAKE_CURRENT_SOURCE_DIR}/pkg_config.cmake)
  set_tests_properties("pkg-config says how to compile and link" PROPERTIES
    FIXTURES_REQUIRED "h2o_package;h2o_programs" TIMEOUT 300 ENVIRONMENT OMP_NUM_THREADS=1)
else()
  message(STATUS "h2o: there is no pkg-config, its test is left out")
endif()

# ---- From the source tree ------------------------------------------------------------------------------------------
add_test(NAME "another project builds h2o as a part of itself and stays as it was"
  COMMAND ${CMAKE_COMMAND} -Dsource_dir=${PROJECT_SOURCE_DIR} -Dbuild_dir=${CMAKE_CURRENT_BINARY_DIR}/subproject
    -Dgenerator=${CMAKE_GENERATOR} -Dmake_program=${CMAKE_MAKE_PROGRAM} -Dcompiler=${CMAKE_CXX_COMPILER}
    -Dpython=${Python_EXECUTABLE} -Dtorch=${LibTorch_LIBRARY_DIR}/..
    -P ${CMAKE_CURRENT_SOURCE_DIR}/subproject.cmake)
set_tests_properties("another project builds h2o as a part of itself and stays as it was" PROPERTIES
  TIMEOUT 900 PROCESSORS 2 ENVIRONMENT OMP_NUM_THREADS=1)

# ---- A layer exported from Python ----------------------------------------------------------------------------------
h2o_ask_python("import torch; print(torch.__version__)" python_torch)
if(python_torch)
  set(exported ${outside}/exported)
  add_test(NAME "a layer with an H2O cache is exported and compiled"
    COMMAND ${CMAKE_COMMAND} -E env CXX=${CMAKE_CXX_COMPILER} TORCHINDUCTOR_CACHE_DIR=${outside}/inductor
      ${Python_EXECUTABLE} ${outside}/examples/aoti/export_decode_layer.py ${first} ${exported})
  set_tests_properties("a layer with an H2O cache is exported and compiled" PROPERTIES
    FIXTURES_REQUIRED h2o_package FIXTURES_SETUP h2o_exported TIMEOUT 300)
  h2o_add_project_test("the program for exported layers builds" examples/aoti h2o_runner)
  h2o_add_program_test("an exported layer decodes from C++ as it does in Python" "h2o_exported;h2o_runner"
    "40 steps as in Python: row 0, head 0 keeps 12 of 40 tokens" "calling init: [^\n]*(libpython|libtorch_python)"
    "${CMAKE_COMMAND};-E;env;LD_DEBUG=libs;${outside}/build/examples/aoti/h2o_run_decode_layer;${exported}")
else()
  message(STATUS "h2o: there is no Python with torch, the test of exported layers is left out")
endif()
