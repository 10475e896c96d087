// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>

#include <joinable/agreement/host_collectives.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/hook/keywords.hpp>
#include <joinable/join/round.hpp>
#include <joinable/participant/options.hpp>

namespace joinable { inline namespace v0 {

/// Keyword of a guard, for each DistributedDataParallel in it: whether gradients are divided by the
/// number of all ranks (true, the default) or of the ranks that are still active. Where notices carry
/// weights it has no effect.
inline constexpr struct divide_by_initial_world_size_t
    : keyword<divide_by_initial_world_size_t, bool> {
    using keyword::operator=;
} divide_by_initial_world_size{};

namespace detail {

/// What gradients are averaged over.
struct Averaging {
    GradientKind kind;
    bool divides_by_initial_world_size = true;

    /// What a rank's gradients are multiplied with, so that their sum is the average. Local in a
    /// guard; outside, a weighted round sums the weights, which is collective.
    /// 0 where the weights of all ranks sum to 0.
    template <Communicator Comm>
    [[nodiscard]] double factor(Comm& comm, Round const& round) const {
        double own = 1.0;
        double divisor = divides_by_initial_world_size ? comm.size() : round.contributor_count();
        if (round.is_weighted()) {
            std::uint64_t total = round.weight_sum();
            if (!round.in_guard()) { // no roll call has summed the weights
                HostCollectives host{comm};
                host.all_reduce(Buffer{&total, 1, DType::u64}, ReduceOp::sum).wait();
            }
            if (total == 0) {
                return 0.0;
            }
            own = kind == GradientKind::mean ? static_cast<double>(round.weight()) : 1.0;
            divisor = static_cast<double>(total);
        }
        return round.contributes() ? own / divisor : 0.0;
    }
};

} // namespace detail
}} // namespace joinable::v0
