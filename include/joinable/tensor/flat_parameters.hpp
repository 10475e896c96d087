// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/shape.hpp>
#include <joinable/tensor/tensor.hpp>
#include <joinable/tensor/traits.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// One parameter of `flat_parameters`. Its gradient cannot be moved, because the engine's kernels
/// write to its address.
struct FlatParameter {
    AnyView value;
    AnyView grad;
};

/// The elements of contiguous memory that outlives the object `range`.
template <class Range>
[[nodiscard]] auto flat_elements(Range&& range) {
    constexpr bool is_contiguous = requires { std::span{range}; };
    static_assert(
        is_contiguous,
        "flat_parameters: values and gradients are contiguous ranges, such as std::vector or std::span; "
        "for a pointer and a count give std::span{pointer, count}"
    );
    static_assert(
        std::is_lvalue_reference_v<Range> ||
            std::ranges::enable_borrowed_range<std::remove_cv_t<Range>>,
        "flat_parameters: temporary memory would be destroyed before it is used; give it a name"
    );
    if constexpr (is_contiguous) {
        using T = typename decltype(std::span{range})::element_type;
        static_assert(
            Element<T>,
            "flat_parameters: values and gradients are written, and of a type that has a DType: float, "
            "double, Half or BFloat16, not const"
        );
        return std::span<T>{range};
    }
}

} // namespace detail

/// The parameters of an engine that keeps all values in one block of memory and all gradients in
/// another. Parameter i has `sizes[i]` elements in both, directly after those of parameter i - 1.
/// Elements after the last parameter are not trained. Local.
///
/// `values` and `gradients` are contiguous ranges of one element type. Their memory must stay in
/// place while the list or a copy of it is used, because the parameters are views and own nothing.
/// `sizes` is only read during the call.
///
/// Such gradients cannot be views of buckets (`gradient_as_bucket_view`), because kernels write
/// them to fixed addresses. Unless ranks sum them where they lie (see that option), each gradient is copied into its
/// bucket when it is ready, and the average is copied back. The backward pass still overlaps with the reductions;
/// tests/benchmarks/README.md has the cost of the copies. If an engine finds each gradient through
/// its own pointer, which others may set, specialise `parameter_traits` with `set_grad` instead.
/// @throws ContractViolation  a size is negative, or the sizes sum to more than the number of
///                            values or gradients.
template <class Values, class Gradients, class Sizes>
[[nodiscard]] ParameterList
flat_parameters(Values&& values, Gradients&& gradients, Sizes const& sizes, DeviceId device = {}) {
    static_assert(
        detail::range_of_integers<Sizes>,
        "flat_parameters: the sizes are a range of integers, one for each parameter"
    );
    auto const value = detail::flat_elements(std::forward<Values>(values));
    auto const gradient = detail::flat_elements(std::forward<Gradients>(gradients));
    using T = typename decltype(value)::element_type;
    static_assert(
        std::is_same_v<T, typename decltype(gradient)::element_type>,
        "flat_parameters: values and gradients are of one element type"
    );
    auto const list = std::make_shared<std::vector<detail::FlatParameter>>();
    std::size_t begin = 0;
    for (auto const given : sizes) {
        auto const size = static_cast<std::size_t>(given);
        // A negative size converts to a huge number, which this refuses too.
        if (size > value.size() - begin || size > gradient.size() - begin) {
            throw ContractViolation{detail::concat(
                "flat_parameters: parameter ",
                list->size(),
                " has ",
                given,
                " elements from ",
                begin,
                " on, but there are ",
                value.size(),
                " values and ",
                gradient.size(),
                " gradients; give sizes in elements, in the order in which parameters lie"
            )};
        }
        auto const view = [&](T* memory) {
            return AnyView{memory + begin, dtype_of<T>, {size}, {1}, device};
        };
        list->push_back({view(value.data()), view(gradient.data())});
        begin += size;
    }
    ParameterList parameters;
    for (detail::FlatParameter& parameter : *list) {
        parameters.push_back(AnyParameter{parameter, list});
    }
    return parameters;
}

}} // namespace joinable::v0
