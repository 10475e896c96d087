// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/detail/verdict.hpp>
#include <joinable/join/options.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What one rank accumulated in training rounds since the last round that synced.
struct Accumulated {
    std::size_t rounds = 0;   ///< rounds that did not sync, on any rank
    std::size_t batches = 0;  ///< the rounds to which this rank added a gradient
    std::uint64_t weight = 0; ///< the weight of this rank in those rounds

    /// Checks the weight `own` of an input before its round.
    /// @throws ContractViolation  together with the held weight it is too large to be summed over
    ///         all ranks.
    void require_summable(Phase phase, std::uint64_t own) const {
        if (own > max_weight) {
            throw ContractViolation{refusal_of(own)};
        }
        if (phase == Phase::train && own > max_weight - weight) {
            throw ContractViolation{
                "a weight of " + to_text(own) + " after " + to_text(weight) + " in " +
                to_text(rounds) + " rounds that did not sync is above the maximum of " +
                to_text(max_weight) + " together; sync more often, or weigh in a larger unit"
            };
        }
    }

    /// Counts a round in which this rank had an input of weight `own`.
    void pass(bool syncs, Phase phase, bool skips, std::uint64_t own) noexcept {
        if (!syncs && phase == Phase::train) {
            batches += skips ? 0 : 1;
            weight += own;
        }
        pass(syncs, phase);
    }
    /// Counts a round that this rank only followed.
    void pass(bool syncs, Phase phase) noexcept {
        if (syncs) {
            *this = {};
        } else if (phase == Phase::train) {
            ++rounds;
        }
    }
};

}}} // namespace joinable::v0::detail
