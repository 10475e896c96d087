// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: bool has no DType, and std::vector<bool> no contiguous elements; use unsigned char
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Mask {
    bool* data;
    std::size_t count;
};
template <>
struct joinable::tensor_traits<Mask> {
    using value_type = bool;
    static bool* data(Mask const& mask) { return mask.data; }
    static auto extents(Mask const& mask) { return std::array{mask.count}; }
};
static_assert(joinable::models_tensor<Mask>());
