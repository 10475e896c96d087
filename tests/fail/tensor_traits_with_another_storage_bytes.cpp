// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: tensor_traits::storage_bytes must be 'static std::size_t storage_bytes(T const&)'
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
    static double storage_bytes(Matrix const&) { return 1; }
};
static_assert(joinable::models_tensor<Matrix>());
