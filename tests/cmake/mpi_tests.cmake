# SPDX-License-Identifier: BSL-1.0
# Tests over every MPI that is here: the one that CMake finds, and on Debian, where several can be installed
# side by side, each of them by its own compiler wrapper and mpirun.

include(cmake/mpirun.cmake)

# The target of an MPI by its wrapper mpicxx.NAME; not defined where there is none.
function(joinable_find_mpi name)
    find_program(JOINABLE_MPICXX_${name} mpicxx.${name})
    find_program(JOINABLE_MPIRUN_${name} mpirun.${name})
    mark_as_advanced(JOINABLE_MPICXX_${name} JOINABLE_MPIRUN_${name})
    if(NOT JOINABLE_MPICXX_${name} OR NOT JOINABLE_MPIRUN_${name})
        return()
    endif()
    execute_process(
        COMMAND ${JOINABLE_MPICXX_${name}} -show
        OUTPUT_VARIABLE line OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE result
    )
    if(NOT result EQUAL 0)
        return()
    endif()
    separate_arguments(words UNIX_COMMAND "${line}")
    add_library(joinable_mpi_${name} INTERFACE)
    target_compile_definitions(joinable_mpi_${name} INTERFACE MPICH_SKIP_MPICXX OMPI_SKIP_MPICXX)
    list(FILTER words EXCLUDE REGEX "^-l.*cxx") # the C++ bindings of old
    foreach(word ${words})
        if(word MATCHES "^-I(.+)")
            target_include_directories(joinable_mpi_${name} SYSTEM INTERFACE ${CMAKE_MATCH_1})
        elseif(word MATCHES "^-L(.+)")
            target_link_directories(joinable_mpi_${name} INTERFACE ${CMAKE_MATCH_1})
        elseif(word MATCHES "^-l(.+)")
            target_link_libraries(joinable_mpi_${name} INTERFACE ${CMAKE_MATCH_1})
        endif()
    endforeach()
endfunction()

# A program of `sources` over an MPI, and a test for each number of processes, which has these arguments, too.
function(joinable_test_mpi program target mpirun numbers arguments) # sources...
    string(MAKE_C_IDENTIFIER ${target}_main main)
    if(NOT TARGET ${main})
        add_library(${main} OBJECT support/mpi_main.cpp)
        target_include_directories(${main} PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
        target_link_libraries(${main} PUBLIC joinable_dev doctest::doctest rapidcheck ${target})
        target_compile_options(${main} PUBLIC ${JOINABLE_TEST_OPTIONS})
    endif()
    add_executable(${program} ${ARGN})
    target_link_libraries(${program} PRIVATE ${main})
    foreach(number ${numbers})
        joinable_mpirun(start ${mpirun} ${number})
        add_test(
            NAME ${program}/${number}
            COMMAND ${start} $<TARGET_FILE:${program}> --no-colors
                    --source-file-exclude=*/checkpoint/* # its ranks share files with their test
                    ${arguments}
        )
        set_tests_properties(${program}/${number} PROPERTIES TIMEOUT 1200 RUN_SERIAL TRUE) # they keep all cores busy
    endforeach()
endfunction()

# The tests of the communicator itself, also over an MPI that is asked for less.
joinable_test_units(mpi_units test_mpi ${mpi_sources})
function(joinable_test_mpi_communicator program target mpirun numbers)
    joinable_test_mpi(${program} ${target} ${mpirun} "${numbers}" "" ${mpi_units})
    joinable_mpirun(start ${mpirun} 2)
    add_test(
        NAME ${program}/funneled
        COMMAND ${start} $<TARGET_FILE:${program}> --funneled "--test-case=*below MPI_THREAD_MULTIPLE*"
    )
    set_tests_properties(${program}/funneled PROPERTIES TIMEOUT 120)
endfunction()

set(names)
foreach(name openmpi mpich)
    joinable_find_mpi(${name})
    if(TARGET joinable_mpi_${name})
        list(APPEND names ${name})
    endif()
endforeach()
if("openmpi" IN_LIST names)
    joinable_test_mpi_communicator(test_openmpi joinable_mpi_openmpi ${JOINABLE_MPIRUN_openmpi} "8")
endif()
if("mpich" IN_LIST names) # its processes never yield a core to each other
    joinable_test_mpi_communicator(test_mpich joinable_mpi_mpich ${JOINABLE_MPIRUN_mpich} "2")
endif()
if(NOT names AND TARGET joinable::mpi)
    joinable_test_mpi_communicator(test_mpi joinable::mpi ${MPIEXEC_EXECUTABLE} "8")
elseif(NOT names)
    message(STATUS "skipped: no MPI is found, so nothing tests joinable/mpi.hpp")
endif()
# The suites of guards and participants, over each, with groups of up to 4, or 2.
if("mpi" IN_LIST JOINABLE_TEST_RANKS)
    set(numbers_openmpi 4)
    set(arguments_openmpi "")
    set(numbers_mpich 2) # as above
    set(arguments_mpich "--test-suite-exclude=[long]")
    foreach(name ${names})
        joinable_test_mpi(
            test_over_${name} joinable_mpi_${name} ${JOINABLE_MPIRUN_${name}} "${numbers_${name}}" "${arguments_${name}}"
            support/rank_kinds/any/over_mpi.cpp $<TARGET_OBJECTS:joinable_test_over_any>
        )
    endforeach()
endif()
