# H2O_SANITIZE: everything that this project compiles, under g++'s or clang's sanitizers. Torch's libraries stay as they
# are: what they do with memory is seen only where they call malloc, memcpy and the like.
set(H2O_SANITIZE "" CACHE STRING "Build for `make sanitize`: address,undefined or thread")
set_property(CACHE H2O_SANITIZE PROPERTY STRINGS "" address,undefined thread)
if(H2O_SANITIZE)
  add_compile_options(-fsanitize=${H2O_SANITIZE} -fno-omit-frame-pointer -g1 -O1)
  add_link_options(-fsanitize=${H2O_SANITIZE})
endif()
if(H2O_SANITIZE MATCHES undefined)
  add_compile_options(-fno-sanitize-recover=undefined)
endif()
if(H2O_SANITIZE STREQUAL thread)
  include_directories(BEFORE ${PROJECT_SOURCE_DIR}/tests/sanitizers/thread)
endif()
