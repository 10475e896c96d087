// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <type_traits>
#include <variant>

#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>
#include <joinable/tensor/shape.hpp>
#include <joinable/tensor/tensor.hpp>
#include <joinable/tensor/traits.hpp>

namespace joinable { inline namespace v0 {

/// A tensor of one of several types, such as an engine's `std::variant<FloatTensor, HalfTensor>`.
/// It is writable if every alternative is, and column-major if every one is. All members throw std::bad_variant_access if the variant
/// is valueless by exception.
template <class... Ts>
    requires(Tensor<Ts> && ...)
struct tensor_traits<std::variant<Ts...>> {
    static constexpr bool is_column_major = (detail::is_column_major<Ts> && ...);

    static DType dtype(std::variant<Ts...> const& t) {
        return std::visit([](auto const& tensor) { return joinable::dtype(tensor); }, t);
    }
    template <class Variant>
    static auto data(Variant& t) {
        using Data = std::conditional_t<
            std::is_const_v<Variant>,
            std::conditional_t<(WritableTensor<Ts const> && ...), void*, void const*>,
            std::conditional_t<(WritableTensor<Ts> && ...), void*, void const*>>;
        return std::visit(
            [](auto& tensor) -> Data { return detail::traits_of<decltype(tensor)>::data(tensor); },
            t
        );
    }
    static Shape extents(std::variant<Ts...> const& t) {
        return std::visit([](auto const& tensor) { return joinable::extents(tensor); }, t);
    }
    static Shape strides(std::variant<Ts...> const& t) {
        return std::visit([](auto const& tensor) { return joinable::strides(tensor); }, t);
    }
    static DeviceId device(std::variant<Ts...> const& t) {
        return std::visit([](auto const& tensor) { return joinable::device(tensor); }, t);
    }
    static std::size_t storage_bytes(std::variant<Ts...> const& t)
        requires(detail::has_storage_bytes<Ts> || ...)
    {
        return std::visit(
            []<class T>(T const& tensor) {
                if constexpr (detail::has_storage_bytes<T>) {
                    return detail::traits_of<T>::storage_bytes(tensor);
                } else {
                    return detail::max_bytes; // it does not say
                }
            },
            t
        );
    }
    static void check_reduction(std::variant<Ts...> const& t, ReduceOp op) {
        std::visit(
            [op]<class T>(T const& tensor) {
                if constexpr (requires { detail::traits_of<T>::check_reduction(tensor, op); }) {
                    detail::traits_of<T>::check_reduction(tensor, op);
                }
            },
            t
        );
    }
};

}} // namespace joinable::v0
