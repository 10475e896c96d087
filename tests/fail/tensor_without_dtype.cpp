// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: tensor_traits needs value_type (an element type that has a DType) or 'static
// EXPECT: DType dtype(T const&)'
#include <joinable/join.hpp>

#include <array>

#include <support/misuse.hpp>

struct Foreign {
    float number;
};
template <>
struct joinable::tensor_traits<Foreign> {
    static float* data(Foreign& t) { return &t.number; }
    static std::array<int, 1> extents(Foreign const&) { return {{1}}; }
};
static_assert(joinable::models_tensor<Foreign>());
