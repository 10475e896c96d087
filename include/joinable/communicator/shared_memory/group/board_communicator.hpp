// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/shared_memory/engine/helper.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/detail/text.hpp>
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
    Work send(ConstBuffer buffer, int to, int tag = 0) {
        check_memory(buffer);
        check_rank("destination", to, size());
        // A send is only read from; both sides of a message share one type.
        Buffer const read{const_cast<void*>(buffer.data), buffer.count, buffer.dtype};
        return {rank_, rank_.post_message(true, to, tag, read)};
    }
    /// Not collective. The other side of send().
    Work receive(Buffer buffer, int from, int tag = 0) {
        check_memory(buffer);
        check_rank("source", from, size());
        return {rank_, rank_.post_message(false, from, tag, buffer)};
    }

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
    ~BoardCommunicator() {
        if (unwinding_.has_begun()) {
            rank_.abort_for_exception("the scope of its communicator");
        }
        rank_.group().leave(rank());
    }

    /// What split() does before there is a communicator.
    [[nodiscard]] Slot allot_slot(int color, int key) {
        if (color < 0) {
            throw ContractViolation{
                concat("split needs a color of at least 0, but was given ", color)
            };
        }
        std::array<std::int32_t, 2> const mine{color, key};
        std::vector<std::array<std::int32_t, 2>> all(static_cast<std::size_t>(size()));
        this->all_gather({mine.data(), 2, DType::i32}, {all.data(), 2 * all.size(), DType::i32})
            .wait();
        std::vector<int> members;
        for (int other = 0; other < size(); ++other) {
            if (all[static_cast<std::size_t>(other)][0] == color) {
                members.push_back(other);
            }
        }
        std::sort(members.begin(), members.end(), [&](int a, int b) {
            return std::pair{all[static_cast<std::size_t>(a)][1], a} <
                   std::pair{all[static_cast<std::size_t>(b)][1], b};
        });
        int const maker = members.front();
        std::uint64_t const made = rank() == maker ? rank_.make_group(members) : 0;
        std::vector<std::uint64_t> places(all.size());
        this->all_gather({&made, 1, DType::u64}, {places.data(), places.size(), DType::u64}).wait();
        std::uint64_t const place = places[static_cast<std::size_t>(maker)];
        if (place == 0) {
            throw CommunicationError{concat(
                "rank ",
                maker,
                " has no memory left that it shares, for a group of ",
                members.size(),
                " ranks: wait for what is under way, or leave groups before making new ones"
            )};
        }
        auto const slot = std::find(members.begin(), members.end(), rank());
        return {rank_.group().group_at(place), static_cast<int>(slot - members.begin())};
    }

    Rank rank_;

private:
    friend class BasicCollectives<BoardCommunicator, Work>;

    Unwinding unwinding_;

    Work post(Request const& request) { return {rank_, rank_.post(request)}; }
};

}}} // namespace joinable::v0::detail
