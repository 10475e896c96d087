// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstring>

#include <joinable/device/device.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Copies elements that lie one after another: on the host at once, else in the order of submissions.
inline void copy_run(Device& device, void const* from, void* to, std::size_t count, DType dtype) {
    if (count == 0 || from == to) {
        return;
    }
    if (is_on_host(device)) {
        std::memcpy(to, from, count * size_of(dtype));
        return;
    }
    auto const all = [&](void* data) {
        return AnyView{data, dtype, Shape{count}, Shape{1}, device.id()};
    };
    device.copy(all(const_cast<void*>(from)), all(to));
}

}}} // namespace joinable::v0::detail
