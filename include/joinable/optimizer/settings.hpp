// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <string_view>

/// @file
/// The settings of the update rules in optimizer/rules.hpp, which has what they compute: include
/// <joinable/zero.hpp> to train by them. A program without it can name them, so that the compiler says what is
/// missing.

namespace joinable { inline namespace v0 {

template <std::floating_point T>
struct UpdateRange;

namespace detail {

template <class T, bool has_momentum>
struct SgdUpdate;

} // namespace detail

/// Stochastic gradient descent, with momentum if it is not 0. The first step uses the undamped
/// gradient as the momentum.
struct Sgd {
    static constexpr bool steps_rows = true; ///< without momentum and weight decay
    double learning_rate = 1e-3;
    double momentum = 0;
    double dampening = 0;
    double weight_decay = 0;
    bool nesterov = false;
    bool maximize = false;

    [[nodiscard]] constexpr std::span<std::string_view const> state_names() const noexcept;
    template <class T>
    void update(UpdateRange<T> const& range) const;
    template <class T, class F>
    decltype(auto) visit_update(std::uint64_t step, F const& f) const;
    void(check)() const; // parenthesised: systems define a macro of this name
    template <class List>
    void agree_on(List& list) const;

private:
    template <class T, bool has_momentum>
    [[nodiscard]] detail::SgdUpdate<T, has_momentum> made(std::uint64_t step) const;
};

/// Adam (Kingma and Ba, 2015). The weight decay is added to the gradient. With amsgrad (Reddi et
/// al., 2018) the largest average of squares is used.
struct Adam {
    double learning_rate = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 0;
    bool amsgrad = false;
    bool maximize = false;

    [[nodiscard]] constexpr std::span<std::string_view const> state_names() const noexcept;
    template <class T>
    void update(UpdateRange<T> const& range) const;
    template <class T, class F>
    decltype(auto) visit_update(std::uint64_t step, F const& f) const;
    void(check)() const; // parenthesised: systems define a macro of this name
    template <class List>
    void agree_on(List& list) const;
};

/// Adam with a weight decay that shrinks the value and is not part of the gradient (Loshchilov and
/// Hutter, 2019).
struct AdamW {
    double learning_rate = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 1e-2;
    bool amsgrad = false;
    bool maximize = false;

    [[nodiscard]] constexpr std::span<std::string_view const> state_names() const noexcept;
    template <class T>
    void update(UpdateRange<T> const& range) const;
    template <class T, class F>
    decltype(auto) visit_update(std::uint64_t step, F const& f) const;
    void(check)() const; // parenthesised: systems define a macro of this name
    template <class List>
    void agree_on(List& list) const;
};

}} // namespace joinable::v0
