// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <joinable/bucket/options.hpp>

namespace joinable { inline namespace v0 {

/// What a rank's gradient is, where notices carry weights: g is the gradient, w the weight, both of
/// all its samples since the last round that synced.
enum class GradientKind : std::uint8_t {
    mean, ///< the mean over the rank's own samples: the average is sum(w * g) / sum(w)
    sum,  ///< their sum: the average is sum(g) / sum(w)
};

/// When buffers are sent in a round that syncs. Both wait for the round's roll call: before the
/// forward pass the wait is in the way, after it the pass has hidden it.
enum class BufferSync : std::uint8_t { after_forward, before_forward };

/// How gradients are cut into buckets (see BucketOptions) and averaged, and what keeps the rest of a
/// model the same.
/// The same on every rank.
struct DataParallelOptions {
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
    /// Buffers are sent from the lowest active rank in every round that syncs, and at the start and
    /// the end with the model. Rounds that accumulate do not send them. Off: each rank has its own.
    bool broadcast_buffers = true;
    GradientKind gradient_kind = GradientKind::mean;
    /// Limits of the first bucket, the second and so on; the last one repeats. Given, they stand in
    /// for the two limits above.
    std::vector<std::size_t> bucket_caps_bytes = {};
    /// Until the order in which gradients become ready is known there is one bucket per dtype;
    /// after the first iteration it is cut by that order. Off: cut at once, from the last parameter
    /// to the first. Without effect where find_unused is on and static_graph is not.
    bool rebuild_buckets = true;
    BufferSync buffer_sync = BufferSync::after_forward;
    /// Take rank 0's values at construction; off: they are the same on all ranks already.
    bool sync_at_start = true;
    /// When a guard ends, take the values of the last rank that trained.
    bool sync_at_end = true;
    /// What a joined rank keeps in its gradients.
    JoinedGradients joined_gradients = JoinedGradients::zeroed_at_end;
    /// What a rank sends of a parameter that its pass does not use.
    UnusedGradients unused_gradients = UnusedGradients::zero;
    /// For debugging: hashes each gradient at ready(i) and again when the backward pass has ended, and
    /// throws ContractViolation with the name of one that changed in between. Nothing is sent before that,
    /// so nothing overlaps. Gradients are in host memory.
    bool verify_ready = false;
};

/// What the buckets of a model need to know of its options.
[[nodiscard]] inline BucketOptions bucket_options(DataParallelOptions const& options) {
    return {
        .bucket_cap_bytes = options.bucket_cap_bytes,
        .first_bucket_bytes = options.first_bucket_bytes,
        .gradient_as_bucket_view = options.gradient_as_bucket_view,
        .find_unused = options.find_unused,
        .static_graph = options.static_graph,
        .bucket_caps_bytes = options.bucket_caps_bytes,
        .rebuild_buckets = options.rebuild_buckets,
        .joined_gradients = options.joined_gradients,
        .unused_gradients = options.unused_gradients,
    };
}

}} // namespace joinable::v0
