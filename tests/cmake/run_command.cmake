# SPDX-License-Identifier: BSL-1.0
# Runs a command, prints what it prints, sets `output` to that, and stops the script if the command fails.
function(run_command)
    execute_process(
        COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text
    )
    message(STATUS "${text}")
    if(NOT result EQUAL 0)
        list(JOIN ARGN " " command)
        message(FATAL_ERROR "${command} failed: ${result}")
    endif()
    set(output "${text}" PARENT_SCOPE)
endfunction()
