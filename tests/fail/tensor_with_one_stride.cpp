// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: tensor_traits::strides must be 'static auto strides(T const&)' and return a range of integers
#include <joinable/join.hpp>

#include <array>
#include <vector>

struct Matrix {
    std::vector<float> numbers;
    int rows, columns;
};

template <>
struct joinable::tensor_traits<Matrix> {
    using value_type = float;
    static float* data(Matrix& m) { return m.numbers.data(); }
    static auto extents(Matrix const& m) { return std::array{m.rows, m.columns}; }
    static int strides(Matrix const& m) { return m.columns; }
};
static_assert(joinable::models_tensor<Matrix>());
