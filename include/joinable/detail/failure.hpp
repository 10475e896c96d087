// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The exception that leaves f(); null: none does.
template <class F>
[[nodiscard]] std::exception_ptr exception_of(F const& f) {
    try {
        f();
        return nullptr;
    } catch (...) {
        return std::current_exception();
    }
}

/// Whether a group of these ranks of a communicator, in this order, gives some of them another
/// number.
[[nodiscard]] inline bool renumbers(std::span<int const> members) noexcept {
    int rank = 0;
    return std::any_of(members.begin(), members.end(), [&](int member) {
        return member != rank++;
    });
}

/// The reason to tell peers about an exception. A failure that came from other ranks keeps its
/// culprits. Any other has none yet, which stands for the rank that throws it.
AbortReason failure_of(std::exception_ptr const& error);

/// The failure that ended the communicator by which ranks meet, from its exception.
AbortReason reason_of(std::exception_ptr const& error);

/// The reason that tells all ranks of a failure in a group of some of them, which numbers its ranks otherwise.
AbortReason failure_in_group(AbortReason reason);

std::string failure_text(std::vector<int> const& ranks, std::string const& text);

/// The same reason, ready to be thrown on other ranks. Without culprits `rank` is the culprit,
/// unless it is an error without culprits on all ranks.
AbortReason blamed_on(int rank, AbortReason reason);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/detail/impl/failure.ipp>
#endif
