// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <concepts>
#include <optional>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/communicator/shared_memory/engine/helper.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The members that communicators over a board have in common. `Rank` is a GroupRank. `Work` is the
/// type of its collectives and messages. A send is complete when the other rank has received the
/// message. Count and dtype must be the same on both sides, else Mismatch on both. The communicators'
/// own docstrings describe the guarantees.
template <class Rank, class Work>
class BoardCommunicator : public Collectives<BoardCommunicator<Rank, Work>, Work>,
                          public Messages<BoardCommunicator<Rank, Work>, Work> {
public:
    BoardCommunicator(BoardCommunicator const&) = delete;
    BoardCommunicator& operator=(BoardCommunicator const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_.rank(); }
    [[nodiscard]] int size() const noexcept { return rank_.size(); }

    /// Local. The first reason wins; every wait that can no longer complete throws it.
    void abort(AbortReason const& reason) { own_rank().abort(reason); }
    [[nodiscard]] bool is_aborted() const { return rank_.group().is_aborted(rank()); }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const {
        return rank_.group().abort_reason(rank());
    }

    [[nodiscard]] bool is_renumbered() const noexcept {
        return rank_.group().board().is_renumbered();
    }

    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return rank_.set_deadline(deadline);
    }
    /// Local. Ranks that wait for this one now wait for one more deadline from this call.
    void keep_alive() { own_rank().keep_alive(); }

    /// Local. The ranks that have not arrived in this rank's oldest unfinished collective.
    [[nodiscard]] std::vector<int> missing_ranks() const { return rank_.missing_ranks(); }

    /// For reducers: see has_sum_of_pieces.
    [[nodiscard]] bool is_in_reach(ConstBuffer buffer) const noexcept {
        return rank_.is_in_reach(buffer);
    }
    Work sum_pieces(BufferPieces const& buffer, double factor) {
        return post(this->requests().sum_pieces(buffer, factor));
    }

    /// For ProgressThread.
    [[nodiscard]] Helper helper() noexcept { return {rank_.group().board(), rank_.rank()}; }

protected:
    /// A place in a group that split() makes.
    struct Slot {
        Group group;
        int rank;
    };

    // Without the constraint it would take the place of the copy that is deleted above.
    template <class... Arguments>
        requires std::constructible_from<Rank, Arguments...>
    explicit BoardCommunicator(Arguments&&... arguments)
        : rank_{std::forward<Arguments>(arguments)...} {}
    /// The rank leaves its group: ranks that wait for it throw PeerFailed. Nothing in a process that
    /// the rank has forked.
    ~BoardCommunicator();

    /// The part of split() that precedes the new communicator.
    [[nodiscard]] Slot allot_slot(int color, int key);

    Rank rank_;

private:
    friend class BasicCollectives<BoardCommunicator, Work>;
    friend class Messages<BoardCommunicator, Work>;

    Unwinding unwinding_;

    /// @throws ContractViolation  this is a process that the rank has forked.
    Rank& own_rank() {
        rank_.require_here(rank());
        return rank_;
    }
    Work post(Request const& request) { return {rank_, own_rank().post(request)}; }
    Work post_message(bool is_send, int peer, int tag, Buffer buffer) {
        return {rank_, own_rank().post_message(is_send, peer, tag, buffer)};
    }
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/group/impl/board_communicator.ipp>
#endif
