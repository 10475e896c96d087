// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Memory that is divided into the arenas of one rank. Any thread may use it: arenas of several
/// communicators lie in it. Its owner or any arena keeps it alive, so an arena may outlive its
/// communicator.
/// @pre the memory itself stays mapped while `reserve` exists
class ArenaSpace {
public:
    struct Close {
        void operator()(ArenaSpace* space) const noexcept {
            space->finish([space] { space->is_closed_ = true; });
        }
    };
    using Owner = std::unique_ptr<ArenaSpace, Close>;
    /// Called before memory is written for the first time. Throws if the system cannot provide it.
    using Reserve = std::function<void(std::byte const* data, std::size_t bytes)>;

    [[nodiscard]] static Owner make(std::span<std::byte> memory, Reserve reserve) {
        return Owner{new ArenaSpace{memory, std::move(reserve)}};
    }
    ArenaSpace(ArenaSpace const&) = delete;
    ArenaSpace& operator=(ArenaSpace const&) = delete;

    /// Takes the first gap that is large enough, zeroed; nothing if there is none. Linear in the
    /// number of arenas.
    [[nodiscard]] std::optional<Arena> allocate(std::size_t bytes, std::size_t alignment);

    /// Whether all of `bytes` bytes from `data` on lie in this memory.
    [[nodiscard]] bool holds(void const* data, std::size_t bytes) const noexcept;

    /// The arena in which `data` lies, if any, is never given out again: a stopped process may still
    /// write there when it goes on.
    void keep(void const* data) noexcept;

private:
    struct Range { ///< as offsets in the memory
        std::size_t begin;
        std::size_t end;
        bool is_kept = false; ///< even after the arena is destroyed
    };

    ArenaSpace(std::span<std::byte> memory, Reserve reserve) noexcept
        : memory_{memory}, reserve_{std::move(reserve)} {}
    ~ArenaSpace() = default;

    static void release(void* context, std::byte* data, std::size_t) noexcept;
    /// Calls f() under the lock, and then ends this object if nothing uses it any more.
    template <class F>
    void finish(F const& f) noexcept {
        bool is_unused = false;
        {
            std::lock_guard const lock{mutex_};
            f();
            is_unused = is_closed_ && arenas_ == 0;
        }
        if (is_unused) { // so no other thread can come
            delete this;
        }
    }

    std::span<std::byte> memory_;
    Reserve reserve_;
    std::mutex mutex_;         ///< for what follows
    std::vector<Range> taken_; ///< sorted by offset
    std::size_t arenas_ = 0;   ///< that are not destroyed
    bool is_closed_ = false;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/board/impl/arena_space.ipp>
#endif
