// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <joinable/bucket/options.hpp>

namespace joinable { inline namespace v0 {

/// The meaning of a rank's gradient if notices carry weights. g is the gradient and w the weight; both
/// cover all samples of the rank since the last round that synced.
enum class GradientKind : std::uint8_t {
    mean, ///< the mean over the rank's own samples; the average is sum(w * g) / sum(w)
    sum,  ///< the sum over them; the average is sum(g) / sum(w). Gradients of f16 over NCCL then
          ///< need kernels (CudaDevice::use_kernels) if f16 cannot hold 1 / sum(w): otherwise the
          ///< round is a ContractViolation on all ranks before a gradient is sent
};

/// When buffers are sent in a round that syncs. Both wait for the round's roll call. Before the
/// forward pass this wait costs time; after it, the pass has hidden the roll call.
enum class BufferSync : std::uint8_t { after_forward, before_forward };

/// How gradients are cut into buckets (see BucketOptions) and averaged, and how the rest of a model
/// is kept equal. The same on every rank.
struct DataParallelOptions {
    std::size_t bucket_cap_bytes = std::size_t{25} << 20U;  ///< see BucketOptions
    std::size_t first_bucket_bytes = std::size_t{1} << 20U; ///< see BucketOptions
    bool gradient_as_bucket_view = false;                   ///< see BucketOptions
    /// Parameters may have no gradient in an iteration. The engine names them before backward, those
    /// that were frozen since they were listed count without being named, and ranks exchange one small
    /// map per iteration before the first bucket, in a guard by its control communicator. A parameter that no rank uses is neither sent nor touched on ranks with a pass;
    /// one that another rank uses gets the average.
    bool find_unused = false;
    bool static_graph = false; ///< see BucketOptions
    /// Buffers are sent from the lowest active rank in every round that syncs, and with the model
    /// at the start and the end. Rounds that accumulate do not send them. Off: each rank keeps its
    /// own.
    bool broadcast_buffers = true;
    GradientKind gradient_kind = GradientKind::mean;
    std::vector<std::size_t> bucket_caps_bytes = {}; ///< see BucketOptions
    bool rebuild_buckets = true;                     ///< see BucketOptions
    BufferSync buffer_sync = BufferSync::after_forward;
    /// Take rank 0's values at construction. Off: they must be equal on all ranks already.
    bool sync_at_start = true;
    /// When a guard ends, take the values of the last rank that trained.
    bool sync_at_end = true;
    /// The gradients that a joined rank keeps.
    JoinedGradients joined_gradients = JoinedGradients::zeroed_at_end;
    /// The gradient that a rank sends for a parameter that its pass does not use.
    UnusedGradients unused_gradients = UnusedGradients::zero;
    /// For debugging. Hashes each gradient at ready(i) and again after the backward pass, and
    /// throws ContractViolation with the name of a gradient that changed in between. Nothing is
    /// sent before that, so nothing overlaps. Gradients must be in host memory.
    bool verify_ready = false;
    /// Thread ranks may share the memory of values, as long as each has gradients of its own. Off: a
    /// ContractViolation when the model is made. Turn sync_at_start and sync_at_end off as well,
    /// because what is sent is written by all ranks.
    bool shares_values = false;
    /// For debugging. In every so many rounds that train and sync, ranks compare the bits of the values
    /// that they train, after the forward pass. A difference is a Mismatch that names the ranks and
    /// the first parameter. Joined ranks compare theirs in a guard with a Step or a sharded optimizer,
    /// which then has to step this model. Where a guard ends, the ranks that trained to its end
    /// compare once more. Costs one sum of six words, and one pass over all values; a device copies
    /// them to the host first. 0: never.
    std::size_t verify_replicas = 0;
    /// In every so many rounds that train and sync, the model writes its data_parallel_report() as a
    /// line, on each rank on which report_to() said where to. 0: never.
    std::size_t report_every = 0;
    std::string_view model_name = {}; ///< for reports; its characters must outlive the model
    /// Parameters and buffers that each rank keeps for itself, by their names in a module, where `*`
    /// stands for any letters or none. They are neither averaged nor sent. For
    /// joinable::torch::DistributedDataParallel alone: others take the list of what they average.
    std::vector<std::string> ignore = {};
    /// Parameters of a module whose gradients are sparse, by their names as in `ignore`, beside the
    /// weights of Embedding and EmbeddingBag with sparse(true), which are found. They travel as the
    /// rows that ranks have. Others say so by parameter_traits::is_sparse.
    std::vector<std::string> sparse = {};
    /// Gradients that are rows travel in buckets, as dense ones do: for a batch that uses most rows, an optimizer that
    /// takes no rows, a reduction, or a communicator without all_gather. They are added up in the bucket, which is the
    /// dense gradient's only memory. The parameter gets the average there: by parameter_traits::set_grad as a dense
    /// gradient; without set_grad by set_sparse_grad as rows, all of them. As for a bucket view, the
    /// memory is valid until the next iteration begins or the model ends.
    bool sparse_as_dense = false;
};

namespace detail {

/// The options that the buckets of a model need.
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
        .sparse_as_dense = options.sparse_as_dense,
    };
}

} // namespace detail

}} // namespace joinable::v0
