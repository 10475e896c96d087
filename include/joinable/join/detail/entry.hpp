// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/config.hpp>
#include <joinable/join/detail/entrant.hpp>
#include <joinable/join/detail/window.hpp>
#include <joinable/join/options.hpp>

/// @file
/// The checks of a rank alone when it enters a guard, and the list that ranks compare.

namespace joinable { inline namespace v0 { namespace detail {

class RankGroups;

/// The orders in which hooks run, as places in the list of participants.
struct HookOrder {
    std::span<std::size_t const> main; ///< also the order in which texts number participants
    std::span<std::size_t const> post;
};

/// The batches that this rank has accumulated and not cleared.
/// @throws ContractViolation  participants that average hold other batches.
[[nodiscard]] Window window_at_entry(Entrants const& entrants);

/// @throws ContractViolation  a participant cannot take part in such a guard.
void check_entrants(Entrants const& entrants, HookOrder const& order, JoinOptions const& options);

/// Lists the participants in hook order, the order of post hooks, the options, then each
/// participant that is not of a group.
[[nodiscard]] AgreementList entry_list(
    Entrants const& entrants,
    HookOrder const& order,
    JoinOptions const& options,
    bool can_abort,
    RankGroups const* groups
);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/join/detail/impl/entry.ipp>
#endif
