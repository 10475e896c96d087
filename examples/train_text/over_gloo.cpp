// SPDX-License-Identifier: BSL-1.0
#include <joinable/gloo.hpp>

#include "data.hpp"
#include "launched.hpp"

int train_text::run_over_gloo(Options const& options, Program const& program) {
    try {
        auto comm = joinable::GlooCommunicator::from_environment(options.deadline());
        return run_as_rank(comm, options, program);
    } catch (joinable::ContractViolation const& error) {
        throw InputError{error.what()};
    }
}
