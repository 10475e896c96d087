// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <utility>

#include <joinable/join/joinable.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// step(closure) of a participant: runs the closure, then `step()`, and returns what the closure returned.
template <class J, class Closure, class F>
decltype(auto) step_after(J& joinable, Closure&& closure, F const& step) {
    static_assert(
        std::invocable<Closure>,
        "step: expected a function that takes nothing and runs the passes, as in optimizer.step([&] { ...; "
        "return loss; })"
    );
    if constexpr (std::invocable<Closure>) {
        return run_then(joinable, std::forward<Closure>(closure), step);
    }
}

}}} // namespace joinable::v0::detail
