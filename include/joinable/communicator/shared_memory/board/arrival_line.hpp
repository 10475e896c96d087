// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/shared_memory/board/tuning.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Whether every rank combines for itself what all contribute; else ranks share the work by chunks.
[[nodiscard]] inline bool is_small(Descriptor const& said) noexcept {
    bool const leaves_all_with_one_share =
        said.collective == Collective::all_reduce || said.collective == Collective::broadcast ||
        said.collective == Collective::barrier || said.collective == Collective::reduce;
    return leaves_all_with_one_share && said.count * size_of(said.dtype) <= tuning::slot_bytes;
}

/// One rank's arrival in one collective, on one cache line: a small message needs no other.
///
/// `word` holds, from the top: frozen (1 bit), whether there are counts (1), root (13), descriptor
/// (11), inline count (7: 0 means that payload begins with the count instead, which matters unless
/// there are counts), sequence number (31). Arriving is one compare-and-swap on it, aborting sets
/// the frozen bit: so whether a rank has arrived before an abort is decided in one step, and every
/// rank sees the same.
struct alignas(64) ArrivalLine {
    std::atomic<std::uint64_t> word{empty};
    std::array<std::uint64_t, 7> payload{};

    static constexpr std::size_t inline_bytes = 56;
    // What a large collective has there.
    static constexpr std::size_t count = 0;
    static constexpr std::size_t in = 1;  ///< where the input is, as a place of the board
    static constexpr std::size_t out = 2; ///< and the output
    static constexpr std::size_t factor = 3;
    static constexpr std::size_t ring = 4; ///< 0, or both are in a ring of so many bytes
    static constexpr std::uint64_t frozen = std::uint64_t{1} << 63U;
    static constexpr std::uint64_t sequence_mask = (std::uint64_t{1} << 31U) - 1;
    static constexpr std::uint64_t empty = sequence_mask; ///< no collective of a fresh ring slot

    static std::uint64_t
    encode(std::uint64_t sequence, Descriptor const& said, bool is_inline) noexcept {
        std::uint64_t const inline_count = is_inline ? said.count + 1 : 0;
        return (sequence & sequence_mask) | inline_count << 31U | said.word() << 38U |
               static_cast<std::uint64_t>(said.has_counts) << 62U;
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
