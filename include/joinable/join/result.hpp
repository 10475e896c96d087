// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include <joinable/config.hpp>

namespace joinable { inline namespace v0 {

/// The course of a guard. The same on every rank, but for `own_rounds`, `shadow_rounds` and
/// `waited`. Over a guard that was not enabled it counts this rank's own rounds alone, and
/// `rounds_per_rank` is empty.
struct JoinResult {
    std::size_t rounds = 0;        ///< rounds that some rank was active in
    std::size_t own_rounds = 0;    ///< rounds with an input of this rank
    std::size_t shadow_rounds = 0; ///< rounds that this rank shadowed
    std::vector<std::size_t> rounds_per_rank;
    std::vector<int> last_joiners; ///< the ranks that were active to the end, ascending
    int authoritative_rank = 0;    ///< the highest last joiner
    bool stopped_early = false;    ///< by a vote or EndPolicy::stop_at_first
    /// Training rounds after the last one that synced, those before this guard included: what they accumulated is
    /// still in the gradients. Ranks that discarded windows, or began with other ones, count others.
    std::size_t unsynced_rounds = 0;
    std::chrono::nanoseconds waited{}; ///< blocked in roll calls
};

namespace detail {
[[nodiscard]] inline bool is_last_joiner(JoinResult const& result, int rank) {
    return std::find(result.last_joiners.begin(), result.last_joiners.end(), rank) !=
           result.last_joiners.end();
}
} // namespace detail

/// The result as a table for people: a line per rank, its rounds and how many it shadowed, and a
/// mark for the last joiners.
[[nodiscard]] std::string to_string(JoinResult const& result);

/// Prints the table to any stream that takes a std::string.
template <class Stream>
    requires requires(Stream& stream, std::string const& text) { stream << text; }
Stream& operator<<(Stream& stream, JoinResult const& result) {
    stream << to_string(result);
    return stream;
}

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/join/impl/result.ipp>
#endif
