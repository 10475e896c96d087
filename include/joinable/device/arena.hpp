// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

inline void check_alignment(std::size_t alignment) {
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        throw ContractViolation{
            concat("memory is aligned to a power of two in bytes, but was asked for ", alignment)
        };
    }
}

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
    ) {
        detail::check_alignment(alignment);
        if (bytes == 0) {
            return;
        }
        std::size_t const offset = page_offset.value_or(0);
        if (page_offset) {
            alignment = (std::max)(alignment, std::size_t{4096});
        }
        std::size_t room = bytes + alignment + offset;
        if (room < bytes) {
            throw std::bad_alloc{};
        }
        void* const block = ::operator new(room);
        void* start = block;
        std::align(alignment, bytes + offset, start, room);
        std::byte* const data = static_cast<std::byte*>(start) + offset;
        std::memset(data, 0, bytes);
        *this = Arena{data, bytes, &free_block, block};
    }
    /// For communicators. Calls `release` once, if it is given.
    Arena(std::byte* data, std::size_t bytes, Release release, void* context) noexcept
        : data_{data}, bytes_{bytes}, release_{release}, context_{context} {}
    Arena(Arena&& other) noexcept
        : data_{std::exchange(other.data_, nullptr)}, bytes_{std::exchange(other.bytes_, 0)},
          release_{std::exchange(other.release_, nullptr)}, context_{other.context_} {}
    Arena& operator=(Arena&& other) noexcept {
        Arena old{std::move(other)};
        std::swap(data_, old.data_);
        std::swap(bytes_, old.bytes_);
        std::swap(release_, old.release_);
        std::swap(context_, old.context_);
        return *this;
    }
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
