# SPDX-License-Identifier: BSL-1.0
# The program train_text with GPUs.
if(NOT TARGET joinable::nccl)
    message(STATUS "skipped: there is no joinable::nccl, so there is no example train_text_cuda")
    return()
endif()
enable_language(CUDA)
add_executable(
    train_text_cuda train_text/main.cpp train_text/engine.cpp ${host_ranks}
                    train_text/launched.cpp train_text/over_machines.cpp train_text/over_tcp.cpp
                    train_text/without_gloo.cpp train_text/without_mpi.cpp
                    train_text/with_cuda.cu
)
target_link_libraries(train_text_cuda PRIVATE joinable_dev joinable::nccl CLI11::CLI11)
set_target_properties(train_text_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Shared) # one, NCCL's, too
# Products are rounded before they are added, as on the host and by the library's rules: whatever is sharded, the
# digest is the same.
target_compile_options(train_text_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false>)
target_compile_options(train_text_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${JOINABLE_TEST_OPTIONS}>")
target_compile_definitions(
    train_text_cuda PRIVATE JOINABLE_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
)

# Without a GPU they end with 3, so they are skipped. The last one is not: it looks at what is said.
set(one_rank ${texts}/a.txt ${texts}/d.txt --ranks 1 --epochs 1 --bucket-bytes 8192)
set(arguments_thread ${one_rank} --communicator thread)
set(arguments_process ${one_rank} --communicator process)
set(arguments_uneven ${three_texts} --communicator process) # also where they share a GPU
set(arguments_sharded ${arguments_uneven} --optimizer adamw --sharding parameters)
foreach(name thread process uneven sharded)
    add_test(NAME example/train_text_cuda_${name} COMMAND train_text_cuda --device cuda
                                                          ${arguments_${name}}
    )
    set_tests_properties(
        example/train_text_cuda_${name} PROPERTIES TIMEOUT 120 SKIP_RETURN_CODE 3
    )
endforeach()
add_test(NAME example/train_text_cuda_or_why_not COMMAND train_text_cuda --device cuda ${one_rank})
set_tests_properties(
    example/train_text_cuda_or_why_not
    PROPERTIES TIMEOUT 120 PASS_REGULAR_EXPRESSION
               "the same bit for bit|--device cuda needs a GPU, but CUDA finds none here"
)
