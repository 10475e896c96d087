// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/sharded/detail/group.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::vector<std::string>
array_names(std::span<std::string_view const> names, StateArrays const& state) {
    std::vector<std::string> all{names.begin(), names.end()};
    if (state.has_masters()) {
        all.emplace_back("master");
    }
    return all;
}

JOINABLE_DEFINITION StateMessages::StateMessages(std::span<ShardGroup const> groups, Device& device)
    : device_{device} {
    std::size_t bytes = 0;
    std::size_t parameters = 0;
    for (ShardGroup const& group : groups) {
        parameters = (std::max)(parameters, group.steps.size());
        for (OptimizerShard const& shard : group.shards) {
            std::size_t const size = size_of(shard.state().computed_in());
            bytes = (std::max)(bytes, shard.bucket().count() * size);
        }
    }
    array_ = device.allocate_staging(bytes);
    if (!is_on_host(device)) {
        on_device_ = device.allocate(bytes, Arena::default_alignment);
    }
    steps.resize(parameters);
}

JOINABLE_DEFINITION AnyView array_view(
    OptimizerShard const& shard, ShardPiece const& piece, AnyView const& value, std::byte* whole
) {
    DType const dtype = shard.state().computed_in();
    Shape const& extents = value.extents();
    return {
        whole + piece.offset * size_of(dtype),
        dtype,
        extents,
        dense_strides(extents, value.strides())
    };
}

JOINABLE_DEFINITION AnyView view_of_tensor(StateTensor const& tensor) {
    auto* const elements = const_cast<std::byte*>(tensor.elements.data());
    return {elements, tensor.dtype, tensor.extents, row_major_strides(tensor.extents)};
}

}}} // namespace joinable::v0::detail
