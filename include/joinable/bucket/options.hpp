// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace joinable { inline namespace v0 {

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
