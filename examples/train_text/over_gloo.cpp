// SPDX-License-Identifier: BSL-1.0
#include <joinable/gloo.hpp>

#include "launch.hpp"
#include "launched.hpp"
#include "options.hpp"

int train_text::run_over_gloo(Options const& options, Program const& program) {
    return run_as_launched_rank<joinable::GlooCommunicator>(options, program);
}
