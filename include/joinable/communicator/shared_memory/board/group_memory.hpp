// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <mutex>
#include <new>
#include <span>
#include <vector>

#include <joinable/communicator/shared_memory/board/arena_space.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/tensor/buffer.hpp>

/// @file
/// The memory of a rank that other ranks can reach. Thread ranks and process ranks differ only in
/// this. Both allocate whole cache lines, and take back only their own.

namespace joinable { inline namespace v0 { namespace detail {

inline constexpr std::size_t cache_line = 64;

[[nodiscard]] constexpr std::size_t in_cache_lines(std::size_t bytes) noexcept {
    return (bytes + cache_line - 1) / cache_line * cache_line;
}

/// A part of a block of memory.
struct BlockPart {
    std::size_t offset;
    std::size_t bytes;
};

/// For thread ranks, which reach all memory.
class Heap {
public:
    static constexpr bool is_all_in_reach = true;
    /// Whether the other ranks can reach the buffer.
    [[nodiscard]] static bool reaches(ConstBuffer) noexcept { return true; }
    static void keep_arena(void const*) noexcept {}

    /// @throws std::bad_alloc
    [[nodiscard]] static std::byte* allocate(std::size_t bytes) {
        return static_cast<std::byte*>(::operator new(bytes, std::align_val_t{cache_line}));
    }
    /// A block whose part `zeros` is zeroed.
    /// @throws std::bad_alloc
    [[nodiscard]] static std::byte*
    allocate(std::size_t bytes, std::span<BlockPart const>, BlockPart zeros) {
        std::byte* const block = allocate(bytes);
        std::memset(block + zeros.offset, 0, zeros.bytes);
        return block;
    }
    static void free(std::byte* memory, std::size_t) noexcept {
        ::operator delete(memory, std::align_val_t{cache_line});
    }
};

/// The part of the shared memory that belongs to one process rank. Only that rank knows which bytes
/// of it are in use. Several threads may use the rank's communicators.
class Room {
public:
    static constexpr bool is_all_in_reach = false;

    /// Zeroes memory. It may give whole pages back to the system, so they are reserved again before
    /// they are used. It may throw what ArenaSpace::Reserve throws.
    using Clear = std::function<void(std::byte* data, std::size_t bytes)>;

    /// `reserve` is called before bytes are used for the first time.
    explicit Room(
        std::span<std::byte> memory,
        ArenaSpace::Reserve reserve = [](auto...) {},
        Clear clear = [](std::byte* data, std::size_t bytes) { std::memset(data, 0, bytes); }
    );
    Room(Room const&) = delete;
    Room& operator=(Room const&) = delete;

    /// The largest block that it could give if none were in use. Half of the memory from the first
    /// arena on.
    [[nodiscard]] std::size_t size() const noexcept {
        return size_.load(std::memory_order_relaxed);
    }

    /// An arena in the upper half of the memory, which allocate() then no longer uses. On the heap
    /// if there is no room. Throws what `reserve` throws.
    [[nodiscard]] Arena arena(std::size_t bytes, std::size_t alignment);
    /// Whether the other ranks can reach the buffer in place: whether it is in an arena.
    [[nodiscard]] bool reaches(ConstBuffer buffer) const noexcept {
        // Without the lock: each collective asks, and another thread may make the first arena.
        ArenaSpace const* const arenas = arenas_.load(std::memory_order_acquire);
        return arenas != nullptr && arenas->holds(buffer.data, buffer.bytes());
    }

    /// The arena in which `data` lies, if any, is never given out again.
    void keep_arena(void const* data) noexcept {
        if (ArenaSpace* const arenas = arenas_.load(std::memory_order_acquire)) {
            arenas->keep(data);
        }
    }

    /// The lowest free block, because memory that was used before is in the caches. Null if there
    /// is none. Linear in the blocks that were given. Throws what `reserve` throws.
    [[nodiscard]] std::byte* allocate(std::size_t bytes);
    /// The same, but of the block only `used` is reserved, and `zeros` is zeroed. Before the caller
    /// uses other parts, it reserves them itself.
    [[nodiscard]] std::byte*
    allocate(std::size_t bytes, std::span<BlockPart const> used, BlockPart zeros);
    void free(std::byte* memory, std::size_t bytes) noexcept;

private:
    /// Reserves what is not reserved yet of the pages of these bytes.
    void reserve(std::size_t begin, std::size_t end);
    /// The pages that lie in these bytes are no longer reserved.
    void unreserve(std::size_t begin, std::size_t end);

    std::span<std::byte> memory_;   ///< never changes
    std::atomic<std::size_t> size_; ///< of the part of it for everything but arenas
    ArenaSpace::Reserve reserve_;
    Clear clear_;
    std::vector<MemoryRange>
        unreserved_;                 ///< sorted by offset; parts of it others may have reserved
    ArenaSpace::Owner arenas_owner_; ///< from the first arena on
    std::atomic<ArenaSpace*> arenas_{nullptr}; ///< what that owns
    std::mutex mutex_;
    std::vector<MemoryRange> given_; ///< sorted by offset
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/board/impl/group_memory.ipp>
#endif
