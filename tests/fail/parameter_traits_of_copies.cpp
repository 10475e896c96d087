// SPDX-License-Identifier: BSL-1.0
// EXPECT: Parameter: parameter_traits::value or grad returns a copy of the elements; return a pointer to the engine's
// EXPECT: own tensor, or std::optional{std::span{...}} over its elements
#include <joinable/join.hpp>

#include <optional>
#include <vector>

struct Weights {
    float *data, *slope;
    int count;
};
template <>
struct joinable::parameter_traits<Weights> {
    static std::optional<std::vector<float>> value(Weights& w) {
        return std::vector<float>(w.data, w.data + w.count);
    }
    static std::optional<std::array<float, 1>> grad(Weights& w) { return std::array{w.slope[0]}; }
};
int main() {
    std::vector<Weights> model(2);
    (void)joinable::parameters(model);
}
