# SPDX-License-Identifier: BSL-1.0
# Compiles the kernels that copy with NVCC for sm_90, without a GPU, and checks their code: no kernel keeps
# registers in memory, a thread of run_copies has at most 32, so that a multiprocessor holds as many as it
# can, and loads 4 words of 16 bytes before it stores one, or 2 pairs of words where it shifts them.
include(${CMAKE_CURRENT_LIST_DIR}/run_command.cmake)

set(source ${FOLDER}/kernel_code.cu)
file(MAKE_DIRECTORY ${FOLDER})
file(
    WRITE ${source}
    "#include <joinable/device/cuda/copy_kernels.hpp>\n"
    "cudaError_t load() { return joinable::detail::load_copies(); }\n"
)
cmake_path(GET NVCC PARENT_PATH programs)
set(ptx ${FOLDER}/kernel_code.ptx)
run_command(${NVCC} -std=c++20 -arch=compute_90 -I${INCLUDE} -ptx ${source} -o ${ptx})
run_command(${programs}/ptxas -arch=sm_90 -v ${ptx} -o ${FOLDER}/kernel_code.cubin)

string(REGEX MATCHALL "[0-9]+ bytes spill (stores|loads)" spills "${output}")
list(FILTER spills EXCLUDE REGEX "^0 bytes")
if(spills OR NOT output MATCHES "0 bytes spill stores")
    message(FATAL_ERROR "a kernel keeps registers in memory: ${spills}")
endif()
string(REGEX MATCHALL "Compiling entry function '[^']*run_copies[^U]*Used [0-9]+ registers" kernels "${output}")
list(LENGTH kernels count)
if(NOT count EQUAL 2)
    message(FATAL_ERROR "expected run_copies for few and for many copies, but found ${count}: ${kernels}")
endif()
foreach(kernel ${kernels})
    string(REGEX MATCH "Used ([0-9]+) registers" used "${kernel}")
    if(CMAKE_MATCH_1 GREATER 32)
        message(FATAL_ERROR "a thread of run_copies has ${CMAKE_MATCH_1} registers, and 32 are aimed at")
    endif()
endforeach()

# Loads and stores of the first kernel, in the order of the code.
file(READ ${ptx} code)
string(FIND "${code}" "run_copies" begin)
string(SUBSTRING "${code}" ${begin} -1 code)
string(FIND "${code}" "\n}" end)
string(SUBSTRING "${code}" 0 ${end} code)
string(REGEX MATCHALL "(ld|st)\\.global\\.[a-z0-9.]*" steps "${code}")
string(REGEX REPLACE "ld\\.global\\.v(4\\.[a-z]32|2\\.[a-z]64)" "L" steps "${steps}")
string(REGEX REPLACE "st\\.global\\.v(4\\.[a-z]32|2\\.[a-z]64)" "S" steps "${steps}")
string(REPLACE ";" "" steps "${steps}")
string(REGEX MATCHALL "LLLLS" found "${steps}") # for bits and for four dtypes, with and without a shift
list(LENGTH found count)
if(NOT count EQUAL 10 OR steps MATCHES "[^L]L(L|LL)?S")
    message(FATAL_ERROR "expected 4 loads of words before stores of words 10 times: ${steps}")
endif()
message(STATUS "${steps}")
