// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/communicator/make_arena.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/host.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Allocates buckets for classes that know no communicator: in the memory that a communicator
/// moves, from make_arena(), or on the heap. Refers to the communicator.
class BufferMemory {
public:
    BufferMemory() = default; ///< the heap
    template <Communicator Comm>
    explicit BufferMemory(Comm& comm) noexcept
        : device_{&detail::device_of(comm)}, comm_{&comm},
          make_{[](void* from, std::size_t bytes, [[maybe_unused]] std::size_t position) {
              if constexpr (requires(Comm& several) { several.allocate_at(position, bytes); }) {
                  return static_cast<Comm*>(from)->allocate_at(position, bytes);
              } else {
                  return make_arena(*static_cast<Comm*>(from), bytes);
              }
          }} {}

    /// The device that reads and writes the arenas; it may stand for several.
    [[nodiscard]] Device& device() const noexcept { return *device_; }
    [[nodiscard]] DeviceId id() const noexcept { return device_->id(); }
    /// `position` is that of a device among several.
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t position = 0) const {
        return make_ == nullptr ? Arena{bytes} : make_(comm_, bytes, position);
    }

private:
    Device* device_ = &detail::the_host();
    void* comm_ = nullptr;
    Arena (*make_)(void* comm, std::size_t bytes, std::size_t position) = nullptr;
};

}}} // namespace joinable::v0::detail
