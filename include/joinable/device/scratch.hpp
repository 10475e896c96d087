// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Memory of a device for a while, such as for a tensor whose elements have to be rearranged. It grows
/// on demand.
class Scratch {
public:
    explicit Scratch(Device& device) noexcept : device_{device} {}

    [[nodiscard]] std::byte* data(std::size_t bytes) {
        if (arena_.bytes() < bytes) {
            if (is_on_host(device_)) {
                arena_ = Arena{};
            } else { // freeing it would wait for the device
                bytes = (std::max)(bytes, 2 * arena_.bytes());
                former_.push_back(std::move(arena_));
            }
            arena_ = device_.allocate(bytes, Arena::default_alignment);
        }
        return arena_.data();
    }

private:
    Device& device_;
    Arena arena_;
    std::vector<Arena> former_;
};

}}} // namespace joinable::v0::detail
