// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/join/options.hpp>

/// @file
/// The words of a roll call, and the verdict that every rank computes from their sum.

namespace joinable { inline namespace v0 { namespace detail {

inline constexpr std::uint64_t max_weight = std::uint64_t{1} << 45;

/// Says why a weight above max_weight is refused. A negative number became such a weight, and is one again.
[[nodiscard]] inline std::string refusal_of(std::uint64_t weight) {
    auto const given = static_cast<std::int64_t>(weight);
    return given < 0
               ? concat("a weight of ", given, " is negative; give the number of samples or tokens")
               : concat("a weight of ", given, " is above the maximum of ", max_weight);
}

/// The contents of a roll call: one rank's contribution, or the sum over all ranks. encode() packs them
/// into seven words: three counts of 20 bits share a word, and so do `code` and `silent`; `code` and
/// `digest` each have a second word for their squares.
struct RollCallLanes {
    std::uint32_t active = 0;
    std::uint32_t arrived = 0;      ///< ran out of inputs since the previous roll call
    std::uint32_t failed = 0;       ///< leaves by an exception
    std::uint32_t stop = 0;         ///< votes to stop
    std::uint32_t weighted = 0;     ///< gives a weight
    std::uint32_t contributors = 0; ///< has a gradient for this round or from before
    std::uint64_t weight = 0;       ///< in a round that syncs, with the weight held before
    Agreement code;                 ///< readable: see RoundCode
    Agreement digest;               ///< the number of the round that the rank opens
    std::uint32_t silent = 0; ///< skips without a weight, so it agrees with weights and without

    using Words = std::array<std::uint64_t, agreement_words>;

    [[nodiscard]] Words encode() const noexcept;
    static RollCallLanes decode(Words const& words) noexcept;

    /// Whether all ranks announce the same round, apart from weights.
    [[nodiscard]] bool have_one_code() const noexcept {
        return code.value(active) && digest.value(active);
    }

private:
    static constexpr unsigned count_at = 44;     ///< sums of 2^18 values below 2^23 are below 2^41
    using Fields = std::array<std::uint32_t, 3>; ///< of 20 bits each: 2^18 ranks fit
    static std::uint64_t packed(std::uint64_t a, std::uint64_t b, std::uint64_t c) noexcept {
        return a | b << 20 | c << 40;
    }
    static Fields unpacked(std::uint64_t word) noexcept;
};

/// The gradients that ranks had accumulated in rounds that did not sync before they ran out of inputs, since
/// the last round that synced. They belong to the next round that syncs.
struct Carry {
    std::uint64_t ranks = 0; ///< the ranks that accumulated anything
    std::uint64_t weight = 0;
    std::uint64_t weighted = 0; ///< those of the ranks whose batches gave weights

    Carry& operator+=(Carry const& other) noexcept {
        ranks += other.ranks;
        weight += other.weight;
        weighted += other.weighted;
        return *this;
    }

    friend constexpr bool operator==(Carry const&, Carry const&) = default;
};

/// How a rank opened a round. With look_ahead the rank announces the next round before this round's
/// collectives, and joined ranks do the same.
enum class Opening : std::uint8_t { notification, next, look_ahead };

/// The code lane: everything about a round that active ranks must agree on and that error texts
/// name.
struct RoundCode {
    Phase phase = Phase::train;
    bool syncs = false;
    Opening opening = Opening::notification;
    std::uint32_t opener = 0; ///< index of the notifying participant

    [[nodiscard]] std::uint32_t encode() const noexcept;
    static RoundCode decode(std::uint32_t code) noexcept;
    /// Lists a round for ranks that disagree about it. `is_weighted` is none if some rank that is compared
    /// is silent about it.
    void agree_on(AgreementList& list, std::optional<bool> is_weighted) const;
};

enum class Verdict : std::uint8_t {
    go_on,     ///< the round is open
    failed,    ///< a rank leaves by an exception: the others throw PeerFailed
    mismatch,  ///< active ranks announced different rounds: all throw Mismatch
    stop,      ///< a vote, or a rank has arrived under EndPolicy::stop_at_first
    early_end, ///< a rank has arrived under EndPolicy::throw_early
    end,       ///< no rank is active any more
};

/// Judges the sum in an order that gives every rank the same verdict. A failure hides a mismatch,
/// because a leaving rank cannot say what it would have done. Both hide an end.
[[nodiscard]] Verdict judge(RollCallLanes const& totals, EndPolicy policy) noexcept;

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/join/detail/impl/verdict.ipp>
#endif
