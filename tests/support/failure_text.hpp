// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include <doctest/doctest.h>

#include <joinable/error.hpp>

namespace joinable_tests {

/// What a rank throws, by type and text; nothing where it throws nothing.
template <class F>
std::string failure_of(F const& f) {
    try {
        f();
    } catch (joinable::ContractViolation const& error) {
        return std::string{"contract: "} + error.what();
    } catch (joinable::CommunicationError const& error) {
        return std::string{"communication: "} + error.what();
    } catch (joinable::PeerFailed const& error) {
        return std::string{"peer: "} + error.what();
    } catch (joinable::Mismatch const& error) {
        return std::string{"mismatch: "} + error.what();
    } catch (std::exception const& error) {
        return std::string{"other: "} + error.what();
    }
    return {};
}

/// Checks that a text has a part.
inline void says(std::string const& text, std::string_view part) {
    CAPTURE(text);
    bool const is_said = text.find(part) != std::string::npos;
    CHECK(is_said);
}

} // namespace joinable_tests
