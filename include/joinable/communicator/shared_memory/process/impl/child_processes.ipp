// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/process/child_processes.hpp>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION ChildProcesses::ChildProcesses(ProcessSegment& segment, int other_threads)
    : segment_{segment}, other_threads_{other_threads} {
    auto const size = static_cast<std::size_t>(segment.board().size());
    children_.reserve(size);
    deaths_.resize(size);
    waited_for_.resize(size);
}

JOINABLE_DEFINITION ChildProcesses::~ChildProcesses() {
    for (Child const& child : children_) {
        end(child);
    }
    for (Child const& child : children_) {
        reap(child);
        close(child.handle);
    }
}

JOINABLE_DEFINITION bool ChildProcesses::start() {
    pid_t const parent = getpid();
    pid_t const child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) { // it died before that
            _exit(1);
        }
        for (Child const& other : children_) {
            close(other.handle);
        }
        children_.clear(); // they are this process's siblings
        return true;
    }
    auto const rank = static_cast<int>(children_.size());
    if (child > 0) {
        int const handle = static_cast<int>(syscall(SYS_pidfd_open, child, 0)); // closed on exec
        if (handle >= 0) {
            children_.push_back({child, handle, rank});
            return false;
        }
        int const error = errno;
        kill(child, SIGKILL);
        reap({child, -1, rank});
        errno = error;
    }
    throw CommunicationError{concat(
        "a process for rank ",
        rank,
        " could not be started: ",
        std::strerror(errno),
        "; process ranks need fork() and the pidfd_open() of Linux 5.3"
    )};
}

JOINABLE_DEFINITION void ChildProcesses::wait() {
    auto limit = (std::chrono::steady_clock::time_point::max)();
    while (!children_.empty()) {
        waited_for_.clear();
        for (Child const& child : children_) {
            waited_for_.push_back({child.handle, POLLIN, 0});
        }
        auto const again = unburied_.empty() ? limit : (std::min)(limit, in_a_moment());
        poll(waited_for_.data(), waited_for_.size(), milliseconds_until(again));
        bool const is_over = std::chrono::steady_clock::now() >= limit;
        for (std::size_t i = children_.size(); i-- > 0;) {
            Child const child = children_[i];
            bool const has_ended = (waited_for_[i].revents & POLLIN) != 0;
            if (has_ended || is_over) {
                children_.erase(children_.begin() + static_cast<std::ptrdiff_t>(i));
                if (has_ended) {
                    note(child.rank, reap(child));
                } else { // no failure of its own, but a consequence of others
                    end(child);
                    reap(child);
                    killed_.push_back(child.rank);
                }
                close(child.handle);
            }
        }
        mark_dead();
        if (has_failure_ && limit == (std::chrono::steady_clock::time_point::max)()) {
            limit = end_of_wait(longest_deadline());
        }
    }
}

JOINABLE_DEFINITION std::string ChildProcesses::killed_text() const {
    if (killed_.empty() || other_threads_ == 0) {
        return {};
    }
    std::vector<int> ranks = killed_;
    std::sort(ranks.begin(), ranks.end());
    return concat(
        "; ",
        ranks_text(ranks),
        " had to be killed: this process had ",
        other_threads_ + 1,
        " threads when it was forked, and a rank gets one of them; if it waits for another (of "
        "OpenMP, a BLAS), call run_processes before threads start"
    );
}

JOINABLE_DEFINITION int ChildProcesses::reap(Child const& child) noexcept {
    int status = 0;
    pid_t reaped = 0;
    do { // NOLINT(cppcoreguidelines-avoid-do-while)
        reaped = waitpid(child.id, &status, 0);
    } while (reaped < 0 && errno == EINTR);
    return reaped == child.id ? status : unknown; // the program may ignore SIGCHLD
}

JOINABLE_DEFINITION void ChildProcesses::note(int rank, int status) {
    Outcome::State const state = segment_.outcome(rank).state.load();
    bool const was_killed = status != unknown && WIFSIGNALED(status);
    has_failure_ = has_failure_ || state != Outcome::returned || was_killed;
    if (state != Outcome::running && !was_killed) {
        return;
    }
    std::string& death = deaths_[static_cast<std::size_t>(rank)];
    if (was_killed) {
        death = concat("its process was killed by signal ", WTERMSIG(status));
    } else if (status != unknown) {
        death = concat("its process ended with status ", WEXITSTATUS(status));
    } else {
        death = "its process ended";
    }
    unburied_.push_back(rank);
}

JOINABLE_DEFINITION void ChildProcesses::mark_dead() {
    std::erase_if(unburied_, [&](int rank) {
        return segment_.group().mark_dead(rank, death(rank), FirstReason::nobody);
    });
}

JOINABLE_DEFINITION std::chrono::nanoseconds ChildProcesses::longest_deadline() const noexcept {
    std::chrono::nanoseconds longest{0};
    for (Child const& child : children_) {
        std::chrono::nanoseconds const its{segment_.outcome(child.rank).deadline.load()};
        longest = (std::max)(longest, its);
    }
    return longest;
}

JOINABLE_DEFINITION int ChildProcesses::milliseconds_until(std::chrono::steady_clock::time_point end
) noexcept {
    if (end == (std::chrono::steady_clock::time_point::max)()) {
        return -1;
    }
    auto const left =
        std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    constexpr int most = (std::numeric_limits<int>::max)();
    return static_cast<int>(std::clamp<std::chrono::milliseconds::rep>(left.count(), 0, most));
}

}}} // namespace joinable::v0::detail
