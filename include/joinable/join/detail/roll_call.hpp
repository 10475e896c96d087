// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/agreement/control.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/detail/agreement.hpp>
#include <joinable/join/detail/schedule.hpp>
#include <joinable/join/options.hpp>

/// @file
/// The agreement that opens every round: one sum of seven words, from which every rank computes
/// the same verdict. Knows nothing of guards, participants or RAII.

namespace joinable::inline v0::detail {

/// Who is where, and the exchanges that find it out. All ranks of `control` make the same calls.
class RollCall {
public:
    /// Bytes of error text that a failing rank can send along.
    static constexpr std::size_t text_bytes = 256;

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
            name_differences(
                concat("ranks disagree about round ", rounds_),
                "every active rank must open the same round",
                RoundCode::text
            );
        }
        rounds_ += verdict == Verdict::go_on ? 1 : 0;
        return verdict;
    }

    /// The same for an agreement that opens no round and in which all ranks are active. After a
    /// mismatch the caller names the differences.
    Verdict agree(std::string_view text) { return hear(text); }

    /// Collective, after a mismatch: one slot per rank with its code and digest, so that the error
    /// can say who said what. `describe` makes a code readable.
    void name_differences(
        std::string const& what, std::string_view advice, std::string (*describe)(std::uint32_t)
    ) {
        auto const size = static_cast<std::size_t>(control_.size());
        std::vector<std::uint64_t> words(2 * size);
        auto const me = static_cast<std::size_t>(control_.rank());
        if (mine_.active != 0) {
            words[2 * me] = mine_.code.sum + 1; // 0 is left to ranks that are not active
            words[2 * me + 1] = mine_.digest.sum;
        }
        control_.sum(words);
        failure_ = {FailureKind::mismatch, {}, what + ":"};
        std::optional<std::size_t> lowest;
        for (std::size_t rank = 0; rank < size; ++rank) {
            if (words[2 * rank] == 0) {
                continue;
            }
            lowest = lowest.value_or(rank);
            bool const differs = words[2 * rank] != words[2 * *lowest] ||
                                 words[2 * rank + 1] != words[2 * *lowest + 1];
            if (differs) {
                failure_.ranks.push_back(static_cast<int>(rank));
            }
            if (differs || rank == *lowest) {
                failure_.message += concat(
                    rank == *lowest ? " rank " : "; rank ",
                    rank,
                    " says: ",
                    describe(static_cast<std::uint32_t>(words[2 * rank] - 1)),
                    " (digest ",
                    words[2 * rank + 1],
                    ")"
                );
            }
        }
        failure_.message += concat("; ", advice);
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
            if (said_.arrived > 0 || said_.failed > 0) {
                exchange_names(text);
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

    /// Two bitmaps, each the sum of one bit per rank: who arrived and who failed. Then the carry of
    /// those who arrive: said once and here, so that a round that does not sync, which nobody can
    /// know before it is heard, sums the weights of its active ranks alone. The text travels only
    /// when one rank failed, because sums of several texts would be noise.
    void exchange_names(std::string_view text) {
        auto const size = static_cast<std::size_t>(control_.size());
        auto const me = static_cast<std::size_t>(control_.rank());
        std::size_t const map_words = (size + 63) / 64;
        std::size_t const text_words = said_.failed == 1 ? text_bytes / 8 : 0;
        std::size_t const carry_at = 2 * map_words;
        std::size_t const text_at = carry_at + 2;
        std::vector<std::uint64_t> words(text_at + text_words);
        std::uint64_t const my_bit = std::uint64_t{1} << (me % 64);
        words[me / 64] = mine_.arrived != 0 ? my_bit : 0;
        words[map_words + me / 64] = mine_.failed != 0 ? my_bit : 0;
        words[carry_at] = my_carry_.ranks;
        words[carry_at + 1] = my_carry_.weight;
        if (mine_.failed != 0 && text_words != 0) {
            for (std::size_t i = 0; i < text.size() && i < text_bytes; ++i) {
                words[text_at + i / 8] |=
                    static_cast<std::uint64_t>(static_cast<unsigned char>(text[i]))
                    << (8 * (i % 8));
            }
        }
        control_.sum(words);
        auto const ranks_in = [&](std::size_t map) {
            std::vector<int> ranks;
            for (std::size_t rank = 0; rank < size; ++rank) {
                if (((words[map * map_words + rank / 64] >> (rank % 64)) & 1U) != 0) {
                    ranks.push_back(static_cast<int>(rank));
                }
            }
            return ranks;
        };
        if (said_.arrived > 0) {
            note_arrivals(ranks_in(0));
            carry_ = {words[carry_at], words[carry_at + 1]};
        }
        failure_ = {FailureKind::peer_failed, ranks_in(1), {}};
        std::string said;
        for (std::size_t i = 0; i < 8 * text_words; ++i) {
            auto const byte = (words[text_at + i / 8] >> (8 * (i % 8))) & 0xffU;
            if (byte != 0) {
                said += static_cast<char>(static_cast<unsigned char>(byte));
            }
        }
        failure_.message = concat(
            ranks_text(failure_.ranks),
            " failed: ",
            said.empty() ? std::string{"an exception left the guard"} : said
        );
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

} // namespace joinable::inline v0::detail
