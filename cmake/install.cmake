# What `cmake --install` puts down: the program, one library in two forms, the public headers, and what find_package(headrace) reads.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# The headers that a user includes. What they include of ours is installed with them, and nothing else.
set(headrace_entry_headers receiver/receiver.h receiver/guard_page.h receiver/models/family.h sender_sdk/sender.h core/transport/run_directory.h)

# Sets `out` to `ARGN` and every header of ours that they include, directly or not.
function(headrace_header_closure out)
  set(closure)
  set(waiting ${ARGN})
  while(waiting)
    list(POP_FRONT waiting header)
    if(header IN_LIST closure)
      continue()
    endif()
    list(APPEND closure ${header})
    set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${header})
    file(STRINGS ${PROJECT_SOURCE_DIR}/${header} includes REGEX "^#include \"")
    list(TRANSFORM includes REPLACE "^#include \"([^\"]+)\".*" "\\1")
    list(APPEND waiting ${includes})
  endwhile()
  set(${out} ${closure} PARENT_SCOPE)
endfunction()

set(headrace_library_rooms headrace_base headrace_wire headrace_device headrace_transport headrace_checkpoint headrace_kernels headrace_receiver
    headrace_sender)
foreach(form shared static)
  string(TOUPPER ${form} FORM)
  add_library(headrace_${form} ${FORM})
  foreach(room ${headrace_library_rooms})
    target_sources(headrace_${form} PRIVATE $<TARGET_OBJECTS:${room}>)
  endforeach()
  set_target_properties(headrace_${form} PROPERTIES OUTPUT_NAME headrace LINKER_LANGUAGE CXX)
  target_compile_features(headrace_${form} INTERFACE cxx_std_20)
  target_include_directories(headrace_${form} INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/headrace>)
  target_link_libraries(headrace_${form} PRIVATE Threads::Threads $<BUILD_INTERFACE:headrace_zmq>
                        $<INSTALL_INTERFACE:cppzmq> PkgConfig::sodium fmt::fmt simdjson::simdjson hwy::hwy)
  install(TARGETS headrace_${form} EXPORT headrace_${form} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endforeach()
# Until 1.0 every minor version may change what callers were compiled against.
set_target_properties(headrace_shared PROPERTIES EXPORT_NAME headrace VERSION ${PROJECT_VERSION}
                      SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set_target_properties(headrace_static PROPERTIES EXPORT_NAME static)

# All that is installed, and nothing else.
add_custom_target(sdk DEPENDS headrace headrace_shared headrace_static)

headrace_header_closure(headrace_public_headers ${headrace_entry_headers})
foreach(header ${headrace_public_headers})
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES ${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/headrace/${folder})
endforeach()

set(headrace_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/headrace)
install(TARGETS headrace RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(EXPORT headrace_shared NAMESPACE headrace:: FILE headrace-shared.cmake DESTINATION ${headrace_cmake_dir})
install(EXPORT headrace_static NAMESPACE headrace:: FILE headrace-static.cmake DESTINATION ${headrace_cmake_dir})
configure_package_config_file(cmake/headrace-config.cmake.in ${PROJECT_BINARY_DIR}/headrace-config.cmake INSTALL_DESTINATION ${headrace_cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/headrace-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/headrace-config.cmake ${PROJECT_BINARY_DIR}/headrace-config-version.cmake DESTINATION ${headrace_cmake_dir})
