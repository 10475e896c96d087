# SPDX-License-Identifier: BSL-1.0
# Runs PROGRAM with ARGUMENTS, which must end with CODE and say TEXT (a regular expression).
execute_process(
    COMMAND ${PROGRAM} ${ARGUMENTS}
    RESULT_VARIABLE result
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output
)
if(NOT result STREQUAL CODE OR NOT output MATCHES "${TEXT}")
    message(FATAL_ERROR "expected ${CODE} and '${TEXT}', but got ${result} and\n${output}")
endif()
