# SPDX-License-Identifier: BSL-1.0
# Compiles SOURCE, which must fail and print what its "// EXPECT:" lines say. control.cpp must compile:
# it shows that the others fail for their misuse and not for the way they are compiled.
execute_process(
    COMMAND ${COMPILER} -std=c++20 -fsyntax-only -Wall -Werror -I${INCLUDE} -I${CMAKE_CURRENT_LIST_DIR}/.. ${SOURCE}
    RESULT_VARIABLE result
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output
)
file(STRINGS ${SOURCE} expectations REGEX "^// EXPECT: ")
cmake_path(GET SOURCE FILENAME file)
if(file STREQUAL "control.cpp")
    if(NOT result EQUAL 0)
        message(FATAL_ERROR "the control does not compile:\n${output}")
    endif()
    return()
endif()
if(NOT expectations)
    message(FATAL_ERROR "has no // EXPECT: line")
endif()
if(result EQUAL 0)
    message(FATAL_ERROR "compiles, but must not")
endif()
foreach(expectation ${expectations})
    string(REPLACE "// EXPECT: " "" expectation "${expectation}")
    string(FIND "${output}" "${expectation}" position)
    if(position EQUAL -1)
        message(FATAL_ERROR "expected the message\n  ${expectation}\nbut got\n${output}")
    endif()
endforeach()
