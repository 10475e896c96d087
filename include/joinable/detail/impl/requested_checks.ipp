// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/detail/requested_checks.hpp>

#include <cstdlib>
#include <string_view>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION RequestedChecks RequestedChecks::read() {
    char const* const text = std::getenv("JOINABLE_CHECK");
    RequestedChecks checks{text == nullptr ? std::string_view{} : text};
    for (std::string_view rest = checks.text; !rest.empty();) {
        std::string_view const word = rest.substr(0, rest.find(','));
        rest.remove_prefix(word.size() + (word.size() < rest.size() ? 1 : 0));
        bool* const check = word == "collectives" ? &checks.collectives
                            : word == "ready"     ? &checks.ready
                            : word == "replicas"  ? &checks.replicas
                                                  : nullptr;
        if (check == nullptr) {
            throw ContractViolation{
                "expected words of collectives, ready and replicas in JOINABLE_CHECK, with commas between "
                "them, but found \"" +
                to_text(word) + '"'
            };
        }
        *check = true;
    }
    return checks;
}

}}} // namespace joinable::v0::detail
