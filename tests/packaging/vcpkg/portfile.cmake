# SPDX-License-Identifier: BSL-1.0
# An overlay port: build.py writes the folder of the sources into it.
set(SOURCE_PATH "@SOURCE@")
set(VCPKG_BUILD_TYPE release) # headers only, the same for both
vcpkg_cmake_configure(
    SOURCE_PATH "${SOURCE_PATH}"
    OPTIONS
        -DJOINABLE_BUILD_TESTS=OFF
        -DJOINABLE_BUILD_EXAMPLES=OFF
        -DJOINABLE_BUILD_BENCHMARKS=OFF
        -DJOINABLE_NCCL=OFF
        -DJOINABLE_MPI=OFF
        -DJOINABLE_GLOO=OFF
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/joinable)
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
