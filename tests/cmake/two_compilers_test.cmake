# SPDX-License-Identifier: BSL-1.0
# Links what NVCC compiles of FOLDER with what COMPILER does, in both orders, and without it.
include(${CMAKE_CURRENT_LIST_DIR}/run_command.cmake)

file(MAKE_DIRECTORY ${BUILD})
set(nvcc "${NVCC};-std=c++20;-O2;-Werror;all-warnings;-diag-suppress;177;-I${INCLUDE}")
set(main ${FOLDER}/main.cu)
run_command(${nvcc} ${main} -o ${BUILD}/alone)
run_command(${BUILD}/alone)
run_command(${COMPILER} -std=c++20 -O2 -I${INCLUDE} -c ${FOLDER}/step.cpp -o ${BUILD}/step.o)
run_command(${nvcc} -DWITH_CPP -c ${main} -o ${BUILD}/main.o)
run_command(${NVCC} ${BUILD}/main.o ${BUILD}/step.o -o ${BUILD}/last)
run_command(${BUILD}/last)
run_command(${NVCC} ${BUILD}/step.o ${BUILD}/main.o -o ${BUILD}/first)
run_command(${BUILD}/first)
