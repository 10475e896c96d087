// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/shared_memory/engine/helper.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/unwinding.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The members that communicators over a board have in common. `Rank` is a GroupRank, and `Work`
/// what its collectives and messages return. What the members promise is said of the communicators.
template <class Rank, class Work>
class BoardCommunicator : public Collectives<BoardCommunicator<Rank, Work>, Work> {
public:
    BoardCommunicator(BoardCommunicator const&) = delete;
    BoardCommunicator& operator=(BoardCommunicator const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_.rank(); }
    [[nodiscard]] int size() const noexcept { return rank_.size(); }

    /// Not collective. Complete when rank `to` has received it: messages between two ranks with one
    /// tag arrive in their order. Both sides say the same count and dtype, else Mismatch on both.
    Work send(ConstBuffer buffer, int to, int tag = 0);
    /// Not collective. The other side of send().
    Work receive(Buffer buffer, int from, int tag = 0);

    /// Local. The first reason wins; every wait that cannot complete any more throws it.
    void abort(AbortReason const& reason) { rank_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return rank_.group().is_aborted(rank()); }

    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return rank_.set_deadline(deadline);
    }
    /// Local. Ranks that wait for this one do so for one more deadline from now.
    void keep_alive() noexcept { rank_.keep_alive(); }

    /// Local. Who has not arrived in this rank's oldest unfinished collective.
    [[nodiscard]] std::vector<int> missing_ranks() const { return rank_.missing_ranks(); }

    /// For ProgressThread.
    [[nodiscard]] Helper helper() noexcept { return {rank_.group().board(), rank_.rank()}; }

protected:
    /// A place in a group that split() makes.
    struct Slot {
        Group group;
        int rank;
    };

    template <class... Arguments>
    explicit BoardCommunicator(Arguments&&... arguments)
        : rank_{std::forward<Arguments>(arguments)...} {}
    /// The rank leaves its group: ranks that wait for it get PeerFailed.
    ~BoardCommunicator();

    /// What split() does before there is a communicator.
    [[nodiscard]] Slot allot_slot(int color, int key);

    Rank rank_;

private:
    friend class BasicCollectives<BoardCommunicator, Work>;

    Unwinding unwinding_;

    Work post(Request const& request) { return {rank_, rank_.post(request)}; }
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/group/board_communicator.ipp>
#endif
