# SPDX-License-Identifier: BSL-1.0
# Finds libtorch and defines Libtorch::Libtorch. Torch's own configuration asks for what it was built with (CUDA,
# protobuf, glog), which a program over it does not need.
# JOINABLE_TORCH_ROOT: a folder of libtorch, such as site-packages/torch; else the system's.
set(JOINABLE_TORCH_ROOT "" CACHE PATH "A folder of libtorch, such as site-packages/torch; else the system's")
set(api torch/csrc/api/include)
find_path(JOINABLE_TORCH_INCLUDE ${api}/torch/torch.h HINTS "${JOINABLE_TORCH_ROOT}/include")
find_library(JOINABLE_TORCH_LIBRARY torch_cpu HINTS "${JOINABLE_TORCH_ROOT}/lib")
find_library(JOINABLE_TORCH_C10 c10 HINTS "${JOINABLE_TORCH_ROOT}/lib")
mark_as_advanced(JOINABLE_TORCH_INCLUDE JOINABLE_TORCH_LIBRARY JOINABLE_TORCH_C10)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
    Libtorch REQUIRED_VARS JOINABLE_TORCH_LIBRARY JOINABLE_TORCH_C10 JOINABLE_TORCH_INCLUDE
)
if(Libtorch_FOUND AND NOT TARGET Libtorch::Libtorch)
    add_library(Libtorch::Libtorch INTERFACE IMPORTED)
    target_include_directories(
        Libtorch::Libtorch SYSTEM INTERFACE ${JOINABLE_TORCH_INCLUDE} ${JOINABLE_TORCH_INCLUDE}/${api}
    )
    target_link_libraries(Libtorch::Libtorch INTERFACE ${JOINABLE_TORCH_LIBRARY} ${JOINABLE_TORCH_C10})
endif()
