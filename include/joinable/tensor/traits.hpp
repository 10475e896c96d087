// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include <joinable/fwd.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 {

/// The kind of a device. No tensor is on `several`: see DeviceId.
enum class DeviceKind : std::uint8_t { host, cuda, several };

/// One device: the host, or an accelerator by its index. A Device that stands for `several` has a set: bit i of the
/// index is CUDA device i.
struct DeviceId {
    DeviceKind kind = DeviceKind::host;
    int index = 0;

    friend constexpr bool operator==(DeviceId, DeviceId) = default;
};

namespace detail {

/// Whether `device` is this one, or one of these.
[[nodiscard]] constexpr bool is_among(DeviceId device, DeviceId these) noexcept {
    return device == these ||
           (these.kind == DeviceKind::several && device.kind == DeviceKind::cuda &&
            device.index < 31 && (these.index >> device.index & 1) != 0);
}

} // namespace detail

/// Adapts a tensor type. Specialise it for the engine's own type, `T` without const or reference.
/// In the specialisation, write `::` before a class `Tensor`, `Parameter`, `Buffer` or `Shape` of
/// the global namespace, because this namespace has classes of these names.
///
/// Types of Eigen, Armadillo and xtensor, and std::mdspan, need no specialisation: include
/// interop/eigen.hpp, armadillo.hpp, xtensor.hpp or mdspan.hpp.
///
/// Traits of a base class do not apply to derived classes (such as `arma::Col` from `arma::Mat`).
/// One constrained specialisation adapts a whole family; the specialisations in this header still
/// take precedence:
/// ```cpp
/// template <class T>
///     requires std::derived_from<T, Base>
/// struct joinable::tensor_traits<T> { ... };
/// ```
///
/// | member                                           | required                                 |
/// |--------------------------------------------------|------------------------------------------|
/// | `using value_type = U;`                          | one of the two: the dtype is static ...  |
/// | `static DType dtype(T const& t);`                | ... or known at run time                 |
/// | `static U* data(T& t);`                          | to be written (`void*` with run-time     |
/// |                                                  | dtype); of a const tensor if T is a view |
/// | `static U const* data(T const& t);`              | to be read                               |
/// | `static auto extents(T const& t);`               | a range of integers, at most 8           |
/// | `static auto strides(T const& t);`               | optional, in elements; else dense        |
/// | `static std::size_t storage_bytes(T const& t);`  | optional: the bytes from data(t) to the  |
/// |                                                  | end of its memory, which extents and     |
/// |                                                  | strides may not exceed                   |
/// | `static DeviceId device(T const& t);`            | optional; else the host                  |
/// | `static constexpr bool is_column_major = true;`  | optional: the first dimension varies     |
/// |                                                  | fastest; else the last one does          |
/// | `static void check_reduction(T const& t,         | optional: throws if collectives may not  |
/// | ReduceOp op);`                                   | combine such elements by `op`            |
/// | `static constexpr bool is_expression = true;`    | instead of all others: T has no memory,  |
/// |                                                  | and an error text says so                |
template <class T>
struct tensor_traits; // primary undefined: a type without a specialisation is no tensor

template <Element U, class Allocator>
    requires(!std::same_as<U, bool>) // packed into bits
struct tensor_traits<std::vector<U, Allocator>> {
    using value_type = U;
    static U* data(std::vector<U, Allocator>& t) noexcept { return t.data(); }
    static U const* data(std::vector<U, Allocator> const& t) noexcept { return t.data(); }
    static std::array<std::size_t, 1> extents(std::vector<U, Allocator> const& t) noexcept {
        return {{t.size()}};
    }
};

template <Element U, std::size_t N>
struct tensor_traits<std::array<U, N>> {
    using value_type = U;
    static constexpr U* data(std::array<U, N>& t) noexcept { return t.data(); }
    static constexpr U const* data(std::array<U, N> const& t) noexcept { return t.data(); }
    static constexpr std::array<std::size_t, 1> extents(std::array<U, N> const&) noexcept {
        return {{N}};
    }
};

template <class U, std::size_t Extent>
    requires Element<std::remove_const_t<U>>
struct tensor_traits<std::span<U, Extent>> {
    using value_type = std::remove_const_t<U>;
    static constexpr U* data(std::span<U, Extent> const& t) noexcept { return t.data(); }
    static constexpr std::array<std::size_t, 1> extents(std::span<U, Extent> const& t) noexcept {
        return {{t.size()}};
    }
};

}} // namespace joinable::v0
