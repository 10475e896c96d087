# SPDX-License-Identifier: BSL-1.0
# COMMAND and OTHER must both succeed, and print the same digest.
foreach(command COMMAND OTHER)
    execute_process(
        COMMAND ${${command}}
        RESULT_VARIABLE result
        OUTPUT_VARIABLE output
        ERROR_VARIABLE output
    )
    if(NOT result EQUAL 0 OR NOT output MATCHES "digest of parameters +([0-9a-f]+)")
        message(FATAL_ERROR "expected a digest, but got ${result} and\n${output}")
    endif()
    set(digest_of_${command} ${CMAKE_MATCH_1})
endforeach()
if(NOT digest_of_COMMAND STREQUAL digest_of_OTHER)
    message(FATAL_ERROR "the digests ${digest_of_COMMAND} and ${digest_of_OTHER} differ")
endif()
