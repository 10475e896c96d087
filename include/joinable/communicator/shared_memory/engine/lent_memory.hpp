// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

#include <joinable/communicator/pieces.hpp>
#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/board/group_memory.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/tensor/buffer.hpp>

/// @file
/// Where the other ranks find the buffers of a large collective until it is done.

namespace joinable { inline namespace v0 { namespace detail {

struct LentAddresses {
    void const* in = nullptr;
    void* out = nullptr;
    std::size_t ring = 0;   ///< bytes of the ring to which slices are copied in turn; 0: no ring
    std::size_t pieces = 0; ///< `in` is a list of so many; 0: it is the input
};

/// For threads, which access each other's buffers in place.
class OwnMemory {
public:
    static constexpr bool needs_slices = false;

    OwnMemory() = default;
    explicit OwnMemory(std::shared_ptr<Heap> const&) noexcept {}

    [[nodiscard]] static bool lend(std::uint64_t, ConstBuffer, Buffer, std::size_t) noexcept {
        return true;
    }
    [[nodiscard]] static bool
    lend_pieces(std::uint64_t, BufferPieces const&, std::size_t) noexcept {
        return true;
    }
    [[nodiscard]] static LentAddresses lent(std::uint64_t, ConstBuffer in, Buffer out) noexcept {
        return {in.data, out.data};
    }
    [[nodiscard]] static LentAddresses lent(std::uint64_t, BufferPieces const& pieces) noexcept {
        return {pieces.list, pieces.out != nullptr ? pieces.out : pieces.list, 0, pieces.number};
    }
    [[nodiscard]] static LentAddresses own(std::uint64_t) noexcept { return {}; }
    [[nodiscard]] static BufferPieces own_pieces(std::uint64_t) noexcept { return {}; }
    static void copy_in(std::uint64_t, std::size_t, std::size_t) noexcept {}
    static void copy_out(std::uint64_t, std::size_t, std::size_t) noexcept {}
    static void give_back(std::uint64_t) noexcept {}
    static void keep(std::uint64_t, Board&) noexcept {}
};

/// For processes. They access buffers in arenas in place, and other buffers through copies in
/// memory that all processes can reach.
class StagedMemory {
public:
    static constexpr bool needs_slices = true;

    explicit StagedMemory(std::shared_ptr<Room> room) noexcept : room_{std::move(room)} {}
    /// Uses memory that nothing else uses.
    explicit StagedMemory(std::span<std::byte> memory)
        : StagedMemory{std::make_shared<Room>(memory)} {}
    StagedMemory(StagedMemory&&) = default;
    StagedMemory& operator=(StagedMemory&&) = delete;
    ~StagedMemory() { // the remaining collectives never complete
        for (Loan const& loan : loans_) {
            free(loan);
        }
    }

    /// See Room.
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t alignment) {
        return room_->arena(bytes, alignment);
    }

    /// Copies the input to free shared memory, unless it is in an arena. If `ring` is not 0, a
    /// larger message gets only a ring of that many bytes; its input and output must then be the
    /// same, or one of them empty. Returns false if there is no room until something is given back.
    /// Linear in the elements.
    /// @throws ContractViolation  there will never be room. Throws what the Room throws.
    [[nodiscard]] bool
    lend(std::uint64_t sequence, ConstBuffer in, Buffer out, std::size_t ring = 0);
    /// Copies the list of pieces if they and their result lie in arenas; the caller makes their addresses places. Else
    /// copies the pieces as above, in one place or by a ring. Returns false as above.
    /// @throws ContractViolation  there will never be room for it. Throws what the Room throws.
    [[nodiscard]] bool
    lend_pieces(std::uint64_t sequence, BufferPieces const& pieces, std::size_t ring = 0);
    [[nodiscard]] LentAddresses lent(std::uint64_t sequence, ConstBuffer, Buffer) const noexcept {
        return loans_[sequence % loans_.size()].at;
    }
    /// Of pieces that lie in arenas, the addresses of the list and of the result: the list again if that goes into them.
    [[nodiscard]] LentAddresses lent(std::uint64_t sequence, BufferPieces const&) const noexcept {
        return loans_[sequence % loans_.size()].at;
    }

    /// The rank's own addresses of the buffers of a collective that moves in slices.
    [[nodiscard]] LentAddresses own(std::uint64_t sequence) const noexcept;
    /// The pieces of its input, and of its output if own() has none; none if they are in one place or in arenas.
    [[nodiscard]] BufferPieces own_pieces(std::uint64_t sequence) const noexcept {
        return loans_[sequence % loans_.size()].parts;
    }
    /// Copies the bytes [begin, end) of the input to their place in the ring. They must not pass
    /// its end.
    void copy_in(std::uint64_t sequence, std::size_t begin, std::size_t end) noexcept;
    /// Copies them from the ring to the output.
    void copy_out(std::uint64_t sequence, std::size_t begin, std::size_t end) noexcept;

    /// Copies the output to the rank's own buffer, unless it was written there directly.
    void give_back(std::uint64_t sequence) noexcept;

    /// Memory to which other ranks write for a collective is never used again: a rank that was
    /// stopped in its share of the work may still write there when it goes on. Pieces have places of `board`.
    void keep(std::uint64_t sequence, Board& board) noexcept;

private:
    struct Loan {
        std::byte* copies = nullptr; ///< null: nothing was copied
        std::size_t bytes = 0;
        LentAddresses at = {};
        ConstBuffer in = {}; ///< copied to `copies`
        Buffer out = {};     ///< copied back from there
        /// Copied likewise, in place of `in`; the output is copied to them if there is no other one.
        BufferPieces parts = {};
        bool is_kept = false;
    };
    /// @throws ContractViolation  there will never be so much.
    void require_room(std::size_t bytes) const;
    [[nodiscard]] bool are_in_reach(BufferPieces const& pieces) const noexcept;
    static void copy(void* to, void const* from, std::size_t bytes) noexcept {
        if (bytes != 0) {
            std::memcpy(to, from, bytes);
        }
    }
    void free(Loan const& loan) noexcept {
        if (loan.copies != nullptr && !loan.is_kept) {
            room_->free(loan.copies, loan.bytes);
        }
    }

    std::shared_ptr<Room> room_;
    std::array<Loan, Board::max_in_flight> loans_{};
};

/// The class for a rank that has its memory from `Memory`.
template <class Memory>
using LentBy = std::conditional_t<Memory::is_all_in_reach, OwnMemory, StagedMemory>;

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/engine/impl/lent_memory.ipp>
#endif
