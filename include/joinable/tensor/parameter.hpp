// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <optional>
#include <string_view>
#include <type_traits>

#include <joinable/tensor/tensor.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// What `parameter_traits` may return for a value or a gradient: something to dereference that may
/// be empty (a pointer, an optional view).
template <class P>
concept pointer_like_to_tensor = requires(P&& pointer) {
    static_cast<bool>(pointer);
    requires WritableTensor<decltype(*pointer)>;
};

template <class T>
constexpr T* address_of_gradient(T& gradient) noexcept {
    return &gradient;
}
template <class T>
constexpr T* address_of_gradient(std::optional<T>& gradient) noexcept {
    return gradient ? &*gradient : nullptr;
}

template <class P>
concept has_value_and_grad_members = requires(P& p) {
    requires WritableTensor<decltype((p.value))>;
    requires WritableTensor<decltype(*address_of_gradient(p.grad))>;
};

} // namespace detail

/// Adapts a parameter type: a value and its gradient. Specialise it for the engine's own type:
///
/// | member                                        | meaning                                          |
/// |-----------------------------------------------|--------------------------------------------------|
/// | `static auto value(P& p)`                     | pointer-like to a writable Tensor                |
/// | `static auto grad(P& p)`                      | the same; empty = there is no gradient           |
/// | `static bool requires_grad(P const& p)`       | optional; else all parameters are trained        |
/// | `static std::string_view name(P const& p)`    | optional; error texts use it                     |
/// | `static void set_grad(P& p, AnyView view)`    | optional; makes `view` the gradient: enables     |
/// |                                               | gradients as bucket views                        |
/// | `static constexpr bool is_handle = true`      | optional; copies of P share storage              |
///
/// The default serves every class with members `value` and `grad` (which may be a std::optional)
/// that are writable tensors, and uses its members `requires_grad` and `name` where it has them.
template <class P>
struct parameter_traits {
    static constexpr auto value(P& p) noexcept
        requires detail::has_value_and_grad_members<P>
    {
        return &p.value;
    }
    static constexpr auto grad(P& p) noexcept
        requires detail::has_value_and_grad_members<P>
    {
        return detail::address_of_gradient(p.grad);
    }
    static constexpr bool requires_grad(P const& p)
        requires requires {
            { p.requires_grad } -> std::convertible_to<bool>;
        }
    {
        return p.requires_grad;
    }
    static constexpr std::string_view name(P const& p)
        requires requires {
            { p.name } -> std::convertible_to<std::string_view>;
        }
    {
        return p.name;
    }
};

namespace detail {

template <class P>
using parameter_traits_of = parameter_traits<std::remove_cvref_t<P>>;

template <class P>
concept has_value = requires(std::remove_cvref_t<P>& p) {
    { parameter_traits_of<P>::value(p) } -> pointer_like_to_tensor;
};
template <class P>
concept has_grad = requires(std::remove_cvref_t<P>& p) {
    { parameter_traits_of<P>::grad(p) } -> pointer_like_to_tensor;
};
template <class P>
concept has_set_grad = requires(std::remove_cvref_t<P>& p, AnyView& view) {
    parameter_traits_of<P>::set_grad(p, view);
};
template <class P>
concept has_name = requires(std::remove_cvref_t<P> const& p) {
    { parameter_traits_of<P>::name(p) } -> std::convertible_to<std::string_view>;
};
template <class P>
concept has_requires_grad = requires(std::remove_cvref_t<P> const& p) {
    { parameter_traits_of<P>::requires_grad(p) } -> std::convertible_to<bool>;
};
template <class P>
concept is_handle_parameter = requires { requires parameter_traits_of<P>::is_handle; };

} // namespace detail

/// A trainable tensor with its gradient, as `parameter_traits` describes it.
///
/// `p` is an lvalue of `P`.
/// | expression                        | result                        | meaning                     |
/// |-----------------------------------|-------------------------------|-----------------------------|
/// | `parameter_traits<P>::value(p)`   | pointer-like to WritableTensor| the value; never empty      |
/// | `parameter_traits<P>::grad(p)`    | pointer-like to WritableTensor| the gradient; empty = none  |
///
/// Not checkable, still required: value and gradient have the same extents and dtype.
template <class P>
concept Parameter = detail::has_value<P> && detail::has_grad<P>;

}} // namespace joinable::v0
