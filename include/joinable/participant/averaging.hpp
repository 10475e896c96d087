// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>

#include <joinable/communicator/control.hpp>
#include <joinable/hook/keywords.hpp>
#include <joinable/join/round.hpp>
#include <joinable/participant/options.hpp>

namespace joinable { inline namespace v0 {

/// Keyword of a guard, for each DistributedDataParallel in it. Gradients are divided by the number
/// of all ranks (true, the default) or of the contributing ranks (Round::contributor_count()). It
/// has no effect if notices carry weights.
inline constexpr struct divide_by_initial_world_size_t
    : keyword<divide_by_initial_world_size_t, bool> {
    using keyword::operator=;
} divide_by_initial_world_size{};

namespace detail {

/// How gradients are averaged.
struct Averaging {
    GradientKind kind;
    bool divides_by_initial_world_size = true;
    double last_divisor = 0; ///< of the last round, for reports; no round is divided by it

    /// The factor of a rank's gradients that makes their sum the average; 0 if the weights of all
    /// ranks sum to 0. Calls accept(f), which may throw, if the gradients of all ranks are multiplied
    /// by f, one over a sum of weights: on ranks that contribute nothing, too. Local in a guard.
    /// Outside a guard a weighted round sums the weights by `words`, which is collective.
    template <class Accept>
    [[nodiscard]] double
    factor(ControlCommunicator& words, Round const& round, Accept const& accept) {
        double own = 1.0;
        double divisor = divides_by_initial_world_size ? words.size() : round.contributor_count();
        if (round.is_weighted()) {
            std::uint64_t total = round.weight_sum();
            if (!round.in_guard()) { // no roll call has summed the weights
                words.sum({&total, 1});
            }
            if (total == 0) {
                last_divisor = 0;
                return 0.0;
            }
            own = kind == GradientKind::mean ? static_cast<double>(round.weight()) : 1.0;
            divisor = static_cast<double>(total);
            if (kind == GradientKind::sum) {
                accept(1.0 / divisor);
            }
        }
        last_divisor = divisor;
        return round.contributes() ? own / divisor : 0.0;
    }
};

} // namespace detail
}} // namespace joinable::v0
