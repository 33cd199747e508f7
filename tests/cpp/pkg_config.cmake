# Compiles package/use_api.cpp with what pkg-config says, links it and `object`, which names nothing of h2o, with each
# library, and runs them.
set(ENV{PKG_CONFIG_PATH} ${outside}/prefix/${libdir}/pkgconfig)
set(ENV{PKG_CONFIG_LIBDIR} "")
function(ask result)
  execute_process(COMMAND ${pkg_config} ${ARGN} OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(answer UNIX_COMMAND "${answer}")
  set(${result} ${answer} PARENT_SCOPE)
endfunction()

ask(version --modversion h2o)
if(NOT version STREQUAL expected_version)
  message(FATAL_ERROR "pkg-config says that h2o is ${version}, not ${expected_version}")
endif()
file(MAKE_DIRECTORY ${outside}/pkg_config)
ask(cflags --cflags h2o)
execute_process(COMMAND ${compiler} ${cflags} -c ${outside}/package/use_api.cpp -o use_api.o
  WORKING_DIRECTORY ${outside}/pkg_config COMMAND_ERROR_IS_FATAL ANY)
foreach(library h2o h2o_static)
  ask(libs --libs ${library})
  foreach(linked use_api.o ${object})
    execute_process(COMMAND ${compiler} -Wl,--as-needed ${linked} ${libs} -o program
      WORKING_DIRECTORY ${outside}/pkg_config COMMAND_ERROR_IS_FATAL ANY)
    execute_process(COMMAND ${outside}/pkg_config/program COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
endforeach()
