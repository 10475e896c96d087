// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/parameter.hpp>
#include <joinable/tensor/traits.hpp>

/// @file
/// torch::Tensor as a tensor, and as a parameter with its grad(). Opt-in; needs libtorch 1.13 or
/// later:
/// ```cpp
/// joinable::all_reduce(comm, loss).wait();                                    // of any device that comm serves
/// joinable::ZeroRedundancyOptimizer zero{comm, model->parameters(), joinable::Adam{}};
/// ```
/// Copies of a torch::Tensor share its elements, so ranges of them may be temporary. Elements are
/// read and written without autograd: a graph that needs a value does not notice such a change.
///
/// A parameter without a gradient gets one in memory of the participant that averages it, as all do
/// with gradient_as_bucket_view. That memory ends with the participant, and such a gradient is then
/// undefined: copy what you keep, and keep no handle of it. joinable::torch::DistributedDataParallel
/// leaves gradients in their own memory instead.
///
/// | torch                         | joinable      | torch                        | joinable          |
/// |-------------------------------|---------------|------------------------------|-------------------|
/// | kFloat, kDouble               | f32, f64      | kShort, kInt, kLong          | i16, i32, i64     |
/// | kHalf, kBFloat16              | f16, bf16     | kUInt16, kUInt32, kUInt64    | u16, u32, u64     |
/// | kChar, kByte, kBool           | i8, u8, boolean | channels_last, views       | their strides     |
/// | kComplexFloat, kComplexDouble | c64, c128     | 8-bit floats, kComplexHalf,  | ContractViolation |
/// |                               |               | sparse, quantised            |                   |
///
/// ReduceOp says which of these are reduced by which operation: kBool has no sum.

namespace joinable { inline namespace v0 {

namespace detail {

/// @throws ContractViolation  its elements cannot be read in place.
inline at::Tensor const& strided(at::Tensor const& tensor) {
    char const* const why =
        !tensor.defined() ? "undefined; give it a value"
        : tensor.layout() != c10::kStrided
            ? "not strided (sparse, or of another library); call to_dense(), and give embeddings sparse(false)"
        : tensor.is_conj() || tensor.is_neg()
            ? "a view that negates or conjugates; call resolve_neg() or resolve_conj()"
            : nullptr;
    if (why != nullptr) {
        throw ContractViolation{concat("a torch::Tensor is ", why)};
    }
    return tensor;
}

/// Whether `type` has elements T. libtorch before 2.3 has no unsigned integers but kByte.
template <class T>
[[nodiscard]] constexpr bool is_torch_type(c10::ScalarType type) {
    if constexpr (requires { c10::CppTypeToScalarType<T>::value; }) {
        return type == c10::CppTypeToScalarType<T>::value;
    } else {
        return false;
    }
}
/// None for a type that this adapter does not take.
[[nodiscard]] inline std::optional<DType> find_dtype_of_torch(c10::ScalarType type) {
    switch (type) {
    case c10::ScalarType::Float: return DType::f32;
    case c10::ScalarType::Double: return DType::f64;
    case c10::ScalarType::Half: return DType::f16;
    case c10::ScalarType::BFloat16: return DType::bf16;
    case c10::ScalarType::Char: return DType::i8;
    case c10::ScalarType::Byte: return DType::u8;
    case c10::ScalarType::Bool: return DType::boolean;
    case c10::ScalarType::Short: return DType::i16;
    case c10::ScalarType::Int: return DType::i32;
    case c10::ScalarType::Long: return DType::i64;
    case c10::ScalarType::ComplexFloat: return DType::c64;
    case c10::ScalarType::ComplexDouble: return DType::c128;
    default:
        if (is_torch_type<std::uint16_t>(type)) {
            return DType::u16;
        }
        if (is_torch_type<std::uint32_t>(type)) {
            return DType::u32;
        }
        if (is_torch_type<std::uint64_t>(type)) {
            return DType::u64;
        }
        return std::nullopt;
    }
}
[[nodiscard]] inline DType dtype_of_torch(c10::ScalarType type) {
    if (auto const dtype = find_dtype_of_torch(type)) {
        return *dtype;
    }
    throw ContractViolation{concat(
        "a torch::Tensor has elements of type ",
        c10::toString(type),
        ", which this adapter does not take; convert it with to(torch::kFloat) or the like"
    )};
}

/// A tensor over memory that ends elsewhere.
[[nodiscard]] inline at::Tensor tensor_over(AnyView const& view, at::TensorOptions const& options) {
    std::vector<std::int64_t> const extents{view.extents().begin(), view.extents().end()};
    std::vector<std::int64_t> const strides{view.strides().begin(), view.strides().end()};
    return at::for_blob(view.data(), extents)
        .strides(strides)
        .options(options.requires_grad(false))
        .target_device(options.device()) // else it is looked up from the address
        .make_tensor();
}

} // namespace detail

template <>
struct tensor_traits<at::Tensor> {
    static DType dtype(at::Tensor const& t) {
        return detail::dtype_of_torch(detail::strided(t).scalar_type());
    }
    static void* data(at::Tensor const& t) { return detail::strided(t).data_ptr(); }
    static auto extents(at::Tensor const& t) { return detail::strided(t).sizes(); }
    static auto strides(at::Tensor const& t) { return detail::strided(t).strides(); }
    static DeviceId device(at::Tensor const& t) {
        c10::Device const device = detail::strided(t).device();
        if (device.is_cpu()) {
            return {};
        }
        if (!device.is_cuda()) {
            throw ContractViolation{detail::concat(
                "a torch::Tensor is on ", device.str(), "; joinable knows cpu and cuda"
            )};
        }
        return {DeviceKind::cuda, device.index()};
    }
};

template <>
struct parameter_traits<at::Tensor> {
    static constexpr bool is_handle = true;

    static at::Tensor* value(at::Tensor& p) noexcept { return &p; }
    static at::Tensor* grad(at::Tensor& p) {
        at::Tensor& gradient = p.mutable_grad();
        return gradient.defined() ? &gradient : nullptr;
    }
    static bool requires_grad(at::Tensor const& p) { return p.requires_grad(); }
    static void set_grad(at::Tensor& p, AnyView const& view) {
        p.mutable_grad() = detail::tensor_over(view, p.options());
    }
    static void release_grad(at::Tensor& p) { p.mutable_grad().reset(); }
};

}} // namespace joinable::v0
