// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <iterator>
#include <type_traits>

#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/shape.hpp>
#include <joinable/tensor/traits.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

template <class T>
using traits_of = tensor_traits<std::remove_cvref_t<T>>;

template <class T>
using lvalue_of = std::add_lvalue_reference_t<std::remove_reference_t<T>>;

template <class T>
concept has_tensor_traits = requires { sizeof(traits_of<T>); };

template <class T>
concept has_static_dtype =
    requires { typename traits_of<T>::value_type; } && Element<typename traits_of<T>::value_type>;

template <class T>
concept has_run_time_dtype = requires(std::remove_cvref_t<T> const& t) {
    { traits_of<T>::dtype(t) } -> std::same_as<DType>;
};

template <class Range>
concept range_of_integers = requires(Range const& range) {
    std::begin(range);
    std::end(range);
    requires std::integral<std::remove_cvref_t<decltype(*std::begin(range))>>;
};

template <class T>
concept has_extents = requires(std::remove_cvref_t<T> const& t) {
    { traits_of<T>::extents(t) } -> range_of_integers;
};

template <class T>
concept has_strides = requires(std::remove_cvref_t<T> const& t) {
    { traits_of<T>::strides(t) } -> range_of_integers;
};

template <class T>
concept has_storage_bytes = requires(std::remove_cvref_t<T> const& t) {
    { traits_of<T>::storage_bytes(t) } -> std::same_as<std::size_t>;
};

template <class T>
concept has_device = requires(std::remove_cvref_t<T> const& t) {
    { traits_of<T>::device(t) } -> std::same_as<DeviceId>;
};

/// Whether a member of traits does not take these arguments. One whose constraint is not satisfied
/// takes them, though it cannot be called, and is no mistake.
template <class Member, class... Arguments>
concept takes_others = !std::is_invocable_v<Member, Arguments...>;

// An optional member of another signature would be ignored.
template <class T>
concept has_other_dtype =
    !has_run_time_dtype<T> && (requires(std::remove_cvref_t<T> const& t) {
        traits_of<T>::dtype(t);
    } || requires {
        requires takes_others<decltype(&traits_of<T>::dtype), std::remove_cvref_t<T> const&>;
    });
template <class T>
concept has_other_strides =
    !has_strides<T> && (requires(std::remove_cvref_t<T> const& t) {
        traits_of<T>::strides(t);
    } || requires {
        requires takes_others<decltype(&traits_of<T>::strides), std::remove_cvref_t<T> const&>;
    });
template <class T>
concept has_other_storage_bytes =
    !has_storage_bytes<T> && (requires(std::remove_cvref_t<T> const& t) {
        traits_of<T>::storage_bytes(t);
    } || requires {
        requires takes_others<
            decltype(&traits_of<T>::storage_bytes),
            std::remove_cvref_t<T> const&>;
    });
template <class T>
concept has_other_device =
    !has_device<T> && (requires(std::remove_cvref_t<T> const& t) {
        traits_of<T>::device(t);
    } || requires {
        requires takes_others<decltype(&traits_of<T>::device), std::remove_cvref_t<T> const&>;
    });
template <class T>
concept has_other_is_column_major = requires { &traits_of<T>::is_column_major; } && !requires {
    requires std::same_as<decltype(traits_of<T>::is_column_major), bool const>;
    typename std::bool_constant<traits_of<T>::is_column_major>;
};

/// The traits of a view take a const tensor whatever its elements are. The traits of a container
/// take it as it is. Passing the lvalue as given covers both.
template <class T>
concept has_data = requires(lvalue_of<T> t) {
    { traits_of<T>::data(t) } -> std::convertible_to<void const*>;
};

template <class T>
concept has_writable_data = requires(lvalue_of<T> t) {
    { traits_of<T>::data(t) } -> std::convertible_to<void*>;
};

template <class T>
concept is_column_major = requires { requires traits_of<T>::is_column_major; };

template <class T>
concept is_expression = requires { requires traits_of<T>::is_expression; };

constexpr Shape const& shape_of(Shape const& shape) noexcept {
    return shape;
}
template <class Range>
Shape shape_of(Range const& range) {
    Shape shape;
    for (auto const value : range) {
        if constexpr (std::signed_integral<std::remove_cvref_t<decltype(value)>>) {
            if (value < 0) {
                throw ContractViolation{concat(
                    "an extent or a stride of a tensor is ", value, ", but must not be negative"
                )};
            }
        }
        shape.push_back(static_cast<std::size_t>(value));
    }
    return shape;
}

} // namespace detail

/// A tensor that can be read: `tensor_traits` describes it.
///
/// `t` is an lvalue of `T`, with its constness; `traits` is `tensor_traits<T>`.
/// | expression                                | result              | meaning                                  |
/// |-------------------------------------------|---------------------|------------------------------------------|
/// | `traits`                                  | complete            | how the type is adapted                  |
/// | `traits::value_type` or `traits::dtype(t)` | Element, or `DType` | the type of the elements                 |
/// | `traits::data(t)`                         | a pointer           | the first element                        |
/// | `traits::extents(t)`                      | a range of integers | one per dimension, at most 8             |
/// | `traits::strides(t)` (optional)           | a range of integers | in elements; dense without it            |
/// | `traits::storage_bytes(t)` (optional)     | `std::size_t`       | memory from data(t) on, for checks       |
/// | `traits::device(t)` (optional)            | `DeviceId`          | where the memory is; the host without it |
/// | `traits::is_column_major` (optional)      | `bool`              | which dimension varies fastest: the first |
/// |                                           |                     | if true, the last without it             |
///
/// Required, but not checkable: the memory stays in place while a collective uses it. Models:
/// std::vector, std::array, std::span, StridedView, AnyView; std::variant of tensors
/// (tensor/variant.hpp).
template <class T>
concept Tensor = detail::has_tensor_traits<T> &&
                 (detail::has_static_dtype<T> || detail::has_run_time_dtype<T>) &&
                 detail::has_data<T> && detail::has_extents<T>;

/// A tensor whose elements can be written.
///
/// `t` is an lvalue of `T`, with its constness.
/// | expression                  | result                 | meaning                             |
/// |-----------------------------|------------------------|-------------------------------------|
/// | `tensor_traits<T>::data(t)` | a pointer to non-const | the first element, to be written to |
///
/// Models: std::vector, std::array, std::span and StridedView of elements that are not const, AnyView.
template <class T>
concept WritableTensor = Tensor<T> && detail::has_writable_data<T>;

namespace detail {

/// A container that packs bools into bits: std::vector<bool>.
template <class T>
concept has_packed_bools = !Tensor<T> && requires {
    requires std::same_as<typename std::remove_cvref_t<T>::value_type, bool>;
};

/// A container whose elements have no DType, such as std::vector<long double>.
template <class T>
concept has_other_elements = !has_tensor_traits<T> && requires {
    typename std::remove_cvref_t<T>::value_type;
    requires !Element<typename std::remove_cvref_t<T>::value_type>;
};

} // namespace detail

/// Explains in one sentence why a type is not a Tensor: `static_assert(models_tensor<My>());`.
template <class T>
consteval bool models_tensor() {
    static_assert(
        !detail::has_packed_bools<T>,
        "Tensor: std::vector<bool> has no contiguous elements; use std::vector<unsigned char>, or an array of bool"
    );
    static_assert(
        !detail::has_other_elements<T>,
        "Tensor: the elements have no DType; use float, double, Half, BFloat16, bool, a complex number of "
        "float or double, or an integer of at most 8 bytes"
    );
    constexpr bool is_number = std::is_arithmetic_v<std::remove_cvref_t<T>>;
    static_assert(!is_number, "Tensor: a number is no tensor; give std::span{&number, 1}");
    constexpr bool is_pointer = std::is_pointer_v<std::decay_t<T>>; // or an array of C
    static_assert(
        !is_pointer || detail::has_tensor_traits<T>,
        "Tensor: a pointer does not say how many elements it points to; give std::span{pointer, count}"
    );
    static_assert(
        detail::has_tensor_traits<T> || detail::has_other_elements<T> || is_number || is_pointer,
        "Tensor: specialise joinable::tensor_traits for this very type (one for its base class does not "
        "count; see tensor/traits.hpp)"
    );
    static_assert(
        !detail::is_expression<T>,
        "Tensor: this is an expression without memory of its own; assign it to a matrix or an array, and give that"
    );
    if constexpr (detail::has_tensor_traits<T> && !detail::is_expression<T>) {
        static_assert(
            !detail::has_other_dtype<T>,
            "Tensor: tensor_traits::dtype must be 'static DType dtype(T const&)', and return a "
            "joinable::DType: translate an enum of the engine there"
        );
        static_assert(
            detail::has_static_dtype<T> || detail::has_run_time_dtype<T> ||
                detail::has_other_dtype<T>,
            "Tensor: tensor_traits needs value_type (an element type that has a DType) or "
            "'static DType dtype(T const&)'"
        );
        static_assert(
            detail::has_data<T>, "Tensor: tensor_traits needs 'static U* data(T&)' for this type"
        );
        static_assert(
            detail::has_extents<T>,
            "Tensor: tensor_traits needs 'static auto extents(T const&)', a range of integers; for one "
            "number n return std::array{n}"
        );
        static_assert(
            !detail::has_other_is_column_major<T>,
            "Tensor: tensor_traits::is_column_major must be 'static constexpr bool is_column_major = true'"
        );
        static_assert(
            !detail::has_other_strides<T>,
            "Tensor: tensor_traits::strides must be 'static auto strides(T const&)' and return a range of integers"
        );
        static_assert(
            !detail::has_other_storage_bytes<T>,
            "Tensor: tensor_traits::storage_bytes must be 'static std::size_t storage_bytes(T const&)'"
        );
        static_assert(
            !detail::has_other_device<T>,
            "Tensor: tensor_traits::device must be 'static DeviceId device(T const&)'"
        );
    }
    return Tensor<T>;
}

/// Explains in one sentence why a type is not a WritableTensor.
template <class T>
consteval bool models_writable_tensor() {
    if constexpr (models_tensor<T>()) {
        static_assert(
            detail::has_writable_data<T>,
            "Tensor: tensor_traits::data returns a pointer to const elements, but values, gradients "
            "and buffers are written; return one to elements that are not const"
        );
    }
    return WritableTensor<T>;
}

/// The dtype of a tensor.
template <Tensor T>
[[nodiscard]] constexpr DType dtype(T const& tensor) {
    if constexpr (detail::has_static_dtype<T>) {
        return dtype_of<typename detail::traits_of<T>::value_type>;
    } else {
        return detail::traits_of<T>::dtype(tensor);
    }
}

/// The extents of a tensor.
template <Tensor T>
[[nodiscard]] constexpr Shape extents(T const& tensor) {
    return detail::shape_of(detail::traits_of<T>::extents(tensor));
}

/// The strides of a tensor, in elements.
/// @throws ContractViolation  strides and extents differ in number, or a stride is negative.
template <Tensor T>
[[nodiscard]] constexpr Shape strides(T const& tensor) {
    if constexpr (detail::has_strides<T>) {
        Shape const given = detail::shape_of(detail::traits_of<T>::strides(tensor));
        if (std::size_t const rank = joinable::extents(tensor).size(); given.size() != rank) {
            throw ContractViolation{detail::concat(
                "a tensor has ", rank, " extents but ", given.size(), " strides; give one for each"
            )};
        }
        return given;
    } else if constexpr (detail::is_column_major<T>) {
        return column_major_strides(joinable::extents(tensor));
    } else {
        return row_major_strides(joinable::extents(tensor));
    }
}

/// The device that has a tensor's memory.
template <Tensor T>
[[nodiscard]] constexpr DeviceId device(T const& tensor) {
    if constexpr (detail::has_device<T>) {
        return detail::traits_of<T>::device(tensor);
    } else {
        return {};
    }
}

namespace detail {

/// Whether a tensor has this dtype, these extents and this device. Makes no Shape.
template <Tensor T>
[[nodiscard]] constexpr bool
is_like(T const& tensor, DType dtype, Shape const& extents, DeviceId device) {
    if (joinable::dtype(tensor) != dtype || joinable::device(tensor) != device) {
        return false;
    }
    std::size_t dimension = 0;
    for (auto const extent : traits_of<T>::extents(tensor)) {
        if (dimension == extents.size() ||
            static_cast<std::size_t>(extent) != extents[dimension++]) {
            return false;
        }
    }
    return dimension == extents.size();
}

} // namespace detail

/// The number of elements of a tensor.
template <Tensor T>
[[nodiscard]] constexpr std::size_t numel(T const& tensor) {
    return joinable::numel(joinable::extents(tensor));
}

/// Whether a tensor's elements lie one after another in the order of its type: column-major if its
/// traits say so, else row-major.
template <Tensor T>
[[nodiscard]] constexpr bool is_contiguous(T const& tensor) {
    if constexpr (detail::is_column_major<T>) {
        return joinable::is_contiguous(
            detail::reversed(joinable::extents(tensor)), detail::reversed(joinable::strides(tensor))
        );
    } else {
        return joinable::is_contiguous(joinable::extents(tensor), joinable::strides(tensor));
    }
}

/// The memory of a contiguous tensor, for writing. Elements are in the order of the tensor's type,
/// so ranks that exchange them must use tensors of the same order.
/// @throws ContractViolation  the tensor is not contiguous.
template <WritableTensor T>
[[nodiscard]] constexpr Buffer to_buffer(T&& tensor) {
    if (!joinable::is_contiguous(tensor)) {
        throw ContractViolation{
            "a collective needs a contiguous tensor; copy the strided one into a dense one first"
        };
    }
    return {detail::traits_of<T>::data(tensor), joinable::numel(tensor), joinable::dtype(tensor)};
}

/// The memory of a contiguous tensor, for reading. Elements are in the order of the tensor's type.
/// @throws ContractViolation  the tensor is not contiguous.
template <Tensor T>
[[nodiscard]] constexpr ConstBuffer to_const_buffer(T const& tensor) {
    if (!joinable::is_contiguous(tensor)) {
        throw ContractViolation{
            "a collective needs a contiguous tensor; copy the strided one into a dense one first"
        };
    }
    return {detail::traits_of<T>::data(tensor), joinable::numel(tensor), joinable::dtype(tensor)};
}

}} // namespace joinable::v0
