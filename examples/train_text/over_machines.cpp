// SPDX-License-Identifier: BSL-1.0
#include <joinable/hierarchical.hpp>
#include <joinable/join.hpp>
#include <joinable/tcp.hpp>

#include <algorithm>
#include <cstddef>
#include <memory>

#include "launch.hpp"
#include "launched.hpp"
#include "options.hpp"

namespace {

/// What the launcher says about this process, which starts the ranks of one machine.
joinable::TcpOptions machine(train_text::Options const& options) {
    try {
        joinable::TcpOptions tcp = joinable::tcp_environment();
        tcp.connect_timeout = options.deadline();
        tcp.deadline = options.deadline();
        return tcp;
    } catch (joinable::ContractViolation const& error) {
        throw train_text::InputError{error.what()};
    }
}

} // namespace

int train_text::run_over_machines(Options const& options, Program const& program) {
    joinable::TcpOptions const tcp = machine(options);
    auto const codes = joinable::shared_buffer<int>(static_cast<std::size_t>(options.ranks));
    joinable::run_processes(options.ranks, [&](joinable::ProcessCommunicator& local) {
        local.set_deadline(options.deadline());
        std::unique_ptr<joinable::TcpCommunicator> across; // none on ranks that lead no machine
        if (local.rank() == 0) {
            across.reset(new joinable::TcpCommunicator(joinable::TcpCommunicator::attach(tcp)));
        }
        joinable::HierarchicalCommunicator machines{local, across};
        joinable::AnyCommunicator comm{machines};
        codes[static_cast<std::size_t>(local.rank())] = run_as_rank(comm, comm, options, program);
    });
    return *std::max_element(codes.begin(), codes.end());
}
