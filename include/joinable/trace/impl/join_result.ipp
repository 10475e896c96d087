// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/trace/join_result.hpp>

#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 {

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
