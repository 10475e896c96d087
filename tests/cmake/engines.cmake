# SPDX-License-Identifier: BSL-1.0
# Sets engines to those whose types have an adapter in joinable/interop, by the names of the headers, and
# library_of_X to what links engine X. That is not set where it is not found, or the compiler refuses it.
set(engines eigen armadillo xtensor torch)
find_package(Eigen3 QUIET)
if(Eigen3_FOUND)
    set(library_of_eigen Eigen3::Eigen)
endif()
find_package(Armadillo QUIET)
if(Armadillo_FOUND)
    add_library(joinable_armadillo INTERFACE)
    target_include_directories(joinable_armadillo SYSTEM INTERFACE ${ARMADILLO_INCLUDE_DIRS})
    target_link_libraries(joinable_armadillo INTERFACE ${ARMADILLO_LIBRARIES})
    set(library_of_armadillo joinable_armadillo)
endif()
find_package(xtensor QUIET)
if(xtensor_FOUND)
    include(CheckCXXSourceCompiles) # clang 19 finds a template of xtensor 0.24 ambiguous
    set(CMAKE_REQUIRED_FLAGS ${CMAKE_CXX20_STANDARD_COMPILE_OPTION})
    set(CMAKE_REQUIRED_LIBRARIES xtensor)
    check_cxx_source_compiles(
        "#include <xtensor/xarray.hpp>\nint main() { return static_cast<int>(xt::xarray<int>{1}(0)); }"
        JOINABLE_XTENSOR_COMPILES
    )
    unset(CMAKE_REQUIRED_FLAGS)
    unset(CMAKE_REQUIRED_LIBRARIES)
    if(JOINABLE_XTENSOR_COMPILES)
        set(library_of_xtensor xtensor)
    endif()
endif()
# No sanitizer knows what libtorch was compiled without.
if(NOT CMAKE_CXX_FLAGS MATCHES "sanitize" AND NOT JOINABLE_TEST_LANGUAGE STREQUAL "CUDA")
    find_package(Libtorch QUIET)
    if(Libtorch_FOUND)
        set(library_of_torch Libtorch::Libtorch)
    endif()
endif()
foreach(engine ${engines})
    if(NOT library_of_${engine})
        message(STATUS "skipped: ${engine} is not found, does not compile or is not for this build, so nothing tests joinable/interop/${engine}.hpp")
    endif()
endforeach()
