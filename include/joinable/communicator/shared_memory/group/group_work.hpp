// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>

#include <joinable/communicator/shared_memory/group/group_rank.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/unwinding.hpp>

namespace joinable { inline namespace v0 { namespace detail {

template <class Rank, class Work>
class BoardCommunicator;

/// A collective or a message of one rank. Its destructor waits up to the deadline, and aborts while
/// unwinding. After that no other rank touches this rank's buffers.
template <class Memory>
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] GroupWork {
public:
    GroupWork(GroupWork&& other) noexcept;
    GroupWork& operator=(GroupWork&&) = delete;

    ~GroupWork();

    /// Blocks until this rank's buffers are final. Waiting again returns at once, or throws again.
    /// @throws Mismatch  ranks said different things; no data moved.
    /// @throws TimedOut, PeerFailed, ...  what the communicator was aborted with, unless every rank
    ///         had arrived before and none died over its share of the work.
    void wait();
    /// Makes progress; true once wait() would return at once. @throws as wait() does; TimedOut, while
    /// some rank has not arrived, once the time between tests of this work, each gap counted as at
    /// most 10 ms, adds up to the deadline.
    [[nodiscard]] bool test();
    /// The same without that deadline, for a rank that waits in the end.
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
