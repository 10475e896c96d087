// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/result.hpp>

#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION std::string to_string(JoinResult const& result) {
    auto const cell = [](auto const& value) {
        std::string const text = detail::concat(value);
        return std::string(text.size() < 8 ? 8 - text.size() : 1, ' ') + text;
    };
    std::string table = "rank   rounds shadowed\n";
    for (std::size_t rank = 0; rank < result.rounds_per_rank.size(); ++rank) {
        std::size_t const own = result.rounds_per_rank[rank];
        bool const is_last = detail::is_last_joiner(result, static_cast<int>(rank));
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

}} // namespace joinable::v0
