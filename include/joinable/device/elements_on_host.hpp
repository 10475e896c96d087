// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/element_hash.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Shows the host the elements of tensors in row-major order. Copies what is on a device or has gaps. Local.
class ElementsOnHost {
public:
    explicit ElementsOnHost(Device& device) noexcept : device_{device} {}

    /// The bytes of a tensor's elements, as they are after all that the engine has requested so far. Valid until
    /// the next call, and as long as the tensor's memory. Blocks until a device has come so far.
    [[nodiscard]] std::span<std::byte const> read(AnyView const& tensor);
    /// The same elements as one number: see hash_elements().
    [[nodiscard]] std::uint64_t hash(AnyView const& tensor) {
        return hash_elements(read(tensor).data(), 0, tensor.numel(), tensor.dtype());
    }

private:
    Device& device_;
    std::vector<Arena> dense_; ///< of each device, by its position
    Arena on_host_;            ///< if those are not
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/device/impl/elements_on_host.ipp>
#endif
