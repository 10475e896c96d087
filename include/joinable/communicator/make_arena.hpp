// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/device/arena.hpp>

namespace joinable { inline namespace v0 {

/// Allocates zeroed memory for buffers that go through `comm`. If `comm` models AllocatesArena, it
/// provides memory that it need not copy. Otherwise the memory is from the heap or the device.
/// Local.
template <Communicator Comm>
[[nodiscard]] Arena
make_arena(Comm& comm, std::size_t bytes, std::size_t alignment = Arena::default_alignment) {
    if constexpr (AllocatesArena<Comm>) {
        return comm.allocate(bytes, alignment);
    } else if constexpr (detail::gives_device<Comm>) {
        return comm.device_memory().allocate(bytes, alignment);
    } else {
        if (alignment > Arena::default_alignment) { // it may not start at a multiple of it
            return Arena{bytes, alignment};
        }
        return Arena{bytes, alignment, detail::page_offset_of(comm.rank(), comm.size())};
    }
}

}} // namespace joinable::v0
