# SPDX-License-Identifier: MIT OR Apache-2.0
#
# find_package(ibgda) gives the targets ibgda::ibgda, the library with its headers, and ibgda::device, the headers that
# kernels include, alone.
get_filename_component(_ibgda_prefix "${CMAKE_CURRENT_LIST_DIR}/../../../.." ABSOLUTE)

if(NOT TARGET ibgda::device)
  add_library(ibgda::device INTERFACE IMPORTED)
  set_target_properties(ibgda::device PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_ibgda_prefix}/include")

  add_library(ibgda::ibgda SHARED IMPORTED)
  set_target_properties(ibgda::ibgda PROPERTIES
    IMPORTED_LOCATION "${CMAKE_CURRENT_LIST_DIR}/../../libibgda.so"
    IMPORTED_SONAME "libibgda.so.0"
    INTERFACE_LINK_LIBRARIES ibgda::device)
endif()
unset(_ibgda_prefix)
