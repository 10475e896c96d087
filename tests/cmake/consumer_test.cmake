# SPDX-License-Identifier: BSL-1.0
# Configures, builds and runs the project tests/consumer/CONSUMER as a user would.
set(build ${BUILD}/consumer/${CONSUMER})
set(prefix ${BUILD}/consumer/prefix)
function(run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT result EQUAL 0)
        message(FATAL_ERROR "${ARGN} failed:\n${output}")
    endif()
endfunction()
file(REMOVE_RECURSE ${build})
if(CONSUMER STREQUAL "find_package")
    file(REMOVE_RECURSE ${prefix})
    run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
endif()
run(${CMAKE_COMMAND} -S ${PROJECT}/tests/consumer/${CONSUMER} -B ${build} -G Ninja
    -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_PREFIX_PATH=${prefix} -DJOINABLE_SOURCE=${PROJECT}
)
run(${CMAKE_COMMAND} --build ${build})
run(${build}/consumer)
