# SPDX-License-Identifier: BSL-1.0
# Compiles SOURCE with COMPILER (g++, clang++ or nvcc), which must fail and print, in the first error and
# within three lines from there, what its "// EXPECT: " lines say, each a part of one sentence. Where compilers themselves
# refuse the misuse, each in its own words, a line is for one of them: "// EXPECT(nvcc): ".
# control.cpp must compile: it shows that the others fail for their misuse and not for the way they
# are compiled. No options but the standard and warnings as errors, so that users see the same:
# without the latter a guard without a name, and with clang options out of order, are warnings.
# SYSTEM are folders of other libraries' headers. A line "// OPTIONS: " has other options than the standard.
file(STRINGS ${SOURCE} standard REGEX "^// OPTIONS: ")
string(REGEX REPLACE "^// OPTIONS: " "" standard "${standard}")
if(standard)
    set(PRECOMPILED "") # not unset, which would uncover what -D gave
else()
    set(standard -std=c++20)
endif()
set(options ${standard} -I${INCLUDE} -I${CMAKE_CURRENT_LIST_DIR}/..)
foreach(folder IN LISTS SYSTEM)
    list(APPEND options -isystem ${folder})
endforeach()
if(COMPILER MATCHES "nvcc")
    set(kind "nvcc")
    list(APPEND options -x cu -Werror all-warnings -ptx -o /dev/null) # its front end for the device alone
else()
    set(kind "g\\+\\+")
    set(first_only -fmax-errors=1) # with its notes; what comes after it is not read
    if(COMPILER MATCHES "clang")
        set(kind "clang\\+\\+")
        set(first_only -ferror-limit=1)
    endif()
    list(APPEND options -fsyntax-only -Werror ${first_only})
endif()
# In PRECOMPILED lie <joinable/join.hpp> and <joinable/zero.hpp> already parsed. What the compiler says stays the same: of the
# lines that say who includes the header, g++ names the file there in place of SOURCE.
set(most_lines 3)
file(STRINGS ${SOURCE} first REGEX "^#include" LIMIT_COUNT 1)
if(PRECOMPILED AND first MATCHES "<joinable/(join|zero).hpp>")
    if(kind STREQUAL "g\\+\\+")
        list(PREPEND options -I${PRECOMPILED})
    else()
        list(APPEND options -include-pch ${PRECOMPILED}/${CMAKE_MATCH_1}.pch)
    endif()
    list(APPEND options ${ONCE}) # as the headers were parsed
elseif(kind STREQUAL "nvcc")
    list(APPEND options ${ONCE})
endif()
set(ENV{LC_ALL} C)
execute_process(
    COMMAND ${COMPILER} ${options} ${SOURCE}
    RESULT_VARIABLE result
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output
)
cmake_path(GET SOURCE FILENAME file)
if(file STREQUAL "control.cpp")
    if(NOT result EQUAL 0)
        message(FATAL_ERROR "the control does not compile:\n${output}")
    endif()
    return()
endif()
file(STRINGS ${SOURCE} expectations REGEX "^// EXPECT(\\(${kind}\\))?: ")
if(NOT expectations)
    message(FATAL_ERROR "has no // EXPECT: line for ${COMPILER}")
endif()
if(result EQUAL 0)
    message(FATAL_ERROR "compiles, but must not")
endif()
# Before it the compiler says where the code was included and instantiated from.
string(REGEX MATCH "[^\n]*error[: ]" first_error "${output}")
string(FIND "${output}" "${first_error}" begin)
string(SUBSTRING "${output}" ${begin} -1 output)
set(beginning "")
foreach(line RANGE 1 ${most_lines})
    string(FIND "${output}" "\n" end)
    math(EXPR end "${end} + 1")
    string(SUBSTRING "${output}" 0 ${end} first)
    string(SUBSTRING "${output}" ${end} -1 output)
    string(APPEND beginning "${first}")
endforeach()
string(REGEX REPLACE "[ \n]+" " " beginning_in_one_line "${beginning}") # nvcc breaks sentences
foreach(expectation ${expectations})
    string(REGEX REPLACE "^// EXPECT[^:]*: " "" expectation "${expectation}")
    string(FIND "${beginning_in_one_line}" "${expectation}" position)
    if(position EQUAL -1)
        message(FATAL_ERROR "expected within ${most_lines} lines from the first error\n  ${expectation}\nbut got\n${beginning}...\n${output}")
    endif()
endforeach()
