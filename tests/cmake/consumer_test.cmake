# SPDX-License-Identifier: BSL-1.0
# Takes the library as the user CONSUMER would, builds a program with it and runs that. QUICK is an option
# that makes the compiler faster, or nothing.
set(ENV{CXXFLAGS} "${QUICK}")
set(build ${BUILD}/consumer/${CONSUMER})
set(prefix ${BUILD}/consumer/prefix)
set(sources ${PROJECT}/tests/consumer)
set(done "")
function(run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
    list(JOIN ARGN " " command)
    if(NOT result EQUAL 0)
        message(FATAL_ERROR "consumer ${CONSUMER}: after\n${done}this failed (${result}):\n"
                            "  ${command}\nand printed:\n${output}"
        )
    endif()
    set(done "${done}  ${command}\n" PARENT_SCOPE)
endfunction()
function(build_project folder)
    run(${CMAKE_COMMAND} -S ${sources}/${folder} -B ${build} -G Ninja
        -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_PREFIX_PATH=${prefix}
        -DJOINABLE_SOURCE=${PROJECT}
    )
    run(${CMAKE_COMMAND} --build ${build})
    set(done "${done}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${build})
file(MAKE_DIRECTORY ${build})
set(one_line ${COMPILER} ${QUICK} -std=c++20 -I${PROJECT}/single_include -pthread -o ${build}/consumer)
if(CONSUMER STREQUAL "install") # for those that look for the package
    file(REMOVE_RECURSE ${prefix})
    run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
    return()
endif()
build_project(${CONSUMER})
if(CONSUMER STREQUAL "find_package")
    # A program of both kinds is refused, whichever file comes first; the symbol says why.
    foreach(mixed mixed reversed)
        execute_process(
            COMMAND ${CMAKE_COMMAND} --build ${build} --target ${mixed}
            RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output
        )
        if(result EQUAL 0 OR NOT output MATCHES "needs_JOINABLE_SEPARATE_COMPILATION_in_all_files")
            message(FATAL_ERROR "${mixed}: expected a linker's error, but it ended with ${result}:\n${output}")
        endif()
    endforeach()
    # Where src.hpp was forgotten, the first symbol that is missing says so.
    execute_process(
        COMMAND ${CMAKE_COMMAND} --build ${build} --target forgotten
        RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output
    )
    string(REGEX MATCH "undefined (reference|symbol)[^\n]*" first "${output}")
    if(result EQUAL 0 OR NOT output MATCHES "src_hpp_in_one"
       OR NOT (first MATCHES "src_hpp_in_one" OR COMPILER MATCHES "clang[+][+]-14$"))
        message(FATAL_ERROR "forgotten: expected a linker's error about src.hpp, but it ended with ${result}:\n${output}")
    endif()
    # What the single header declares, the library has that src.hpp compiles.
    run(${one_line}_single -DJOINABLE_SEPARATE_COMPILATION ${sources}/main.cpp ${build}/libjoinable_compiled.a)
    run(${build}/consumer_single)
    # A component that is required but missing is named, with the reason.
    foreach(wanted "a_typo:it has no component a_typo, only checkpoint, compiled, gloo" "gloo:its component gloo needs Gloo")
        string(REGEX MATCH "^([^:]*):(.*)" matched ${wanted})
        set(text "${CMAKE_MATCH_2}")
        file(WRITE ${build}/missing/CMakeLists.txt
            "cmake_minimum_required(VERSION 3.25)\nproject(missing LANGUAGES CXX)\n"
            "find_package(joinable REQUIRED COMPONENTS compiled ${CMAKE_MATCH_1})\n"
        )
        execute_process(
            COMMAND ${CMAKE_COMMAND} -S ${build}/missing -B ${build}/missing/build -G Ninja
                    -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_DISABLE_FIND_PACKAGE_Gloo=ON
            RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output
        )
        string(REGEX REPLACE "[ \n]+" " " output "${output}")
        string(FIND "${output}" "${text}" position)
        if(result EQUAL 0 OR position EQUAL -1)
            message(FATAL_ERROR "expected an error with '${text}', but it ended with ${result}:\n${output}")
        endif()
    endforeach()
endif()
run(${build}/consumer)
