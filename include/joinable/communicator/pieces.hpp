// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include <joinable/communicator/work.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>

/// @file
/// Sums of what lies in several places, one after another: a reducer need not copy gradients into a bucket.

namespace joinable { inline namespace v0 { namespace detail {

/// One of the places, and where it ends in the whole.
struct BufferPiece {
    std::uint64_t at; ///< its address; in the hands of a collective, its place as all ranks find it
    std::size_t end;  ///< the bytes of this piece and of all before it

    [[nodiscard]] static BufferPiece of(void const* data, std::size_t end) noexcept {
        return {reinterpret_cast<std::uintptr_t>(data), end};
    }
    [[nodiscard]] void* data() const noexcept { return of_address(at); }
    [[nodiscard]] static void* of_address(std::uint64_t address) noexcept {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): it was one
        return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
    }
};

/// Like a Buffer, in pieces of whole elements, of which none is empty. Owns neither them nor the list.
struct BufferPieces {
    BufferPiece* list = nullptr;
    std::size_t number = 0; ///< of pieces; 0: none
    DType dtype = DType::f32;
    /// Where the result goes, as a whole; null: into the pieces. Each piece is at its place there, or apart from it.
    void* out = nullptr;

    [[nodiscard]] std::size_t count() const noexcept {
        return list[number - 1].end / size_of(dtype);
    }
    /// The address or place of byte `offset` of the whole, like `at` of its piece. Logarithmic in the pieces.
    [[nodiscard]] std::uint64_t address_of(std::size_t offset) const noexcept {
        BufferPiece const& piece = at(offset);
        return piece.at + (offset - begin_of(piece));
    }
    /// Where a piece begins in the whole, in bytes.
    [[nodiscard]] std::size_t begin_of(BufferPiece const& piece) const noexcept {
        return &piece == list ? 0 : (&piece - 1)->end;
    }
    /// The one that has the byte `offset` of the whole. Logarithmic in the pieces.
    [[nodiscard]] BufferPiece const& at(std::size_t offset) const noexcept {
        std::size_t first = 0;
        for (std::size_t left = number; left > 1;) {
            std::size_t const half = left / 2;
            bool const is_behind = list[first + half - 1].end <= offset;
            first += is_behind ? half : 0;
            left = is_behind ? left - half : half;
        }
        return list[first];
    }
};

/// | expression                        | result | meaning                                                                   |
/// |-----------------------------------|--------|---------------------------------------------------------------------------|
/// | `comm.is_in_reach(buffer)`        | bool   | local: whether the other ranks use memory there without a copy            |
/// | `comm.sums_pieces()`              | bool   | local, the same on all ranks: whether the next one may be called          |
/// | `comm.sum_pieces(pieces, factor)` | Work   | on the other ranks all_reduce() with a factor, or this; owns the list,    |
/// |                                   |        | not its memory, until the work has ended                                  |
template <class C>
concept has_sum_of_pieces =
    requires(C& comm, ConstBuffer memory, BufferPieces const& buffer, double factor) {
        { comm.is_in_reach(memory) } -> std::same_as<bool>;
        { comm.sums_pieces() } -> std::same_as<bool>;
        { comm.sum_pieces(buffer, factor) } -> Work;
    };

/// Whether ranks sum pieces: some communicators with that member are of ranks that do not.
template <class Comm>
[[nodiscard]] bool sums_pieces(Comm const& comm) noexcept {
    if constexpr (has_sum_of_pieces<Comm>) {
        return comm.sums_pieces();
    } else {
        return false;
    }
}

/// Whether a rank reads memory of the others wherever it lies, as threads do.
template <class Comm>
[[nodiscard]] bool reaches_all(Comm const& comm) noexcept {
    if constexpr (has_sum_of_pieces<Comm>) {
        std::byte const here{}; // no process has its stack in shared memory
        return comm.is_in_reach({&here, 1, DType::u8});
    } else {
        return false;
    }
}

}}} // namespace joinable::v0::detail
