// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "join.hpp"

// ---- joinable/join/groups.hpp

namespace joinable { inline namespace v0 {
namespace detail {

class GroupsOfRanks final : public RankGroups {
public:
    static std::unique_ptr<RankGroups> make(
        ControlCommunicator const& control,
        std::vector<std::unique_ptr<Entrant>> const& entrants,
        std::span<std::size_t const> sequence
    ) {
        auto groups = std::make_unique<GroupsOfRanks>();
        for (std::size_t const place : sequence) {
            ControlCommunicator& own = entrants[place]->control();
            ControlCommunicator* const shards = entrants[place]->shards.get();
            for (ControlCommunicator* one : {&own, shards}) {
                if (one != nullptr && one->size() < control.size() &&
                    groups->number_of(*one) == 0) {
                    groups->groups_.push_back({one, groups->numbers_.size(), {}});
                }
            }
            groups->numbers_.push_back(groups->number_of(own));
            groups->shards_.push_back(shards == nullptr ? 0 : groups->number_of(*shards));
            groups->sequence_.push_back(place);
        }
        return groups;
    }

    [[nodiscard]] bool is_of_group(std::size_t position) const noexcept override {
        return numbers_[position] != 0;
    }
    void check_entry(std::vector<std::unique_ptr<Entrant>> const& entrants, AgreementList& list)
        override {
        GuardView all{};
        for (auto const& entrant : entrants) {
            entrant->add_to(all);
        }
        bool const steps_joined_ranks = all.steps && !all.leaves_local;
        for (auto const& entrant : entrants) {
            std::size_t const group = number_of(entrant->control());
            bool averages = false;
            bool steps = false;
            GuardView view{};
            view.lists_all_averaged = true;
            for (auto const& other : entrants) {
                if (number_of(other->control()) == group) {
                    other->add_to(view);
                    averages |= other->averages != Averages::none;
                    steps |= other->info.steps;
                }
            }
            // Sharded models average and step by themselves, and list no gradients.
            bool const needs_step =
                averages && (!view.averaged.empty() || !view.lists_all_averaged);
            if (group != 0 && steps_joined_ranks &&
                ((needs_step && !steps) || (steps && !averages))) {
                throw ContractViolation{concat(
                    "a group without an active rank neither averages nor steps, so its values need participants for "
                    "both over one communicator, but over that of a ",
                    entrant->info.name,
                    steps ? " nothing averages" : " nothing steps"
                )};
            }
            entrant->check_guard(view); // what is averaged elsewhere is not averaged for this one
        }
        list.begin_section("guards differ: ");
        list.add("groups of the participants (0: of all ranks)", numbers_);
        list.add("groups that share a state (0: all ranks, or none)", shards_);
        for (std::size_t position = 0; position < numbers_.size(); ++position) {
            if (is_of_group(position)) { // which may differ from that of other ranks
                AgreementList& of_group = groups_[numbers_[position] - 1].list;
                entrants[sequence_[position]]->list_at_entry(of_group, position);
            }
        }
    }

    [[nodiscard]] std::optional<AbortReason>
    exchange(ControlCommunicator& control, TurnOrder const& turns) override {
        DifferenceReport report{control, 0, static_cast<std::uint64_t>(control.size()), true};
        for (Group& group : groups_) {
            auto const refused = [&](std::vector<int> ranks, char const* why) {
                auto text = concat("guards differ: ", turns.name(group.position), ": ", why);
                text +=
                    concat(" (", ranks_text(ranks), "); give all ranks the groups of one split()");
                return report.reason(FailureKind::mismatch, std::move(ranks), std::move(text));
            };
            ControlCommunicator& own = *group.communicator;
            auto const now = std::chrono::steady_clock::now().time_since_epoch().count();
            std::array<std::uint64_t, 3> const mine{
                {static_cast<std::uint64_t>(own.size()),
                 static_cast<std::uint64_t>(own.rank()),
                 static_cast<std::uint64_t>(now)}
            };
            std::vector<std::uint64_t> const all = control.gather(mine);
            std::vector<Place> places;
            for (std::size_t k = 0; k < all.size(); k += mine.size()) {
                places.push_back({all[k], all[k + 1]});
            }
            // Before groups communicate, because a rank would wait for one that is not there.
            std::vector<int> ranks = ranks_without_group(places);
            if (!ranks.empty()) {
                return refused(
                    std::move(ranks), "its groups overlap, or leave out ranks of the guard"
                );
            }
            std::uint64_t const guard = all[2]; // the time on rank 0: another guard has another one
            std::array<std::uint64_t, 2> const self{
                {static_cast<std::uint64_t>(control.rank()), guard}
            };
            std::vector<std::uint64_t> const members = own.gather(self);
            bool has_others = false;
            for (std::size_t k = 0; k < members.size(); k += self.size()) {
                group.members.push_back(static_cast<int>(members[k]));
                has_others |= members[k + 1] != guard;
            }
            ranks = report.ranks_with(has_others);
            if (!ranks.empty()) {
                return refused(
                    std::move(ranks), "its groups have ranks that are not in this guard"
                );
            }
            auto differs = find_disagreement(own, group.list, nullptr);
            ranks = report.ranks_with(differs.has_value());
            if (!ranks.empty()) {
                std::string text =
                    differs ? std::move(differs->message) : "they differ in another group";
                text += concat(" (by the numbers in a group of ", ranks_text(ranks), ")");
                return report.reason(FailureKind::mismatch, std::move(ranks), std::move(text));
            }
        }
        return {};
    }

    void enter(Round& round, RollCall const& roll_call) override {
        if (!is_of_group(round.position_)) {
            return;
        }
        Group& group = groups_[numbers_[round.position_] - 1];
        if (group.rounds != roll_call.rounds()) {
            count(group, round, roll_call);
            group.rounds = roll_call.rounds();
        }
        round.is_of_group_ = true;
        round.active_count_ = group.active;
        round.buffer_source_ = group.source;
        if (!round.will_sync_) {
            round.contributor_count_ = std::min(round.contributor_count_, group.active);
            return;
        }
        round.weight_sum_ = group.weight;
        round.contributor_count_ = static_cast<int>(group.contributors);
        round.contributes_ = round.contributes_ && group.contributors != 0;
    }

    [[nodiscard]] int member(int rank, std::size_t position) const override {
        return groups_[numbers_[position] - 1].members[static_cast<std::size_t>(rank)];
    }

    void run_post_hook(Entrant& entrant, JoinResult result) const override {
        ControlCommunicator const& communicator = entrant.control();
        if (std::size_t const number = number_of(communicator); number != 0) {
            take_group(groups_[number - 1], result);
        }
        entrant.run_post_hook(result, is_last_joiner(result, communicator.rank()));
    }

    [[nodiscard]] bool
    may_name(ControlCommunicator& communicator, AbortReason const& reason) const override {
        // A group that split() has not made does not know that it numbers ranks otherwise.
        auto const has_failed = [&](Group const& group) {
            return group.communicator->is_aborted() &&
                   (reason.is_renumbered || renumbers(group.members));
        };
        return number_of(communicator) == 0 &&
               std::none_of(groups_.begin(), groups_.end(), has_failed);
    }
    [[nodiscard]] std::optional<AbortReason> in_guard(AbortReason reason) const override {
        Group const* failed = nullptr;
        for (Group const& group : groups_) {
            if (group.communicator->is_aborted()) {
                if (failed != nullptr) {
                    return std::nullopt;
                }
                failed = &group;
            }
        }
        for (int& rank : reason.ranks) {
            if (failed == nullptr || static_cast<std::size_t>(rank) >= failed->members.size()) {
                return std::nullopt;
            }
            rank = failed->members[static_cast<std::size_t>(rank)];
        }
        std::sort(reason.ranks.begin(), reason.ranks.end());
        reason.is_renumbered = false;
        return reason;
    }

    [[nodiscard]] AbortReason
    reason_for(ControlCommunicator const& communicator, AbortReason reason) const override {
        std::size_t const number = number_of(communicator);
        if (number == 0 || reason.ranks.empty()) {
            return reason;
        }
        std::vector<int> const named = std::exchange(reason.ranks, {});
        std::vector<int> const& members = groups_[number - 1].members;
        for (std::size_t rank = 0; rank < members.size(); ++rank) {
            if (std::find(named.begin(), named.end(), members[rank]) != named.end()) {
                reason.ranks.push_back(static_cast<int>(rank));
            }
        }
        if (reason.ranks.empty()) { // of another group: this rank ends the own one
            reason.ranks = {communicator.rank()};
        }
        return reason;
    }

private:
    struct Group {
        ControlCommunicator* communicator;
        std::size_t position;     ///< of its first participant
        std::vector<int> members; ///< the guard's numbers of its ranks
        AgreementList list = {};  ///< its participants

        std::size_t rounds = 0; ///< the following is known for the last of so many
        int active = 0;
        int source = 0; ///< the lowest active rank; if there is none, the lowest last joiner
        std::uint64_t contributors = 0;
        std::uint64_t weight = 0;
    };
    using Place = std::pair<std::uint64_t, std::uint64_t>; ///< the size of a group, a rank in it

    /// The ranks in groups of a size of which one place is taken more often than another, or never.
    static std::vector<int> ranks_without_group(std::vector<Place> const& places) {
        std::vector<Place> sorted = places;
        std::sort(sorted.begin(), sorted.end());
        auto const ranks_before = [&](std::uint64_t size, std::uint64_t rank) {
            Place const place{size, rank};
            auto const at = std::lower_bound(sorted.begin(), sorted.end(), place);
            return static_cast<std::uint64_t>(at - sorted.begin());
        };
        std::vector<int> ranks;
        for (std::size_t k = 0; k < places.size(); ++k) {
            auto const [size, rank] = places[k];
            std::uint64_t const here = ranks_before(size, rank + 1) - ranks_before(size, rank);
            if (here * size != ranks_before(size + 1, 0) - ranks_before(size, 0)) {
                ranks.push_back(static_cast<int>(k));
            }
        }
        return ranks;
    }

    /// The number of a communicator's group, counted from 1 in hook order; 0: it has all ranks.
    [[nodiscard]] std::size_t number_of(ControlCommunicator const& communicator) const {
        auto const group = std::find_if(groups_.begin(), groups_.end(), [&](Group const& known) {
            return known.communicator->address() == communicator.address();
        });
        return group == groups_.end() ? 0 : static_cast<std::size_t>(group - groups_.begin()) + 1;
    }

    /// Makes the result of all ranks that of a group.
    static void take_group(Group const& group, JoinResult& result) {
        std::vector<std::size_t> const of_all = std::exchange(result.rounds_per_rank, {});
        for (int const member : group.members) {
            result.rounds_per_rank.push_back(of_all[static_cast<std::size_t>(member)]);
        }
        std::vector<std::size_t> const& rounds = result.rounds_per_rank;
        result.rounds = *std::max_element(rounds.begin(), rounds.end());
        result.shadow_rounds = result.rounds - result.own_rounds;
        result.last_joiners.clear();
        for (std::size_t rank = 0; rank < rounds.size(); ++rank) {
            if (rounds[rank] == result.rounds) {
                result.last_joiners.push_back(static_cast<int>(rank));
            }
        }
        result.authoritative_rank = result.last_joiners.back();
    }

    /// The roll call has counted all ranks. It tells which ones of the group are active. If that is not all, the
    /// group sums weights and contributors.
    static void count(Group& group, Round const& round, RollCall const& roll_call) {
        std::vector<int> const& members = group.members;
        auto const is_active = [&](int rank) { return roll_call.is_active(rank); };
        auto const source = std::max_element(members.begin(), members.end(), [&](int a, int b) {
            return roll_call.rounds_of(a) < roll_call.rounds_of(b);
        });
        group.active = static_cast<int>(std::count_if(members.begin(), members.end(), is_active));
        group.source = static_cast<int>(source - members.begin());
        auto const& totals = roll_call.totals();
        auto const contributors = static_cast<std::uint32_t>(round.contributor_count());
        bool const may_be_carried = contributors > totals.contributors;
        bool const may_skip = contributors != totals.active || totals.contributors != totals.active;
        bool const sums = round.will_sync() &&
                          (group.active == 0 ? may_be_carried
                                             : round.is_weighted() || may_be_carried || may_skip);
        std::array<std::uint64_t, 2> words{{0, static_cast<std::uint64_t>(group.active)}};
        if (sums) {
            words = {round.weight(), round.contributes() ? 1U : 0U};
            group.communicator->sum(words);
        }
        group.weight = words[0];
        // Weights that sum to 0 average to zeros.
        group.contributors = round.is_weighted() && words[0] == 0 ? 0 : words[1];
    }

    std::vector<std::size_t> numbers_;  ///< of the groups of all positions
    std::vector<std::size_t> shards_;   ///< the same of those that share a state
    std::vector<std::size_t> sequence_; ///< the places of their participants
    std::vector<Group> groups_;
};

} // namespace detail

/// control() for a guard some of whose participants have communicators of groups, as experts have:
///
/// @code
/// auto pair = comm.split(comm.rank() / 2, comm.rank());
/// joinable::DistributedDataParallel shared{comm, layers}, expert{pair, own_layers};
/// joinable::Step step{comm, ...};
/// joinable::Step expert_step{pair, ...};
/// joinable::Join guard{joinable::participants(shared, expert, step, expert_step), joinable::groups_of(comm)};
/// @endcode
///
/// The ranks of the guard are those of `comm`. A communicator with fewer ranks is one of a group. The groups of one
/// participant, on all ranks, divide these ranks, and each rank is in one of them; ranks compare this when they
/// enter. Roll calls and JoinResult stay those of all ranks.
///
/// In rounds and post hooks of a participant over a group, counts, sources and numbers of ranks are those of the
/// group; but in a round that does not sync, weight_sum() is that of all ranks, and contributor_count() may be too high.
/// It averages over the group. A group without an active rank runs no round of its participants, unless
/// one of its ranks has left accumulated gradients to the round. So the values that it averages are stepped over the
/// same communicator. Beside NoReduction and PeriodicAverage joined ranks step nothing, so a Step
/// may have any.
///
/// An exception between rounds leaves all communicators usable. Anywhere else it aborts `comm` and
/// the groups, these with the first reason that `comm` was given. A group's failure names ranks in
/// the numbers of that group where it is thrown (see FailureOfRanks::is_renumbered), and on the
/// other ranks in those of `comm`, if no other group has failed.
/// Cost: in a round that syncs, one sum of two words in each group if ranks give weights, skip batches or
/// have left accumulated gradients.
template <class Comm>
[[nodiscard]] Control<Comm> groups_of(Comm& communicator) {
    Control<Comm> control = joinable::control(communicator);
    control.make_groups = &detail::GroupsOfRanks::make;
    return control;
}

}} // namespace joinable::v0

// ---- joinable/groups.hpp

/// @file
/// Guards some of whose participants have communicators of groups of ranks. In addition to <joinable/join.hpp>.
