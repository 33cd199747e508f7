# The installed C++ package, component cpp: headers h2o/*.h, find_package(h2o) with the targets h2o::h2o and, where
# libh2o.a was built, h2o::h2o_static, and h2o.pc and h2o_static.pc for pkg-config.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/h2o)
foreach(library h2o h2o_static)
  if(TARGET ${library})
    install(TARGETS ${library} EXPORT h2oTargets
      LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp NAMELINK_COMPONENT cpp
      ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
  endif()
endforeach()
if(TARGET h2o_generate)
  install(TARGETS h2o_generate RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT cpp OPTIONAL)  # setup.py leaves it out
endif()
install(EXPORT h2oTargets NAMESPACE h2o:: DESTINATION ${package_dir} COMPONENT cpp)
install(FILES
  csrc/h2o/budget.h csrc/h2o/config.h csrc/h2o/eviction_policy.h csrc/h2o/export.h csrc/h2o/h2o.h csrc/h2o/kv_cache.h
  csrc/h2o/scoring.h
  ${PROJECT_BINARY_DIR}/include/h2o/version.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/h2o COMPONENT cpp)
install(FILES csrc/h2o/ops/attention_decode.h csrc/h2o/ops/evict.h csrc/h2o/ops/prefill_select.h csrc/h2o/ops/rotate.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/h2o/ops COMPONENT cpp)
configure_package_config_file(cmake/h2oConfig.cmake.in h2oConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(h2oConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/h2oConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/h2oConfigVersion.cmake
  cmake/FindLibTorch.cmake DESTINATION ${package_dir} COMPONENT cpp)

# ---- pkg-config ------------------------------------------------------------------------------------------------
# Paths relative to the .pc file, so that the prefix can be moved.
cmake_path(ABSOLUTE_PATH CMAKE_INSTALL_LIBDIR BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX} OUTPUT_VARIABLE pc_libdir)
cmake_path(ABSOLUTE_PATH CMAKE_INSTALL_INCLUDEDIR BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX} OUTPUT_VARIABLE pc_includedir)
cmake_path(RELATIVE_PATH pc_includedir BASE_DIRECTORY ${pc_libdir}/pkgconfig)
cmake_path(GET LibTorch_INCLUDE_DIR PARENT_PATH pc_torchdir)

function(h2o_install_pc name library)
  if(library STREQUAL h2o)
    set(pc_keep --no-as-needed,\${libdir}/libh2o.so)
    set(pc_more "-Wl,-rpath,\${libdir}")
  else()
    set(pc_keep --whole-archive,\${libdir}/libh2o.a)
    get_target_property(openmp LibTorch::OpenMP INTERFACE_LINK_LIBRARIES)
    list(JOIN openmp " " pc_more)
    string(REPLACE ${pc_torchdir}/ "\${torchdir}/" pc_more "${pc_more}")
    if(H2O_BUILD_CUDA)
      string(APPEND pc_more " -ltorch_cuda -lc10_cuda -L${h2o_cuda_runtime_dir} -l:libcudart.so.${CUDAToolkit_VERSION_MAJOR}"
        " -Wl,-rpath,${h2o_cuda_runtime_dir}")
    endif()
  endif()
  configure_file(cmake/h2o.pc.in ${name}.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT cpp)
endfunction()
if(H2O_SHARED)
  h2o_install_pc(h2o h2o)
else()
  h2o_install_pc(h2o h2o_static)
endif()
if(H2O_STATIC)
  h2o_install_pc(h2o_static h2o_static)
endif()
