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

/// Copies a gradient that is on a device or has gaps first.
[[nodiscard]] inline bool is_zero(AnyView const& gradient, Device& device) {
    std::size_t const bytes = gradient.numel() * size_of(gradient.dtype());
    if (bytes == 0) {
        return true;
    }
    if (is_on_host(device) && gradient.is_contiguous()) {
        return are_zeros(static_cast<std::byte const*>(gradient.data()), bytes);
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
