# SPDX-License-Identifier: BSL-1.0
# PROGRAM --help is written for people: it names defaults and no types, and fits into 100 columns.
execute_process(COMMAND ${PROGRAM} --help OUTPUT_VARIABLE help COMMAND_ERROR_IS_FATAL ANY)
if(NOT help MATCHES "Default: ")
    message(FATAL_ERROR "the help names no defaults:\n${help}")
endif()
if(help MATCHES "ENUM|(TEXT|INT|FLOAT)[:= ]|POSITIVE| in \\[|[{}]|\n\n\n")
    message(FATAL_ERROR "nobody would write '${CMAKE_MATCH_0}':\n${help}")
endif()
string(REPLACE ";" "," lines "${help}") # a semicolon would end an element of the list
string(REPLACE "\n" ";" lines "${lines}")
foreach(line IN LISTS lines)
    string(LENGTH "${line}" length)
    if(length GREATER 100)
        message(FATAL_ERROR "this line has ${length} columns:\n${line}")
    endif()
endforeach()
