// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <optional>

#include <joinable/config.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

void check_alignment(std::size_t alignment);

/// Where in a page the arenas of a rank begin, in bytes. Elements that are combined have the same place in
/// the buffers of all ranks. Where all buffers begin at the start of a page, as large blocks of the heap do,
/// these elements compete for one set of a first-level cache, which has 8 or 12 lines. So the ranks' arenas
/// begin as far apart as a page allows; from 64 ranks on some share a place.
[[nodiscard]] constexpr std::size_t page_offset_of(int rank, int size) noexcept {
    constexpr int lines = 64; // of 64 bytes in a page
    int const apart = size < lines ? lines / size : 1;
    return static_cast<std::size_t>(rank * apart % lines) * 64;
}

} // namespace detail

/// Zeroed host memory, from the heap or from wherever a communicator has it. Owns it; moves, never
/// copies. The object that it came from need not live as long.
class Arena {
public:
    static constexpr std::size_t default_alignment = 64; ///< a cache line
    /// Takes back `bytes` bytes at `data`. `context` is what the arena was made with.
    using Release = void (*)(void* context, std::byte* data, std::size_t bytes) noexcept;

    Arena() = default;
    /// From the heap. With `page_offset`, a multiple of the alignment, it begins that many bytes
    /// behind the start of a page of 4096 bytes.
    /// @throws std::bad_alloc; ContractViolation  alignment is no power of two.
    explicit Arena(
        std::size_t bytes,
        std::size_t alignment = default_alignment,
        std::optional<std::size_t> page_offset = {}
    );
    /// For communicators. Calls `release` once, if it is given.
    Arena(std::byte* data, std::size_t bytes, Release release, void* context) noexcept
        : data_{data}, bytes_{bytes}, release_{release}, context_{context} {}
    Arena(Arena&& other) noexcept;
    Arena& operator=(Arena&& other) noexcept;
    ~Arena() {
        if (release_ != nullptr) {
            release_(context_, data_, bytes_);
        }
    }

    /// Null if it has no bytes.
    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

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
#include <joinable/device/arena.ipp>
#endif
