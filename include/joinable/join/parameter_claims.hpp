// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 {

/// The parameters that the participants of a guard average and step. A participant lists its own in
/// `void list_claims(ParameterClaims& claims) const`. A guard refuses two participants that average,
/// or that step, one parameter.
class ParameterClaims {
public:
    /// Claims that the caller averages the gradients of the trained parameters of `parameters`,
    /// which must live until the guard is made. Texts count them from `first`.
    void add_averaged(ParameterList const& parameters, std::size_t first = 0);
    /// Claims that the caller averages the values.
    void add_averaged_values(ParameterList const& parameters, std::size_t first = 0);
    /// Claims that it averages a gradient without a parameter, which texts call gradient `index`.
    void add_averaged(AnyView const& gradient, std::size_t index);
    /// The same for the values that the caller steps.
    void add_stepped(ParameterList const& parameters, std::size_t first = 0);

    /// The following claims are those of the next participant. For guards.
    void begin_participant(std::string_view name) { names_.push_back(name); }
    /// @throws ContractViolation  two participants average, or step, one parameter. The text names
    ///         it and them.
    void require_disjoint() const;

private:
    struct Claim {
        std::size_t participant;         ///< an index of names_
        AnyView view;                    ///< of the value or the gradient
        ParameterList const* parameters; ///< null: a gradient without a parameter
        std::size_t index;
        std::size_t first;
    };

    void
    add(std::vector<Claim>& claims,
        ParameterList const& parameters,
        std::size_t first,
        AnyView (AnyParameter::*view)() const);
    /// Two claims of different participants on one object, of those without elements in memory.
    static std::optional<std::pair<std::size_t, std::size_t>>
    same_object(std::vector<Claim> const& claims);
    void require_disjoint(
        std::vector<Claim> const& claims, std::string_view verb, std::string_view consequence
    ) const;

    std::vector<std::string_view> names_;
    std::vector<Claim> averaged_; ///< of values and of gradients
    std::vector<Claim> stepped_;
};

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/join/impl/parameter_claims.ipp>
#endif
