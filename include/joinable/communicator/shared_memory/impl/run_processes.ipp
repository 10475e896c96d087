// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/run_processes.hpp>

#if defined(__linux__)

#include <chrono>
#include <cstdio>
#include <dirent.h>
#include <exception>
#include <thread>
#include <unistd.h>
#include <vector>

#include <joinable/communicator/detail/home_process.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void end_process(int status) noexcept {
    std::fflush(nullptr);
    _exit(status);
}

JOINABLE_DEFINITION void run_rank(
    ProcessSegment& segment, int rank, std::function<void(ProcessCommunicator&)> const& body
) noexcept {
    Outcome& outcome = segment.outcome(rank);
    HomeProcess const home;
    {
        ProcessCommunicator comm{segment, rank};
        try {
            body(comm);
            if (!home.is_here()) { // a helper that the rank has forked says nothing for it
                end_process(0);
            }
            outcome.state.store(Outcome::returned);
        } catch (...) {
            if (!home.is_here()) {
                end_process(1);
            }
            AbortReason const reason = failure_of(std::current_exception());
            AbortReason const told = reason_of_exit(segment.group(), rank, reason);
            outcome.reason.store(reason.ranks.empty() ? reason : told);
            outcome.state.store(Outcome::threw);
            comm.abort(told);
        }
    }
    end_process(outcome.state.load() == Outcome::returned ? 0 : 1);
}

JOINABLE_DEFINITION int count_other_threads(std::chrono::milliseconds patience) {
    auto const count = [] {
        DIR* const tasks = opendir("/proc/self/task");
        if (tasks == nullptr) {
            return 0;
        }
        int others = -1;
        while (dirent const* const task = readdir(tasks)) {
            others += task->d_name[0] != '.' ? 1 : 0;
        }
        closedir(tasks);
        return others;
    };
    int others = count();
    for (; others > 0 && patience.count() > 0; --patience) {
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
        others = count();
    }
    return others;
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
            throw PeerFailed{
                failures.back().ranks, failures.back().message + children.killed_text()
            };
        }
    };
    if (segment.board().is_aborted()) {
        for (int const rank : own_ranks(segment.board().reason())) {
            if (rank < size) {
                look_at(rank);
            }
        }
    }
    for (int rank = 0; rank < size; ++rank) {
        look_at(rank);
    }
    if (!failures.empty()) {
        throw PeerFailed{failures.front().ranks, failures.front().message + children.killed_text()};
    }
}

JOINABLE_DEFINITION void run_processes_of(
    int world_size,
    std::function<void(ProcessCommunicator&)> const& body,
    ProcessOptions const& options
) {
    std::chrono::seconds const patience{options.other_threads ? 0 : 1};
    int const others = has_thread_sanitizer ? 0 : count_other_threads(patience);
    if (others != 0 && !options.other_threads) {
        throw ContractViolation{concat(
            "run_processes: expected a process with one thread, but it has ",
            others + 1,
            " threads, of which its ranks get one: a rank that waits for another one (of OpenMP, a BLAS) hangs for "
            "ever; call run_processes before threads start, or give it {.other_threads = true} if the ranks need none"
        )};
    }
    ProcessSegment segment{world_size};
    ChildProcesses children{segment, others};
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
