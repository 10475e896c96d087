// SPDX-License-Identifier: BSL-1.0
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <mpi.h>
#include <support/count_failed_checks.hpp>

/// Every process that mpirun has started runs the same tests in the same order. What fails in one of them
/// fails the program.
int main(int count, char** arguments) {
    int level = MPI_THREAD_SINGLE;
    MPI_Init_thread(&count, &arguments, MPI_THREAD_MULTIPLE, &level);
    int result = doctest::Context{count, arguments}.run();
    int worst = 1;
    MPI_Allreduce(&result, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    MPI_Finalize();
    return worst;
}
