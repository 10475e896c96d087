// SPDX-License-Identifier: BSL-1.0
// EXPECT: Tensor: tensor_traits::dtype must be 'static DType dtype(T const&)', and return a
// EXPECT: joinable::DType: translate an enum of the engine there
#include <joinable/join.hpp>

#include <array>
#include <vector>

namespace house {
enum class Kind { single, twice };
struct Matrix {
    std::vector<float> numbers;
    Kind kind = Kind::single;
};
} // namespace house

template <>
struct joinable::tensor_traits<house::Matrix> {
    static void* data(house::Matrix& m) { return m.numbers.data(); }
    static std::array<std::size_t, 1> extents(house::Matrix const& m) { return {m.numbers.size()}; }
    static house::Kind dtype(house::Matrix const& m) { return m.kind; }
};
static_assert(joinable::models_tensor<house::Matrix>());
