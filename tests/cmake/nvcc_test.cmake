# SPDX-License-Identifier: BSL-1.0
# Compiles SOURCE as a .cu file with NVCC, links it with LIBRARY, and runs PROGRAM. ONCE is the option that leaves out
# what joinable::compiled has, and its file; or nothing.
include(${CMAKE_CURRENT_LIST_DIR}/run_command.cmake)

list(LENGTH ONCE length)
if(length EQUAL 2)
    list(GET ONCE 0 option)
    list(GET ONCE 1 library)
endif()
cmake_path(GET LIBRARY PARENT_PATH folder)
run_command(
    ${NVCC} -std=c++20 -Werror all-warnings -I${INCLUDE} ${option} -x cu -c ${SOURCE} -o ${PROGRAM}.o
)
run_command(
    ${NVCC} ${PROGRAM}.o ${library} -o ${PROGRAM} -L${folder} -lnccl -Xlinker -rpath=${folder}
)
run_command(${PROGRAM})
