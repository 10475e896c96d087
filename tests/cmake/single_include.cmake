# SPDX-License-Identifier: BSL-1.0
# Gives the target joinable_single_include and the folder JOINABLE_INCLUDE, in which every header
# that a single header holds is one line that includes it: so all tests test the single headers,
# whichever header they name. The others (interop) are copies. What single headers hold for definitions alone they
# lack where a program compiles these once, so there the header itself is included.
set(JOINABLE_INCLUDE ${PROJECT_BINARY_DIR}/forward)
# Those that amalgamate.py writes, in its order.
file(STRINGS ${PROJECT_SOURCE_DIR}/single_include/amalgamate.py singles REGEX "^    \"join ")
string(REGEX MATCHALL "[a-z_]+" singles "${singles}")
foreach(single IN LISTS singles)
    set(path_${single} ${PROJECT_SOURCE_DIR}/single_include/joinable/${single}.hpp)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path_${single}})
    file(READ ${path_${single}} text_${single})
endforeach()
get_target_property(headers joinable HEADER_SET)
get_target_property(opt_in joinable HEADER_SET_interop)
get_target_property(definitions joinable HEADER_SET_definitions)
foreach(header ${headers} ${opt_in} ${definitions})
    cmake_path(ABSOLUTE_PATH header BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
    cmake_path(
        RELATIVE_PATH header BASE_DIRECTORY ${PROJECT_SOURCE_DIR}/include OUTPUT_VARIABLE name
    )
    set(found "")
    set(is_whole FALSE) # the first that always holds it, or else the first
    foreach(single IN LISTS singles)
        string(FIND "${text_${single}}" "// ---- ${name}\n" position)
        if(NOT is_whole AND NOT position EQUAL -1)
            string(FIND "${text_${single}}" "// ---- ${name}\n\n#if JOINABLE_HAS_DEFINITIONS\n" position)
            if(position EQUAL -1)
                set(is_whole TRUE)
                set(found ${single})
            elseif(NOT found)
                set(found ${single})
            endif()
        endif()
    endforeach()
    if(NOT found)
        configure_file(${header} ${JOINABLE_INCLUDE}/${name} COPYONLY)
        continue()
    endif()
    set(lines "#include \"${path_${found}}\"\n")
    if(NOT is_whole)
        string(APPEND lines "#if !JOINABLE_HAS_DEFINITIONS\n#include \"${header}\"\n#endif\n")
    endif()
    file(CONFIGURE OUTPUT ${JOINABLE_INCLUDE}/${name} CONTENT "${lines}")
endforeach()

add_library(joinable_single_include INTERFACE)
target_include_directories(joinable_single_include INTERFACE ${JOINABLE_INCLUDE})
target_compile_features(joinable_single_include INTERFACE cxx_std_20)
target_link_libraries(joinable_single_include INTERFACE Threads::Threads)
