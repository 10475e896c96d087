# SPDX-License-Identifier: BSL-1.0
# Finds NCCL and the CUDA Toolkit, which it needs: the target NCCL::nccl. NCCL_ROOT says where to look first.
# Without the library there is no target, but NCCL_INCLUDE_DIR is where nccl.h lies, if it was found.
find_package(CUDAToolkit QUIET)
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR})
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
    NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR CUDAToolkit_FOUND
)
if(NCCL_FOUND AND NOT TARGET NCCL::nccl)
    add_library(NCCL::nccl UNKNOWN IMPORTED)
    set_target_properties(
        NCCL::nccl
        PROPERTIES IMPORTED_LOCATION "${NCCL_LIBRARY}"
                   INTERFACE_INCLUDE_DIRECTORIES "${NCCL_INCLUDE_DIR}"
                   INTERFACE_LINK_LIBRARIES CUDA::cudart
    )
endif()
