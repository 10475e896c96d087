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
    constexpr int wrong_input = -1; // the type of an exception stays in the rank's process
    auto const body = [&](joinable::ProcessCommunicator& local) {
        local.set_deadline(options.deadline());
        std::unique_ptr<joinable::TcpCommunicator> across; // none on ranks that lead no machine
        if (local.rank() == 0) {
            across.reset(new joinable::TcpCommunicator(joinable::TcpCommunicator::attach(tcp)));
        }
        joinable::HierarchicalCommunicator machines{local, across};
        joinable::AnyCommunicator comm{machines};
        int& code = codes[static_cast<std::size_t>(local.rank())];
        try {
            code = run_as_rank(comm, comm, options, program);
        } catch (InputError const&) {
            code = wrong_input;
            throw;
        }
    };
    try {
        joinable::run_processes(options.ranks, body);
    } catch (joinable::PeerFailed const& error) {
        if (std::count(codes.begin(), codes.end(), wrong_input) != 0) {
            throw InputError{error.what()};
        }
        throw;
    }
    return *std::max_element(codes.begin(), codes.end());
}
