// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>

#include <joinable/communicator/shared_memory/group/group_rank.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/unwinding.hpp>

namespace joinable { inline namespace v0 { namespace detail {

template <class Rank, class Work>
class BoardCommunicator;

/// A collective or a message of one rank. Its destructor waits up to the deadline; during unwinding
/// it aborts. After that no other rank accesses this rank's buffers, with one exception: a process
/// that was stopped past the deadline while it wrote to a buffer in an arena may finish that when it
/// goes on. Such an arena, and other memory to which it may write, is never used again.
template <class Memory>
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] GroupWork {
public:
    GroupWork(GroupWork&& other) noexcept;
    GroupWork& operator=(GroupWork&&) = delete;

    ~GroupWork();

    /// Blocks until this rank's buffers are final. Waiting again returns at once, or throws again.
    /// @throws Mismatch  the ranks' calls differ; no data moved.
    /// @throws TimedOut, PeerFailed, ...  the reason why the communicator was aborted, unless every
    ///         rank had arrived before and none died during its share of the work.
    void wait();
    /// Makes progress; true once wait() would return at once.
    /// @throws as wait() does; TimedOut while some rank has not arrived, once the time between
    ///         tests of this work adds up to the deadline. Each gap counts as at most 10 ms.
    [[nodiscard]] bool test();
    /// test() without that deadline, for a rank that finally waits.
    [[nodiscard]] bool progress();

private:
    template <class, class>
    friend class BoardCommunicator;
    GroupWork(GroupRank<Memory>& rank, std::uint64_t sequence) noexcept;
    GroupWork(GroupRank<Memory>& rank, Message const& message) noexcept;

    [[nodiscard]] bool is_message() const noexcept { return message_.peer >= 0; }

    GroupRank<Memory>* rank_;
    std::uint64_t sequence_ = 0;
    Message message_;
    bool is_lost_ = false;
    Unwinding unwinding_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/group/group_work.ipp>
#endif
