// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/device/elements_on_host.hpp>

#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::span<std::byte const> ElementsOnHost::read(AnyView const& tensor) {
    std::size_t const bytes = tensor.numel() * size_of(tensor.dtype());
    auto const* data = static_cast<std::byte const*>(tensor.data());
    if (bytes == 0 || (is_on_host(device_) && tensor.is_contiguous())) {
        return {data, bytes};
    }
    Device& device = device_.at(device_.position(tensor.device()));
    if (!tensor.is_contiguous()) {
        if (dense_.bytes() < bytes || dense_on_ != &device) {
            dense_ = device.allocate(bytes, Arena::default_alignment);
            dense_on_ = &device;
        }
        Shape const& extents = tensor.extents();
        device.copy(
            tensor,
            {dense_.data(), tensor.dtype(), extents, row_major_strides(extents), tensor.device()}
        );
        data = dense_.data();
    }
    device.submit();
    if (is_on_host(device_)) {
        return {data, bytes};
    }
    if (on_host_.bytes() < bytes) {
        on_host_ = device.allocate_staging(bytes);
    }
    device.download(data, on_host_.data(), bytes);
    return {on_host_.data(), bytes};
}

}}} // namespace joinable::v0::detail
