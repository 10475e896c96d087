// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: tensor_traits needs 'static auto extents(T const&)', a range of integers; for one number
// EXPECT: n return std::array{n}
#include <joinable/join.hpp>

struct Matrix {
    std::vector<float> elements;
};
template <>
struct joinable::tensor_traits<Matrix> {
    using value_type = float;
    static float* data(Matrix& m) { return m.elements.data(); }
    static std::size_t extents(Matrix const& m) { return m.elements.size(); }
};

struct Weights {
    Matrix value, grad;
};
int main() {
    std::vector<Weights> model(2);
    (void)joinable::parameters(model);
}
