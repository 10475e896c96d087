# SPDX-License-Identifier: BSL-1.0
# Writes into LIST the tests of PROGRAM, each up to AT_ONCE cases of one file that follow each other. A case that is alone
# gives its test the name, and one of doctest's suite [long] is alone. Of several, support/count_failed_checks.hpp prints
# the name of each that begins, so that the last one is known where they hang.
cmake_minimum_required(VERSION 3.25)
execute_process(
    COMMAND ${PROGRAM} ${OPTIONS} --list-test-cases --reporters=xml
    OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY
)
string(REPLACE "testsuite=\"[long]\"" "testsuite=\"long\"" output "${output}")
foreach(pair "&quot|'" "&lt|<" "&gt|>" "&amp|&") # names are shown, and no more
    string(REGEX MATCH "(.*)[|](.*)" pair "${pair}")
    string(REPLACE "${CMAKE_MATCH_1};" "${CMAKE_MATCH_2}" output "${output}")
endforeach()
string(REGEX REPLACE "[][;]" " " output "${output}") # which mean something in a list
string(REGEX MATCHALL "<TestCase [^\n]*" cases "${output}")
if(NOT cases)
    message(FATAL_ERROR "${PROGRAM} ${OPTIONS} lists no test case:\n${output}")
endif()

if(TITLE)
    string(APPEND TITLE " ")
endif()
set(script "")
set(command "[==[${PROGRAM}]==]")
foreach(option IN LISTS OPTIONS)
    string(APPEND command " [==[${option}]==]")
endforeach()
set(index 0) # of the case, among all
set(count 0) # of cases that are not written yet: the last ones
set(file "")
macro(joinable_write_test)
    if(count GREATER 0)
        math(EXPR first "${index} - ${count} + 1")
        set(seconds 600) # a hang ends a case after 300: support/hang.hpp
        if(count GREATER 1)
            set(seconds 900)
            math(EXPR begin "${in_file} - ${count} + 1")
            string(REGEX REPLACE "^(.*/)?tests/|[.]test[.][a-z]+$" "" name "${file}")
            string(APPEND name ", ${begin} to ${in_file}")
        endif()
        string(APPEND script "add_test([==[${TITLE}${name}]==] ${command} --first=${first} --last=${index})\n"
                      "set_tests_properties([==[${TITLE}${name}]==] PROPERTIES TIMEOUT ${seconds})\n"
        )
        set(count 0)
    endif()
endmacro()
foreach(case IN LISTS cases)
    if(NOT case MATCHES " name=\"([^\"]*)\"( testsuite=\"([^\"]*)\")? filename=\"([^\"]*)\"")
        message(FATAL_ERROR "doctest lists test cases in another way: ${case}")
    endif()
    set(next_name "${CMAKE_MATCH_1}")
    set(next_suite "${CMAKE_MATCH_3}")
    set(next_file "${CMAKE_MATCH_4}")
    if(NOT next_file STREQUAL file OR next_suite STREQUAL "long" OR suite STREQUAL "long" OR count EQUAL AT_ONCE)
        joinable_write_test()
    endif()
    if(NOT next_file STREQUAL file)
        set(in_file 0)
    endif()
    set(name "${next_name}")
    set(suite "${next_suite}")
    set(file "${next_file}")
    math(EXPR index "${index} + 1")
    math(EXPR in_file "${in_file} + 1")
    math(EXPR count "${count} + 1")
endforeach()
joinable_write_test()
file(WRITE ${LIST} "${script}")
