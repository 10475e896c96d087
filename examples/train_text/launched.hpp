// SPDX-License-Identifier: BSL-1.0
#pragma once

// How a launched rank runs the program, whatever connects it to the others.

#include <joinable/join.hpp>

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include "launch.hpp"
#include "options.hpp"
#include "train.hpp"

namespace train_text {

/// Trains this rank, together with those of the other processes. Collective.
template <class Comm, class Hosts>
std::vector<Findings> train_launched(
    Comm& comm,
    Hosts& hosts,
    Options const& options,
    std::vector<Text> const& texts,
    Text const& held_out
) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    // Rank 0 sees the progress of its own process only.
    Workload const workload{options, texts, 1};
    std::vector<Findings> findings(texts.size());
    findings[rank] = train_on_host(comm, hosts, workload.job(options, texts[rank], held_out));
    int root = 0;
    for (Findings& one : findings) {
        joinable::Buffer const bytes{&one, sizeof one, joinable::DType::u8};
        comm.broadcast(bytes, root++).wait();
    }
    return findings;
}

/// Runs the program on a rank. If it fails, it tells the other ranks why. `hosts` is for roll calls.
template <class Comm, class Hosts>
int run_as_rank(Comm& comm, Hosts& hosts, Options options, Program const& program) {
    options.ranks = comm.size();
    auto const train = [&](auto const&... arguments) {
        return train_launched(comm, hosts, arguments...);
    };
    try {
        return program(options, train, comm.rank());
    } catch (std::exception const& error) {
        std::string const text = "rank " + std::to_string(comm.rank()) + ": " + error.what();
        comm.abort({joinable::FailureKind::peer_failed, {comm.rank()}, text});
        throw;
    }
}
template <class Comm>
int run_as_rank(Comm& comm, Options const& options, Program const& program) {
    return run_as_rank(comm, comm, options, program);
}

/// The same on a rank that meets the others as its launcher says.
template <class Comm>
int run_as_launched_rank(Options const& options, Program const& program) {
    try {
        auto comm = Comm::from_environment(options.deadline());
        return run_as_rank(comm, options, program);
    } catch (joinable::ContractViolation const& error) {
        throw InputError{error.what()};
    }
}

} // namespace train_text
