# SPDX-License-Identifier: BSL-1.0
# Parses <joinable/HEADER.hpp> once for all of fail/: in FOLDER it is then found already parsed by COMPILER,
# which is g++ or clang++. ONCE is an option of the compiler, or nothing. See fail_test.cmake.
if(COMPILER MATCHES "clang")
    file(MAKE_DIRECTORY ${FOLDER})
    set(header ${INCLUDE}/joinable/${HEADER}.hpp)
    set(output ${FOLDER}/${HEADER}.pch)
else()
    set(header ${FOLDER}/joinable/${HEADER}.hpp) # no copy: g++ warns of #pragma once where it starts
    file(WRITE ${header} "#include \"${INCLUDE}/joinable/${HEADER}.hpp\"\n")
    set(output ${header}.gch)
endif()
file(REMOVE ${output})
execute_process(
    COMMAND ${COMPILER} -std=c++20 ${ONCE} -I${INCLUDE} -Werror -x c++-header ${header} -o ${output}
    COMMAND_ERROR_IS_FATAL ANY
)
