// SPDX-License-Identifier: BSL-1.0
// What the examples share that show how one rank's failure ends all: options that let a rank fail,
// and a run that tells which rank each of the others names.
#pragma once

#include <joinable/join.hpp>

#include <csignal>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>

#include <CLI/CLI.hpp>

namespace examples {

enum class RankKind { thread, process };

struct RunOptions {
    RankKind kind = RankKind::thread;
    int throws = -1; ///< the rank that throws; -1: none
    int dies = -1;   ///< the process rank that is killed; -1: none
};

inline void add_run_options(CLI::App& app, RunOptions& options) {
    std::map<std::string, RankKind> const kinds{
        {"thread", RankKind::thread}, {"process", RankKind::process}
    };
    app.add_option(
           "--communicator", options.kind, "What a rank is, thread or process. Default: thread."
    )
        ->transform(CLI::CheckedTransformer(kinds))
        ->option_text("WORD");
    app.add_option("--throws", options.throws, "A rank that throws. Default: none.")
        ->option_text("RANK");
    app.add_option("--dies", options.dies, "A process rank that is killed. Default: none.")
        ->option_text("RANK");
}

/// Ends this rank if the options say so.
inline void fail_if_asked(RunOptions const& options, int rank) {
    if (rank == options.throws) {
        throw std::runtime_error{"a sample of rank " + std::to_string(rank) + " is broken"};
    }
    if (rank == options.dies) {
        std::raise(SIGKILL);
    }
}

/// Runs `body(comm)` on `ranks` ranks. If one fails, prints which rank each other one names.
/// @return whether all ranks came to their end
template <class Body>
bool run_ranks(int ranks, RunOptions const& options, Body body) {
    for (int const rank : {options.throws, options.dies}) {
        if (rank >= ranks) {
            throw std::invalid_argument{
                "expected a rank below " + std::to_string(ranks) + " to fail, but got " +
                std::to_string(rank)
            };
        }
    }
    if (options.dies >= 0 && options.kind == RankKind::thread) {
        throw std::invalid_argument{"--dies: a thread cannot be killed; add --communicator process"
        };
    }
    auto const culprits = joinable::shared_buffer<int>(static_cast<std::size_t>(ranks));
    auto const reported = [&](auto& comm) {
        int& culprit = culprits[static_cast<std::size_t>(comm.rank())];
        culprit = -1;
        try {
            body(comm);
        } catch (joinable::PeerFailed const&) {
            // The error of a group may come first, and has its numbers. The rank that failed ends
            // this communicator, too.
            while (!comm.abort_reason()) {
                std::this_thread::yield();
            }
            auto const ranks_of = comm.abort_reason()->ranks;
            culprit = ranks_of.empty() ? -1 : ranks_of.front();
            throw;
        }
    };
    try {
        if (options.kind == RankKind::process) {
            joinable::run_processes(ranks, reported);
        } else {
            joinable::run_threads(ranks, reported);
        }
        return true;
    } catch (std::exception const& error) {
        std::printf("\nended: %s\n", error.what());
        for (int rank = 0; rank < ranks; ++rank) {
            int const culprit = culprits[static_cast<std::size_t>(rank)];
            if (culprit >= 0) {
                std::printf("rank %d was ended by rank %d\n", rank, culprit);
            }
        }
        return false;
    }
}

} // namespace examples
