// SPDX-License-Identifier: BSL-1.0
#include "launch.hpp"
#include "options.hpp"

int train_text::run_over_gloo(Options const&, Program const&) {
    throw InputError{
        "--communicator gloo needs a program that was built with Gloo, and this one was not; install "
        "Gloo and build it again, or take --communicator tcp"
    };
}
