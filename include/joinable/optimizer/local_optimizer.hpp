// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include <joinable/optimizer/update_rule.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 {

/// A parameter that an engine's optimizer steps.
struct WholeParameter {
    std::size_t index; ///< in the order in which parameters were given, across all groups
    AnyView value;
    AnyView gradient;   ///< averaged over ranks; it has the value's dtype and extents
    std::uint64_t step; ///< of this parameter, counted from 1
};

namespace detail {

template <class O>
concept has_step =
    requires(O& optimizer, WholeParameter const& parameter) { optimizer.step(parameter); };
template <class O>
concept has_settings = requires(O& optimizer) {
    { optimizer.settings() };
    requires std::is_lvalue_reference_v<decltype(optimizer.settings())>;
    requires !std::is_const_v<std::remove_reference_t<decltype(optimizer.settings())>>;
    requires std::is_trivially_copyable_v<std::remove_cvref_t<decltype(optimizer.settings())>>;
};

template <class O>
concept has_settings_without_address = requires(O& optimizer) {
    requires !has_address<std::remove_cvref_t<decltype(optimizer.settings())>>();
};

} // namespace detail

/// An engine's optimizer that steps one whole parameter at a time and keeps its own state. It may
/// read all of a parameter, as LAMB does for its norm (You et al., 2020), so parameters are dealt
/// out whole: Partition::by_parameters. All members are local.
///
/// `optimizer` is an lvalue of `O`, `constant` a const one.
/// | expression                  | result | meaning                                                         |
/// |-----------------------------|--------|-----------------------------------------------------------------|
/// | `optimizer.step(parameter)` |        | steps a WholeParameter; called on its owner, in the same order  |
/// |                             |        | in every step                                                   |
/// | `optimizer.settings()`      | `S&`   | learning rate and other settings that change between steps;     |
/// |                             |        | joined owners get those of the lowest active rank. `S` is       |
/// |                             |        | trivially copyable and has no pointer, reference, std::span or   |
/// |                             |        | std::string_view: addresses are not valid on another rank       |
/// | `constant.check()`          |        | optional; throws ContractViolation if the settings are invalid  |
/// | `constant.agree_on(list)`   |        | optional; adds its settings to an AgreementList, for ranks to   |
/// |                             |        | compare                                                         |
///
/// O is movable and not an UpdateRule.
template <class O>
concept LocalOptimizer = std::movable<O> && !UpdateRule<O> && detail::has_step<O> &&
                         detail::has_settings<O> && detail::has_settings_without_address<O>;

/// Says in one sentence why a class is not a LocalOptimizer.
template <class O>
consteval bool models_local_optimizer() {
    static_assert(
        std::movable<O>,
        "LocalOptimizer: the optimizer has to be movable, because groups are kept in a list"
    );
    static_assert(
        detail::has_step<O>,
        "LocalOptimizer: expected a member 'void step(joinable::WholeParameter const& parameter)'"
    );
    static_assert(
        detail::has_settings<O>,
        "LocalOptimizer: expected a member 'S& settings()' with a trivially copyable S, such as a struct "
        "with the learning rate: joined ranks get the settings of the others"
    );
    static_assert(
        !detail::has_settings<O> || detail::has_settings_without_address<O>,
        "LocalOptimizer: settings() has a pointer or a reference, but settings travel from rank to rank, where an address "
        "leads nowhere; keep numbers in it"
    );
    return LocalOptimizer<O>;
}

namespace detail {

/// Says in one sentence why a class cannot step shards. Its members show which of the two concepts
/// it means to model.
template <class R>
consteval bool steps_shards() {
    constexpr bool is_local = has_step<R> || has_settings<R>;
    constexpr bool is_rule = has_state_names<R> || has_update<R>;
    static_assert(
        is_local || is_rule,
        "sharded optimizer: after the parameters comes the optimizer itself: an UpdateRule, with "
        "state_names() and update(range), or a LocalOptimizer, with step(parameter) and settings()"
    );
    if constexpr (is_local) {
        return models_local_optimizer<R>();
    } else if constexpr (is_rule) {
        return models_update_rule<R>();
    } else {
        return false;
    }
}

/// The settings of a rule or of an engine's optimizer that are sent to other ranks.
template <class R>
auto& settings_of(R& rule) {
    if constexpr (LocalOptimizer<R>) {
        return rule.settings();
    } else {
        return rule;
    }
}

/// The names of the state that a rule keeps with the shard. An engine's optimizer keeps its own
/// state.
template <class R>
std::span<std::string_view const> state_names_of(R const& rule) {
    if constexpr (LocalOptimizer<R>) {
        return {};
    } else {
        return rule.state_names();
    }
}

} // namespace detail

}} // namespace joinable::v0
