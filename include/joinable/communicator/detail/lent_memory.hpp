// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

#include <joinable/communicator/arena.hpp>
#include <joinable/communicator/detail/board.hpp>
#include <joinable/communicator/detail/group_memory.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>

/// @file
/// Where the other ranks find the buffers of a large collective until it is done.

namespace joinable::inline v0::detail {

struct LentAddresses {
    void const* in = nullptr;
    void* out = nullptr;
};

/// Threads read and write each other's buffers where they are.
class OwnMemory {
public:
    OwnMemory() = default;
    explicit OwnMemory(std::shared_ptr<Heap> const&) noexcept {}

    [[nodiscard]] static bool lend(std::uint64_t, ConstBuffer, Buffer) noexcept { return true; }
    [[nodiscard]] static LentAddresses lent(std::uint64_t, ConstBuffer in, Buffer out) noexcept {
        return {in.data, out.data};
    }
    static void give_back(std::uint64_t) noexcept {}
};

/// Processes read and write buffers where they are in arenas, and copies of others: in memory that all
/// of them can find.
class StagedMemory {
public:
    explicit StagedMemory(std::shared_ptr<Room> room) noexcept : room_{std::move(room)} {}
    /// Of one that nobody else uses.
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

    /// Copies the input to where there is room, unless it lies in an arena. False: there is no room
    /// until something is given back. Linear in the elements.
    /// @throws ContractViolation  there will never be room. Throws what the Room throws.
    [[nodiscard]] bool lend(std::uint64_t sequence, ConstBuffer in, Buffer out) {
        bool const copies_in = !room_->reaches(in);
        bool const copies_out = !room_->reaches(out);
        bool const is_in_place = in.data == out.data && copies_in;
        std::size_t const in_bytes = copies_in ? in_cache_lines(in.bytes()) : 0;
        std::size_t const out_at = is_in_place ? 0 : in_bytes;
        std::size_t const out_end = copies_out ? out_at + in_cache_lines(out.bytes()) : 0;
        std::size_t const bytes = (std::max)(in_bytes, out_end);
        if (bytes > room_->size()) {
            throw ContractViolation{concat(
                "a collective of ",
                bytes,
                " bytes does not fit in the ",
                room_->size(),
                " bytes that a process rank shares: cut it into smaller ones"
            )};
        }
        std::byte* const copies = bytes == 0 ? nullptr : room_->allocate(bytes);
        if (bytes != 0 && copies == nullptr) {
            return false;
        }
        if (copies_in && in.count != 0) {
            std::memcpy(copies, in.data, in.bytes());
        }
        loans_[sequence % loans_.size()] = {
            copies,
            bytes,
            {copies_in ? copies : in.data, copies_out ? copies + out_at : out.data},
            copies_out ? out : Buffer{}
        };
        return true;
    }
    [[nodiscard]] LentAddresses lent(std::uint64_t sequence, ConstBuffer, Buffer) const noexcept {
        return loans_[sequence % loans_.size()].at;
    }
    /// Copies the output to the rank's own buffer, unless it was written there.
    void give_back(std::uint64_t sequence) noexcept {
        Loan& loan = loans_[sequence % loans_.size()];
        if (loan.out.count != 0) {
            std::memcpy(loan.out.data, loan.at.out, loan.out.bytes());
        }
        free(loan);
        loan = {};
    }

private:
    struct Loan {
        std::byte* copies = nullptr; ///< null: there are none
        std::size_t bytes = 0;
        LentAddresses at = {};
        Buffer out = {}; ///< what is to be copied back
    };
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

} // namespace joinable::inline v0::detail
