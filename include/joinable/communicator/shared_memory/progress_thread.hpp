// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <thread>

#include <joinable/communicator/shared_memory/engine/helper.hpp>

namespace joinable { inline namespace v0 {

/// A thread that computes a rank's share of large collectives while the rank does something else.
///
/// Without one, a collective makes progress when a rank waits or tests; with one also in between, on
/// another core. Worth it where ranks leave cores idle: while they wait for a device, or for data.
/// Where every core computes it only takes turns with its rank. What it computes is the same bit for
/// bit. It sleeps unless all ranks have posted a collective of more than 2 KiB.
///
/// Each rank decides for itself, and one thread serves one communicator: not those split from it.
class ProgressThread {
public:
    /// Local. `comm` is a ThreadCommunicator or a ProcessCommunicator, and is there for longer.
    /// @throws std::system_error  the system has no more threads.
    template <class Comm>
    explicit ProgressThread(Comm& comm)
        : helper_{comm.helper()}, thread_{[this] { helper_.run(); }} {}
    /// Local. Returns when the chunk is through that it computes.
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
