// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/tensor/sparse_rows.hpp>
#include <joinable/tensor/tensor.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// Whether a function that returns a `T` returns a copy of elements, which nobody would see change.
template <class T>
inline constexpr bool owns_elements = false;
template <class T, class Allocator>
inline constexpr bool owns_elements<std::optional<std::vector<T, Allocator>>> = true;
template <class T, std::size_t N>
inline constexpr bool owns_elements<std::optional<std::array<T, N>>> = true;

/// A result of `parameter_traits` for a value or a gradient: it can be dereferenced and may be
/// empty (a pointer, an optional view).
template <class P>
concept pointer_like_to_tensor = !owns_elements<std::remove_const_t<P>> && requires(P&& pointer) {
    static_cast<bool>(pointer);
    requires WritableTensor<decltype(*pointer)>;
};

template <class T>
constexpr T* address_of_gradient(T& gradient) noexcept {
    return std::addressof(gradient);
}
template <class T>
constexpr T* address_of_gradient(std::optional<T>& gradient) noexcept {
    return gradient ? std::addressof(*gradient) : nullptr;
}

/// The base of a `parameter_traits` that is not specialised.
struct DefaultParameterTraits {};

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
/// |                                               | gradients as bucket views. The memory of `view`  |
/// |                                               | ends with the reducer or participant that sets   |
/// |                                               | it, which first calls release_grad               |
/// | `static void release_grad(P& p)`              | optional; frees the gradient, which is averaged  |
/// |                                               | or of no use: grad(p) is empty until the next    |
/// |                                               | backward pass, or set_grad(p). Write it beside   |
/// |                                               | set_grad, else nobody may read a gradient that   |
/// |                                               | was set after the reducer has ended              |
/// | `static void set_value(P& p, AnyView view)`   | optional, with the next: makes `view` the value  |
/// | `static void release_value(P& p)`             | frees the value, or forgets the view that it is: |
/// |                                               | ranks keep parts of values; must not throw,      |
/// |                                               | because it also runs while an exception unwinds  |
/// | `static DType grad_dtype(P const& p)`         | optional: the gradient's, while there is none;   |
/// |                                               | f32 beside a value of f16 or bf16. Else it is    |
/// |                                               | that of the gradient that a participant finds    |
/// |                                               | when it is made, or the value's                  |
/// | `static bool is_sparse(P const& p)`           | optional, with the next two: whether the         |
/// |                                               | gradient is rows of an embedding. Asked when the |
/// |                                               | reducer or participant is made; then grad(p) is  |
/// |                                               | empty (sparse_as_dense: or these rows are)       |
/// | `static SparseRows sparse_grad(P& p)`         | the rows; a row may be there several times, in   |
/// |                                               | any order: they are added. Empty = no gradient   |
/// | `static void set_sparse_grad(P& p,            | makes `rows` the gradient: the rows of all ranks,|
/// | SparseRows rows)`                             | ascending, each once. They are valid until the   |
/// |                                               | next iteration begins or the reducer ends        |
/// | `static constexpr bool is_handle = true`      | optional; copies of P share storage              |
///
/// The default serves every class with members `value` and `grad` that are writable tensors; `grad`
/// may be a std::optional. It uses the members `requires_grad` and `name` if there are any. In a
/// specialisation, write `::` before a class `Parameter` of the global namespace.
template <class P>
struct parameter_traits : detail::DefaultParameterTraits {
    static constexpr auto value(P& p) noexcept
        requires detail::has_value_and_grad_members<P>
    {
        return std::addressof(p.value);
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
concept has_set_grad = requires(std::remove_cvref_t<P>& p, AnyView const& view) {
    parameter_traits_of<P>::set_grad(p, view);
};
template <class P>
concept has_release_grad =
    requires(std::remove_cvref_t<P>& p) { parameter_traits_of<P>::release_grad(p); };
template <class P>
concept has_set_value = requires(std::remove_cvref_t<P>& p, AnyView const& view) {
    parameter_traits_of<P>::set_value(p, view);
    parameter_traits_of<P>::release_value(p);
};
template <class P>
concept has_grad_dtype = requires(std::remove_cvref_t<P> const& p) {
    { parameter_traits_of<P>::grad_dtype(p) } -> std::same_as<DType>;
};
template <class P>
concept has_sparse_grad = requires(
    std::remove_cvref_t<P>& p, std::remove_cvref_t<P> const& constant, SparseRows const& rows
) {
    { parameter_traits_of<P>::is_sparse(constant) } -> std::convertible_to<bool>;
    { parameter_traits_of<P>::sparse_grad(p) } -> std::same_as<SparseRows>;
    parameter_traits_of<P>::set_sparse_grad(p, rows);
};
template <class P>
concept has_name = requires(std::remove_cvref_t<P> const& p) {
    requires lasting_text<decltype(parameter_traits_of<P>::name(p))>;
};
template <class P>
concept has_requires_grad = requires(std::remove_cvref_t<P> const& p) {
    { parameter_traits_of<P>::requires_grad(p) } -> std::convertible_to<bool>;
};
template <class P>
concept is_handle_parameter = requires { requires parameter_traits_of<P>::is_handle; };

template <class P>
concept has_default_traits = std::derived_from<parameter_traits_of<P>, DefaultParameterTraits>;
/// The class that declares requires_grad.
template <class P>
using declares_requires_grad =
    std::conditional_t<has_default_traits<P>, std::remove_cvref_t<P>, parameter_traits_of<P>>;

// An optional member of another signature, or without its partner, would be ignored.
template <class P>
concept has_other_requires_grad = requires {
    requires std::is_member_function_pointer_v<decltype(&declares_requires_grad<P>::requires_grad)>;
} || (!has_default_traits<P> && !has_requires_grad<P> && (requires(std::remove_cvref_t<P> const& p) {
    parameter_traits_of<P>::requires_grad(p);
} || requires {
    requires takes_others<decltype(&parameter_traits_of<P>::requires_grad), std::remove_cvref_t<P> const&>;
}));
template <class P>
concept has_other_name = !has_name<P> && (requires(std::remove_cvref_t<P> const& p) {
    parameter_traits_of<P>::name(p);
} || requires {
    requires takes_others<decltype(&parameter_traits_of<P>::name), std::remove_cvref_t<P> const&>;
});
template <class P>
concept has_other_set_grad = requires {
    requires takes_others<
        decltype(&parameter_traits_of<P>::set_grad),
        std::remove_cvref_t<P>&,
        AnyView const&>;
};
template <class P>
concept has_other_release_grad = requires {
    requires takes_others<decltype(&parameter_traits_of<P>::release_grad), std::remove_cvref_t<P>&>;
};
template <class P>
concept has_other_set_value =
    !has_set_value<P> && (requires(std::remove_cvref_t<P>& p, AnyView const& view) {
        parameter_traits_of<P>::set_value(p, view);
    } || requires(std::remove_cvref_t<P>& p) { parameter_traits_of<P>::release_value(p); } || requires {
        requires takes_others<
            decltype(&parameter_traits_of<P>::set_value),
            std::remove_cvref_t<P>&,
            AnyView const&>;
    } || requires {
        requires takes_others<decltype(&parameter_traits_of<P>::release_value), std::remove_cvref_t<P>&>;
    });
template <class P>
concept has_other_grad_dtype =
    !has_grad_dtype<P> && (requires(std::remove_cvref_t<P> const& p) {
        parameter_traits_of<P>::grad_dtype(p);
    } || requires { &parameter_traits_of<P>::grad_dtype; });
template <class P>
concept has_other_sparse_grad =
    !has_sparse_grad<P> && (requires { &parameter_traits_of<P>::is_sparse; } || requires {
        &parameter_traits_of<P>::sparse_grad;
    } || requires { &parameter_traits_of<P>::set_sparse_grad; } || requires(std::remove_cvref_t<P>& p) {
        parameter_traits_of<P>::is_sparse(p);
    } || requires(std::remove_cvref_t<P>& p) { parameter_traits_of<P>::sparse_grad(p); });
template <class P>
concept has_other_is_handle = requires { &parameter_traits_of<P>::is_handle; } && !requires {
    requires std::same_as<decltype(parameter_traits_of<P>::is_handle), bool const>;
    typename std::bool_constant<parameter_traits_of<P>::is_handle>;
};

/// Explains why an optional member is unusable. Returns true if all are usable.
template <class P>
consteval bool has_usable_options() {
    static_assert(
        !has_other_requires_grad<P>,
        "Parameter: requires_grad must be a data member that converts to bool, or 'static bool "
        "requires_grad(P const&)' in parameter_traits; else frozen parameters would be trained"
    );
    static_assert(
        !has_other_set_grad<P>,
        "Parameter: parameter_traits::set_grad must be 'static void set_grad(P&, AnyView)'"
    );
    static_assert(
        !has_other_release_grad<P>,
        "Parameter: parameter_traits::release_grad must be 'static void release_grad(P&)'"
    );
    static_assert(
        !has_other_name<P>,
        "Parameter: parameter_traits::name must be 'static std::string_view name(P const&)', a view of a "
        "text that the parameter keeps"
    );
    static_assert(
        !has_other_is_handle<P>,
        "Parameter: parameter_traits::is_handle must be 'static constexpr bool is_handle = true'"
    );
    static_assert(
        !has_other_grad_dtype<P>,
        "Parameter: parameter_traits::grad_dtype must be 'static DType grad_dtype(P const&)'"
    );
    static_assert(
        !has_other_sparse_grad<P>,
        "Parameter: parameter_traits needs all of 'static bool is_sparse(P const&)', 'static SparseRows "
        "sparse_grad(P&)' and 'static void set_sparse_grad(P&, SparseRows)', or none"
    );
    static_assert(
        !has_other_set_value<P>,
        "Parameter: parameter_traits needs both 'static void set_value(P&, AnyView)' and 'static void "
        "release_value(P&)', or neither"
    );
    return true;
}

} // namespace detail

/// A trainable tensor with its gradient, as `parameter_traits` describes it.
///
/// `p` is an lvalue of `P`.
/// | expression                        | result                        | meaning                     |
/// |-----------------------------------|-------------------------------|-----------------------------|
/// | `parameter_traits<P>::value(p)`   | pointer-like to WritableTensor| the value; never empty      |
/// | `parameter_traits<P>::grad(p)`    | pointer-like to WritableTensor| the gradient; empty = none  |
///
/// Required, but not checkable: value and gradient have the same extents and dtype.
template <class P>
concept Parameter = detail::has_value<P> && detail::has_grad<P>;

namespace detail {

template <class T>
inline constexpr bool is_raw_pointer = std::is_pointer_v<std::remove_reference_t<T>>;

/// Explains why the member `value` or `grad` is unusable. `Member` is a reference to it.
template <class Member>
consteval bool models_parameter_member() {
    if constexpr (is_raw_pointer<Member>) {
        static_assert(
            !is_raw_pointer<Member>,
            "Parameter: 'value' or 'grad' is a raw pointer, which does not say how many elements it "
            "has; use std::span, or specialise joinable::parameter_traits"
        );
        return false;
    } else {
        return models_writable_tensor<std::remove_reference_t<Member>>();
    }
}

/// Explains why the result of `parameter_traits::value` or `grad` is unusable.
template <class Returned>
consteval bool models_parameter_pointer() {
    constexpr bool is_pointer_like = requires(Returned pointer) {
        static_cast<bool>(pointer);
        *pointer;
    };
    static_assert(
        is_pointer_like,
        "Parameter: parameter_traits::value and grad return something to dereference, as a pointer to "
        "a tensor or a std::optional view, not the tensor itself"
    );
    constexpr bool is_number =
        is_raw_pointer<Returned> &&
        std::is_arithmetic_v<std::remove_pointer_t<std::remove_reference_t<Returned>>>;
    static_assert(
        !is_number,
        "Parameter: parameter_traits::value or grad returns a pointer to a number, which does not say how "
        "many there are; return std::optional{std::span{pointer, count}}"
    );
    static_assert(
        !owns_elements<std::remove_const_t<Returned>>,
        "Parameter: parameter_traits::value or grad returns a copy of the elements; return a pointer to the "
        "engine's own tensor, or std::optional{std::span{...}} over its elements"
    );
    if constexpr (is_pointer_like && !is_number) {
        return models_parameter_member<decltype(*std::declval<Returned&>())>();
    }
    return false;
}

} // namespace detail

/// Explains in one sentence why a class is not a Parameter:
/// `static_assert(models_parameter<My>());`.
template <class P>
consteval bool models_parameter() {
    using Traits = detail::parameter_traits_of<P>;
    constexpr bool is_default = detail::has_default_traits<P>;
    if constexpr (Parameter<P>) {
        using Value = decltype(*Traits::value(std::declval<std::remove_cvref_t<P>&>()));
        using Grad = decltype(*Traits::grad(std::declval<std::remove_cvref_t<P>&>()));
        return detail::has_usable_options<P>() && models_tensor<std::remove_reference_t<Value>>() &&
               models_tensor<std::remove_reference_t<Grad>>();
    } else if constexpr (is_default) {
        constexpr bool has_members = requires(P& p) {
            p.value;
            p.grad;
        };
        constexpr bool is_model = requires(P& p) { p.parameters(); };
        static_assert(
            has_members || !is_model,
            "Parameter: a model was given in place of its parameters; give model.parameters()"
        );
        static_assert(
            has_members || is_model,
            "Parameter: give the class members 'value' and 'grad' (public, of these names), or specialise "
            "joinable::parameter_traits for this very type"
        );
        if constexpr (has_members) {
            return detail::models_parameter_member<decltype((std::declval<P&>().value))>() &&
                   detail::models_parameter_member<
                       decltype(*detail::address_of_gradient(std::declval<P&>().grad))>();
        }
        return false;
    } else {
        constexpr bool has_both = requires(P& p) {
            Traits::value(p);
            Traits::grad(p);
        };
        static_assert(
            has_both,
            "Parameter: parameter_traits needs 'static auto value(P&)' and 'static auto grad(P&)'"
        );
        if constexpr (has_both) {
            return detail::models_parameter_pointer<decltype(Traits::value(std::declval<P&>()))>(
                   ) &&
                   detail::models_parameter_pointer<decltype(Traits::grad(std::declval<P&>()))>();
        }
        return false;
    }
}

}} // namespace joinable::v0
