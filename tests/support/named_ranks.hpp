// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <support/failed_checks.hpp>
#include <support/hang.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/communicator/shared_memory/process/members.hpp>
#include <joinable/communicator/shared_memory/process/named_segment.hpp>
#include <joinable/communicator/shared_memory/process/shared_object.hpp>

namespace joinable_tests {

/// A job id that no other test has, in no other process.
inline std::string fresh_job() {
    static int jobs = 0;
    return "test " + std::to_string(getpid()) + " " + std::to_string(jobs++);
}

/// Where the ranks of a job find each other.
inline std::string file_of(std::string const& job) {
    return joinable::detail::path_of_job(job);
}
inline bool file_exists(std::string const& job) {
    return access(file_of(job).c_str(), F_OK) == 0;
}

/// Whether a rank is among those of a job that wait for others to attach.
inline bool has_come(std::string const& job, int rank) {
    using namespace joinable::detail;
    auto const object = SharedObject::find(file_of(job));
    if (!object) {
        return false;
    }
    Mapping const memory{*object, MemberTable::bytes_for(rank + 1)};
    return std::launder(reinterpret_cast<MemberTable*>(memory.begin()))->member(rank).has_come();
}

/// Gives this process a /dev/shm of its own. Returns whether that is allowed.
inline bool has_own_shared_memory(char const* options, unsigned long flags = 0) {
    return unshare(CLONE_NEWNS) == 0 &&
           mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
           mount("none", "/dev/shm", "tmpfs", flags, options) == 0;
}

/// In processes that are copies of one, ranks that call this map the memory of a group of `size` ranks
/// at different addresses: each keeps another part of the place where it would lie.
inline void displace(int rank, int size) {
    std::size_t const room = (static_cast<std::size_t>(size) << 36U) + (std::size_t{1} << 28U);
    std::size_t const kept = static_cast<std::size_t>(rank) << 20U;
    void* const place =
        mmap(nullptr, room + kept, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place != MAP_FAILED) {
        munmap(place, room); // addresses are given out from above
    }
}

/// Processes that have nothing in common but what a job id gives them.
class Processes {
public:
    Processes() = default;
    Processes(Processes const&) = delete;
    Processes& operator=(Processes const&) = delete;
    ~Processes() {
        for (pid_t const process : running_) {
            kill(process, SIGKILL);
            waitpid(process, nullptr, 0);
        }
    }

    /// One that runs `body()`; it fails if that throws, or a CHECK in it does.
    template <class Body>
    pid_t start(Body const& body) {
        std::fflush(nullptr);
        pid_t const process = fork();
        if (process != 0) {
            running_.push_back(process);
            return process;
        }
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(seconds_to_hang);
        failed_checks = 0;
        try {
            body();
        } catch (std::exception const& error) {
            std::printf("a process of a test failed: %s\n", error.what());
            ++failed_checks;
        }
        std::fflush(nullptr);
        _exit(failed_checks == 0 ? 0 : 1);
    }

    /// How the next one ended, in the order in which they were started: 0, or a signal, or -1.
    int wait() {
        int status = 0;
        waitpid(running_.front(), &status, 0);
        running_.erase(running_.begin());
        if (WIFSIGNALED(status)) {
            return WTERMSIG(status);
        }
        return WEXITSTATUS(status) == 0 ? 0 : -1;
    }
    /// Those that are left are the ranks of a group, of which none may fail.
    void wait_for_all() {
        for (std::size_t rank = 0, size = running_.size(); rank < size; ++rank) {
            if (int const how = wait(); how != 0) {
                throw std::runtime_error{
                    "rank " + std::to_string(rank) + " of a group of processes ended with " +
                    std::to_string(how)
                };
            }
        }
    }

private:
    std::vector<pid_t> running_;
};

/// Runs `body(comm)` over groups of unrelated processes of these sizes, one after another.
template <class Body>
void run_named_ranks(std::initializer_list<int> sizes, Body const& body) {
    for (int const size : groups_of_processes(sizes)) {
        std::string const job = fresh_job();
        Processes processes;
        for (int rank = 0; rank < size; ++rank) {
            processes.start([&] {
                displace(rank, size);
                auto comm = joinable::ProcessCommunicator::attach(
                    {rank, size, job, std::chrono::seconds{50}}
                );
                body(comm);
            });
        }
        processes.wait_for_all();
        if (file_exists(job)) {
            throw std::runtime_error{file_of(job) + " was left behind"};
        }
    }
}

} // namespace joinable_tests
