# Fails where an object compiled for an instruction set defines a symbol that the linker may merge with another file's:
# a CPU without the instructions would run it. ATen's vectors are in a namespace per set (CPU_CAPABILITY).
foreach(object IN LISTS objects)
  execute_process(COMMAND ${nm} -C --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[0-9a-f]+ [WVui] [^\n]*" shared "${symbols}")
  list(FILTER shared EXCLUDE REGEX " at::vec::H2O_")
  if(shared)
    list(JOIN shared "\n  " shared)
    message(SEND_ERROR "${object}:\n  ${shared}")
  endif()
  if(NOT symbols MATCHES " T [^\n]*h2o::cpu::[a-z0-9_]+::")
    message(SEND_ERROR "${object}: no table of kernels found by ${nm}")
  endif()
endforeach()
