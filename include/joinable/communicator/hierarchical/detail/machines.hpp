// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Which ranks are on which machine. They are numbered machine by machine, and by their local rank
/// on each. A machine has also a number among the machines, which is the rank of its leader there.
class Machines {
public:
    Machines() = default; ///< not known yet
    Machines(std::span<std::uint64_t const> sizes, int own) : own_{own} {
        for (std::uint64_t const size : sizes) {
            firsts_.push_back(firsts_.back() + static_cast<int>(size));
        }
    }

    [[nodiscard]] bool are_known() const noexcept { return firsts_.size() > 1; }
    [[nodiscard]] int count() const noexcept { return static_cast<int>(firsts_.size()) - 1; }
    [[nodiscard]] int ranks() const noexcept { return firsts_.back(); }
    [[nodiscard]] int own() const noexcept { return own_; }
    /// The rank of its leader.
    [[nodiscard]] int first_of(int machine) const noexcept {
        return firsts_[static_cast<std::size_t>(machine)];
    }
    [[nodiscard]] int machine_of(int rank) const noexcept {
        auto const after = std::upper_bound(firsts_.begin(), firsts_.end(), rank);
        return static_cast<int>(after - firsts_.begin()) - 1;
    }

    /// A reason that has this origin or a greater one names ranks of a communicator around these machines. A level of
    /// a group hears the reasons of the level that it was split from, so both count alike.
    [[nodiscard]] int first_origin_around() const noexcept {
        return (std::max)(ranks(), first_origin_around_);
    }
    /// These are machines of a group that was split from `parent`.
    void become_group_of(Machines const& parent) noexcept {
        first_origin_around_ = parent.first_origin_around();
    }

private:
    std::vector<int> firsts_{0}; ///< of each machine, then the number of ranks
    int own_ = 0;
    int first_origin_around_ = 0; ///< of the communicator that it is a group of
};

/// The levels on which ranks meet.
enum class Level : std::uint8_t { local, across };

/// Cuts a reason, so that it is the same on ranks which get it by abort().
[[nodiscard]] inline AbortReason cut(AbortReason reason) {
    constexpr std::size_t most_text = most_reason_text / 2; // MPI sends ranks in the same message
    constexpr std::size_t most_ranks = 300;                 // more are left out, on every rank
    if (reason.ranks.size() > most_ranks) {
        reason.ranks.resize(most_ranks);
    }
    reason.message = cut_text(std::move(reason.message), most_text);
    return reason;
}

/// The reason to abort a level with, on `rank` of all machines. It keeps the ranks of all machines.
/// See Machines::first_origin_around() for ranks of a communicator around this one.
[[nodiscard]] inline AbortReason to_level(AbortReason reason, int rank, Machines const& machines) {
    reason.origin = reason.origin < 0 ? rank : machines.first_origin_around() + reason.origin;
    return reason;
}

/// The same reason, by the ranks of all machines. If they have other numbers on the level where it
/// arose, the text says so.
[[nodiscard]] inline AbortReason
to_global(AbortReason reason, Level level, Machines const& machines) {
    if (reason.origin >= 0) { // from to_level()
        int const around = machines.first_origin_around();
        bool const is_around = machines.are_known() && reason.origin >= around;
        reason.origin = is_around ? reason.origin - around : -1;
        return reason;
    }
    if (reason.kind == FailureKind::communication || reason.kind == FailureKind::contract) {
        reason.ranks.clear(); // as on ranks that learn of it by its exception
    }
    int const own = machines.own();
    int const first = machines.first_of(own);
    int const numbers = !machines.are_known()    ? 0
                        : level == Level::across ? machines.count()
                                                 : machines.first_of(own + 1) - first;
    // A group around this level may number its ranks differently.
    if (std::any_of(reason.ranks.begin(), reason.ranks.end(), [&](int rank) {
            return rank < 0 || rank >= numbers;
        })) {
        reason.ranks.clear();
        return cut(std::move(reason));
    }
    bool is_same = level == Level::across || first == 0;
    for (int& rank : reason.ranks) {
        int const number = level == Level::local ? first + rank : machines.first_of(rank);
        is_same = is_same && number == rank;
        rank = number;
    }
    if (!is_same && level == Level::local) {
        std::string const where = concat(
            "on machine ", own, ", which counts its ranks from ", first, " on as 0, 1, ...: "
        );
        reason.message = where + reason.message;
    } else if (!is_same) {
        reason.message = ranks_text(reason.ranks) +
                         concat(
                             reason.ranks.size() == 1 ? " leads a machine" : " lead machines",
                             ", and machines are counted here: ",
                             reason.message
                         );
    }
    return cut(std::move(reason));
}

}}} // namespace joinable::v0::detail
