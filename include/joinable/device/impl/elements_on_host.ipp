// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/device/elements_on_host.hpp>

#include <algorithm>

#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::span<std::byte const> ElementsOnHost::read(AnyView const& tensor) {
    std::size_t const bytes = tensor.numel() * size_of(tensor.dtype());
    auto const* data = static_cast<std::byte const*>(tensor.data());
    std::size_t const position = device_.position(tensor.device());
    Device& device = device_.at(position);
    if (bytes != 0 && !tensor.is_contiguous()) {
        dense_.resize((std::max)(dense_.size(), position + 1));
        Arena& dense = dense_[position];
        if (dense.bytes() < bytes) {
            dense = device.allocate(bytes, Arena::default_alignment);
        }
        Shape const& extents = tensor.extents();
        device.copy(
            tensor,
            {dense.data(), tensor.dtype(), extents, row_major_strides(extents), tensor.device()}
        );
        data = dense.data();
    }
    device.submit();
    if (bytes == 0 || is_on_host(device_)) {
        return {data, bytes};
    }
    if (on_host_.bytes() < bytes) {
        on_host_ = device.allocate_staging(bytes);
    }
    device.download(data, on_host_.data(), bytes);
    return {on_host_.data(), bytes};
}

}}} // namespace joinable::v0::detail
