// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/round.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The work of a reduction in the passes of a model, besides its buckets. The defaults are those of a reduction that
/// does nothing there. The same calls on every rank in the same order.
struct PassHooks {
    /// Whether passes gather values, which are there while a pass uses them.
    [[nodiscard]] static bool gathers_values() noexcept { return false; }
    static void begin_forward() noexcept {}
    static void finish_forward() noexcept {}
    /// The backward pass of a round that does not sync begins.
    static void begin_accumulating() noexcept {}
    /// Runs what is left of the passes of a round that does not sync.
    static void finish_passes(bool /*trains*/) noexcept {}
    /// @throws ContractViolation  values are held.
    static void require_released() noexcept {}
    /// Whether begin_round() is collective.
    [[nodiscard]] static bool meets_between_passes() noexcept { return false; }
    /// Between the passes of a round that syncs.
    static void begin_round(Round const& /*round*/) noexcept {}
};

}}} // namespace joinable::v0::detail
