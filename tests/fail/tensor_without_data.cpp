// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: tensor_traits needs 'static U* data(T&)' for this type
#include <joinable/join.hpp>

#include <array>

#include <support/misuse.hpp>

struct Foreign {
    float number;
};
template <>
struct joinable::tensor_traits<Foreign> {
    using value_type = float;
    static std::array<int, 1> extents(Foreign const&) { return {{1}}; }
};
static_assert(joinable::models_tensor<Foreign>());
