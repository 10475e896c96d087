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
        -DJOINABLE_SOURCE=${PROJECT} ${ARGN}
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
if(CONSUMER STREQUAL "single_header")
    run(${one_line} ${sources}/main.cpp ${sources}/two_units/other.cpp)
elseif(CONSUMER STREQUAL "compiled_once")
    build_project(compiled_once)
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
    # The single header, too.
    file(WRITE ${build}/source.cpp "#define JOINABLE_SOURCE\n#include <joinable/join.hpp>\n")
    run(${one_line}_single -DJOINABLE_SEPARATE_COMPILATION ${sources}/main.cpp ${build}/source.cpp)
    run(${build}/consumer_single)
elseif(CONSUMER STREQUAL "cxx_23")
    build_project(fetch_content -DCMAKE_CXX_STANDARD=23)
else()
    build_project(${CONSUMER})
endif()
run(${build}/consumer)
