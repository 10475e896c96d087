// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <joinable/communicator/detail/board.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>

/// @file
/// Where the other ranks find the buffers of a large collective until it is done.

namespace joinable::inline v0::detail {

struct LentAddresses {
    void const* in;
    void* out;
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

/// Processes read and write copies, in memory that has the same address in all of them.
class StagedMemory {
public:
    explicit StagedMemory(std::span<std::byte> memory) noexcept : memory_{memory} {}

    /// Copies the input to where there is room. False: there is none until something is given back.
    /// Complexity: quadratic in the collectives in flight, at most 64; linear in the elements.
    /// @throws ContractViolation  there will never be room.
    [[nodiscard]] bool lend(std::uint64_t sequence, ConstBuffer in, Buffer out) {
        bool const is_in_place = in.data == out.data;
        std::size_t const out_at = is_in_place ? 0 : rounded(in.bytes());
        std::size_t const bytes = (std::max)(rounded(in.bytes()), out_at + rounded(out.bytes()));
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
        if (in.count != 0) {
            std::memcpy(memory_.data() + begin, in.data, in.bytes());
        }
        loans_[sequence % loans_.size()] = {begin, begin + bytes, begin + out_at, out};
        return true;
    }
    [[nodiscard]] LentAddresses lent(std::uint64_t sequence, ConstBuffer, Buffer) const noexcept {
        Loan const& loan = loans_[sequence % loans_.size()];
        return {memory_.data() + loan.begin, memory_.data() + loan.out_at};
    }
    /// Copies the output to the rank's own buffer.
    void give_back(std::uint64_t sequence) noexcept {
        Loan& loan = loans_[sequence % loans_.size()];
        if (loan.out.count != 0) {
            std::memcpy(loan.out.data, memory_.data() + loan.out_at, loan.out.bytes());
        }
        loan = {};
    }

private:
    struct Loan {
        std::size_t begin = 0; ///< as places in the memory
        std::size_t end = 0;
        std::size_t out_at = 0;
        Buffer out = {};
    };
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

    std::span<std::byte> memory_;
    std::array<Loan, Board::max_in_flight> loans_{};
};

} // namespace joinable::inline v0::detail
