# SPDX-License-Identifier: BSL-1.0
# Used by fail_test.cmake and fail_unit.cmake, which have COMPILER (g++, clang++ or nvcc), INCLUDE, SYSTEM (folders of
# other libraries' headers), PRECOMPILED and ONCE (options with which headers were parsed).
if(COMPILER MATCHES "nvcc")
    set(kind "nvcc")
elseif(COMPILER MATCHES "clang")
    set(kind "clang\\+\\+")
else()
    set(kind "g\\+\\+")
endif()
# Compiles SOURCE, whose first header is FIRST, by STANDARD and further options. Sets `result` and `output`, in which
# ( and ) stand for brackets, a comma for a semicolon: the others mean something in a list.
# No options but the standard and warnings as errors, so that users see the same: without the latter a guard without a
# name, and with clang options out of order, are warnings.
# In PRECOMPILED lie <joinable/join.hpp> and <joinable/zero.hpp> already parsed. What the compiler says stays the same:
# of the lines that say who includes the header, g++ names the file there in place of SOURCE.
function(joinable_compile_misuse source first standard) # options...
    set(options ${standard} -I${INCLUDE} -I${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..)
    foreach(folder IN LISTS SYSTEM)
        list(APPEND options -isystem ${folder})
    endforeach()
    if(kind STREQUAL "nvcc")
        list(APPEND options ${ONCE} -x cu -Werror all-warnings -ptx -o /dev/null) # its front end for the device alone
    else()
        list(APPEND options -fsyntax-only -Werror)
        if(PRECOMPILED AND standard STREQUAL "-std=c++20" AND first MATCHES "<joinable/(join|zero).hpp>")
            if(kind STREQUAL "g\\+\\+")
                list(PREPEND options -I${PRECOMPILED})
            else()
                list(APPEND options -include-pch ${PRECOMPILED}/${CMAKE_MATCH_1}.pch)
            endif()
            list(APPEND options ${ONCE})
        endif()
    endif()
    set(ENV{LC_ALL} C)
    execute_process(
        COMMAND ${COMPILER} ${options} ${ARGN} ${source}
        RESULT_VARIABLE result
        OUTPUT_VARIABLE output
        ERROR_VARIABLE output
    )
    joinable_without_lists(output "${output}")
    set(result ${result} PARENT_SCOPE)
    set(output "${output}" PARENT_SCOPE)
endfunction()
function(joinable_without_lists variable text)
    string(REPLACE ";" "," text "${text}")
    string(REPLACE "[" "(" text "${text}")
    string(REPLACE "]" ")" text "${text}")
    string(REPLACE "\\" "/" text "${text}")
    set(${variable} "${text}" PARENT_SCOPE)
endfunction()
