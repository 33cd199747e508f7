# Installs what a C++ program needs of `build_dir` into an empty `prefix`; an `example_dir` built against another goes too.
file(REMOVE_RECURSE ${prefix} ${example_dir})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${build_dir} --prefix ${prefix} --component cpp
  COMMAND_ERROR_IS_FATAL ANY)
