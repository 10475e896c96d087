// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include <joinable/communicator/arena.hpp>
#include <joinable/communicator/detail/arena_space.hpp>
#include <joinable/communicator/detail/board.hpp>
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
    explicit StagedMemory(std::span<std::byte> memory) noexcept : memory_{memory} {}

    /// An arena in the upper half of the memory, whose lower half is for copies from then on. From the
    /// heap, where there is no room.
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t alignment) {
        std::size_t const half = memory_.size() / 2;
        bool const is_half_free = std::all_of(loans_.begin(), loans_.end(), [&](Loan const& loan) {
            return loan.end <= half;
        });
        if (!arenas_ && is_half_free) {
            arenas_ = ArenaSpace::make(memory_.subspan(half));
            memory_ = memory_.first(half);
        }
        std::optional<Arena> arena;
        if (arenas_) {
            arena = arenas_->allocate(bytes, alignment);
        }
        return arena ? std::move(*arena) : Arena{bytes, alignment};
    }

    /// Copies the input to where there is room, unless it lies in an arena. False: there is no room
    /// until something is given back.
    /// Complexity: quadratic in the collectives in flight, at most 64; linear in the elements.
    /// @throws ContractViolation  there will never be room.
    [[nodiscard]] bool lend(std::uint64_t sequence, ConstBuffer in, Buffer out) {
        bool const copies_in = !is_in_arena(in);
        bool const copies_out = !is_in_arena(out);
        bool const is_in_place = in.data == out.data && copies_in;
        std::size_t const in_bytes = copies_in ? rounded(in.bytes()) : 0;
        std::size_t const out_at = is_in_place ? 0 : in_bytes;
        std::size_t const out_end = copies_out ? out_at + rounded(out.bytes()) : 0;
        std::size_t const bytes = (std::max)(in_bytes, out_end);
        if (bytes > memory_.size()) {
            throw ContractViolation{concat(
                "a collective of ",
                bytes,
                " bytes does not fit in the ",
                memory_.size(),
                " bytes that a process rank shares: cut it into smaller ones"
            )};
        }
        std::size_t const begin = lowest_gap(bytes);
        if (begin + bytes > memory_.size()) {
            return false;
        }
        std::byte* const copies = memory_.data() + begin;
        if (copies_in && in.count != 0) {
            std::memcpy(copies, in.data, in.bytes());
        }
        loans_[sequence % loans_.size()] = {
            begin,
            begin + bytes,
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
        loan = {};
    }

private:
    struct Loan {
        std::size_t begin = 0; ///< of the copies, as places in the memory
        std::size_t end = 0;
        LentAddresses at = {};
        Buffer out = {}; ///< what is to be copied back
    };
    [[nodiscard]] bool is_in_arena(ConstBuffer buffer) const noexcept {
        return arenas_ && arenas_->holds(buffer.data, buffer.bytes());
    }
    static constexpr std::size_t rounded(std::size_t bytes) noexcept {
        return (bytes + 63) / 64 * 64; // whole cache lines
    }
    /// The lowest, because memory that was used before is in the caches.
    [[nodiscard]] std::size_t lowest_gap(std::size_t bytes) const noexcept {
        std::size_t begin = 0;
        for (;;) {
            auto const in_the_way =
                std::find_if(loans_.begin(), loans_.end(), [&](Loan const& loan) {
                    return loan.begin < begin + bytes && begin < loan.end;
                });
            if (in_the_way == loans_.end()) {
                return begin;
            }
            begin = in_the_way->end;
        }
    }

    std::span<std::byte> memory_; ///< for copies
    ArenaSpace::Owner arenas_;
    std::array<Loan, Board::max_in_flight> loans_{};
};

} // namespace joinable::inline v0::detail
