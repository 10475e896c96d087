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
    std::size_t ring = 0; ///< 0: of all; else of so many bytes, to which slices are copied in turn
};

/// Threads read and write each other's buffers where they are.
class OwnMemory {
public:
    static constexpr bool needs_slices = false;

    OwnMemory() = default;
    explicit OwnMemory(std::shared_ptr<Heap> const&) noexcept {}

    [[nodiscard]] static bool lend(std::uint64_t, ConstBuffer, Buffer, std::size_t) noexcept {
        return true;
    }
    [[nodiscard]] static LentAddresses lent(std::uint64_t, ConstBuffer in, Buffer out) noexcept {
        return {in.data, out.data};
    }
    [[nodiscard]] static LentAddresses own(std::uint64_t) noexcept { return {}; }
    static void copy_in(std::uint64_t, std::size_t, std::size_t) noexcept {}
    static void copy_out(std::uint64_t, std::size_t, std::size_t) noexcept {}
    static void give_back(std::uint64_t) noexcept {}
};

/// Processes read and write buffers where they are in arenas, and copies of others: in memory that all
/// of them can find.
class StagedMemory {
public:
    static constexpr bool needs_slices = true;

    explicit StagedMemory(std::shared_ptr<Room> room) noexcept : room_{std::move(room)} {}
    /// In memory that nobody else uses.
    explicit StagedMemory(std::span<std::byte> memory)
        : StagedMemory{std::make_shared<Room>(memory)} {}
    StagedMemory(StagedMemory&&) = default;
    StagedMemory& operator=(StagedMemory&&) = delete;
    ~StagedMemory() { // the collectives that are left will never be
        for (Loan const& loan : loans_) {
            free(loan);
        }
    }

    /// See Room.
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t alignment) {
        return room_->arena(bytes, alignment);
    }

    /// Copies the input to where there is room, unless it lies in an arena. A message that is larger
    /// than `ring` bytes only gets a ring of so many, if that is not 0: then its input and its output
    /// are the same, or there is only one of them. False: there is no room until something is given
    /// back. Linear in the elements.
    /// @throws ContractViolation  there will never be room. Throws what the Room throws.
    [[nodiscard]] bool
    lend(std::uint64_t sequence, ConstBuffer in, Buffer out, std::size_t ring = 0);
    [[nodiscard]] LentAddresses lent(std::uint64_t sequence, ConstBuffer, Buffer) const noexcept {
        return loans_[sequence % loans_.size()].at;
    }

    /// Where the rank itself has the buffers of a collective that moves in slices.
    [[nodiscard]] LentAddresses own(std::uint64_t sequence) const noexcept;
    /// The bytes [begin, end) of the input to their place in the ring. They do not pass its end.
    void copy_in(std::uint64_t sequence, std::size_t begin, std::size_t end) noexcept;
    /// The same from the ring to the output.
    void copy_out(std::uint64_t sequence, std::size_t begin, std::size_t end) noexcept;

    /// Copies the output to the rank's own buffer, unless it was written there.
    void give_back(std::uint64_t sequence) noexcept;

private:
    struct Loan {
        std::byte* copies = nullptr; ///< null: there are none
        std::size_t bytes = 0;
        LentAddresses at = {};
        ConstBuffer in = {}; ///< what is copied there
        Buffer out = {};     ///< what is copied back
    };
    static void copy(void* to, void const* from, std::size_t bytes) noexcept {
        if (bytes != 0) {
            std::memcpy(to, from, bytes);
        }
    }
    void free(Loan const& loan) noexcept {
        if (loan.copies != nullptr) {
            room_->free(loan.copies, loan.bytes);
        }
    }

    std::shared_ptr<Room> room_;
    std::array<Loan, Board::max_in_flight> loans_{};
};

/// Where the buffers of a rank are that has its memory from `Memory`.
template <class Memory>
using LentBy = std::conditional_t<Memory::is_all_in_reach, OwnMemory, StagedMemory>;

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/engine/lent_memory.ipp>
#endif
