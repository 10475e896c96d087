# SPDX-License-Identifier: BSL-1.0
# Tests of CTest for the test cases of a program that OPTIONS of doctest leave: discover_tests.cmake lists them when the
# program is linked. Up to `at_once` neighbours of a file are one test, since most take less time than a process takes
# to start.
function(joinable_discover_tests program title at_once) # OPTIONS...
    set(list ${CMAKE_CURRENT_BINARY_DIR}/${program}_tests.cmake)
    add_custom_command(
        TARGET ${program} POST_BUILD BYPRODUCTS ${list}
        COMMAND
            ${CMAKE_COMMAND} -DPROGRAM=$<TARGET_FILE:${program}> "-DTITLE=${title}" "-DOPTIONS=${ARGN}"
            -DAT_ONCE=${at_once} -DLIST=${list} -P
            ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/discover_tests.cmake
        VERBATIM
    )
    set(found ${CMAKE_CURRENT_BINARY_DIR}/${program}_found.cmake)
    file(CONFIGURE OUTPUT ${found} @ONLY CONTENT [[
if(EXISTS "@list@")
    include("@list@")
else()
    add_test("@program@ is not built" "@program@")
endif()
]])
    set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${found})
endfunction()
