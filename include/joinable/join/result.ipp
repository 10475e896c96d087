// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/result.hpp>

#include <algorithm>

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

JOINABLE_DEFINITION std::string to_json(JoinResult const& result) {
    auto const array = [](auto const& numbers) {
        std::string text = "[";
        for (auto const number : numbers) {
            text += detail::concat(text.size() == 1 ? "" : ",", number);
        }
        return text + "]";
    };
    std::string text = detail::concat("{\"rounds\":", result.rounds);
    text += detail::concat(",\"own_rounds\":", result.own_rounds);
    text += detail::concat(",\"shadow_rounds\":", result.shadow_rounds);
    text += ",\"rounds_per_rank\":" + array(result.rounds_per_rank);
    text += ",\"last_joiners\":" + array(result.last_joiners);
    text += detail::concat(",\"authoritative_rank\":", result.authoritative_rank);
    text += detail::concat(",\"stopped_early\":", result.stopped_early ? "true" : "false");
    text += detail::concat(",\"unsynced_rounds\":", result.unsynced_rounds);
    return text + detail::concat(",\"waited_nanoseconds\":", result.waited.count(), "}");
}

}} // namespace joinable::v0
