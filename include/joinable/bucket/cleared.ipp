// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/bucket/cleared.hpp>

#include <algorithm>
#include <cstddef>
#include <vector>

#include <joinable/device/arena.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

namespace cleared {

[[nodiscard]] inline bool are_zeros(std::byte const* bytes, std::size_t count) {
    return std::all_of(bytes, bytes + count, [](std::byte byte) { return byte == std::byte{}; });
}

/// The elements from `dimension` on, which begin at `data`.
[[nodiscard]] inline bool
are_zeros(AnyView const& view, std::byte const* data, std::size_t dimension) {
    std::size_t const element = size_of(view.dtype());
    if (dimension == view.extents().size()) {
        return are_zeros(data, element);
    }
    for (std::size_t i = 0; i < view.extents()[dimension]; ++i) {
        if (!are_zeros(view, data + i * view.strides()[dimension] * element, dimension + 1)) {
            return false;
        }
    }
    return true;
}

/// Copies a gradient of a device first, because its layout is the engine's.
[[nodiscard]] inline bool is_zero(AnyView const& gradient, Device& device) {
    std::size_t const bytes = gradient.numel() * size_of(gradient.dtype());
    if (bytes == 0) {
        return true;
    }
    if (is_on_host(device)) {
        auto const* const data = static_cast<std::byte const*>(gradient.data());
        return gradient.is_contiguous() ? are_zeros(data, bytes) : are_zeros(gradient, data, 0);
    }
    Arena const dense = device.allocate(bytes, size_of(gradient.dtype()));
    Shape const& extents = gradient.extents();
    device.copy(
        gradient,
        {dense.data(), gradient.dtype(), extents, row_major_strides(extents), gradient.device()}
    );
    device.submit();
    std::vector<std::byte> on_host(bytes);
    device.download(dense.data(), on_host.data(), bytes);
    return are_zeros(on_host.data(), bytes);
}

} // namespace cleared

JOINABLE_DEFINITION bool are_cleared(ParameterList const& parameters, Device& device) {
    for (AnyParameter const& parameter : parameters) {
        AnyView const gradient = parameter.requires_grad() ? parameter.grad() : AnyView{};
        if (gradient && !cleared::is_zero(gradient, device)) {
            return false;
        }
    }
    return true;
}

}}} // namespace joinable::v0::detail
