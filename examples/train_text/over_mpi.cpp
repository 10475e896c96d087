// SPDX-License-Identifier: BSL-1.0
#include <joinable/mpi.hpp>
#include <joinable/tcp.hpp>

#include "launch.hpp"
#include "launched.hpp"
#include "options.hpp"

int train_text::run_over_mpi(Options const& options, Program const& program) {
    joinable::AnyCommunicator comm = connected<joinable::MpiCommunicator>(joinable::MpiOptions{
        // Without a guard a rank that runs out does something else than the others.
        .deadline = options.deadline(),
        .check = options.without_join
    });
    if (!options.has_tcp_roll_calls) {
        return run_as_rank(comm, comm, options, program);
    }
    joinable::AnyCommunicator hosts = connected<joinable::TcpCommunicator>(options.deadline());
    return run_as_rank(comm, hosts, options, program);
}
