// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>

#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/tensor.hpp>

namespace joinable { inline namespace v0 {

/// The properties of a tensor that bucket assignment needs. It can replace tensors that have no
/// memory yet, so a layout can be computed before the model is made, or at compile time.
struct TensorSize {
    std::size_t numel = 0;
    DType dtype = DType::f32;
    DeviceId device = {};

    [[nodiscard]] constexpr std::size_t bytes() const noexcept { return numel * size_of(dtype); }
    /// Whether tensors of both sizes may share a bucket, which has one dtype and one device.
    [[nodiscard]] constexpr bool shares_buckets_with(TensorSize const& other) const noexcept {
        return dtype == other.dtype && device == other.device;
    }
};

namespace detail {

template <class T>
concept has_tensor_size =
    Tensor<T> || Parameter<T> || std::same_as<std::remove_cvref_t<T>, AnyParameter> ||
    std::same_as<std::remove_cvref_t<T>, TensorSize>;

/// The size of a tensor, or that of a parameter's value.
template <has_tensor_size T>
[[nodiscard]] constexpr TensorSize tensor_size_of(T&& object) {
    using Object = std::remove_cvref_t<T>;
    if constexpr (std::same_as<Object, TensorSize>) {
        return object;
    } else if constexpr (std::same_as<Object, AnyParameter>) {
        return tensor_size_of(object.value());
    } else if constexpr (Tensor<T>) {
        return {joinable::numel(object), joinable::dtype(object), joinable::device(object)};
    } else {
        // Traits take mutable parameters, but the size is only read.
        return tensor_size_of(*parameter_traits<Object>::value(const_cast<Object&>(object)));
    }
}

} // namespace detail

}} // namespace joinable::v0
