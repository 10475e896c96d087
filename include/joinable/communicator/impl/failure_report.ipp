// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/failure_report.hpp>

#include <cstring>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::string read_text(std::span<std::uint64_t const> words) {
    std::string text(8 * words.size(), '\0');
    std::memcpy(text.data(), words.data(), text.size());
    std::erase(text, '\0');
    return text;
}

JOINABLE_DEFINITION void
append_bits(std::vector<int>& ranks, std::span<std::uint64_t const> words, int first) {
    for (int bit = 0; bit < 64 * static_cast<int>(words.size()); ++bit) {
        if (((words[static_cast<std::size_t>(bit / 64)] >> (bit % 64)) & 1U) != 0) {
            ranks.push_back(first + bit);
        }
    }
}

JOINABLE_DEFINITION std::vector<int> FailureReport::ranks_with(bool is_so) {
    constexpr int bits = 64 * static_cast<int>(message_words);
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

JOINABLE_DEFINITION AbortReason FailureReport::failure(bool has_failed, std::string_view text) {
    std::vector<int> ranks = ranks_with(has_failed);
    words_ = {};
    write_text(place(0, text_bytes), text);
    control_.broadcast(words_, ranks.front());
    std::string message = failure_text(ranks, read_text(place(0, text_bytes)));
    return reason(FailureKind::peer_failed, std::move(ranks), std::move(message));
}

}}} // namespace joinable::v0::detail
