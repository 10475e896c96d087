// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/parameter_claims.hpp>

#include <string>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/overlap.hpp>

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION void
ParameterClaims::add_averaged(ParameterList const& parameters, std::size_t first) {
    add(averaged_, parameters, first, false); // a value that ranks keep in parts has no memory here
    add(averaged_, parameters, first, true);
}

JOINABLE_DEFINITION void
ParameterClaims::add_stepped(ParameterList const& parameters, std::size_t first) {
    add(stepped_, parameters, first, false);
}

JOINABLE_DEFINITION void ParameterClaims::add(
    std::vector<Claim>& claims, ParameterList const& parameters, std::size_t first, bool is_gradient
) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].requires_grad()) {
            claims.push_back({names_.size() - 1, &parameters, i, first, is_gradient});
        }
    }
}

JOINABLE_DEFINITION void ParameterClaims::require_disjoint() const {
    require_disjoint(
        averaged_,
        "average",
        "it would be averaged twice in a round; let one participant average it: a DistributedDataParallel over "
        "both models, without ZeroOptions::reduces_gradients beside it"
    );
    require_disjoint(
        stepped_, "step", "it would be stepped twice in a round; give each parameter to one of them"
    );
}

JOINABLE_DEFINITION void ParameterClaims::require_disjoint(
    std::vector<Claim> const& claims, std::string_view verb, std::string_view consequence
) const {
    if (claims.empty() || claims.front().participant == claims.back().participant) {
        return; // a participant has checked its own
    }
    auto const view_of = [&](std::size_t k) {
        AnyParameter const& parameter = (*claims[k].parameters)[claims[k].index];
        return claims[k].is_gradient ? parameter.grad() : parameter.value();
    };
    std::vector<detail::AddressRange> ranges;
    for (std::size_t k = 0; k < claims.size(); ++k) {
        ranges.push_back(detail::AddressRange::of(view_of(k), k));
    }
    auto const shared =
        detail::find_shared(std::move(ranges), view_of, [&](std::size_t a, std::size_t b) {
            return claims[a].participant != claims[b].participant;
        });
    if (!shared) {
        return;
    }
    auto const participant = [&](Claim const& claim) {
        return detail::concat(
            "participant ", claim.participant, " (", names_[claim.participant], ")"
        );
    };
    auto const parameter = [](Claim const& claim) {
        return detail::describe_parameter(*claim.parameters, claim.index, claim.first);
    };
    Claim const& one = claims[shared->first];
    Claim const& other = claims[shared->second];
    std::string const named = parameter(one);
    std::string const also = parameter(other);
    throw ContractViolation{
        participant(one) + " and " + participant(other) + " both " + std::string{verb} + " " +
        named + (named == also ? std::string{} : ", which is " + also + " of the second one") +
        ", so " + std::string{consequence}
    };
}

}} // namespace joinable::v0
