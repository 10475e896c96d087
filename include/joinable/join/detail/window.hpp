// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/detail/verdict.hpp>
#include <joinable/join/options.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Before a guard, a participant's gradients of batches that no round has reduced.
enum class Accumulated : std::uint8_t { none, zeros, numbers };

/// The training rounds since the last one that synced, as one rank counts them. It lives across guards,
/// because gradients do, and ends where gradients are reduced.
struct Window {
    std::size_t rounds = 0;        ///< rounds that did not sync, on any rank
    std::size_t batches = 0;       ///< those to which this rank added a gradient
    std::uint64_t weight = 0;      ///< of these batches
    bool is_weighted = false;      ///< whether these batches gave a weight
    std::size_t last_batches = 0;  ///< of the last of these rounds
    std::uint64_t last_weight = 0; ///< likewise

    /// Whether the gradients of this rank hold something.
    [[nodiscard]] bool is_open() const noexcept { return batches != 0; }
    /// Whether the next average counts anything of it. A batch that was skipped may have a weight.
    [[nodiscard]] bool is_empty() const noexcept { return batches == 0 && weight == 0; }
    /// Whether two participants of a rank hold the same batches.
    [[nodiscard]] bool holds_the_same(Window const& other) const noexcept {
        return batches == other.batches && weight == other.weight &&
               is_weighted == other.is_weighted;
    }

    /// Checks a notice before its round. The rank adds `own` to its weight.
    /// @throws ContractViolation  together with the held weight it is too large to be summed over
    ///         all ranks; or it has a weight and the batches of the window have none, or the reverse.
    void require_continued(RoundNotice const& notice, std::uint64_t own) const {
        if (own > max_weight) {
            throw ContractViolation{refusal_of(own)};
        }
        if (notice.phase != Phase::train) {
            return;
        }
        if (own > max_weight - weight) {
            throw ContractViolation{
                "a weight of " + to_text(own) + " after " + to_text(weight) + " in " +
                to_text(rounds) + " rounds that did not sync is above the maximum of " +
                to_text(max_weight) + " together; sync more often, or weigh in a larger unit"
            };
        }
        if (is_open() && !notice.skips && notice.weight.has_value() != is_weighted) {
            throw ContractViolation{concat(
                "the gradients hold ",
                batches,
                is_weighted
                    ? " batches with weights that no round has reduced, but this round has no weight"
                    : " batches without weights that no round has reduced, but this round has a weight",
                "; discard_window(), or give weights as in the rounds before"
            )};
        }
    }

    /// Counts a round in which this rank had an input of weight `own`.
    void pass(bool syncs, RoundNotice const& notice, std::uint64_t own) noexcept {
        if (!syncs && notice.phase == Phase::train) {
            last_batches = notice.skips ? 0 : 1;
            last_weight = own;
            batches += last_batches;
            weight += own;
            is_weighted = notice.skips ? is_weighted : notice.weight.has_value();
        }
        pass(syncs, notice.phase);
    }
    /// Counts a round that this rank only followed.
    void pass(bool syncs, Phase phase) noexcept {
        if (syncs) {
            *this = {};
        } else if (phase == Phase::train) {
            ++rounds;
        }
    }
    /// The gradients were cleared before the pass of the last round, or, with `in_round` false, after it.
    void clear(bool in_round) noexcept {
        *this = in_round
                    ? Window{1, last_batches, last_weight, is_weighted, last_batches, last_weight}
                    : Window{};
    }
};

}}} // namespace joinable::v0::detail
