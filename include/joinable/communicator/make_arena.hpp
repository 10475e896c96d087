// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

#include <joinable/communicator/arena.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>

namespace joinable::inline v0 {

/// Zeroed memory for buffers that go through `comm`: where it needs no copies of them, if it
/// models AllocatesArena, else from the heap. Local.
template <Communicator Comm>
[[nodiscard]] Arena
make_arena(Comm& comm, std::size_t bytes, std::size_t alignment = Arena::default_alignment) {
    if constexpr (AllocatesArena<Comm>) {
        return comm.allocate(bytes, alignment);
    } else {
        return Arena{bytes, alignment};
    }
}

/// Where arenas come from, for classes that know no communicator: the heap, or make_arena(). Refers
/// to the communicator.
class ArenaSource {
public:
    ArenaSource() = default; ///< the heap
    template <Communicator Comm>
    explicit ArenaSource(Comm& comm) noexcept
        : comm_{&comm}, make_{[](void* from, std::size_t bytes) {
              return make_arena(*static_cast<Comm*>(from), bytes);
          }} {}

    [[nodiscard]] Arena operator()(std::size_t bytes) const {
        return make_ == nullptr ? Arena{bytes} : make_(comm_, bytes);
    }

private:
    void* comm_ = nullptr;
    Arena (*make_)(void* comm, std::size_t bytes) = nullptr;
};

} // namespace joinable::inline v0
