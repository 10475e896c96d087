// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include <joinable/optimizer/before_step.hpp>
#include <joinable/optimizer/partition.hpp>
#include <joinable/participant/options.hpp>
#include <joinable/participant/sharded/zero_options.hpp>

namespace joinable { inline namespace v0 {

/// Options of a ShardedDataParallel. All except `before_step` must be the same on every rank.
struct ShardedOptions {
    Sharding sharding = Sharding::optimizer;
    Partition partition = Partition::by_parameters;
    /// The owner of each parameter of the constructor's list, instead of the rule of by_parameters.
    std::vector<int> owners = {};
    /// Gradients and values travel in buckets, which close when they reach this size. From
    /// Sharding::gradients on a rank has memory for two of them, and for as many more as fill at
    /// the same time. With Sharding::parameters such a run of parameters is a unit, unless `units`
    /// says otherwise. The values of two units exist at a time, plus those of units that a pass
    /// holds longer.
    std::size_t bucket_cap_bytes = std::size_t{25} << 20U;
    GradientKind gradient_kind = GradientKind::mean;
    /// As in DataParallelOptions.
    bool broadcast_buffers = true;
    BufferSync buffer_sync = BufferSync::after_forward;
    bool sync_at_end = true;
    /// As in ZeroOptions.
    std::function<bool(ShardGradients const&)> before_step = {};
    std::vector<SharedObject> shared = {};
    /// Steps what this rank owns of a bucket as soon as its averages arrive, while the backward
    /// pass still runs. `ready(i)` then also means that the pass no longer reads value i, and
    /// `unused` that it reads none of the listed values. Settings must be set before backward().
    /// After a failure in the pass some owners have stepped: continue from a checkpoint. From
    /// Sharding::gradients on; not together with `before_step`, which sees all gradients before the
    /// first step.
    bool step_in_backward = false;
    /// As in DataParallelOptions, if all ranks have all averages. Off: a rank has each gradient
    /// twice, its own and the one in a bucket.
    bool gradient_as_bucket_view = false;
    /// As in DataParallelOptions, if all ranks have all averages. From Sharding::gradients on,
    /// gradients travel during the pass, and are compared at its end. One that is released at
    /// ready(i) is found if the pass makes it anew.
    bool verify_ready = false;
    /// With Sharding::parameters: the number of parameters in each unit, in list order, such as
    /// those of each layer, instead of runs of bucket_cap_bytes. For the constructor's list;
    /// frozen parameters count, and a unit of only frozen ones is not gathered.
    std::vector<std::size_t> units = {};
    /// As in ZeroOptions, with Sharding::optimizer or Sharding::gradients.
    bool parameters_as_bucket_view = false;
};

namespace detail {

/// The options that the optimizer needs.
[[nodiscard]] inline ZeroOptions zero_options(ShardedOptions const& options) {
    return {
        // If each rank steps everything, it steps whole parameters.
        .partition =
            options.sharding == Sharding::none ? Partition::by_parameters : options.partition,
        .owners = options.owners,
        .bucket_cap_bytes = options.bucket_cap_bytes,
        .reduces_gradients = detail::reduces_to_owners(options.sharding),
        .before_step = options.before_step,
        .shared = options.shared,
        .parameters_as_bucket_view = options.parameters_as_bucket_view,
    };
}

/// The options that the passes need.
[[nodiscard]] inline DataParallelOptions data_parallel_options(ShardedOptions const& options) {
    return {
        .bucket_cap_bytes = options.bucket_cap_bytes,
        .gradient_as_bucket_view = options.gradient_as_bucket_view,
        .broadcast_buffers = options.broadcast_buffers,
        .gradient_kind = options.gradient_kind,
        .buffer_sync = options.buffer_sync,
        .sync_at_end = options.sync_at_end,
        .verify_ready = options.verify_ready,
    };
}

} // namespace detail

}} // namespace joinable::v0
