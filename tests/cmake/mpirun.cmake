# SPDX-License-Identifier: BSL-1.0
# Sets OUT to a command that starts `number` processes on this machine, however few cores it has.
function(joinable_mpirun out mpirun number)
    set(options)
    execute_process(COMMAND ${mpirun} --version OUTPUT_VARIABLE version ERROR_QUIET)
    if(version MATCHES "Open MPI|OpenRTE")
        set(options --oversubscribe --allow-run-as-root --bind-to none --mca btl self,vader)
    endif()
    set(${out} ${mpirun} ${options} -n ${number} PARENT_SCOPE)
endfunction()
