// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string_view>

#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/communicator/work.hpp>

namespace joinable { inline namespace v0 {

/// Sends nothing: each rank keeps its own gradients, bit for bit, and steps by them. For local SGD, beside a
/// PeriodicAverage. Passes, buffers, guards and timelines are those of any model, and no bucket is told to a timeline,
/// because none travels. No map of used parameters and no ready order is sent either: `find_unused` and `static_graph`
/// concern the marks of each rank alone. Buckets have memory only with `gradient_as_bucket_view`.
///
/// Joined ranks, and those that skip(), keep what their gradients hold. A Step in such a guard runs on active ranks only.
///
/// There is no average, so what defines one is refused: weights, GradientKind::sum, the keyword
/// divide_by_initial_world_size, sharded optimizers; and what needs equal values, sync_at_end and verify_replicas.
struct NoReduction {
    static constexpr std::string_view name = "NoReduction";
    static constexpr bool delivers = false;
    static constexpr bool sends = false;

    /// So that no factor reaches a gradient.
    template <class Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return true;
    }
    template <class Comm>
    [[nodiscard]] static CompletedWork
    start(Comm&, BucketRun const&, double /*factor*/, bool /*contributes*/) noexcept {
        return {};
    }
    template <class Comm>
    static void finish(Comm&, BucketRun const&) noexcept {}
};

}} // namespace joinable::v0
