# SPDX-License-Identifier: BSL-1.0
# Compiles SOURCE, which must fail and print what its "// EXPECT:" lines say. A file without such a
# line is a control: it must compile.
execute_process(
    COMMAND ${COMPILER} -std=c++20 -fsyntax-only -Wall -Werror -I${INCLUDE} -I${INCLUDE}/../tests ${SOURCE}
    RESULT_VARIABLE result
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output
)
file(STRINGS ${SOURCE} expectations REGEX "^// EXPECT: ")
if(NOT expectations)
    if(NOT result EQUAL 0)
        message(FATAL_ERROR "the control does not compile:\n${output}")
    endif()
    return()
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
