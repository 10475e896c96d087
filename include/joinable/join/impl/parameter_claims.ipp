// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/parameter_claims.hpp>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/overlap.hpp>

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION void
ParameterClaims::add_averaged(ParameterList const& parameters, std::size_t first) {
    add_averaged_values(parameters, first);
    add(averaged_, parameters, first, &AnyParameter::grad);
}

JOINABLE_DEFINITION void
ParameterClaims::add_averaged_values(ParameterList const& parameters, std::size_t first) {
    add(averaged_, parameters, first, &AnyParameter::value);
}

JOINABLE_DEFINITION void ParameterClaims::add_averaged(AnyView const& gradient, std::size_t index) {
    averaged_.push_back({names_.size() - 1, gradient, nullptr, index, 0});
}

JOINABLE_DEFINITION void
ParameterClaims::add_stepped(ParameterList const& parameters, std::size_t first) {
    add(stepped_, parameters, first, &AnyParameter::value);
}

JOINABLE_DEFINITION void ParameterClaims::add(
    std::vector<Claim>& claims,
    ParameterList const& parameters,
    std::size_t first,
    AnyView (AnyParameter::*view)() const
) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].requires_grad()) {
            claims.push_back({names_.size() - 1, (parameters[i].*view)(), &parameters, i, first});
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

JOINABLE_DEFINITION std::optional<std::pair<std::size_t, std::size_t>>
ParameterClaims::same_object(std::vector<Claim> const& claims) {
    std::vector<std::size_t> order;
    for (std::size_t k = 0; k < claims.size(); ++k) {
        bool const is_in_memory = detail::AddressRange::of(claims[k].view).begin != nullptr;
        if (claims[k].parameters != nullptr && !is_in_memory) {
            order.push_back(k);
        }
    }
    auto const object = [&](std::size_t k) {
        return (*claims[k].parameters)[claims[k].index].identity();
    };
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return std::pair{object(a), a} < std::pair{object(b), b};
    });
    auto const found =
        std::adjacent_find(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
            return claims[a].participant != claims[b].participant && object(a) == object(b);
        });
    if (found == order.end()) {
        return std::nullopt;
    }
    return std::pair{*found, *std::next(found)};
}

JOINABLE_DEFINITION void ParameterClaims::require_disjoint(
    std::vector<Claim> const& claims, std::string_view verb, std::string_view consequence
) const {
    if (claims.empty() || claims.front().participant == claims.back().participant) {
        return; // a participant has checked its own
    }
    auto shared = detail::find_shared(
        claims.size(),
        [&](std::size_t k) { return claims[k].view; },
        [&](std::size_t a, std::size_t b) { return claims[a].participant != claims[b].participant; }
    );
    if (!shared) { // a value that ranks keep in parts has no memory here, and its gradient may have none
        shared = same_object(claims);
    }
    if (!shared) {
        return;
    }
    auto const participant = [&](Claim const& claim) {
        return detail::concat(
            "participant ", claim.participant, " (", names_[claim.participant], ")"
        );
    };
    auto const parameter = [](Claim const& claim) {
        return claim.parameters == nullptr
                   ? detail::concat("gradient ", claim.index)
                   : detail::describe_parameter(*claim.parameters, claim.index, claim.first);
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
