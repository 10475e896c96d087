// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Memory from which the arenas of one rank are cut. One thread at a time. It is there as long as
/// its owner or an arena: so an arena may outlive its communicator.
/// @pre the memory itself stays mapped as long as `reserve` exists
class ArenaSpace {
public:
    struct Close {
        void operator()(ArenaSpace* space) const noexcept {
            space->is_closed_ = true;
            space->end_if_unused();
        }
    };
    using Owner = std::unique_ptr<ArenaSpace, Close>;
    /// Is told what is going to be written, and throws where there is no memory for it.
    using Reserve = std::function<void(std::byte const* data, std::size_t bytes)>;

    [[nodiscard]] static Owner make(std::span<std::byte> memory, Reserve reserve) {
        return Owner{new ArenaSpace{memory, std::move(reserve)}};
    }
    ArenaSpace(ArenaSpace const&) = delete;
    ArenaSpace& operator=(ArenaSpace const&) = delete;

    /// The first gap that is large enough, zeroed; nothing where there is none. Linear in the arenas.
    [[nodiscard]] std::optional<Arena> allocate(std::size_t bytes, std::size_t alignment);

    /// Whether all of `bytes` bytes from `data` on lie in this memory.
    [[nodiscard]] bool holds(void const* data, std::size_t bytes) const noexcept;

private:
    struct Range { ///< as places in the memory
        std::size_t begin;
        std::size_t end;
    };

    ArenaSpace(std::span<std::byte> memory, Reserve reserve) noexcept
        : memory_{memory}, reserve_{std::move(reserve)} {}
    ~ArenaSpace() = default;

    static void release(void* context, std::byte* data, std::size_t) noexcept;
    void end_if_unused() noexcept {
        if (is_closed_ && taken_.empty()) {
            delete this;
        }
    }

    std::span<std::byte> memory_;
    Reserve reserve_;
    std::vector<Range> taken_; ///< in the order of their places
    bool is_closed_ = false;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/board/arena_space.ipp>
#endif
