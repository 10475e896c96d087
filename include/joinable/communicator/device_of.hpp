// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>

#include <joinable/communicator/communicator.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/host.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Communicators of host memory are not asked; they need no device_memory().
template <class C>
concept gives_device = requires(C& comm) {
    { comm.device_memory() } -> std::convertible_to<Device&>;
};

/// The device whose memory a communicator moves.
template <Communicator Comm>
[[nodiscard]] Device& device_of(Comm& comm) noexcept {
    if constexpr (reduces_host_memory<Comm>) {
        (void)comm;
        return the_host();
    } else {
        static_assert(
            gives_device<Comm>,
            "a communicator that moves device memory needs a member 'device_type& device_memory()', "
            "where device_type derives from joinable::Device; CudaDevice is in <joinable/cuda.hpp>"
        );
        return comm.device_memory();
    }
}

}}} // namespace joinable::v0::detail
