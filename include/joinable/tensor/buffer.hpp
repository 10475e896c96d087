// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 {

/// Contiguous memory that a communicator reads and writes. Does not own it.
struct Buffer {
    void* data = nullptr;
    std::size_t count = 0; ///< in elements
    DType dtype = DType::f32;

    [[nodiscard]] constexpr std::size_t bytes() const noexcept { return count * size_of(dtype); }
};

/// Contiguous memory that a communicator only reads. Does not own it.
struct ConstBuffer {
    void const* data = nullptr;
    std::size_t count = 0; ///< in elements
    DType dtype = DType::f32;

    constexpr ConstBuffer() = default;
    constexpr ConstBuffer(void const* address, std::size_t elements, DType type) noexcept
        : data{address}, count{elements}, dtype{type} {}
    // NOLINTNEXTLINE(google-explicit-constructor): reading writable memory is always safe
    constexpr ConstBuffer(Buffer buffer) noexcept
        : data{buffer.data}, count{buffer.count}, dtype{buffer.dtype} {}

    [[nodiscard]] constexpr std::size_t bytes() const noexcept { return count * size_of(dtype); }
};

namespace detail {

/// The same memory with complex numbers as pairs of reals. Others stay.
[[nodiscard]] constexpr Buffer as_reals(Buffer buffer) noexcept {
    return {buffer.data, buffer.count * reals_in(buffer.dtype), real_of(buffer.dtype)};
}

} // namespace detail

}} // namespace joinable::v0
