// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 {

/// State of an optimizer for one parameter, under one name. It has one element for each of the
/// parameter's, in row-major order, whatever the layout of the value.
struct StateTensor {
    std::string name; ///< of the rule's state_names(), or "master"
    DType dtype;
    Shape extents;
    std::vector<std::byte> elements;
};

/// The whole state of an optimizer, independent of the number of ranks.
template <class Rule>
struct OptimizerState {
    struct Parameter {
        std::uint64_t steps = 0;
        std::vector<StateTensor> tensors; ///< none if the parameter needs no gradient
    };

    std::vector<Rule> rules;           ///< of the groups
    std::vector<Parameter> parameters; ///< of all groups, one after another
};

}} // namespace joinable::v0
