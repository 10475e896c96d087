// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include <joinable/communicator/shared_memory/board/waiting.hpp>
#include <joinable/communicator/shared_memory/process/process_segment.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace joinable { inline namespace v0 { namespace detail {

/// The processes of one group, seen by the one that started them. None is left when this is gone.
class ChildProcesses {
public:
    explicit ChildProcesses(ProcessSegment& segment) : segment_{segment} {
        auto const size = static_cast<std::size_t>(segment.board().size());
        children_.reserve(size);
        deaths_.resize(size);
        waited_for_.resize(size);
    }
    ~ChildProcesses() {
        for (Child const& child : children_) {
            end(child);
        }
        for (Child const& child : children_) {
            reap(child);
            close(child.handle);
        }
    }
    ChildProcesses(ChildProcesses const&) = delete;
    ChildProcesses& operator=(ChildProcesses const&) = delete;

    /// Makes the process of the next rank. True in the new process, which must end by _exit.
    /// @throws CommunicationError  the system has no more processes.
    [[nodiscard]] bool start() {
        pid_t const parent = getpid();
        pid_t const child = fork();
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent) { // it died before that
                _exit(1);
            }
            return true;
        }
        auto const rank = static_cast<int>(children_.size());
        if (child > 0) {
            int const handle =
                static_cast<int>(syscall(SYS_pidfd_open, child, 0)); // closed on exec
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

    /// Returns when all have ended. Tells the others of one that died. Once one has failed the
    /// others have their longest deadline to end, then they are killed.
    void wait() {
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
                    } else { // no failure of its own, but what follows from that of others
                        end(child);
                        reap(child);
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

    /// How the process of `rank` died; empty if it ended as it should, or had to be killed after a
    /// failure of others.
    [[nodiscard]] std::string const& death(int rank) const noexcept {
        return deaths_[static_cast<std::size_t>(rank)];
    }

private:
    struct Child {
        pid_t id;
        int handle;
        int rank;
    };
    static constexpr int unknown = -1;

    static void end(Child const& child) noexcept {
        // By its handle: its number may be another process's, where the program ignores SIGCHLD.
        syscall(SYS_pidfd_send_signal, child.handle, SIGKILL, nullptr, 0);
    }
    static int reap(Child const& child) noexcept {
        int status = 0;
        pid_t reaped = 0;
        do { // NOLINT(cppcoreguidelines-avoid-do-while)
            reaped = waitpid(child.id, &status, 0);
        } while (reaped < 0 && errno == EINTR);
        return reaped == child.id ? status : unknown; // the program may ignore SIGCHLD
    }

    void note(int rank, int status) {
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

    /// Tells the others. Who is left over was stopped by another that died, not yet noted.
    void mark_dead() {
        std::erase_if(unburied_, [&](int rank) {
            return segment_.group().mark_dead(rank, death(rank), FirstReason::nobody);
        });
    }

    [[nodiscard]] std::chrono::nanoseconds longest_deadline() const noexcept {
        std::chrono::nanoseconds longest{0};
        for (Child const& child : children_) {
            std::chrono::nanoseconds const its{segment_.outcome(child.rank).deadline.load()};
            longest = (std::max)(longest, its);
        }
        return longest;
    }
    [[nodiscard]] static std::chrono::steady_clock::time_point in_a_moment() noexcept {
        return std::chrono::steady_clock::now() + std::chrono::milliseconds{1};
    }
    [[nodiscard]] static int milliseconds_until(std::chrono::steady_clock::time_point end
    ) noexcept {
        if (end == (std::chrono::steady_clock::time_point::max)()) {
            return -1;
        }
        auto const left =
            std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
        constexpr int most = (std::numeric_limits<int>::max)();
        return static_cast<int>(std::clamp<std::chrono::milliseconds::rep>(left.count(), 0, most));
    }

    ProcessSegment& segment_;
    std::vector<Child> children_;
    std::vector<std::string> deaths_;
    std::vector<int> unburied_; ///< ranks
    std::vector<pollfd> waited_for_;
    bool has_failure_ = false;
};

}}} // namespace joinable::v0::detail
