// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include <joinable/communicator/shared_memory/process/process_segment.hpp>
#include <joinable/config.hpp>

#include <csignal>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace joinable { inline namespace v0 { namespace detail {

/// The processes of one group, as seen by the process that started them. The destructor kills those
/// that are left.
class ChildProcesses {
public:
    /// `other_threads` is the number of threads that the processes do not get.
    explicit ChildProcesses(ProcessSegment& segment, int other_threads = 0);
    ~ChildProcesses();
    ChildProcesses(ChildProcesses const&) = delete;
    ChildProcesses& operator=(ChildProcesses const&) = delete;

    /// Starts the process of the next rank. Returns true in the new process, which must end by
    /// _exit.
    /// @throws CommunicationError  the system cannot create more processes.
    [[nodiscard]] bool start();

    /// Returns when all have ended. Tells the others about each death. After the first failure the
    /// others have their longest deadline to end; then they are killed.
    void wait();

    /// How the process of `rank` died. Empty if it ended normally, or had to be killed after
    /// another rank's failure.
    [[nodiscard]] std::string const& death(int rank) const noexcept {
        return deaths_[static_cast<std::size_t>(rank)];
    }

    /// Why processes that had to be killed may have been stuck, for the end of an error's text.
    /// Empty if none was, or if they lack no thread.
    [[nodiscard]] std::string killed_text() const;

private:
    struct Child {
        pid_t id;
        int handle;
        int rank;
    };
    static constexpr int unknown = -1;

    static void end(Child const& child) noexcept {
        // By its handle: its number may belong to another process if the program ignores SIGCHLD.
        syscall(SYS_pidfd_send_signal, child.handle, SIGKILL, nullptr, 0);
    }
    static int reap(Child const& child) noexcept;

    void note(int rank, int status);

    /// Tells the others. Processes left over were stopped by another death that is not yet
    /// recorded.
    void mark_dead();

    [[nodiscard]] std::chrono::nanoseconds longest_deadline() const noexcept;
    [[nodiscard]] static std::chrono::steady_clock::time_point in_a_moment() noexcept {
        return std::chrono::steady_clock::now() + std::chrono::milliseconds{1};
    }
    [[nodiscard]] static int milliseconds_until(std::chrono::steady_clock::time_point end) noexcept;

    ProcessSegment& segment_;
    std::vector<Child> children_;
    std::vector<std::string> deaths_;
    std::vector<int> unburied_; ///< ranks
    std::vector<int> killed_;   ///< ranks that did not end by themselves
    int other_threads_;
    std::vector<pollfd> waited_for_;
    bool has_failure_ = false;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/process/impl/child_processes.ipp>
#endif
