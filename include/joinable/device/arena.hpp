// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <optional>

#include <joinable/config.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

void check_alignment(std::size_t alignment);

/// The offset within a page, in bytes, at which the arenas of a rank begin. Elements that are
/// combined have the same offset in the buffers of all ranks. If all buffers began at the start of
/// a page, as large blocks of the heap do, these elements would compete for one set of a
/// first-level cache, which has 8 or 12 lines. The ranks' arenas therefore begin as far apart as a
/// page allows. From 64 ranks on, some ranks share an offset.
[[nodiscard]] constexpr std::size_t page_offset_of(int rank, int size) noexcept {
    constexpr int lines = 64; // of 64 bytes in a page
    int const apart = size < lines ? lines / size : 1;
    return static_cast<std::size_t>(rank * apart % lines) * 64;
}

} // namespace detail

/// Owns zeroed host memory, from the heap or from a communicator. Movable, not copyable. It may
/// outlive the object that made it.
class Arena {
public:
    static constexpr std::size_t default_alignment = 64; ///< a cache line
    /// Takes back `bytes` bytes at `data`. `context` is the one with which the arena was made.
    using Release = void (*)(void* context, std::byte* data, std::size_t bytes) noexcept;

    Arena() = default;
    /// Allocates from the heap. With `page_offset`, a multiple of the alignment, the arena begins
    /// that many bytes after the start of a page of 4096 bytes.
    /// @throws std::bad_alloc; ContractViolation  alignment is not a power of two.
    explicit Arena(
        std::size_t bytes,
        std::size_t alignment = default_alignment,
        std::optional<std::size_t> page_offset = {}
    );
    /// For communicators. Calls `release`, if given, exactly once.
    Arena(std::byte* data, std::size_t bytes, Release release, void* context) noexcept
        : data_{data}, bytes_{bytes}, release_{release}, context_{context} {}
    Arena(Arena&& other) noexcept;
    Arena& operator=(Arena&& other) noexcept;
    ~Arena() {
        if (release_ != nullptr) {
            release_(context_, data_, bytes_);
        }
    }

    /// Null if the arena has no bytes.
    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
    /// The context, if the arena was made with this `release`; else null.
    [[nodiscard]] void* context_of(Release release) const noexcept {
        return release_ == release ? context_ : nullptr;
    }

private:
    static void free_block(void* block, std::byte*, std::size_t) noexcept {
        ::operator delete(block);
    }

    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
    Release release_ = nullptr;
    void* context_ = nullptr;
};

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/device/impl/arena.ipp>
#endif
