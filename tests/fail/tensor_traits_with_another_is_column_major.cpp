// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: tensor_traits::is_column_major must be 'static constexpr bool is_column_major = true'
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
    static bool is_column_major(Matrix const&) { return true; }
};
static_assert(joinable::models_tensor<Matrix>());
