// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/detail/shard_plan.hpp>

#include <algorithm>

#include <joinable/optimizer/shard.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void agree_on_options(AgreementList& list, ZeroOptions const& options) {
    list.add("partition", is_flat(options) ? "flat" : "by_parameters");
    list.add("bucket_cap_bytes", options.bucket_cap_bytes);
    list.add("reduces_gradients", options.reduces_gradients);
    list.add("has before_step", static_cast<bool>(options.before_step));
    std::vector<std::size_t> shared;
    for (joinable::SharedObject const& object :
         options.shared) { // there is one of shared memory, too
        shared.push_back(object.bytes());
    }
    list.add("bytes of shared objects", shared);
}

JOINABLE_DEFINITION void
check_averaged(ShardGroup const& group, std::vector<void const*> const& averaged) {
    std::vector<void const*> sorted = averaged;
    std::sort(sorted.begin(), sorted.end());
    for (OptimizerShard const& shard : group.shards) {
        for (ShardPiece const& piece : shard.bucket().pieces) {
            void const* const value = group.parameters[piece.parameter].value().data();
            if (!std::binary_search(sorted.begin(), sorted.end(), value)) {
                throw ContractViolation{concat(
                    describe_parameter(group.parameters, piece.parameter),
                    " is stepped by ZeroRedundancyOptimizer, but no participant of this guard averages its "
                    "gradient; give DistributedDataParallel the same parameters"
                )};
            }
        }
    }
}

}}} // namespace joinable::v0::detail
