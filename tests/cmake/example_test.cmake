# SPDX-License-Identifier: BSL-1.0
# Runs PROGRAM and compares what it prints with the comment at the end of SOURCE, after "// Output:".
execute_process(COMMAND ${PROGRAM} RESULT_VARIABLE result OUTPUT_VARIABLE output)
file(READ ${SOURCE} text)
string(FIND "${text}" "// Output:\n" position)
if(position EQUAL -1)
    message(FATAL_ERROR "${SOURCE} says no output")
endif()
math(EXPR position "${position} + 11")
string(SUBSTRING "${text}" ${position} -1 expected)
string(REGEX REPLACE "(^|\n)// ?" "\\1" expected "${expected}")
if(NOT result EQUAL 0 OR NOT output STREQUAL expected)
    message(FATAL_ERROR "expected\n${expected}\nbut got (${result})\n${output}")
endif()
