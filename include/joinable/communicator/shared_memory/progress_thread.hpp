// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <exception>
#include <thread>

#include <joinable/communicator/shared_memory/engine/helper.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

template <class Comm>
concept HasHelper = requires(Comm& comm) {
    { comm.helper() } -> std::same_as<Helper>;
};

template <class Comm>
[[nodiscard]] Helper helper_of(Comm& comm) {
    static_assert(
        HasHelper<Comm>,
        "ProgressThread: the communicator has to be a ThreadCommunicator or a ProcessCommunicator, in whose "
        "memory a thread can compute; over another transport call test() now and then"
    );
    if constexpr (HasHelper<Comm>) {
        return comm.helper();
    } else {
        std::terminate();
    }
}

} // namespace detail

/// A thread that computes a rank's share of large collectives while the rank does something else.
///
/// Without it, collectives make progress only while a rank waits or tests. With it they also
/// progress in between, on another core. It helps if ranks leave cores idle, as when they wait for
/// a device or for data. If every core computes, it only competes with its rank. Results are
/// bitwise identical with and without it. It sleeps unless all ranks have posted a collective of
/// more than 2 KiB.
///
/// Each rank decides for itself whether to have one. One thread serves one communicator, not those
/// split from it.
class ProgressThread {
public:
    /// Local. `comm` is a ThreadCommunicator or a ProcessCommunicator, and must outlive this
    /// object.
    /// @throws std::system_error  the system cannot start another thread.
    template <class Comm>
    explicit ProgressThread(Comm& comm)
        : helper_{detail::helper_of(comm)}, thread_{[this] { helper_.run(); }} {}
    /// Local. Returns after the chunk that the thread is computing.
    ~ProgressThread() {
        helper_.stop();
        thread_.join();
    }
    ProgressThread(ProgressThread const&) = delete;
    ProgressThread& operator=(ProgressThread const&) = delete;

private:
    detail::Helper helper_;
    std::thread thread_;
};

}} // namespace joinable::v0
