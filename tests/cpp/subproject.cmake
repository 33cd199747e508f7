# Configures and builds subproject/ in `build_dir`, runs its programs, and installs it, which must install nothing.
execute_process(
  COMMAND ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/subproject -B ${build_dir} -G ${generator}
    -Dh2o_source=${source_dir} -DH2O_STATIC=ON -DH2O_CUDA=OFF -DLibTorch_ROOT=${torch}
    -DCMAKE_CXX_COMPILER=${compiler} -DCMAKE_MAKE_PROGRAM=${make_program} -DPython_EXECUTABLE=${python}
    # No build type, as in a project that sets none. A processor without a name is one without AVX, which compiles in
    # half the time.
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=baseline
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${build_dir} -j 2 COMMAND_ERROR_IS_FATAL ANY)
foreach(library h2o h2o_static)
  execute_process(COMMAND ${build_dir}/parent_${library} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
file(REMOVE_RECURSE ${build_dir}/installed)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${build_dir} --prefix ${build_dir}/installed
  COMMAND_ERROR_IS_FATAL ANY)
file(GLOB_RECURSE installed ${build_dir}/installed/*)
if(installed)
  message(FATAL_ERROR "h2o makes its parent install ${installed}")
endif()
