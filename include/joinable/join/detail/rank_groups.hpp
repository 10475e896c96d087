// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/join/detail/roll_call.hpp>
#include <joinable/join/detail/turn_order.hpp>
#include <joinable/join/result.hpp>
#include <joinable/join/round.hpp>

namespace joinable { inline namespace v0 { namespace detail {

class Entrant;

/// The groups into which the communicators of some participants divide the ranks of a guard: see groups_of().
/// Roll calls are those of all ranks. What concerns a group follows from them, in the numbers that it gives its
/// ranks. Positions are in hook order.
class RankGroups {
public:
    virtual ~RankGroups() = default;

    [[nodiscard]] virtual bool is_of_group(std::size_t position) const noexcept = 0;

    /// Checks the participants of each group, and lists which are of one. Keeps a list of each group's own.
    virtual void
    check_entry(std::vector<std::unique_ptr<Entrant>> const& entrants, AgreementList& list) = 0;
    /// Collective. Returns what all ranks throw unless each one is in one group of each of these participants.
    [[nodiscard]] virtual std::optional<AbortReason>
    exchange(ControlCommunicator& control, TurnOrder const& turns) = 0;

    /// Makes a round of all ranks that of the participant at its position. Collective over the group in the first
    /// part of a round that syncs, if weights or skipped batches make groups differ. If the group runs no such round,
    /// because none of its ranks is active or has left gradients to it, both counts are 0.
    virtual void enter(Round& round, RollCall const& roll_call) = 0;
    [[nodiscard]] virtual int member(int rank, std::size_t position) const = 0;
    /// Entrant::run_post_hook(), with the result of its group.
    virtual void run_post_hook(Entrant& entrant, JoinResult result) const = 0;

    /// Whether ranks in a reason that this rank has caught may be those of the guard.
    virtual bool may_name(ControlCommunicator& comm, AbortReason const& reason) const = 0;
    /// The reason by the guard's numbers, if it can be that of one group alone.
    [[nodiscard]] virtual std::optional<AbortReason> in_guard(AbortReason reason) const = 0;
    /// The reason for the ranks of a communicator, by their numbers there; `reason` has those of the guard.
    virtual AbortReason reason_for(ControlCommunicator const& comm, AbortReason reason) const = 0;
};

/// Makes the groups of a guard. `sequence`: the places of its participants, in hook order.
using MakesGroups = std::unique_ptr<RankGroups> (*)(
    ControlCommunicator const& control,
    std::vector<std::unique_ptr<Entrant>> const& entrants,
    std::span<std::size_t const> sequence
);

}}} // namespace joinable::v0::detail
