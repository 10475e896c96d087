// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/detail/entry.hpp>

#include <cstddef>
#include <string_view>
#include <vector>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/detail/attachments.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/parameter_claims.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION Window window_at_entry(Entrants const& entrants) {
    bool has_numbers = false;
    for (auto const& entrant : entrants) {
        entrant->held = entrant->accumulated();
        has_numbers |= entrant->held == Accumulated::numbers;
    }
    Entrant const* first = nullptr;
    for (auto const& entrant : entrants) {
        bool const is_zeros = entrant->held == Accumulated::zeros;
        if (is_zeros && !has_numbers) { // beside another's numbers, zeros are gradients
            entrant->forget_before_guard();
        }
        WindowOf{entrant->state}.begin_guard(is_zeros);
    }
    for (auto const& entrant : entrants) {
        if (entrant->averages == Averages::none) {
            continue;
        }
        first = first == nullptr ? entrant.get() : first;
        Window const& window = WindowOf{entrant->state}.window();
        Window const& common = WindowOf{first->state}.window();
        if (!window.holds_the_same(common)) {
            throw ContractViolation{concat(
                "the participants of a guard that average gradients must have accumulated the same batches, but a ",
                first->info.name,
                " holds ",
                common.batches,
                " batches of weight ",
                common.weight,
                " and a ",
                entrant->info.name,
                " holds ",
                window.batches,
                " batches of weight ",
                window.weight,
                "; clear the gradients of both before the guard, or call discard_window()"
            )};
        }
    }
    return first == nullptr ? Window{} : WindowOf{first->state}.window();
}

JOINABLE_DEFINITION void
check_entrants(Entrants const& entrants, HookOrder const& order, JoinOptions const& options) {
    GuardView view{};
    view.carries_accumulated = options.carry_accumulated;
    view.lists_all_averaged = true;
    view.weighs = options.weight_per_input.has_value();
    bool averages = false;
    for (auto const& entrant : entrants) {
        entrant->add_to(view);
        averages = averages || entrant->averages != Averages::none;
        for (auto other = entrants.begin(); other->get() != entrant.get(); ++other) {
            if (&(*other)->state == &entrant->state) {
                throw ContractViolation{concat(
                    "a ",
                    entrant->info.type,
                    " is twice among the participants of a guard; list it once"
                )};
            }
        }
        if (Attachment::is_attached(entrant->state)) {
            throw ContractViolation{concat(
                "a ", entrant->info.type, " already takes part in another guard; end that one first"
            )};
        }
    }
    char const* const why =
        !view.leaves_local ? nullptr
        : view.shards
            ? "NoReduction and PeriodicAverage leave each rank its own gradients, so a sharded optimizer beside them "
              "has no averages to step by; step by an optimizer of each rank"
        : view.steps && averages
            ? "a Step runs on joined ranks where gradients are averaged, and on active ranks alone beside NoReduction "
              "and PeriodicAverage, so it cannot be beside both; give the model of each kind a guard of its own"
            : nullptr;
    if (why != nullptr) {
        throw ContractViolation{why};
    }
    ParameterClaims claims;
    for (std::size_t const place : order.main) {
        claims.begin_participant(entrants[place]->info.name);
        entrants[place]->list_claims(claims);
    }
    claims.require_disjoint();
    for (auto const& entrant : entrants) {
        entrant->check_guard(view);
    }
}

/// Leaves out `enable`, because ranks without it do not enter, and what may differ by rank.
inline void agree_on(AgreementList& list, JoinOptions const& options, bool can_abort) {
    list.begin_section("options differ: ");
    list.add("end_policy", name_of(options.end_policy));
    char const* const inputs = can_abort ? "a value" : "a value, but cannot abort";
    list.add("inputs", options.inputs ? inputs : "no value");
    list.add("weight_per_input", options.weight_per_input ? "a value" : "no value");
    list.add("sync_every", options.sync_every);
    list.add("carry_accumulated", options.carry_accumulated);
}

JOINABLE_DEFINITION AgreementList entry_list(
    Entrants const& entrants,
    HookOrder const& order,
    JoinOptions const& options,
    bool can_abort,
    RankGroups const* groups
) {
    std::vector<std::string_view> names;
    std::vector<std::size_t> positions(entrants.size());
    for (std::size_t const place : order.main) {
        positions[place] = names.size();
        names.push_back(entrants[place]->info.name);
    }
    std::vector<std::size_t> post;
    for (std::size_t const place : order.post) {
        post.push_back(positions[place]);
    }
    AgreementList list;
    list.begin_section("guards differ: ");
    list.add("library version", library_version);
    list.add("participants", names);
    list.add("order of post hooks", post);
    agree_on(list, options, can_abort);
    for (std::size_t position = 0; position < names.size(); ++position) {
        if (groups == nullptr || !groups->is_of_group(position)) {
            entrants[order.main[position]]->list_at_entry(list, position);
        }
    }
    return list;
}

}}} // namespace joinable::v0::detail
