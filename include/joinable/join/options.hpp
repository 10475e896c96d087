// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

namespace joinable { inline namespace v0 {

/// What happens when some ranks have run out of inputs and others have not.
enum class EndPolicy : std::uint8_t {
    drain,         ///< the others go on to their end, and the joined ranks shadow them
    stop_at_first, ///< all ranks leave after the same number of rounds, without an exception
    throw_early,   ///< all ranks throw EarlyTermination, before the pass of that round
};

/// What an active rank does in a round.
enum class Phase : std::uint8_t {
    train,
    evaluate, ///< no gradients: such a round never syncs
};

/// What a rank says about the round that it opens. All active ranks must say the same, apart from
/// the number of their weight and `skips`.
struct RoundNotice {
    bool will_sync = true; ///< whether gradients are reduced in this round
    Phase phase = Phase::train;
    /// Samples or tokens of this rank's input: averages are then weighted. None = unweighted. Give
    /// it in all rounds that accumulate together or in none: one without it adds gradients, but no
    /// weight.
    std::optional<std::uint64_t> weight = {};
    /// This rank has no gradient of its own for this round (a batch that failed): it counts with
    /// weight 0. In a guard it may leave `weight` out where the others give one. Outside a guard, and
    /// in one that is not enabled, it says `.weight = 0` there. With known lengths
    /// (JoinOptions::inputs) nobody hears of it: its weight stays in the divisor, and the others count
    /// it as a contributor.
    bool skips = false;

    friend constexpr bool operator==(RoundNotice const&, RoundNotice const&) = default;
};

/// How a guard behaves. `end_policy`, `sync_every`, `carry_accumulated` and whether `inputs` and
/// `weight_per_input` are given must be the same on every rank, or all ranks throw Mismatch when they
/// enter. `enable` must be, too: a rank that does not enter is missing there until the deadline.
struct JoinOptions {
    bool enable = true; ///< false: nothing is attached and nothing is sent
    EndPolicy end_policy = EndPolicy::drain;
    /// Inside the guard, overrides the deadline of its communicators. Positive.
    std::optional<std::chrono::nanoseconds> timeout = {};
    /// This rank's number of inputs. When every rank gives it and the communicators can abort,
    /// rounds need no roll calls: no vote, no leaving early, no notice but the default one.
    std::optional<std::size_t> inputs = {};
    /// The weight in a notice that says nothing.
    std::optional<std::uint64_t> weight_per_input = {};
    /// A notice that says nothing syncs in every `sync_every`th round only.
    std::size_t sync_every = 1;
    /// What a rank accumulated in rounds that did not sync before it ran out flows into the next
    /// reduction, once. False: it is dropped, as PyTorch does.
    bool carry_accumulated = true;
    /// Told when this rank has shadowed more than `skew_limit` rounds in a row, at most once a
    /// minute in this process. What it throws leaves the guard.
    std::function<void(std::string_view)> warn = {};
    std::size_t skew_limit = 1000;
};

namespace detail {

/// The notice of round `round`: one that says nothing, or nothing but that it skips, is given the
/// options' weight and sync period.
[[nodiscard]] inline RoundNotice
completed(RoundNotice notice, JoinOptions const& options, std::size_t round) noexcept {
    if (notice == RoundNotice{.skips = notice.skips}) {
        notice.will_sync = (round + 1) % options.sync_every == 0;
        notice.weight = options.weight_per_input;
    }
    return notice;
}

} // namespace detail

/// The enumerator's name, for error texts.
[[nodiscard]] constexpr std::string_view name_of(EndPolicy policy) noexcept {
    constexpr std::string_view names[] = {"drain", "stop_at_first", "throw_early"};
    return names[static_cast<std::size_t>(policy)];
}

}} // namespace joinable::v0
