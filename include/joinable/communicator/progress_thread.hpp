// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include <joinable/communicator/detail/home_process.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// The work of a thread beside a rank: run() until stop().
template <class Comm>
concept HasHelper = requires(Comm& comm) {
    comm.helper().run();
    comm.helper().stop();
};

} // namespace detail

/// A thread that completes a rank's collectives while the rank does something else.
///
/// Without it, collectives make progress only while a rank waits or tests. With it they also
/// progress in between, on another core. It helps if ranks leave cores idle, as when they wait for
/// a device or for data. If every core computes, it only competes with its rank. Results are
/// bitwise identical with and without it.
///
/// Over thread and process ranks it computes the rank's share of collectives of more than 2 KiB
/// that all ranks have posted, and else sleeps. It leaves to the rank what moves in slices between processes (see
/// ProcessCommunicator), so also sums of large gradients that lie in no arena.
///
/// Over MPI it tests all collectives and messages in flight and delivers their results. It also
/// receives aborts and answers the other ranks, so they do not name its rank as missing in a
/// collective that this rank has posted. If it finds a failure, it tells all ranks; its own rank
/// throws the reason at its next call. It polls while something is in flight. Otherwise it looks
/// for messages every 10 ms. It rests while the rank waits. MPI must be initialised with
/// MPI_THREAD_MULTIPLE.
///
/// Each rank decides for itself whether to have one. One thread serves one communicator, not those
/// split from it.
class ProgressThread {
public:
    /// Local. `comm` is a ThreadCommunicator, a ProcessCommunicator or an MpiCommunicator. It must
    /// outlive this object, and MPI must still run when this object is destroyed. Only a thread that
    /// may use `comm` constructs or destroys this object.
    /// @throws std::system_error  the system cannot start another thread.
    /// @throws ContractViolation  MPI runs with a lower level than MPI_THREAD_MULTIPLE, or this is a process that
    ///                            a thread or process rank has forked.
    template <class Comm>
    explicit ProgressThread(Comm& comm) {
        static_assert(
            detail::HasHelper<Comm>,
            "ProgressThread: the communicator has to be a ThreadCommunicator, a ProcessCommunicator or an "
            "MpiCommunicator, whose collectives another thread can complete; over others call test() now and then"
        );
        if constexpr (detail::HasHelper<Comm>) {
            using Helper = decltype(comm.helper());
            std::shared_ptr<Helper> const helper{new Helper(comm.helper())};
            stop_ = [helper] { helper->stop(); };
            thread_ = std::thread{[&helps = *helper] { helps.run(); }};
        }
    }
    /// Local. Returns after the chunk that the thread is computing, or after its turn over MPI. Does
    /// nothing in a process that was forked meanwhile, which does not have the thread.
    ~ProgressThread() {
        if (!home_.is_here()) { // the thread may hold a lock there for ever, and cannot be joined
            static_cast<void>(new std::function<void()>{std::move(stop_)});
            static_cast<void>(new std::thread{std::move(thread_)});
            return;
        }
        stop_();
        thread_.join();
    }
    ProgressThread(ProgressThread const&) = delete;
    ProgressThread& operator=(ProgressThread const&) = delete;

private:
    std::function<void()> stop_; ///< owns what the thread runs
    std::thread thread_;
    detail::HomeProcess home_;
};

}} // namespace joinable::v0
