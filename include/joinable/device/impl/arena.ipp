// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/device/arena.hpp>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void check_alignment(std::size_t alignment) {
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        throw ContractViolation{
            concat("memory is aligned to a power of two in bytes, but was asked for ", alignment)
        };
    }
}

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION
Arena::Arena(std::size_t bytes, std::size_t alignment, std::optional<std::size_t> page_offset) {
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

JOINABLE_DEFINITION Arena::Arena(Arena&& other) noexcept
    : data_{std::exchange(other.data_, nullptr)}, bytes_{std::exchange(other.bytes_, 0)},
      release_{std::exchange(other.release_, nullptr)}, context_{other.context_} {}

JOINABLE_DEFINITION Arena& Arena::operator=(Arena&& other) noexcept {
    Arena old{std::move(other)};
    std::swap(data_, old.data_);
    std::swap(bytes_, old.bytes_);
    std::swap(release_, old.release_);
    std::swap(context_, old.context_);
    return *this;
}

}} // namespace joinable::v0
