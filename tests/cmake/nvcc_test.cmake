# SPDX-License-Identifier: BSL-1.0
# Compiles SOURCE as a .cu file with NVCC, links it with LIBRARY, and runs PROGRAM.
include(${CMAKE_CURRENT_LIST_DIR}/run_command.cmake)

cmake_path(GET LIBRARY PARENT_PATH folder)
run_command(
    ${NVCC} -std=c++20 -x cu -Werror all-warnings -I${INCLUDE} ${SOURCE} -o ${PROGRAM}
    -L${folder} -lnccl -Xlinker -rpath=${folder}
)
run_command(${PROGRAM})
