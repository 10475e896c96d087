// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
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

/// A part of a rank's memory, as offsets.
struct MemoryRange {
    std::size_t begin;
    std::size_t end;
    bool is_kept = false; ///< also after its arena is destroyed
};

/// Takes the lowest place that is large enough between what is taken, which is sorted by offset, once `prepare(begin)`
/// has returned. Null if there is none. `alignment` is a power of two. Linear in what is taken.
template <class Prepare>
[[nodiscard]] std::byte* take_first_fit(
    std::vector<MemoryRange>& taken,
    std::span<std::byte> memory,
    std::size_t bytes,
    std::size_t alignment,
    Prepare const& prepare
) {
    auto const start = reinterpret_cast<std::uintptr_t>(memory.data());
    std::size_t end = 0; // of the range before
    for (auto next = taken.begin();; ++next) {
        std::size_t const begin = ((start + end + alignment - 1) & ~(alignment - 1)) - start;
        bool const is_last = next == taken.end();
        std::size_t const limit = is_last ? memory.size() : next->begin;
        if (begin <= limit && bytes <= limit - begin) {
            prepare(begin);
            taken.insert(next, {begin, begin + bytes});
            return memory.data() + begin;
        }
        if (is_last) {
            return nullptr;
        }
        end = next->end;
    }
}

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
    std::mutex mutex_;               ///< for what follows
    std::vector<MemoryRange> taken_; ///< sorted by offset
    std::size_t arenas_ = 0;         ///< that are not destroyed
    bool is_closed_ = false;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/board/impl/arena_space.ipp>
#endif
