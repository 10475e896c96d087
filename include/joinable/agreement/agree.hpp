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
#include <utility>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/agreement/control.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
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
    [[nodiscard]] std::optional<std::uint32_t> value(std::uint64_t count) const noexcept {
        if (count == 0) {
            return 0;
        }
        std::uint64_t const mean = sum / count;
        if (sum % count != 0 || squares != count * mean * mean) {
            return {};
        }
        return static_cast<std::uint32_t>(mean);
    }
};

/// The words of a sum that shows whether ranks have the same 64 bits: three agreements on 22 of them.
struct HashAgreement {
    static constexpr std::size_t words = 6;

    static void write(std::uint64_t* to, std::uint64_t hash) noexcept {
        for (unsigned part = 0; part < 3; ++part) {
            constexpr std::uint64_t mask = (1U << 22) - 1;
            auto const said =
                Agreement::of(static_cast<std::uint32_t>((hash >> (22 * part)) & mask));
            to[2 * part] = said.sum;
            to[2 * part + 1] = said.squares;
        }
    }
    static bool is_common(std::uint64_t const* sum, std::uint64_t ranks) noexcept {
        return Agreement{sum[0], sum[1]}.value(ranks) && Agreement{sum[2], sum[3]}.value(ranks) &&
               Agreement{sum[4], sum[5]}.value(ranks);
    }
};

inline constexpr std::size_t text_bytes = 256; ///< of one rank, in any message

/// A text that only one rank adds to the sum; what is too long ends with "...".
inline void write_text(std::span<std::uint64_t> words, std::string_view text) {
    std::size_t const space = 8 * words.size();
    std::string written{text.substr(0, space)};
    if (text.size() > space) {
        written.replace(space - 3, 3, "...");
    }
    std::memcpy(words.data(), written.data(), written.size());
}
inline std::string read_text(std::span<std::uint64_t const> words) {
    std::string text(8 * words.size(), '\0');
    std::memcpy(text.data(), words.data(), text.size());
    std::erase(text, '\0');
    return text;
}

/// The sum of one bit per rank, from `first` on, as ranks.
inline void set_bit(std::span<std::uint64_t> words, int bit) {
    words[static_cast<std::size_t>(bit / 64)] |= std::uint64_t{1} << (bit % 64);
}
inline void append_bits(std::vector<int>& ranks, std::span<std::uint64_t const> words, int first) {
    for (int bit = 0; bit < 64 * static_cast<int>(words.size()); ++bit) {
        if (((words[static_cast<std::size_t>(bit / 64)] >> (bit % 64)) & 1U) != 0) {
            ranks.push_back(first + bit);
        }
    }
}

/// What ranks ask each other when they know that they differ, in messages of one size. All ranks of
/// `control` make the same calls.
class Inquiry {
public:
    /// `lowest` of the `count` ranks that have a say; a rank without one adds nothing.
    Inquiry(ControlCommunicator& control, int lowest, std::uint64_t count, bool has_say)
        : control_{control}, lowest_{lowest}, count_{count}, has_say_{has_say} {}

    /// The ranks on which `is_so`, ascending.
    [[nodiscard]] std::vector<int> ranks_with(bool is_so) {
        std::vector<int> ranks;
        for (int first = 0; first < control_.size(); first += bits) {
            words_ = {};
            int const mine = control_.rank() - first;
            if (is_so && mine >= 0 && mine < bits) {
                set_bit(words_, mine);
            }
            control_.sum(words_);
            append_bits(ranks, words_, first);
        }
        return ranks;
    }

    /// Why all ranks throw after some of them failed, the lowest with its `text`.
    [[nodiscard]] AbortReason failure(bool has_failed, std::string_view text) {
        std::vector<int> ranks = ranks_with(has_failed);
        words_ = {};
        write_text(place(0, text_bytes), text);
        control_.broadcast(words_, ranks.front());
        std::string message = failure_text(ranks, read_text(place(0, text_bytes)));
        return {FailureKind::peer_failed, std::move(ranks), std::move(message)};
    }

    /// Why all ranks throw after the hashes of their lists differed: names the first item that does.
    [[nodiscard]] AbortReason difference(AgreementList const& list) {
        std::size_t const item = first_difference(list);
        words_ = {list.hash(item)};
        control_.broadcast(words_, lowest_);
        std::vector<int> ranks = ranks_with(has_say_ && list.hash(item) != words_[0]);
        int const other = ranks.empty() ? lowest_ : ranks.front();
        words_ = {};
        bool const is_lowest = control_.rank() == lowest_;
        if ((is_lowest || control_.rank() == other) && item < list.items().size()) {
            write_item(is_lowest ? 0 : text_bytes, list.items()[item]);
        }
        control_.sum(words_);
        std::string text = text_of(other);
        if (ranks.size() > 1) {
            text += concat("; ", ranks_text(ranks), " differ from rank ", lowest_);
        }
        return {FailureKind::mismatch, std::move(ranks), std::move(text)};
    }

private:
    static constexpr std::size_t slot_count = 64;
    static constexpr int bits = 64 * slot_count * HashAgreement::words;
    static constexpr std::size_t label_bytes = 112;

    /// One item in each slot; the last one stands for all that follow.
    [[nodiscard]] std::size_t first_difference(AgreementList const& list) {
        constexpr std::size_t last = slot_count - 1;
        for (std::size_t first = 0;; first += last) {
            words_ = {};
            for (std::size_t slot = 0; has_say_ && slot < slot_count; ++slot) {
                std::size_t const item = first + slot;
                HashAgreement::write(
                    &words_[slot * HashAgreement::words],
                    slot == last ? list.hash_from(item) : list.hash(item)
                );
            }
            control_.sum(words_);
            std::size_t slot = 0;
            while (slot < slot_count &&
                   HashAgreement::is_common(&words_[slot * HashAgreement::words], count_)) {
                ++slot;
            }
            if (slot != last) {
                return first + slot;
            }
        }
    }

    [[nodiscard]] std::span<std::uint64_t> place(std::size_t byte, std::size_t bytes) noexcept {
        return std::span{words_}.subspan(byte / 8, bytes / 8);
    }
    void write_item(std::size_t at, AgreementList::Item const& item) {
        write_text(place(at, label_bytes), item.label);
        write_text(place(at + label_bytes, text_bytes - label_bytes), item.value);
    }
    [[nodiscard]] AgreementList::Item read_item(std::size_t at) {
        AgreementList::Item item{read_text(place(at, label_bytes)), "nothing"};
        if (!item.label.empty()) {
            item.value = read_text(place(at + label_bytes, text_bytes - label_bytes));
        }
        return item;
    }
    /// Where the name begins in "models differ: parameter 3", behind the title.
    [[nodiscard]] static std::size_t name_in(std::string const& label) {
        std::size_t const colon = label.find(": ");
        return colon == std::string::npos ? 0 : colon + 2;
    }
    /// "rank 1 compares models (parameter 3: f32)".
    [[nodiscard]] static std::string place_of(int rank, AgreementList::Item const& item) {
        std::string const title = item.label.substr(0, item.label.find(" differ: "));
        return concat("rank ", rank, " compares ", title, " (") +
               item.label.substr(name_in(item.label)) + ": " + item.value + ")";
    }
    /// Labels that differ are both said, their common title once.
    [[nodiscard]] std::string text_of(int other) {
        auto const [label, value] = read_item(0);
        auto const there = read_item(text_bytes);
        std::size_t const name = name_in(there.label);
        std::string const text = (label.empty() ? there.label : label) + ": rank ";
        std::string const has = concat(lowest_, " has ", value, ", rank ", other, " has ");
        if (label == there.label || label.empty() || there.label.empty()) {
            return text + has + there.value;
        }
        if (label.substr(0, name_in(label)) == there.label.substr(0, name)) {
            return text + has + there.label.substr(name) + ": " + there.value;
        }
        return "ranks are at different places of the program: " +
               place_of(lowest_, {label, value}) + ", " + place_of(other, there) +
               "; do the same on every rank, in the same order";
    }

    ControlCommunicator& control_;
    int lowest_;
    std::uint64_t count_;
    bool has_say_;
    std::array<std::uint64_t, slot_count * HashAgreement::words> words_{};
};

/// Collective. What the ranks without an error are to throw, where a rank has one or lists differ;
/// then a rank with an error throws its own. Throws what the communicator throws.
/// Complexity: one sum of seven words where all is well, no allocation.
[[nodiscard]] inline std::optional<AbortReason> find_disagreement(
    ControlCommunicator& control, AgreementList const& list, std::exception_ptr const& local_error
) {
    std::array<std::uint64_t, 1 + HashAgreement::words> words{};
    words[0] = local_error ? 1 : 0;
    HashAgreement::write(&words[1], list.hash_from(0));
    control.sum(words);
    auto const ranks = static_cast<std::uint64_t>(control.size());
    Inquiry inquiry{control, 0, ranks, true};
    if (words[0] != 0) {
        return inquiry.failure(local_error != nullptr, failure_of(local_error).message);
    }
    if (!HashAgreement::is_common(&words[1], ranks)) {
        return inquiry.difference(list);
    }
    return {};
}

/// Collective. Returns where no rank has an error and all lists are the same. Else all ranks throw:
/// this one `local_error`, if it has one, others PeerFailed with its text, or all Mismatch that names
/// the first item that differs, two values of it and the ranks that differ from rank 0. The
/// communicator stays usable then; what else is thrown has aborted it.
inline void agree(
    ControlCommunicator& control,
    AgreementList const& list,
    std::exception_ptr const& local_error = {}
) {
    std::optional<AbortReason> failure;
    try {
        failure = find_disagreement(control, list, local_error);
    } catch (...) {
        control.abort(blamed_on(control.rank(), reason_of(std::current_exception())));
        throw;
    }
    if (local_error) {
        std::rethrow_exception(local_error);
    }
    if (failure) {
        throw_failure(*failure);
    }
}

}}} // namespace joinable::v0::detail
