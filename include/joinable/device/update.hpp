// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Elements that an update rule steps, in the memory of a device. No two updates of one call have
/// memory in common.
struct DeviceUpdate {
    void* values;          ///< of `dtype`
    void const* gradients; ///< of `dtype`; may be `values`
    void* masters;         ///< of f32, for values of 16 bits; null: the values are stepped
    void* state;           ///< the first array, of the type that is computed in; null: no state
    std::size_t stride;    ///< from one array of the state to the next, in elements
    std::size_t count;
    std::uint64_t step; ///< of this parameter, counted from 1
    DType dtype;
};

/// An update rule whose class a device does not know.
struct DeviceRule {
    void const* id;       ///< equal for equal classes, within a program or shared object
    void const* settings; ///< the rule
    std::size_t bytes;    ///< of the rule, which is trivially copyable
    void (*on_host)(void const* settings, DeviceUpdate const& update); ///< steps in host memory
};

/// Its address is DeviceRule::id.
template <class Rule>
inline char rule_id = 0;

/// A sum of the squares of a tensor's elements, for Device::sum_squares().
struct SquareSum {
    AnyView tensor;                           ///< of a floating-point dtype
    double* sum;                              ///< in the memory of the tensor's device
    double (*on_host)(AnyView const& tensor); ///< sums them in host memory: sum_of_squares
};

}}} // namespace joinable::v0::detail
