// SPDX-License-Identifier: BSL-1.0
#pragma once

// How a launched rank runs the program, whatever connects it to the others.

#include <joinable/any_communicator.hpp>

#include <memory>

#include "launch.hpp"
#include "options.hpp"

namespace train_text {

/// Runs the program on a rank. If it fails, it tells the other ranks why. `hosts` is for roll calls.
int run_as_rank(
    joinable::AnyCommunicator& comm,
    joinable::AnyCommunicator& hosts,
    Options options,
    Program const& program
);

/// What meets the other ranks as the launcher says.
/// @throws InputError  the launcher does not say enough.
template <class Comm, class How>
joinable::AnyCommunicator connected(How const& how) {
    try {
        return joinable::AnyCommunicator{std::unique_ptr<Comm>{new Comm(Comm::from_environment(how))
        }};
    } catch (joinable::ContractViolation const& error) {
        throw InputError{error.what()};
    }
}
template <class Comm>
int run_as_launched_rank(Options const& options, Program const& program) {
    joinable::AnyCommunicator comm = connected<Comm>(options.deadline());
    return run_as_rank(comm, comm, options, program);
}

} // namespace train_text
