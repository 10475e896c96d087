// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/detail/roll_call.hpp>

#include <cstdint>
#include <span>

#include <joinable/agreement/agree.hpp>
#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION RollCall::RollCall(ControlCommunicator& control, EndPolicy policy)
    : control_{control}, policy_{policy}, joined_after_(static_cast<std::size_t>(control.size())),
      is_active_(static_cast<std::size_t>(control.size()), true) {}

JOINABLE_DEFINITION void RollCall::post(RollCallLanes const& mine, Carry const& carry) {
    mine_ = mine;
    if (mine.active != 0) {
        auto const round = static_cast<std::uint32_t>(mine.digest.sum);
        mine_.digest = Agreement::of(round ^ settings_.digest());
    }
    my_carry_ = carry;
    if (schedule_) {
        schedule_->require_promised(control_.rank(), rounds_, mine);
    } else {
        words_ = mine_.encode();
        control_.post_sum(words_);
    }
    posted_ = true;
}

JOINABLE_DEFINITION void RollCall::post_closing() {
    is_closing_ = true;
    RollCallLanes lanes;
    lanes.digest = Agreement::of(settings_.digest());
    post(lanes);
}

JOINABLE_DEFINITION Verdict RollCall::answer(std::string_view text) {
    carry_ = {};
    if (schedule_) {
        totals_ = schedule_->next();
        if (totals_.arrived > 0) {
            carry_ = schedule_->carry();
            note_arrivals(schedule_->arriving());
        }
    } else {
        control_.wait_sum();
        totals_ = RollCallLanes::decode(words_);
        if (totals_.arrived > 0) {
            exchange_arrivals();
        }
        if (totals_.failed > 0) {
            bool const has_failed = mine_.failed != 0;
            auto const size = static_cast<std::uint64_t>(control_.size());
            failure_ = DifferenceReport{control_, 0, size, true}.failure(has_failed, text);
        }
    }
    posted_ = false;
    Verdict const verdict = is_closing_ && totals_.failed == 0
                                ? totals_.digest.value(static_cast<std::uint64_t>(control_.size()))
                                      ? Verdict::end
                                      : Verdict::mismatch
                                : judge(totals_, policy_);
    if (verdict == Verdict::go_on) {
        ++rounds_;
        return verdict;
    }
    schedule_.reset();
    if (verdict == Verdict::mismatch) {
        name_difference();
    }
    return verdict;
}

JOINABLE_DEFINITION void RollCall::note_arrivals(std::vector<int> const& ranks) {
    arrived_ = ranks;
    for (int const rank : ranks) {
        is_active_[index(rank)] = false;
        joined_after_[index(rank)] = rounds_;
    }
    while (lowest_active_ + 1 < control_.size() && !is_active_[index(lowest_active_)]) {
        ++lowest_active_;
    }
}

JOINABLE_DEFINITION void RollCall::exchange_arrivals() {
    std::size_t const carry_at = (is_active_.size() + 63) / 64;
    std::vector<std::uint64_t> words(carry_at + 3);
    if (mine_.arrived != 0) {
        set_bit(words, control_.rank());
    }
    words[carry_at] = my_carry_.ranks;
    words[carry_at + 1] = my_carry_.weight;
    words[carry_at + 2] = my_carry_.weighted;
    control_.sum(words);
    std::vector<int> ranks;
    append_bits(ranks, std::span{words}.first(carry_at), 0);
    note_arrivals(ranks);
    carry_ = {words[carry_at], words[carry_at + 1], words[carry_at + 2]};
}

JOINABLE_DEFINITION void RollCall::name_setting() {
    bool const has_say = is_closing_ || mine_.active != 0;
    auto const count = is_closing_ ? static_cast<std::uint64_t>(control_.size()) : totals_.active;
    int const lowest = is_closing_ ? 0 : lowest_active_;
    failure_ = DifferenceReport{control_, lowest, count, has_say}.difference(settings_.list());
    failure_.message +=
        "; ranks have stepped by them, so values are mixed: go on from a checkpoint, with the "
        "same settings on every rank";
}

JOINABLE_DEFINITION void RollCall::name_difference() {
    if (is_closing_ ||
        (totals_.code.value(totals_.active) && !totals_.digest.value(totals_.active))) {
        name_setting();
        return;
    }
    int lowest = lowest_active_;
    std::uint64_t count = totals_.active;
    bool has_say = mine_.active != 0;
    std::optional<bool> is_weighted;
    if (totals_.silent == 0 || totals_.have_one_code()) {
        is_weighted = mine_.weighted != 0;
        has_say = has_say && mine_.silent == 0;
        count -= totals_.silent;
    }
    if (count != totals_.active) {
        lowest = DifferenceReport{control_, lowest, count, has_say}.ranks_with(has_say).front();
    }
    AgreementList list;
    list.begin_section(concat("ranks disagree about round ", rounds_, ": "));
    RoundCode::decode(static_cast<std::uint32_t>(mine_.code.sum)).agree_on(list, is_weighted);
    failure_ = DifferenceReport{control_, lowest, count, has_say}.difference(list);
    failure_.message += "; every active rank must open the same round";
}

}}} // namespace joinable::v0::detail
