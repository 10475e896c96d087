// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: tensor_traits::strides must be 'static auto strides(T const&)' and return a range of integers
#include <joinable/join.hpp>

#include <array>
#include <vector>

struct Matrix {
    std::vector<float> numbers;
};

template <>
struct joinable::tensor_traits<Matrix> {
    using value_type = float;
    static float* data(Matrix& m) { return m.numbers.data(); }
    static std::array<std::size_t, 1> extents(Matrix const& m) { return {m.numbers.size()}; }
    static std::size_t strides(Matrix const&, std::size_t dimension) { return dimension; }
};
static_assert(joinable::models_tensor<Matrix>());
