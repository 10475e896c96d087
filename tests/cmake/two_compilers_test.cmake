# SPDX-License-Identifier: BSL-1.0
# Links what NVCC compiles of FOLDER with what COMPILER does, in both orders, and without it.
file(MAKE_DIRECTORY ${BUILD})
set(nvcc "${NVCC};-std=c++20;-O2;-Werror;all-warnings;-diag-suppress;177;-I${INCLUDE}")
set(main ${FOLDER}/main.cu)
foreach(command
        "${nvcc};${main};-o;${BUILD}/alone"
        "${BUILD}/alone"
        "${COMPILER};-std=c++20;-O2;-I${INCLUDE};-c;${FOLDER}/step.cpp;-o;${BUILD}/step.o"
        "${nvcc};-DWITH_CPP;-c;${main};-o;${BUILD}/main.o"
        "${NVCC};${BUILD}/main.o;${BUILD}/step.o;-o;${BUILD}/last"
        "${BUILD}/last"
        "${NVCC};${BUILD}/step.o;${BUILD}/main.o;-o;${BUILD}/first"
        "${BUILD}/first"
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
