// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace joinable { inline namespace v0 {

/// What a rank's gradients are when it has joined a guard and shadows the reductions of the others.
enum class JoinedGradients : std::uint8_t {
    /// The averages, while the guard lives; when it ends, zeros where a reduction that this rank
    /// shadowed wrote last: for engines that zero gradients, be it before the pass or after the step.
    /// Where a shadowed round reduces nothing, because no rank uses a parameter, zeros at once, or a
    /// Step would take an earlier average again.
    zeroed_at_end,
    /// The averages, also when the guard has ended: for engines that never zero them.
    kept,
    /// As this rank's last own round left them, as in PyTorch. Not beside a Step; needs
    /// JoinOptions::carry_accumulated = false. Where gradients may lie in buckets (set_grad) it
    /// allocates as much memory again.
    untouched,
};

/// What a rank sends of a parameter that its pass does not use, where another rank does.
enum class UnusedGradients : std::uint8_t {
    zero, ///< zeros, and what it accumulated in rounds that did not sync
    held, ///< what the gradient holds, be it of a round that was reduced, as in PyTorch
};

/// How gradients are cut into buckets. The same on every rank.
struct BucketOptions {
    std::size_t bucket_cap_bytes = std::size_t{25} << 20U; ///< a bucket closes when it reaches this
    /// The limit of the bucket that is launched first, at most bucket_cap_bytes: small, so that
    /// communication starts early.
    std::size_t first_bucket_bytes = std::size_t{1} << 20U;
    /// Gradients live in the buckets and are never copied; needs parameter_traits::set_grad for
    /// every parameter. They are valid as long as the reducer.
    bool gradient_as_bucket_view = false;
    /// Parameters may go without a gradient in an iteration: the engine says which before backward,
    /// and ranks exchange one small map per iteration. What no rank uses is neither sent nor
    /// touched; what another rank uses gets the average.
    bool find_unused = false;
    /// Every iteration uses the same parameters, equally often: recorded in a rank's first one,
    /// checked in all others. Finds unused parameters by itself, and sends one map in all.
    bool static_graph = false;
    /// Limits of the first bucket, the second and so on; the last one repeats. Given, they stand in
    /// for the two limits above.
    std::vector<std::size_t> bucket_caps_bytes = {};
    /// Until the order in which gradients become ready is known there is one bucket per dtype;
    /// after the first iteration it is cut by that order. Off: cut at once, from the last parameter
    /// to the first. Without effect where find_unused is on and static_graph is not.
    bool rebuild_buckets = true;
    JoinedGradients joined_gradients = JoinedGradients::zeroed_at_end;
    UnusedGradients unused_gradients = UnusedGradients::zero;
};

namespace detail {

/// Whether buckets are cut when the order of gradients is known.
[[nodiscard]] inline bool rebuilds(BucketOptions const& options) noexcept {
    return options.rebuild_buckets && (options.static_graph || !options.find_unused);
}

/// The limits of all buckets, one after another.
[[nodiscard]] inline std::vector<std::size_t> bucket_limits(BucketOptions const& options) {
    if (!options.bucket_caps_bytes.empty()) {
        return options.bucket_caps_bytes;
    }
    return {
        (std::min)(options.first_bucket_bytes, options.bucket_cap_bytes), options.bucket_cap_bytes
    };
}

} // namespace detail

}} // namespace joinable::v0
