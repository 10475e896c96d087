// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/error.hpp>
#include <joinable/join/detail/schedule.hpp>
#include <joinable/join/detail/verdict.hpp>
#include <joinable/join/options.hpp>

/// @file
/// The agreement that opens every round: one sum of seven words, from which every rank computes the
/// same verdict. It is independent of guards, participants and RAII.

namespace joinable { inline namespace v0 { namespace detail {

/// The settings by which this rank has stepped in a guard, in rounds in which all ranks were active.
/// Roll calls compare their digest, so that ranks which step by other settings hear of it.
class UsedSettings {
public:
    /// Adds the settings of one step. `list`, whose hash is `hash`, names them; it lives as long as
    /// the guard, and each caller gives its own.
    void add(AgreementList const& list, std::uint64_t hash) {
        chain_ = Hash{}.add(chain_).add(hash).value();
        if (std::find(lists_.begin(), lists_.end(), &list) == lists_.end()) {
            lists_.push_back(&list);
        }
    }

    /// 0 before the first step.
    [[nodiscard]] std::uint32_t digest() const noexcept {
        return static_cast<std::uint32_t>(chain_) & digest_mask;
    }
    /// Lists the last settings, and last a hash of all, by which ranks differ in any case.
    [[nodiscard]] AgreementList list() const {
        AgreementList all;
        for (AgreementList const* const settings : lists_) {
            for (AgreementList::Item const& item : settings->items()) {
                all.add(item.label, item.value);
            }
        }
        all.begin_section("settings differ: ");
        all.add("hash over all steps of this guard", chain_);
        return all;
    }

private:
    std::uint64_t chain_ = 0;
    std::vector<AgreementList const*> lists_;
};

/// Runs roll calls, and keeps track of which ranks are active. All ranks of `control` make the same
/// calls.
class RollCall {
public:
    RollCall(ControlCommunicator& control, EndPolicy policy);

    /// Starts a roll call; `answer()` ends it. Asynchronous, no allocation. `carry` is what this
    /// rank accumulated, if it arrives.
    /// @throws ContractViolation  it differs from the schedule, see follow().
    void post(RollCallLanes const& mine, Carry const& carry = {});
    /// Starts the last one of a guard, in which no rank is active. All ranks compare the settings by
    /// which they have stepped.
    void post_closing();
    /// The settings by which this rank has stepped. A rank that opens a round compares them.
    [[nodiscard]] UsedSettings& settings() noexcept { return settings_; }
    [[nodiscard]] bool is_posted() const noexcept { return posted_; }
    [[nodiscard]] bool test() { return schedule_ || control_.test_sum(); }
    /// Whether answer() waits once more for all ranks, because some arrived or failed.
    /// @pre test()
    [[nodiscard]] bool needs_another_message() const noexcept {
        RollCallLanes const totals = RollCallLanes::decode(words_);
        return !schedule_ && totals.arrived + totals.failed > 0;
    }

    /// For guards with known lengths. The schedule now answers instead of a sum, and nothing is sent,
    /// until it gives a verdict other than `go_on`.
    void follow(Schedule schedule) { schedule_ = std::move(schedule); }
    [[nodiscard]] bool is_scheduled() const noexcept { return schedule_.has_value(); }

    /// Waits for the posted roll call and returns the verdict, the same on every rank. Sends one
    /// more message only when a rank arrives or fails, or when ranks disagree. `text` is sent along
    /// if this rank failed. Throws what the communicator throws.
    Verdict answer(std::string_view text = {});

    /// The sum of what all ranks said in the last roll call.
    [[nodiscard]] RollCallLanes const& totals() const noexcept { return totals_; }
    /// The ranks that arrived in the last roll call that had arrivals, ascending.
    [[nodiscard]] std::vector<int> const& arrived() const noexcept { return arrived_; }
    /// The sum of what ranks that arrived in the last roll call had accumulated; nothing if none arrived.
    [[nodiscard]] Carry const& carry() const noexcept { return carry_; }
    /// After the verdicts failed and mismatch: the reason that every rank throws.
    [[nodiscard]] AbortReason const& failure() const noexcept { return failure_; }
    /// The round that was answered is refused for another reason, the same on every rank.
    void refuse(AbortReason reason) noexcept { failure_ = std::move(reason); }

    /// The number of opened rounds, including the current one.
    [[nodiscard]] std::size_t rounds() const noexcept { return rounds_; }
    [[nodiscard]] bool is_active(int rank) const { return is_active_[index(rank)]; }
    [[nodiscard]] std::size_t rounds_of(int rank) const {
        return is_active(rank) ? rounds_ : joined_after_[index(rank)];
    }
    [[nodiscard]] int lowest_active() const noexcept { return lowest_active_; }

private:
    static std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }

    void note_arrivals(std::vector<int> const& ranks);

    /// Sums a bitmap of the arriving ranks and their carry. Roll calls do not contain the carry, because
    /// ranks post them before they know whether the round syncs, and a round that does not sync sums
    /// only the weights of its active ranks.
    void exchange_arrivals();

    /// Compares the active ranks. If only weights differ, it compares the ranks that say whether
    /// they have one; if only settings differ, it names these.
    void name_difference();
    void name_setting();

    ControlCommunicator& control_;
    EndPolicy policy_;
    RollCallLanes mine_;
    RollCallLanes totals_;
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
    UsedSettings settings_;
    bool is_closing_ = false;
    AbortReason failure_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/join/detail/impl/roll_call.ipp>
#endif
