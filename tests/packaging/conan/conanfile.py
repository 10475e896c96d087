# SPDX-License-Identifier: BSL-1.0
# For Conan 2. It lies beside CMakeLists.txt when it runs; `conan create` gets the version as --version.
from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain
from conan.tools.files import copy


class Joinable(ConanFile):
    name = "joinable"
    description = "Data-parallel training that is safe when ranks have different amounts of data"
    license = "BSL-1.0"
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    exports_sources = "CMakeLists.txt", "LICENSE", "include/*", "tests/cmake/*"
    no_copy_source = True

    def validate(self):
        check_min_cppstd(self, 20)

    def generate(self):
        toolchain = CMakeToolchain(self)
        for option in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_BENCHMARKS", "NCCL", "MPI", "GLOO"):
            toolchain.cache_variables[f"JOINABLE_{option}"] = False
        toolchain.generate()

    def build(self):
        CMake(self).configure()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, f"{self.package_folder}/licenses")

    def package_id(self):
        self.info.clear()  # the headers are the same for every compiler

    def package_info(self):
        # The library's own joinable-config.cmake is found, which has the components.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["share/cmake/joinable"]
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
