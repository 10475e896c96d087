# SPDX-License-Identifier: BSL-1.0
# Compiles SOURCE as a .cu file with NVCC, links it with LIBRARY, and runs PROGRAM.
cmake_path(GET LIBRARY PARENT_PATH folder)
foreach(command
        "${NVCC};-std=c++20;-x;cu;-Werror;all-warnings;-I${INCLUDE};${SOURCE};-o;${PROGRAM};-L${folder};-lnccl;-Xlinker;-rpath=${folder}"
        "${PROGRAM}"
)
    execute_process(
        COMMAND ${command} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output
    )
    message(STATUS "${output}")
    if(NOT result EQUAL 0)
        list(JOIN command " " command)
        message(FATAL_ERROR "${command} failed: ${result}")
    endif()
endforeach()
