// SPDX-License-Identifier: BSL-1.0
#include "launched.hpp"

#include <joinable/join.hpp>

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include "host_ranks.hpp"
#include "train.hpp"

namespace train_text {

namespace {

/// Trains this rank, together with those of the other processes. Collective.
std::vector<Findings> train_launched(
    joinable::AnyCommunicator& comm,
    joinable::AnyCommunicator& hosts,
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

} // namespace

int run_as_rank(
    joinable::AnyCommunicator& comm,
    joinable::AnyCommunicator& hosts,
    Options options,
    Program const& program
) {
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

} // namespace train_text
