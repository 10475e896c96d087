// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>

#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The process in which an object was made. A process that is forked later has a copy of the
/// object, which must not speak for the rank. Every collective asks, so the answer costs no system call.
class HomeProcess {
public:
    HomeProcess();
    [[nodiscard]] bool is_here() const noexcept {
        return forks_before_ == forks().load(std::memory_order_relaxed);
    }
    /// @throws ContractViolation  this is another process.
    void require_here(int rank) const;

private:
    /// The forks that lead from the first process to this one.
    static std::atomic<int>& forks() noexcept {
        static std::atomic<int> forks{0};
        return forks;
    }

    int id_; ///< for the error
    int forks_before_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/detail/impl/home_process.ipp>
#endif
