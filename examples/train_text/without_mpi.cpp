// SPDX-License-Identifier: BSL-1.0
#include "launch.hpp"
#include "options.hpp"

int train_text::run_over_mpi(Options const&, Program const&) {
    throw InputError{
        "--communicator mpi needs a program that was built with MPI, and this one was not; install "
        "an MPI and build it again, or take --communicator thread"
    };
}
