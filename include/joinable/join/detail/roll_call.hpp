// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/control.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/detail/schedule.hpp>
#include <joinable/join/detail/verdict.hpp>
#include <joinable/join/options.hpp>

/// @file
/// The agreement that opens every round: one sum of seven words, from which every rank computes
/// the same verdict. Knows nothing of guards, participants or RAII.

namespace joinable { inline namespace v0 { namespace detail {

/// Who is where, and the exchanges that find it out. All ranks of `control` make the same calls.
class RollCall {
public:
    RollCall(ControlCommunicator& control, EndPolicy policy)
        : control_{control}, policy_{policy},
          joined_after_(static_cast<std::size_t>(control.size())),
          is_active_(static_cast<std::size_t>(control.size()), true) {}

    /// Starts a roll call; `answer()` ends it. Asynchronous, no allocation. `carry` is what this rank
    /// accumulated, if it arrives.
    /// @throws ContractViolation  it is not what the schedule says, if there is one.
    void post(RollCallLanes const& mine, Carry const& carry = {}) {
        mine_ = mine;
        my_carry_ = carry;
        if (schedule_) {
            schedule_->require_promised(control_.rank(), rounds_, mine);
        } else {
            words_ = mine.encode();
            control_.post_sum(words_);
        }
        posted_ = true;
    }
    [[nodiscard]] bool is_posted() const noexcept { return posted_; }
    [[nodiscard]] bool test() { return schedule_ || control_.test_sum(); }

    /// From now on nothing is sent, until the schedule ends with a verdict other than `go_on`.
    void follow(Schedule schedule) { schedule_ = std::move(schedule); }
    [[nodiscard]] bool is_scheduled() const noexcept { return schedule_.has_value(); }

    /// Waits for the roll call that was posted and returns the verdict, the same on every rank.
    /// One more message only when a rank arrives or fails, or when ranks disagree.
    /// `text` is sent along if this rank failed. Throws what the communicator throws.
    Verdict answer(std::string_view text = {}) {
        Verdict const verdict = hear(text);
        if (verdict == Verdict::mismatch) {
            name_difference();
        }
        rounds_ += verdict == Verdict::go_on ? 1 : 0;
        return verdict;
    }

    /// What all ranks said in the last roll call, summed.
    [[nodiscard]] RollCallLanes const& said() const noexcept { return said_; }
    /// The ranks that arrived in the last roll call in which any did, ascending.
    [[nodiscard]] std::vector<int> const& arrived() const noexcept { return arrived_; }
    /// What the ranks that arrived in the last roll call accumulated before; nothing if none did.
    [[nodiscard]] Carry const& carry() const noexcept { return carry_; }
    /// After the verdicts failed and mismatch: what every rank throws.
    [[nodiscard]] AbortReason const& failure() const noexcept { return failure_; }

    /// Rounds that were opened, the current one included.
    [[nodiscard]] std::size_t rounds() const noexcept { return rounds_; }
    [[nodiscard]] bool is_active(int rank) const { return is_active_[index(rank)]; }
    [[nodiscard]] std::size_t rounds_of(int rank) const {
        return is_active(rank) ? rounds_ : joined_after_[index(rank)];
    }
    [[nodiscard]] int lowest_active() const noexcept { return lowest_active_; }

private:
    static std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }

    Verdict hear(std::string_view text) {
        carry_ = {};
        if (schedule_) {
            said_ = schedule_->next();
            if (said_.arrived > 0) {
                carry_ = schedule_->carry();
                note_arrivals(schedule_->arriving());
            }
        } else {
            control_.wait_sum();
            said_ = RollCallLanes::decode(words_);
            if (said_.arrived > 0) {
                exchange_arrivals();
            }
            if (said_.failed > 0) {
                bool const has_failed = mine_.failed != 0;
                auto const size = static_cast<std::uint64_t>(control_.size());
                failure_ = Inquiry{control_, 0, size, true}.failure(has_failed, text);
            }
        }
        posted_ = false;
        Verdict const verdict = judge(said_, policy_);
        if (verdict != Verdict::go_on) {
            schedule_.reset();
        }
        return verdict;
    }

    void note_arrivals(std::vector<int> const& ranks) {
        arrived_ = ranks;
        for (int const rank : ranks) {
            is_active_[index(rank)] = false;
            joined_after_[index(rank)] = rounds_;
        }
        while (lowest_active_ + 1 < control_.size() && !is_active_[index(lowest_active_)]) {
            ++lowest_active_;
        }
    }

    /// A bitmap of those who arrive, the sum of one bit per rank, and their carry: said once and here,
    /// so that a round that does not sync, which nobody can know before it is heard, sums the weights
    /// of its active ranks alone.
    void exchange_arrivals() {
        std::size_t const carry_at = (is_active_.size() + 63) / 64;
        std::vector<std::uint64_t> words(carry_at + 2);
        if (mine_.arrived != 0) {
            set_bit(words, control_.rank());
        }
        words[carry_at] = my_carry_.ranks;
        words[carry_at + 1] = my_carry_.weight;
        control_.sum(words);
        std::vector<int> ranks;
        append_bits(ranks, std::span{words}.first(carry_at), 0);
        note_arrivals(ranks);
        carry_ = {words[carry_at], words[carry_at + 1]};
    }

    /// Among the active ranks; where only weights differ, among those that say whether they have one.
    void name_difference() {
        int lowest = lowest_active_;
        std::uint64_t count = said_.active;
        bool has_say = mine_.active != 0;
        std::optional<bool> is_weighted;
        if (said_.silent == 0 || said_.have_one_code()) {
            is_weighted = mine_.weighted != 0;
            has_say = has_say && mine_.silent == 0;
            count -= said_.silent;
        }
        if (count != said_.active) {
            lowest = Inquiry{control_, lowest, count, has_say}.ranks_with(has_say).front();
        }
        AgreementList list;
        list.begin_section(concat("ranks disagree about round ", rounds_, ": "));
        RoundCode::decode(static_cast<std::uint32_t>(mine_.code.sum)).agree_on(list, is_weighted);
        failure_ = Inquiry{control_, lowest, count, has_say}.difference(list);
        failure_.message += "; every active rank must open the same round";
    }

    ControlCommunicator& control_;
    EndPolicy policy_;
    RollCallLanes mine_;
    RollCallLanes said_;
    RollCallLanes::Words words_{};
    bool posted_ = false;
    std::size_t rounds_ = 0;
    int lowest_active_ = 0;
    std::vector<std::size_t> joined_after_;
    std::vector<bool> is_active_;
    std::vector<int> arrived_;
    Carry my_carry_;
    Carry carry_;
    std::optional<Schedule> schedule_;
    AbortReason failure_;
};

}}} // namespace joinable::v0::detail
