// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/optimizer/detail/update_loop.hpp>
#include <joinable/optimizer/settings.hpp>
#include <joinable/optimizer/update_rule.hpp>

/// @file
/// The update rules of PyTorch's optimizers of the same names: torch/optim/sgd.py, adam.py and
/// adamw.py of 2.15, with their defaults. As in PyTorch, settings are computed in double and then
/// rounded to the type of the elements.

namespace joinable { inline namespace v0 {

namespace detail {

/// @throws ContractViolation  a setting is not in [least, below).
inline void
check_setting(std::string_view rule, std::string_view name, double value, double below = HUGE_VAL) {
    if (!(value >= 0.0 && value < below)) {
        throw ContractViolation{concat(
            to_text(rule),
            "::",
            to_text(name),
            " is ",
            value,
            below == HUGE_VAL ? "; give a finite number that is not negative"
                              : "; give a number from 0 to below 1"
        )};
    }
}

/// Changes to a gradient before a rule sees it.
template <class T>
struct GradientTerms {
    T sign;  ///< -1: ascends
    T decay; ///< times the value, added to the gradient

    template <class V>
    [[gnu::always_inline]] JOINABLE_HOST_DEVICE void
    apply(V& gradient, V const& value) const noexcept {
        gradient = gradient * sign; // exact
        if (decay != T{0}) {
            add_product(gradient, value, decay);
        }
    }
};

template <class T, bool has_momentum>
struct SgdUpdate {
    static constexpr std::size_t state_count = has_momentum ? 1 : 0;
    GradientTerms<T> terms;
    T momentum;
    T undamped; ///< the share of a gradient that goes into the momentum
    T negative_rate;
    bool is_first;
    bool is_nesterov;

    template <class V>
    [[gnu::always_inline]] JOINABLE_HOST_DEVICE void
    operator()(V& value, V& gradient, V* state) const noexcept {
        terms.apply(gradient, value);
        if constexpr (has_momentum) {
            V& buffer = state[0];
            if (is_first) {
                buffer = gradient;
            } else {
                multiply(buffer, buffer, momentum);
                add_product(buffer, gradient, undamped);
            }
            if (is_nesterov) {
                add_product(gradient, buffer, momentum);
            } else {
                gradient = buffer;
            }
        }
        add_product(value, gradient, negative_rate);
    }
};

template <class T, bool is_amsgrad>
struct AdamUpdate {
    static constexpr std::size_t state_count = is_amsgrad ? 3 : 2;
    GradientTerms<T> terms;
    T kept; ///< factor of the value, for a decay that is not part of the gradient
    T first_rate;
    T beta2;
    T second_rate;
    T root_correction;
    T epsilon;
    T negative_rate;

    template <class V>
    [[gnu::always_inline]] JOINABLE_HOST_DEVICE void
    operator()(V& value, V& gradient, V* state) const noexcept {
        terms.apply(gradient, value);
        if (kept != T{1}) {
            multiply(value, value, kept);
        }
        V& average = state[0];
        V& square_average = state[1];
        V const change = gradient - average;
        add_product(average, change, first_rate);
        V square;
        multiply(square, gradient, gradient);
        multiply(square_average, square_average, beta2);
        add_product(square_average, square, second_rate);
        V denominator;
        if constexpr (is_amsgrad) {
            V& largest = state[2];
            largest = largest > square_average ? largest : square_average; // NaN stays
            root<T>(denominator, largest);
        } else {
            root<T>(denominator, square_average);
        }
        denominator = denominator / root_correction + epsilon;
        V const quotient = average / denominator;
        add_product(value, quotient, negative_rate);
    }
};

inline constexpr std::array<std::string_view, 1> sgd_state{"momentum_buffer"};
inline constexpr std::array<std::string_view, 3> adam_state{
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
};

/// Adam and AdamW, which differ in where the weight decay is applied.
template <class T, bool is_amsgrad, class Settings>
AdamUpdate<T, is_amsgrad>
adam_update(Settings const& settings, bool is_decoupled, std::uint64_t count) {
    auto const step = static_cast<double>(count);
    double const first_correction = 1.0 - std::pow(settings.beta1, step);
    double const second_correction = 1.0 - std::pow(settings.beta2, step);
    double const decay = settings.weight_decay;
    AdamUpdate<T, is_amsgrad> update;
    update.terms.sign = static_cast<T>(settings.maximize ? -1.0 : 1.0);
    update.terms.decay = static_cast<T>(is_decoupled ? 0.0 : decay);
    update.kept = static_cast<T>(is_decoupled ? 1.0 - settings.learning_rate * decay : 1.0);
    update.first_rate = static_cast<T>(1.0 - settings.beta1);
    update.beta2 = static_cast<T>(settings.beta2);
    update.second_rate = static_cast<T>(1.0 - settings.beta2);
    update.root_correction = static_cast<T>(std::sqrt(second_correction));
    update.epsilon = static_cast<T>(settings.epsilon);
    update.negative_rate = static_cast<T>(-settings.learning_rate / first_correction);
    return update;
}
/// Calls f with the update of a step.
template <class T, class Settings, class F>
decltype(auto)
visit_adam(Settings const& settings, bool is_decoupled, std::uint64_t step, F const& f) {
    return settings.amsgrad ? f(adam_update<T, true>(settings, is_decoupled, step))
                            : f(adam_update<T, false>(settings, is_decoupled, step));
}

/// Steps a range in host memory by the update that the rule gives.
template <class Rule, class T>
void run_rule(Rule const& rule, UpdateRange<T> const& range) {
    rule.template visit_update<T>(range.step, [&](auto const& update) {
        run_update(update, range);
    });
}

template <class Settings>
void check_adam(std::string_view name, Settings const& settings) {
    check_setting(name, "learning_rate", settings.learning_rate);
    check_setting(name, "beta1", settings.beta1, 1.0);
    check_setting(name, "beta2", settings.beta2, 1.0);
    check_setting(name, "epsilon", settings.epsilon);
    check_setting(name, "weight_decay", settings.weight_decay);
}

template <class List, class Settings>
void agree_on_adam(List& list, Settings const& settings) {
    list.add("learning_rate", settings.learning_rate);
    list.add("beta1", settings.beta1);
    list.add("beta2", settings.beta2);
    list.add("epsilon", settings.epsilon);
    list.add("weight_decay", settings.weight_decay);
    list.add("amsgrad", settings.amsgrad);
    list.add("maximize", settings.maximize);
}

} // namespace detail

constexpr std::span<std::string_view const> Sgd::state_names() const noexcept {
    return std::span{detail::sgd_state}.first(momentum == 0.0 ? 0 : 1);
}
template <class T>
void Sgd::update(UpdateRange<T> const& range) const {
    detail::run_rule(*this, range);
}
template <class T, class F>
decltype(auto) Sgd::visit_update(std::uint64_t step, F const& f) const {
    return momentum == 0.0 ? f(made<T, false>(step)) : f(made<T, true>(step));
}
inline void Sgd::check() const {
    detail::check_setting("Sgd", "learning_rate", learning_rate);
    detail::check_setting("Sgd", "momentum", momentum);
    detail::check_setting("Sgd", "weight_decay", weight_decay);
    if (!std::isfinite(dampening)) {
        throw ContractViolation{
            detail::concat("Sgd::dampening is ", dampening, "; give a finite number")
        };
    }
    if (nesterov && (momentum <= 0.0 || dampening != 0.0)) {
        throw ContractViolation{detail::concat(
            "Sgd::nesterov needs a momentum and no dampening, but momentum is ",
            momentum,
            " and dampening is ",
            dampening
        )};
    }
}
template <class List>
void Sgd::agree_on(List& list) const {
    list.add("learning_rate", learning_rate);
    list.add("momentum", momentum);
    list.add("dampening", dampening);
    list.add("weight_decay", weight_decay);
    list.add("nesterov", nesterov);
    list.add("maximize", maximize);
}
template <class T, bool has_momentum>
detail::SgdUpdate<T, has_momentum> Sgd::made(std::uint64_t step) const {
    detail::SgdUpdate<T, has_momentum> update;
    update.terms.sign = static_cast<T>(maximize ? -1.0 : 1.0);
    update.terms.decay = static_cast<T>(weight_decay);
    update.momentum = static_cast<T>(momentum);
    update.undamped = static_cast<T>(1.0 - dampening);
    update.negative_rate = static_cast<T>(-learning_rate);
    update.is_first = step == 1;
    update.is_nesterov = nesterov;
    return update;
}

constexpr std::span<std::string_view const> Adam::state_names() const noexcept {
    return std::span{detail::adam_state}.first(amsgrad ? 3 : 2);
}
template <class T>
void Adam::update(UpdateRange<T> const& range) const {
    detail::run_rule(*this, range);
}
template <class T, class F>
decltype(auto) Adam::visit_update(std::uint64_t step, F const& f) const {
    return detail::visit_adam<T>(*this, false, step, f);
}
inline void Adam::check() const {
    detail::check_adam("Adam", *this);
}
template <class List>
void Adam::agree_on(List& list) const {
    detail::agree_on_adam(list, *this);
}

constexpr std::span<std::string_view const> AdamW::state_names() const noexcept {
    return std::span{detail::adam_state}.first(amsgrad ? 3 : 2);
}
template <class T>
void AdamW::update(UpdateRange<T> const& range) const {
    detail::run_rule(*this, range);
}
template <class T, class F>
decltype(auto) AdamW::visit_update(std::uint64_t step, F const& f) const {
    return detail::visit_adam<T>(*this, true, step, f);
}
inline void AdamW::check() const {
    detail::check_adam("AdamW", *this);
}
template <class List>
void AdamW::agree_on(List& list) const {
    detail::agree_on_adam(list, *this);
}

}} // namespace joinable::v0
