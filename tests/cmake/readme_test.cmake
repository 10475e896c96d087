# SPDX-License-Identifier: BSL-1.0
# The first code in README.md compiles as it stands there, and prints what its comment says.
# cmake -DREADME=... -DCOMPILER=... -DINCLUDE=... -DWORK=... -P readme_test.cmake
file(READ ${README} readme)
string(FIND "${readme}" "```cpp\n" begin)
math(EXPR begin "${begin} + 7")
string(SUBSTRING "${readme}" ${begin} -1 code)
string(FIND "${code}" "```" end)
string(SUBSTRING "${code}" 0 ${end} code)
file(WRITE ${WORK}/quick_start.cpp
     "#include <cstdio>\n#include <span>\n#include <joinable/join.hpp>\nint main() {\n${code}}\n"
)
execute_process(
    COMMAND ${COMPILER} -std=c++20 -Wall -Wextra -Werror -I${INCLUDE} -pthread
            ${WORK}/quick_start.cpp -o ${WORK}/quick_start COMMAND_ERROR_IS_FATAL ANY
)
execute_process(COMMAND ${WORK}/quick_start OUTPUT_VARIABLE printed COMMAND_ERROR_IS_FATAL ANY)
foreach(line "rank 0: 10, then 11\n" "rank 1: 11, then 11\n")
    string(FIND "${printed}" "${line}" at)
    if(at EQUAL -1)
        message(FATAL_ERROR "expected ${line}in what was printed:\n${printed}")
    endif()
endforeach()
