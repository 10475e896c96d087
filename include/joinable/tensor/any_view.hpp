// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include <joinable/tensor/strided_view.hpp>

namespace joinable { inline namespace v0 {

/// A non-owning writable tensor whose dtype is known at run time. A default-constructed one is
/// empty: it stands for "no tensor".
class AnyView {
public:
    AnyView() = default;

    /// Views any writable tensor.
    template <WritableTensor T>
        requires(!std::same_as<std::remove_cvref_t<T>, AnyView>)
    explicit AnyView(T&& tensor)
        : AnyView{
              detail::traits_of<T>::data(tensor),
              joinable::dtype(tensor),
              joinable::extents(tensor),
              joinable::strides(tensor),
              joinable::device(tensor)
          } {
        if constexpr (detail::has_storage_bytes<T>) {
            detail::check_storage(
                extents_,
                strides_,
                size_of(dtype_),
                detail::traits_of<T>::storage_bytes(std::as_const(tensor))
            );
        }
    }

    /// @throws ContractViolation  extents and strides differ in number, one is negative (a signed
    ///                            number converted to std::size_t), or the view is larger than
    ///                            memory can be.
    AnyView(
        void* data, DType dtype, Shape const& extents, Shape const& strides, DeviceId device = {}
    )
        : data_{data}, extents_{extents}, strides_{strides}, device_{device}, dtype_{dtype},
          is_tensor_{true} {
        (void)detail::checked_reach(extents, strides, size_of(dtype));
    }

    /// Whether there is a tensor, even one without elements.
    explicit operator bool() const noexcept { return is_tensor_; }

    [[nodiscard]] void* data() const noexcept { return data_; }
    [[nodiscard]] DType dtype() const noexcept { return dtype_; }
    [[nodiscard]] Shape const& extents() const noexcept { return extents_; }
    [[nodiscard]] Shape const& strides() const noexcept { return strides_; }
    [[nodiscard]] DeviceId device() const noexcept { return device_; }
    [[nodiscard]] std::size_t numel() const { return joinable::numel(extents_); }
    [[nodiscard]] bool is_contiguous() const { return joinable::is_contiguous(extents_, strides_); }

    /// The same tensor with a static element type.
    /// @throws ContractViolation  the elements are not of type `T`.
    template <Element T>
    [[nodiscard]] StridedView<T> as() const {
        if (dtype_ != dtype_of<T>) {
            throw ContractViolation{
                "a tensor of " + detail::to_text(name_of(dtype_)) +
                " was asked for its elements as " + detail::to_text(name_of(dtype_of<T>))
            };
        }
        return {static_cast<T*>(data_), extents_, strides_};
    }

private:
    void* data_ = nullptr;
    Shape extents_{0}; ///< an empty view has no elements, so it is never read or written
    Shape strides_{1};
    DeviceId device_;
    DType dtype_ = DType::f32;
    bool is_tensor_ = false;
};

namespace detail {

/// "f32 (2, 3)": how error texts name a tensor.
[[nodiscard]] inline std::string to_text(AnyView const& view) {
    return view ? concat(name_of(view.dtype()), " ", to_text(view.extents())) : "missing";
}

/// "the host", "CUDA device 1", or "CUDA device 0 or CUDA device 1".
[[nodiscard]] inline std::string to_text(DeviceId device) {
    if (device.kind == DeviceKind::several) {
        int const others = device.index & (device.index - 1); // without the lowest
        int const lowest = std::countr_zero(static_cast<unsigned>(device.index));
        return to_text(DeviceId{DeviceKind::cuda, lowest}) +
               (others == 0 ? "" : " or " + to_text(DeviceId{DeviceKind::several, others}));
    }
    return device.kind == DeviceKind::host ? "the host" : concat("CUDA device ", device.index);
}

/// Whether the tensor has memory, or needs none because it has no elements.
[[nodiscard]] inline bool has_memory(AnyView const& view) {
    return view.data() != nullptr || view.numel() == 0;
}

/// The same memory with complex numbers as pairs of reals, in a last dimension of extent 2. Others
/// stay.
/// @throws ContractViolation  the tensor is complex and has `max_tensor_rank` dimensions.
[[nodiscard]] inline AnyView as_reals(AnyView const& view) {
    if (!is_complex(view.dtype())) {
        return view;
    }
    if (view.extents().size() == max_tensor_rank) {
        throw ContractViolation{concat(
            "a tensor of complex numbers has at most ",
            max_tensor_rank - 1,
            " dimensions here, because its parts are one more, but this one has ",
            max_tensor_rank,
            "; merge two of them"
        )};
    }
    Shape extents = view.extents();
    Shape strides;
    for (std::size_t const stride : view.strides()) {
        strides.push_back(2 * stride);
    }
    extents.push_back(2);
    strides.push_back(1);
    return {view.data(), real_of(view.dtype()), extents, strides, view.device()};
}

/// The shape of complex numbers whose pairs of reals are of this shape.
[[nodiscard]] inline Shape without_last(Shape const& shape) {
    return Shape{std::span{shape.data(), shape.size() - 1}};
}

/// The inverse of as_reals().
/// @pre `view` is what it returned, or has its shape.
[[nodiscard]] inline AnyView as_complex(AnyView const& view) {
    Shape strides;
    for (std::size_t const stride : without_last(view.strides())) {
        strides.push_back(stride / 2);
    }
    return {
        view.data(), complex_of(view.dtype()), without_last(view.extents()), strides, view.device()
    };
}

/// A view of any writable tensor. Returns an AnyView unchanged.
template <class T>
[[nodiscard]] AnyView view_of(T&& tensor) {
    if constexpr (std::same_as<std::remove_cvref_t<T>, AnyView>) {
        return tensor;
    } else {
        return AnyView{tensor};
    }
}

/// A view of any tensor, in the form that takes writable ones: nothing is written to a source.
template <class T>
[[nodiscard]] AnyView source_view(T const& tensor) {
    if constexpr (std::same_as<T, AnyView>) {
        return tensor;
    } else {
        void const* const data = traits_of<T const>::data(tensor);
        // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
        return {
            const_cast<void*>(data),
            joinable::dtype(tensor),
            joinable::extents(tensor),
            joinable::strides(tensor),
            joinable::device(tensor)
        };
    }
}

/// Whether two tensors of the same extents have their elements in the same places, apart from where
/// they begin. The stride of a dimension of extent 1 does not matter.
[[nodiscard]] inline bool has_same_steps(AnyView const& a, AnyView const& b) {
    for (std::size_t d = 0; d < a.extents().size(); ++d) {
        if (a.extents()[d] != 1 && a.strides()[d] != b.strides()[d]) {
            return a.numel() == 0;
        }
    }
    return true;
}

/// Whether two tensors have the same number and type of elements, on the same device.
[[nodiscard]] inline bool is_like(AnyView const& a, AnyView const& b) {
    return static_cast<bool>(a) == static_cast<bool>(b) && a.dtype() == b.dtype() &&
           a.extents() == b.extents() && a.device() == b.device();
}

} // namespace detail

template <>
struct tensor_traits<AnyView> {
    static DType dtype(AnyView const& view) noexcept { return view.dtype(); }
    static void* data(AnyView const& view) noexcept { return view.data(); }
    static Shape const& extents(AnyView const& view) noexcept { return view.extents(); }
    static Shape const& strides(AnyView const& view) noexcept { return view.strides(); }
    static DeviceId device(AnyView const& view) noexcept { return view.device(); }
};

}} // namespace joinable::v0
