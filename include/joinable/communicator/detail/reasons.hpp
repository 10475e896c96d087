// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

/// @file
/// Why a collective ends for all, in the same words over every transport.

namespace joinable::inline v0::detail {

/// `rank` is done with its communicator.
[[nodiscard]] inline AbortReason reason_of_leaving(int rank) {
    return {
        FailureKind::peer_failed, {rank}, concat("rank ", rank, " left while others wait for it")
    };
}

/// The ranks `overdue` "did not <do>" in time, while `rank` does what `meanwhile` says.
[[nodiscard]] inline AbortReason reason_of_delay(
    std::vector<int> const& overdue,
    std::string_view to_do,
    std::chrono::nanoseconds deadline,
    int rank,
    std::string const& meanwhile
) {
    double const seconds = std::chrono::duration<double>(deadline).count();
    return {
        FailureKind::timed_out,
        overdue,
        concat(
            ranks_text(overdue),
            " did not ",
            to_do,
            " within ",
            seconds,
            " s, while rank ",
            rank,
            " ",
            meanwhile
        )
    };
}

/// Ranks say different things: `said_by(rank)` is a Descriptor.
template <class SaidBy>
[[nodiscard]] AbortReason reason_of_difference(int size, SaidBy const& said_by) {
    AbortReason reason{FailureKind::mismatch, {}, {}};
    reason.message = "ranks run different collectives: rank 0 " + said_by(0).text();
    for (int rank = 1; rank < size; ++rank) {
        if (!(said_by(rank) == said_by(0))) {
            reason.ranks.push_back(rank);
            reason.message += concat(", rank ", rank, " ", said_by(rank).text());
        }
    }
    return reason;
}

} // namespace joinable::inline v0::detail
