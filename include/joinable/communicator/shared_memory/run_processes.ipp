// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/run_processes.hpp>

#if defined(__linux__)

#include <cstdio>
#include <exception>
#include <unistd.h>
#include <vector>

#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/detail/failure.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void run_rank(
    ProcessSegment& segment, int rank, std::function<void(ProcessCommunicator&)> const& body
) noexcept {
    Outcome& outcome = segment.outcome(rank);
    {
        ProcessCommunicator comm{segment, rank};
        try {
            body(comm);
            outcome.state.store(Outcome::returned);
        } catch (...) {
            AbortReason const reason = failure_of(std::current_exception());
            AbortReason const told = reason_of_exit(segment.group(), rank, reason);
            outcome.reason.store(reason.ranks.empty() ? reason : told);
            outcome.state.store(Outcome::threw);
            comm.abort(told);
        }
    }
    std::fflush(nullptr); // _exit skips the program's destructors and open files
    _exit(outcome.state.load() == Outcome::returned ? 0 : 1);
}

JOINABLE_DEFINITION void
throw_first_failure(ProcessSegment& segment, ChildProcesses const& children) {
    int const size = segment.board().size();
    std::vector<AbortReason> failures;
    auto const look_at = [&](int rank) {
        if (!children.death(rank).empty()) {
            failures.push_back({FailureKind::peer_failed, {}, children.death(rank)});
        } else if (segment.outcome(rank).state.load() == Outcome::threw) {
            failures.push_back(segment.outcome(rank).reason.load());
        } else {
            return;
        }
        bool const is_own = failures.back().ranks.empty();
        failures.back() = blamed_on(rank, failures.back());
        if (is_own) {
            throw PeerFailed{failures.back().ranks, failures.back().message};
        }
    };
    if (segment.board().is_aborted()) {
        for (int const rank : segment.board().reason().ranks) {
            if (rank < size) {
                look_at(rank);
            }
        }
    }
    for (int rank = 0; rank < size; ++rank) {
        look_at(rank);
    }
    if (!failures.empty()) {
        throw PeerFailed{failures.front().ranks, failures.front().message};
    }
}

JOINABLE_DEFINITION void
run_processes_of(int world_size, std::function<void(ProcessCommunicator&)> const& body) {
    ProcessSegment segment{world_size};
    ChildProcesses children{segment};
    std::fflush(nullptr); // else each rank would print this process's buffered output again
    for (int rank = 0; rank < world_size; ++rank) {
        if (children.start()) {
            run_rank(segment, rank, body);
        }
    }
    children.wait();
    throw_first_failure(segment, children);
}

}}} // namespace joinable::v0::detail

#endif
