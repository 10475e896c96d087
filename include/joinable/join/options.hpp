// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <type_traits>

namespace joinable { inline namespace v0 {

/// The behaviour of a guard when some ranks have run out of inputs and others have not.
enum class EndPolicy : std::uint8_t {
    drain,         ///< the others continue to their end, and the joined ranks shadow them
    stop_at_first, ///< all ranks leave after the same number of rounds, without an exception
    throw_early,   ///< all ranks throw EarlyTermination, before the pass of that round
};

/// The kind of work that an active rank does in a round.
enum class Phase : std::uint8_t {
    train,
    evaluate, ///< no gradients, so the round never syncs
};

namespace detail {

/// An optional number of inputs, samples or tokens. It refuses fractions, because std::optional
/// converts 0.5 to 0 without a warning.
class OptionalCount : public std::optional<std::uint64_t> {
    using Base = std::optional<std::uint64_t>;

public:
    template <std::integral T>
    constexpr OptionalCount(std::optional<T> const& count) noexcept : Base{count} {} // NOLINT
    constexpr OptionalCount(std::nullopt_t = std::nullopt) noexcept {}               // NOLINT
    template <class T>
        requires std::is_arithmetic_v<T>
    constexpr OptionalCount(T count) noexcept // NOLINT(google-explicit-constructor)
        : Base{static_cast<std::uint64_t>(count)} {
        static_assert(
            std::integral<T>,
            "RoundNotice and JoinOptions: weights and inputs are whole numbers; give an integer"
        );
    }

    template <std::same_as<OptionalCount> T> // no conversions: those are std::optional's
    friend constexpr bool operator==(T const& a, T const& b) noexcept {
        return static_cast<Base const&>(a) == static_cast<Base const&>(b);
    }
};

} // namespace detail

/// A rank's announcement of the round that it opens. All active ranks must announce the same, apart
/// from the value of `weight` and `skips`.
struct RoundNotice {
    bool will_sync = true; ///< whether gradients are reduced in this round
    Phase phase = Phase::train;
    /// The number of samples or tokens in this rank's input; averages are then weighted. None =
    /// unweighted. All rounds that accumulate together have one, or none has.
    detail::OptionalCount weight = {};
    /// This rank has no gradient of its own for this round (a batch that failed), so it counts with
    /// weight 0. In a guard it may omit `weight` where the others give one. Outside a guard, and in
    /// one that is not enabled, it gives `.weight = 0` there. With known lengths
    /// (JoinOptions::inputs) the others do not learn of it: its weight stays in the divisor, and
    /// they count it as a contributor.
    bool skips = false;

    friend constexpr bool operator==(RoundNotice const&, RoundNotice const&) = default;
};

namespace detail {
/// Whether such a round reduces gradients: an evaluation has none.
[[nodiscard]] constexpr bool syncs(RoundNotice const& notice) noexcept {
    return notice.will_sync && notice.phase == Phase::train;
}
/// Of this rank's input: 0 if it skips.
[[nodiscard]] constexpr std::uint64_t own_weight(RoundNotice const& notice) noexcept {
    return notice.skips ? 0 : notice.weight.value_or(0);
}
} // namespace detail

/// Options of a guard. These must be the same on every rank, or all ranks throw Mismatch when they
/// enter: `end_policy`, `sync_every`, `carry_accumulated`, and whether `inputs` and
/// `weight_per_input` are given. `enable` must be the same, too: the others wait until the deadline
/// for a rank that does not enter.
struct JoinOptions {
    /// False: nothing is sent, and ranks must have the same number of rounds. Notices, windows, `weight_per_input` and
    /// `sync_every` apply as in an enabled guard, and a step is refused in a round that does not sync. The other
    /// options have no effect, keywords of participants neither, check_guard() and list_claims() are not called, and
    /// vote_stop() is refused.
    bool enable = true;
    EndPolicy end_policy = EndPolicy::drain;
    /// Overrides the deadline of the communicators inside the guard. Positive.
    std::optional<std::chrono::nanoseconds> timeout = {};
    /// This rank's number of inputs. When every rank gives it and the communicators can abort,
    /// rounds need no roll calls. Votes, leaving early and notices other than the default are then
    /// errors.
    detail::OptionalCount inputs = {};
    /// The weight of a default notice.
    detail::OptionalCount weight_per_input = {};
    /// With default notices only every `sync_every`th training round of this guard syncs. Such a round may be skipped
    /// by `skip()`, or with `weight_per_input` by `skip({.weight = 0})`.
    std::size_t sync_every = 1;
    /// A rank that runs out adds what it accumulated in rounds that did not sync to the next
    /// reduction, once. False drops it, as PyTorch does.
    bool carry_accumulated = true;
    /// Called when this rank has shadowed more than `skew_limit` rounds in a row, at most once a
    /// minute in this process. An exception that it throws leaves the guard.
    std::function<void(std::string_view)> warn = {};
    std::size_t skew_limit = 1000;
};

namespace detail {

/// The notice of a round after `round` training rounds. A default notice, or one that sets only `skips`, gets
/// the options' weight and sync period; so does one that skips with a weight of its own, where default ones have
/// a weight.
[[nodiscard]] inline RoundNotice
completed(RoundNotice notice, JoinOptions const& options, std::size_t round) noexcept {
    OptionalCount const own =
        notice.skips && options.weight_per_input ? notice.weight : OptionalCount{};
    if (notice == RoundNotice{.weight = own, .skips = notice.skips}) {
        notice.will_sync = (round + 1) % options.sync_every == 0;
        notice.weight = own ? own : options.weight_per_input;
    }
    return notice;
}

/// Whether a participant's notice says nothing else than the one that opened the round.
[[nodiscard]] constexpr bool
repeats(RoundNotice const& notice, RoundNotice const& opened) noexcept {
    constexpr RoundNotice silent{};
    return (notice.will_sync == silent.will_sync || notice.will_sync == opened.will_sync) &&
           (notice.phase == silent.phase || notice.phase == opened.phase) &&
           (!notice.weight || notice.weight == opened.weight) && (!notice.skips || opened.skips);
}

} // namespace detail

/// The enumerator's name for error texts.
[[nodiscard]] constexpr std::string_view name_of(EndPolicy policy) noexcept {
    constexpr std::string_view names[] = {"drain", "stop_at_first", "throw_early"};
    return names[static_cast<std::size_t>(policy)];
}

}} // namespace joinable::v0
