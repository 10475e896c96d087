// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
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

private:
    std::vector<int> firsts_{0}; ///< of each machine, then the number of ranks
    int own_ = 0;
};

/// The levels on which ranks meet.
enum class Level : std::uint8_t { local, across };

/// A failure travels from level to level as the reason of an abort, whose ranks must be ranks of
/// that level. So the ranks of all machines stand before its text.
inline constexpr std::string_view sealed_mark = "of all machines' ranks ";
inline constexpr std::size_t most_sealed_ranks = 300; ///< more are left out, on every rank

/// Cuts a reason, so that it is the same on ranks which get it by abort().
[[nodiscard]] inline AbortReason cut(AbortReason reason) {
    constexpr std::size_t most_text = most_reason_text / 2; // the rest is for the ranks
    if (reason.ranks.size() > most_sealed_ranks) {
        reason.ranks.resize(most_sealed_ranks);
    }
    if (reason.message.size() > most_text) {
        reason.message.resize(length_before_cut(reason.message, most_text));
        reason.message += cut_mark;
    }
    return reason;
}

/// The reason to abort a level with. Without culprits on that level it names none there.
[[nodiscard]] inline AbortReason
sealed(AbortReason const& reason, Level level, Machines const& machines) {
    AbortReason result{reason.kind, {}, std::string{sealed_mark}};
    for (int const rank : reason.ranks) {
        result.message += concat(rank == reason.ranks.front() ? "" : ",", rank);
        if (!machines.are_known() ||
            rank >= machines.ranks()) { // a rank of a group around this one
            continue;
        }
        int const machine = machines.machine_of(rank);
        if (level == Level::across && (result.ranks.empty() || result.ranks.back() != machine)) {
            result.ranks.push_back(machine);
        } else if (level == Level::local && machine == machines.own()) {
            result.ranks.push_back(rank - machines.first_of(machine));
        }
    }
    result.message += concat(": ", reason.message);
    return result;
}

/// The reason that another rank has sealed, if it is one.
[[nodiscard]] inline std::optional<AbortReason> unsealed(AbortReason const& reason) {
    if (!reason.message.starts_with(sealed_mark)) {
        return std::nullopt;
    }
    AbortReason result{reason.kind, {}, {}};
    char const* const end = reason.message.data() + reason.message.size();
    char const* at = reason.message.data() + sealed_mark.size();
    while (at != end && *at != ':') {
        int rank = 0;
        auto const [after, error] = std::from_chars(at, end, rank);
        if (error != std::errc{}) {
            return std::nullopt;
        }
        result.ranks.push_back(rank);
        at = after != end && *after == ',' ? after + 1 : after;
    }
    if (end - at < 2) {
        return std::nullopt;
    }
    result.message.assign(at + 2, end);
    return result;
}

/// The same reason, by the ranks of all machines. If they have other numbers on the level where it
/// arose, the text says so.
[[nodiscard]] inline AbortReason
globalised(AbortReason reason, Level level, Machines const& machines) {
    if (auto sent = unsealed(reason)) {
        return *std::move(sent);
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
