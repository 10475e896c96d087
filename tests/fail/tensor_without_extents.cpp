// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: tensor_traits needs 'static auto extents(T const&)', a range of integers
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Foreign {
    float number;
};
template <>
struct joinable::tensor_traits<Foreign> {
    using value_type = float;
    static float* data(Foreign& t) { return &t.number; }
};
static_assert(joinable::models_tensor<Foreign>());
