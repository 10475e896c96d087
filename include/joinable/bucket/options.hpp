// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace joinable { inline namespace v0 {

/// The gradients of a rank that has joined a guard and shadows the reductions of the others.
enum class JoinedGradients : std::uint8_t {
    /// The averages during the guard. When it ends, zeros in every gradient whose last write was a
    /// reduction that this rank shadowed: for engines that zero gradients before the pass or after
    /// the step. If no rank uses a parameter in a round, the gradient of a rank without a pass
    /// becomes zeros at once, or a Step would use an earlier average again. If ranks with a pass
    /// have no gradient when backward() begins, because the engine drops gradients, it is released
    /// (parameter_traits with set_grad and release_grad), so that a Step skips the parameter, too.
    zeroed_at_end,
    /// The averages, also after the guard has ended: for engines that never zero gradients. A parameter
    /// that no rank uses in a round becomes what ranks with a pass have, as above.
    kept,
    /// The gradients of this rank's last own round, as in PyTorch. Not together with a Step; needs
    /// JoinOptions::carry_accumulated = false. If gradients may lie in buckets (set_grad) it
    /// allocates the same memory again.
    untouched,
};

/// The gradient that a rank sends for a parameter that its pass does not use, but another rank's does.
enum class UnusedGradients : std::uint8_t {
    zero, ///< zeros, and what it accumulated in rounds that did not sync
    held, ///< the gradient's contents, even of a reduced round, as in PyTorch
};

/// How gradients are cut into buckets. The same on every rank.
struct BucketOptions {
    std::size_t bucket_cap_bytes = std::size_t{25} << 20U; ///< a bucket closes when it reaches this
    /// The limit of the bucket that is launched first, at most bucket_cap_bytes. It is small, so
    /// that communication starts early.
    std::size_t first_bucket_bytes = std::size_t{1} << 20U;
    /// Off: threads and processes of one machine sum gradients where they lie and write the averages there. Processes
    /// copy what lies in no arena of make_arena() during the sum, a slice at a time. From when a gradient is ready, or was
    /// said to be unused, nobody else reads, writes or frees it, until backward() has returned or thrown; with the verbs,
    /// until finalize_backward() has returned, or the Join or the reducer is destroyed. That counts an engine that goes on with
    /// its pass, too; the one of libtorch gets a copy where autograd still reads the memory. Over processes an exception first
    /// finishes sums that have begun with the others, at most until the deadline: their slices need this rank's share.
    /// Other transports copy gradients into the buckets and back; so do all with gradients whose strides are not those of
    /// the bucket.
    ///
    /// On: gradients live in the buckets, so they are not copied. One that a pass has made elsewhere is copied there;
    /// threads sum it where it lies, so the same holds for it, and write its average into the bucket. Needs
    /// parameter_traits::set_grad for every parameter. The gradients are valid as long as the reducer, which releases them at its
    /// end (parameter_traits::release_grad). That is so without this option, too, for a parameter
    /// that had no gradient when its average came.
    bool gradient_as_bucket_view = false;
    /// Parameters may have no gradient in an iteration. The engine names them before backward, and
    /// ranks exchange one small map per iteration. A parameter that no rank uses is neither sent
    /// nor touched on ranks with a pass; one that another rank uses gets the average.
    bool find_unused = false;
    /// Every iteration uses the same parameters equally often. A rank records them in its first
    /// iteration and checks all others. Finds unused parameters by itself and sends one map in
    /// total.
    bool static_graph = false;
    /// Limits of the first bucket, the second and so on; the last one repeats. If given, they
    /// replace the two limits above.
    std::vector<std::size_t> bucket_caps_bytes = {};
    /// There is one bucket per dtype until the order in which gradients become ready is known.
    /// After the first iteration it is cut by that order. Off: cut at once, from the last parameter
    /// to the first. No effect with find_unused unless static_graph is on.
    bool rebuild_buckets = true;
    JoinedGradients joined_gradients = JoinedGradients::zeroed_at_end;
    UnusedGradients unused_gradients = UnusedGradients::zero;
    /// Gradients that are rows (parameter_traits::is_sparse) travel as dense ones: the rows are added in the bucket,
    /// and the parameter gets the bucket's view by set_grad; without set_grad, all its rows by set_sparse_grad.
    bool sparse_as_dense = false;
};

namespace detail {

/// Whether buckets are cut after the order of gradients is known.
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
