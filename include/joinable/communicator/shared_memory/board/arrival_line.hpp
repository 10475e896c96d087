// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/shared_memory/board/tuning.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Whether every rank combines all contributions for itself; else the ranks share the work in
/// chunks.
[[nodiscard]] inline bool is_small(Descriptor const& signature) noexcept {
    bool const leaves_all_with_one_share = signature.collective == Collective::all_reduce ||
                                           signature.collective == Collective::broadcast ||
                                           signature.collective == Collective::barrier ||
                                           signature.collective == Collective::reduce;
    return leaves_all_with_one_share &&
           signature.count * size_of(signature.dtype) <= tuning::slot_bytes;
}

/// One rank's arrival in one collective, on one cache line. A small message needs no other line.
///
/// `word` holds, from the highest bit: frozen (1 bit), has counts (1), root (13), descriptor (11),
/// inline count (7), sequence number (31). An inline count of 0 means that the payload begins with
/// the count, which is compared unless there are counts. A rank arrives by one compare-and-swap on
/// `word`; an abort sets the frozen bit. One step thus decides whether a rank has arrived before an
/// abort, and all ranks see the same.
struct alignas(64) ArrivalLine {
    std::atomic<std::uint64_t> word{empty};
    std::array<std::uint64_t, 7> payload{};

    static constexpr std::size_t inline_bytes = 56;
    // The payload of a large collective:
    static constexpr std::size_t count = 0;
    /// Address of the input, as an offset from the board; of the list of its pieces, if it has some.
    static constexpr std::size_t in = 1;
    /// Likewise of the output; the same address if both are one, also in pieces.
    static constexpr std::size_t out = 2;
    static constexpr std::size_t factor = 3;
    static constexpr std::size_t ring = 4; ///< size of the ring that has both, in bytes; 0: no ring
    static constexpr std::size_t pieces = 5; ///< their number; 0: it is in one place
    static constexpr std::uint64_t frozen = std::uint64_t{1} << 63U;
    static constexpr std::uint64_t sequence_mask = (std::uint64_t{1} << 31U) - 1;
    static constexpr std::uint64_t empty = sequence_mask; ///< no collective in a fresh slot has it

    static std::uint64_t
    encode(std::uint64_t sequence, Descriptor const& signature, bool is_inline) noexcept {
        std::uint64_t const inline_count = is_inline ? signature.count + 1 : 0;
        return (sequence & sequence_mask) | inline_count << 31U | signature.word() << 38U |
               static_cast<std::uint64_t>(signature.has_counts) << 62U;
    }
    [[nodiscard]] static bool tells_count(std::uint64_t word) noexcept {
        return (word >> 31U & 0x7fU) == 0 && (word >> 62U & 1U) == 0;
    }
    [[nodiscard]] static Descriptor
    decode(std::uint64_t word, std::array<std::uint64_t, 7> const& payload) noexcept {
        std::uint64_t const inline_count = word >> 31U & 0x7fU;
        return Descriptor::of_word(
            word >> 38U & 0xff'ffffU,
            static_cast<std::size_t>(inline_count != 0 ? inline_count - 1 : payload[count]),
            (word >> 62U & 1U) != 0
        );
    }
};

}}} // namespace joinable::v0::detail
