// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/optimizer/update_rule.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 {

/// A parameter that an engine's optimizer steps.
struct WholeParameter {
    std::size_t index; ///< in the order in which parameters were given, across all groups
    AnyView value;
    AnyView gradient;   ///< averaged over ranks; it has the value's dtype and extents
    std::uint64_t step; ///< of this parameter, counted from 1
    /// The arrays of the optimizer's state_names(), with the value's dtype and extents: zeros before the first
    /// step, then what the optimizer wrote, or what a Checkpoint has read.
    std::vector<AnyView> state = {};
};

namespace detail {

template <class O>
concept has_step =
    requires(O& optimizer, WholeParameter const& parameter) { optimizer.step(parameter); };
template <class O>
concept steps_all_at_once = requires(O& optimizer, std::span<WholeParameter const> parameters) {
    optimizer.step(parameters);
};
template <class O>
concept takes_parameters = requires(O& optimizer, std::span<WholeParameter const> parameters) {
    optimizer.take(parameters);
};
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
/// | `optimizer.step(span)`      |        | in its place: steps all of a `std::span<WholeParameter const>`  |
/// |                             |        | at once, before any value is sent; not with step_in_backward    |
/// | `optimizer.settings()`      | `S&`   | learning rate and other settings that change between steps;     |
/// |                             |        | joined owners get those of the lowest active rank. `S` is       |
/// |                             |        | trivially copyable and has no pointer, reference, std::span or   |
/// |                             |        | std::string_view: addresses are not valid on another rank       |
/// | `optimizer.apply_settings()` |       | optional; settings() has got those of another rank or of a file |
/// | `optimizer.take(span)`      |        | optional; called once with what this rank steps, values alone,  |
/// |                             |        | before ranks compare settings                                   |
/// | `constant.state_names()`    | `std::span<std::string_view const>` | optional; names the arrays of      |
/// |                             |        | WholeParameter::state, so that a Checkpoint takes the optimizer.|
/// |                             |        | `S` then has state_names() and agree_on(list), too              |
/// | `constant.check()`          |        | optional; throws ContractViolation if the settings are invalid  |
/// | `constant.agree_on(list)`   |        | optional; adds its settings to an AgreementList, for ranks to   |
/// |                             |        | compare                                                         |
///
/// O is movable and not an UpdateRule.
template <class O>
concept LocalOptimizer =
    std::movable<O> && !UpdateRule<O> && (detail::has_step<O> || detail::steps_all_at_once<O>) &&
    detail::has_settings<O> && detail::has_settings_without_address<O>;

/// Says in one sentence why a class is not a LocalOptimizer.
template <class O>
consteval bool models_local_optimizer() {
    static_assert(
        std::movable<O>,
        "LocalOptimizer: the optimizer has to be movable, because groups are kept in a list"
    );
    static_assert(
        detail::has_step<O> || detail::steps_all_at_once<O>,
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
    constexpr bool is_local = has_step<R> || steps_all_at_once<R> || has_settings<R>;
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
template <class R>
using SettingsOf = std::remove_cvref_t<decltype(settings_of(std::declval<R&>()))>;
/// After those of another rank or of a file were written there.
template <class R>
void apply_settings_of(R& rule) {
    if constexpr (requires { rule.apply_settings(); }) {
        rule.apply_settings();
    }
}

/// The names of the state that a rule, or its settings, keep with the shard. An engine's optimizer may keep its own
/// state.
template <class R>
std::span<std::string_view const> state_names_of(R const& rule) {
    if constexpr (has_state_names<R>) {
        return rule.state_names();
    } else {
        return {};
    }
}
/// Whether a file can have what an engine's optimizer keeps.
template <class R>
concept keeps_state_with_shard =
    LocalOptimizer<R> && has_state_names<R> && has_state_names<SettingsOf<R>>;

} // namespace detail

}} // namespace joinable::v0
