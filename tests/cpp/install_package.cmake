# Installs what a C++ program needs of `build_dir` into `outside`/prefix and copies the sources of programs there, so
# that nothing of this tree is in their reach. The folder is moved after the installation.
file(REMOVE_RECURSE ${outside})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${build_dir} --prefix ${outside}/installed --component cpp
  COMMAND_ERROR_IS_FATAL ANY)
file(RENAME ${outside}/installed ${outside}/prefix)
file(COPY ${CMAKE_CURRENT_LIST_DIR}/../../examples/cpp/ DESTINATION ${outside}/examples)
file(COPY ${CMAKE_CURRENT_LIST_DIR}/package DESTINATION ${outside})
# Another copy of the library.
file(COPY_FILE ${outside}/prefix/${library} ${outside}/second_libh2o.so)
