// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <utility>

#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/transport.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/communicator/shared_memory/engine/helper.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/scope.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The members that communicators over a board have in common. `Rank` is a GroupRank. `Work` is the
/// type of its collectives and messages. A send is complete when the other rank has received the
/// message. Count and dtype must be the same on both sides, else Mismatch on both. The communicators'
/// own docstrings describe the guarantees.
template <class Rank, class Work>
class BoardCommunicator : public RankMembers<BoardCommunicator<Rank, Work>>,
                          public Collectives<BoardCommunicator<Rank, Work>, Work>,
                          public Messages<BoardCommunicator<Rank, Work>, Work> {
public:
    BoardCommunicator(BoardCommunicator const&) = delete;
    BoardCommunicator& operator=(BoardCommunicator const&) = delete;

    /// For reducers: see has_sum_of_pieces.
    [[nodiscard]] bool is_in_reach(ConstBuffer buffer) const noexcept {
        return rank_.is_in_reach(buffer);
    }
    [[nodiscard]] static constexpr bool sums_pieces() noexcept { return true; }
    Work sum_pieces(BufferPieces const& buffer, double factor) {
        return post(this->requests().sum_pieces(buffer, factor));
    }

    /// For ProgressThread.
    /// @throws ContractViolation  this is a process that the rank has forked.
    [[nodiscard]] Helper helper() { return {rank_here().group().board(), rank_.rank()}; }

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

    /// @throws ContractViolation  this is a process that the rank has forked.
    [[nodiscard]] Rank& rank_here() {
        rank_.require_here(rank_.rank());
        return rank_;
    }

    Rank rank_;

private:
    friend class RankMembers<BoardCommunicator>;
    friend class BasicCollectives<BoardCommunicator, Work>;
    friend class Messages<BoardCommunicator, Work>;

    Unwinding unwinding_;

    [[nodiscard]] Rank& own_rank() noexcept { return rank_; }
    [[nodiscard]] Rank const& own_rank() const noexcept { return rank_; }
    Work post(Request const& request) { return {rank_, rank_here().post(request)}; }
    Work post_message(bool is_send, int peer, int tag, Buffer buffer) {
        return {rank_, rank_here().post_message(is_send, peer, tag, buffer)};
    }
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/group/impl/board_communicator.ipp>
#endif
