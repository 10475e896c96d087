// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <type_traits>
#include <variant>

#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>
#include <joinable/tensor/tensor.hpp>
#include <joinable/tensor/traits.hpp>

namespace joinable { inline namespace v0 {

/// A tensor of one of several types, such as an engine's `std::variant<FloatTensor, HalfTensor>`.
/// It is writable if every alternative is. All members throw std::bad_variant_access if the variant
/// is valueless by exception.
template <class... Ts>
    requires(Tensor<Ts> && ...)
struct tensor_traits<std::variant<Ts...>> {
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
};

}} // namespace joinable::v0
