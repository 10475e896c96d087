// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>

#include <pthread.h>
#include <unistd.h>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The process in which an object was made. A process that is forked later has a copy of the
/// object, which must not speak for the rank. Every collective asks, so the answer costs no system call.
class HomeProcess {
public:
    HomeProcess() {
        static int const counts = ::pthread_atfork(nullptr, nullptr, [] { ++forks(); });
        static_cast<void>(counts);
    }
    [[nodiscard]] bool is_here() const noexcept {
        return forks_before_ == forks().load(std::memory_order_relaxed);
    }
    /// @throws ContractViolation  this is another process.
    void require_here(int rank) const {
        if (!is_here()) {
            throw ContractViolation{concat(
                "expected rank ",
                rank,
                " in process ",
                id_,
                ", which attached, but process ",
                ::getpid(),
                " that was forked since calls its communicator: attach after the fork"
            )};
        }
    }

private:
    /// The forks that lead from the first process to this one.
    static std::atomic<int>& forks() noexcept {
        static std::atomic<int> forks{0};
        return forks;
    }

    pid_t id_ = ::getpid();
    int forks_before_ = forks().load(std::memory_order_relaxed);
};

}}} // namespace joinable::v0::detail
