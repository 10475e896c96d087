// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 {

/// What happened inside a guard. The same on every rank, but for `own_rounds`, `shadow_rounds` and
/// `waited`. Over a guard that was not enabled it counts this rank's own rounds alone.
struct JoinResult {
    std::size_t rounds = 0;        ///< rounds that some rank was active in
    std::size_t own_rounds = 0;    ///< rounds with an input of this rank
    std::size_t shadow_rounds = 0; ///< rounds that this rank shadowed
    std::vector<std::size_t> rounds_per_rank;
    std::vector<int> last_joiners; ///< the ranks that were active to the end, ascending
    int authoritative_rank = 0;    ///< the highest last joiner
    bool stopped_early = false;    ///< by a vote or EndPolicy::stop_at_first
    /// Rounds after the last one that synced: what they accumulated is still in the gradients.
    std::size_t unsynced_rounds = 0;
    std::chrono::nanoseconds waited{}; ///< blocked in roll calls
};

/// The result as a table for people: a line per rank, its rounds and how many it shadowed, and a
/// mark for the last joiners.
[[nodiscard]] inline std::string to_string(JoinResult const& result) {
    auto const cell = [](auto const& value) {
        std::string const text = detail::concat(value);
        return std::string(text.size() < 8 ? 8 - text.size() : 1, ' ') + text;
    };
    std::string table = "rank   rounds shadowed\n";
    for (std::size_t rank = 0; rank < result.rounds_per_rank.size(); ++rank) {
        std::size_t const own = result.rounds_per_rank[rank];
        auto const& last = result.last_joiners;
        bool const is_last = std::count(last.begin(), last.end(), static_cast<int>(rank)) != 0;
        table += cell(rank).substr(4) + " " + cell(own) + " " + cell(result.rounds - own);
        table += is_last ? " last\n" : "\n";
    }
    double const milliseconds = std::chrono::duration<double, std::milli>(result.waited).count();
    table +=
        detail::concat(result.rounds, " rounds", result.stopped_early ? ", stopped early" : "");
    table += detail::concat("; this rank ran ", result.own_rounds, ", shadowed ");
    table += detail::concat(result.shadow_rounds, ", waited ", milliseconds, " ms");
    if (result.unsynced_rounds != 0) {
        table += detail::concat("; the last ", result.unsynced_rounds, " did not sync");
    }
    return table + "\n";
}

/// Prints the table to any stream that takes a std::string.
template <class Stream>
    requires requires(Stream& stream, std::string const& text) { stream << text; }
Stream& operator<<(Stream& stream, JoinResult const& result) {
    stream << to_string(result);
    return stream;
}

}} // namespace joinable::v0
