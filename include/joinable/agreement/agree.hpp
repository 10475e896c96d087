// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/agreement/control.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>

/// @file
/// What fails or differs on one rank fails on all of them: the one mechanism for it.

namespace joinable { inline namespace v0 { namespace detail {

inline constexpr int max_world_size = 1 << 18; ///< so that no sum of squares overflows
inline constexpr std::uint32_t digest_mask = (1U << 23) - 1;

/// Whether all of `count` ranks added the same value F < 2^23: sum and sum of squares determine it,
/// because the mean of squares equals the square of the mean for equal values only.
struct Agreement {
    std::uint64_t sum = 0;
    std::uint64_t squares = 0;

    static Agreement of(std::uint32_t value) noexcept {
        return {value, static_cast<std::uint64_t>(value) * value};
    }
    [[nodiscard]] std::optional<std::uint32_t> value(std::uint64_t count) const noexcept;
};

/// The words of a sum that shows whether ranks have the same 64 bits: three agreements on 22 of them.
struct HashAgreement {
    static constexpr std::size_t words = 6;

    static void write(std::uint64_t* to, std::uint64_t hash) noexcept;
    static bool is_common(std::uint64_t const* sum, std::uint64_t ranks) noexcept;
};

inline constexpr std::size_t text_bytes = 256; ///< of one rank, in any message

/// A text that only one rank adds to the sum; what is too long ends with "...".
void write_text(std::span<std::uint64_t> words, std::string_view text);
std::string read_text(std::span<std::uint64_t const> words);

/// The sum of one bit per rank, from `first` on, as ranks.
void set_bit(std::span<std::uint64_t> words, int bit);
void append_bits(std::vector<int>& ranks, std::span<std::uint64_t const> words, int first);

/// What ranks ask each other when they know that they differ, in messages of one size. All ranks of
/// `control` make the same calls.
class Inquiry {
public:
    /// `lowest` of the `count` ranks that have a say; a rank without one adds nothing.
    Inquiry(ControlCommunicator& control, int lowest, std::uint64_t count, bool has_say)
        : control_{control}, lowest_{lowest}, count_{count}, has_say_{has_say} {}

    /// The ranks on which `is_so`, ascending.
    [[nodiscard]] std::vector<int> ranks_with(bool is_so);

    /// Why all ranks throw after some of them failed, the lowest with its `text`.
    [[nodiscard]] AbortReason failure(bool has_failed, std::string_view text);

    /// Why all ranks throw after the hashes of their lists differed: names the first item that does.
    [[nodiscard]] AbortReason difference(AgreementList const& list);

private:
    static constexpr std::size_t slot_count = 64;
    static constexpr int bits = 64 * slot_count * HashAgreement::words;
    static constexpr std::size_t label_bytes = 112;

    /// One item in each slot; the last one stands for all that follow.
    [[nodiscard]] std::size_t first_difference(AgreementList const& list);

    [[nodiscard]] std::span<std::uint64_t> place(std::size_t byte, std::size_t bytes) noexcept {
        return std::span{words_}.subspan(byte / 8, bytes / 8);
    }
    void write_item(std::size_t at, AgreementList::Item const& item);
    [[nodiscard]] AgreementList::Item read_item(std::size_t at);
    /// Where the name begins in "models differ: parameter 3", behind the title.
    [[nodiscard]] static std::size_t name_in(std::string const& label);
    /// "rank 1 compares models (parameter 3: f32)".
    [[nodiscard]] static std::string place_of(int rank, AgreementList::Item const& item);
    /// Labels that differ are both said, their common title once.
    [[nodiscard]] std::string text_of(int other);

    ControlCommunicator& control_;
    int lowest_;
    std::uint64_t count_;
    bool has_say_;
    std::array<std::uint64_t, slot_count * HashAgreement::words> words_{};
};

/// Collective. What the ranks without an error are to throw, where a rank has one or lists differ;
/// then a rank with an error throws its own. Throws what the communicator throws.
/// Complexity: one sum of seven words where all is well, no allocation.
[[nodiscard]] std::optional<AbortReason> find_disagreement(
    ControlCommunicator& control, AgreementList const& list, std::exception_ptr const& local_error
);

/// Collective. Returns where no rank has an error and all lists are the same. Else all ranks throw:
/// this one `local_error`, if it has one, others PeerFailed with its text, or all Mismatch that names
/// the first item that differs, two values of it and the ranks that differ from rank 0. The
/// communicator stays usable then; what else is thrown has aborted it.
void agree(
    ControlCommunicator& control,
    AgreementList const& list,
    std::exception_ptr const& local_error = {}
);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/agreement/agree.ipp>
#endif
