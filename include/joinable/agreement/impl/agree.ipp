// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/agreement/agree.hpp>

#include <array>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::optional<std::uint32_t> Agreement::value(std::uint64_t count
) const noexcept {
    if (count == 0) {
        return 0;
    }
    std::uint64_t const mean = sum / count;
    if (sum % count != 0 || squares != count * mean * mean) {
        return {};
    }
    return static_cast<std::uint32_t>(mean);
}

JOINABLE_DEFINITION void HashAgreement::write(std::uint64_t* to, std::uint64_t hash) noexcept {
    for (unsigned part = 0; part < 3; ++part) {
        constexpr std::uint64_t mask = (1U << 22) - 1;
        auto const sums = Agreement::of(static_cast<std::uint32_t>((hash >> (22 * part)) & mask));
        to[2 * part] = sums.sum;
        to[2 * part + 1] = sums.squares;
    }
}

JOINABLE_DEFINITION bool
HashAgreement::is_common(std::uint64_t const* sum, std::uint64_t ranks) noexcept {
    return Agreement{sum[0], sum[1]}.value(ranks) && Agreement{sum[2], sum[3]}.value(ranks) &&
           Agreement{sum[4], sum[5]}.value(ranks);
}

JOINABLE_DEFINITION AbortReason DifferenceReport::difference(AgreementList const& list) {
    std::size_t const item = first_difference(list);
    words_ = {list.hash(item)};
    control_.broadcast(words_, lowest_);
    std::vector<int> ranks = ranks_with(has_say_ && list.hash(item) != words_[0]);
    int const other = ranks.empty() ? lowest_ : ranks.front();
    words_ = {};
    bool const is_lowest = control_.rank() == lowest_;
    if ((is_lowest || control_.rank() == other) && item < list.items().size()) {
        auto const& [label, value] = list.items()[item];
        std::size_t const at = is_lowest ? 0 : text_bytes;
        write_text(place(at, label_bytes), label);
        write_text(place(at + label_bytes, text_bytes - label_bytes), value);
    }
    control_.sum(words_);
    std::string text = text_of(other);
    if (ranks.size() > 1) {
        text += concat("; ", ranks_text(ranks), " differ from rank ", lowest_);
    }
    return reason(FailureKind::mismatch, std::move(ranks), std::move(text));
}

JOINABLE_DEFINITION std::size_t DifferenceReport::first_difference(AgreementList const& list) {
    for (std::size_t first = 0;; first += slot_count) {
        words_ = {};
        for (std::size_t slot = 0; has_say_ && slot < slot_count; ++slot) {
            HashAgreement::write(&words_[slot * HashAgreement::words], list.hash(first + slot));
        }
        control_.sum(words_);
        bool const has_ended = words_ == decltype(words_){}; // no list has an item there
        std::size_t slot = 0;
        while (slot < slot_count &&
               HashAgreement::is_common(&words_[slot * HashAgreement::words], count_)) {
            ++slot;
        }
        if (slot != slot_count || has_ended) {
            return first + slot;
        }
    }
}

JOINABLE_DEFINITION AgreementList::Item DifferenceReport::read_item(std::size_t at) {
    AgreementList::Item item{read_text(place(at, label_bytes)), "nothing"};
    if (!item.label.empty()) {
        item.value = read_text(place(at + label_bytes, text_bytes - label_bytes));
    }
    return item;
}

JOINABLE_DEFINITION std::string
DifferenceReport::place_of(int rank, AgreementList::Item const& item) {
    std::string const title = item.label.substr(0, item.label.find(" differ: "));
    return concat("rank ", rank, " compares ", title, " (") +
           item.label.substr(name_in(item.label)) + ": " + item.value + ")";
}

JOINABLE_DEFINITION std::string DifferenceReport::text_of(int other) {
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
    return "ranks are at different places of the program: " + place_of(lowest_, {label, value}) +
           ", " + place_of(other, there) + "; do the same on every rank, in the same order";
}

JOINABLE_DEFINITION std::optional<AbortReason> find_disagreement(
    ControlCommunicator& control,
    AgreementList const& list,
    std::exception_ptr const& local_error,
    std::uint64_t* tally
) {
    constexpr unsigned errors = 20; // bits of their count
    static_assert(agreement_words == 1 + HashAgreement::words);
    std::array<std::uint64_t, agreement_words> words{};
    words[0] = (local_error ? 1U : 0U) | (tally != nullptr ? *tally << errors : 0);
    HashAgreement::write(&words[1], list.hash_from(0));
    control.sum(words);
    if (tally != nullptr) {
        *tally = words[0] >> errors;
    }
    words[0] &= (1U << errors) - 1;
    auto const ranks = static_cast<std::uint64_t>(control.size());
    DifferenceReport report{control, 0, ranks, true};
    if (words[0] != 0) {
        return report.failure(local_error != nullptr, failure_of(local_error).message);
    }
    if (!HashAgreement::is_common(&words[1], ranks)) {
        return report.difference(list);
    }
    return {};
}

JOINABLE_DEFINITION void agree(
    ControlCommunicator& control, AgreementList const& list, std::exception_ptr const& local_error
) {
    throw_if_any_failed(
        local_error,
        [&] { return find_disagreement(control, list, local_error); },
        [&](AbortReason const& reason) { abort_for(control, reason); }
    );
}

}}} // namespace joinable::v0::detail
