# SPDX-License-Identifier: BSL-1.0
# Gives the target joinable_single_include and the folder JOINABLE_INCLUDE, in which every header
# that the single header holds is one line that includes it: so all tests test the single header,
# whichever header they name. The others (interop) are copies. What it holds for definitions alone it lacks
# where a program compiles these once, so there the header itself is included.
set(JOINABLE_INCLUDE ${PROJECT_BINARY_DIR}/forward)
set(single ${PROJECT_SOURCE_DIR}/single_include/joinable/join.hpp)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${single})
file(READ ${single} text)
get_target_property(headers joinable HEADER_SET)
get_target_property(opt_in joinable HEADER_SET_interop)
get_target_property(definitions joinable HEADER_SET_definitions)
foreach(header ${headers} ${opt_in} ${definitions})
    cmake_path(ABSOLUTE_PATH header BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
    cmake_path(
        RELATIVE_PATH header BASE_DIRECTORY ${PROJECT_SOURCE_DIR}/include OUTPUT_VARIABLE name
    )
    string(FIND "${text}" "// ---- ${name}\n" position)
    if(position EQUAL -1)
        configure_file(${header} ${JOINABLE_INCLUDE}/${name} COPYONLY)
        continue()
    endif()
    set(lines "#include \"${single}\"\n")
    string(FIND "${text}" "// ---- ${name}\n\n#if JOINABLE_HAS_DEFINITIONS\n" position)
    if(NOT position EQUAL -1)
        string(APPEND lines "#if !JOINABLE_HAS_DEFINITIONS\n#include \"${header}\"\n#endif\n")
    endif()
    file(CONFIGURE OUTPUT ${JOINABLE_INCLUDE}/${name} CONTENT "${lines}")
endforeach()

add_library(joinable_single_include INTERFACE)
target_include_directories(joinable_single_include INTERFACE ${JOINABLE_INCLUDE})
target_compile_features(joinable_single_include INTERFACE cxx_std_20)
target_link_libraries(joinable_single_include INTERFACE Threads::Threads)
