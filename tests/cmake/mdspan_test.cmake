# SPDX-License-Identifier: BSL-1.0
# Compiles SOURCE with COMPILER and OPTIONS, and runs PROGRAM.
foreach(command "${COMPILER};${OPTIONS};-Werror;-I${INCLUDE};${SOURCE};-pthread;-o;${PROGRAM}" "${PROGRAM}")
    execute_process(COMMAND ${command} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endforeach()
