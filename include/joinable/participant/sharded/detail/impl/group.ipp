// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/sharded/detail/group.hpp>

#include <algorithm>

#include <joinable/optimizer/shard.hpp>

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

/// Adds size(shard) over all shards.
template <class Size>
[[nodiscard]] std::size_t sum_over(std::span<ShardGroup const> groups, Size const& size) {
    std::size_t sum = 0;
    for (ShardGroup const& group : groups) {
        for (OptimizerShard const& shard : group.shards) {
            sum += size(shard);
        }
    }
    return sum;
}

[[nodiscard]] inline std::string in_column(std::size_t number, std::size_t width) {
    std::string const digits = std::to_string(number);
    return std::string(width - (std::min)(width, digits.size()), ' ') + digits;
}

JOINABLE_DEFINITION std::string
table_of_shards(std::span<ShardGroup const> groups, std::size_t ranks) {
    std::string text = "rank    elements  bytes of state\n";
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        std::size_t const elements =
            sum_over(groups, [&](OptimizerShard const& shard) { return shard.kept_count(rank); });
        std::size_t const bytes = sum_over(groups, [&](OptimizerShard const& shard) {
            return shard.kept_count(rank) * shard.state().element_bytes();
        });
        text += in_column(rank, 4) + in_column(elements, 12) + in_column(bytes, 16) + "\n";
    }
    return text;
}

JOINABLE_DEFINITION std::size_t gradient_bytes_of(std::span<ShardGroup const> groups) noexcept {
    return sum_over(groups, [](OptimizerShard const& shard) {
        return shard.reduces() ? shard.part() * shard.element() : 0;
    });
}

JOINABLE_DEFINITION std::size_t value_bytes_of(std::span<ShardGroup const> groups) noexcept {
    std::size_t bytes = 0;
    for (ShardGroup const& group : groups) {
        bytes += group.values ? group.values->bytes() : 0;
    }
    return bytes;
}

JOINABLE_DEFINITION std::size_t state_bytes_of(std::span<ShardGroup const> groups) noexcept {
    return sum_over(groups, [](OptimizerShard const& shard) { return shard.state().bytes(); });
}

}}} // namespace joinable::v0::detail
