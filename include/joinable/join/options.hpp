// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace joinable::inline v0 {

/// What happens when some ranks have run out of inputs and others have not.
enum class EndPolicy : std::uint8_t {
    drain,         ///< the others go on to their end, and the joined ranks shadow them
    stop_at_first, ///< all ranks leave after the same number of rounds, without an exception
    throw_early,   ///< all ranks throw EarlyTermination
};

/// What an active rank does in a round.
enum class Phase : std::uint8_t {
    train,
    evaluate, ///< no gradients: such a round never syncs
};

/// What a rank says about the round that it opens. All active ranks must say the same, apart from
/// the number of their weight.
struct RoundNotice {
    bool will_sync = true; ///< whether gradients are reduced in this round
    Phase phase = Phase::train;
    /// Samples or tokens of this rank's input: averages are then weighted. None = unweighted.
    std::optional<std::uint64_t> weight = {};

    friend constexpr bool operator==(RoundNotice const&, RoundNotice const&) = default;
};

/// How a guard behaves; every rank must give the same, but for the timeout.
struct JoinOptions {
    bool enable = true; ///< false: nothing is attached and nothing is sent
    EndPolicy end_policy = EndPolicy::drain;
    /// Inside the guard, overrides the deadline of the participants' communicators.
    std::optional<std::chrono::nanoseconds> timeout = {};
};

/// The enumerator's name, for error texts.
[[nodiscard]] constexpr std::string_view name_of(EndPolicy policy) noexcept {
    constexpr std::string_view names[] = {"drain", "stop_at_first", "throw_early"};
    return names[static_cast<std::size_t>(policy)];
}

} // namespace joinable::inline v0
