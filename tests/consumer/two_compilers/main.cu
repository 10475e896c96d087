// SPDX-License-Identifier: BSL-1.0
// A program that steps by the same rule in a .cu file and, WITH_CPP, in a .cpp file. Both get the loops
// over registers that the .cpp file has, whichever of the rule's definitions the linker keeps.
#include <joinable/optimizer/rules.hpp>

#include <cstddef>
#include <cstdio>
#include <vector>

void step_in_cpp(joinable::Adam const& rule, joinable::UpdateRange<float> const& range);

namespace {

struct Model {
    std::vector<float> values, gradients, averages, squares;
    std::vector<float*> state;

    Model() : values(1003), gradients(1003), averages(1003), squares(1003) {
        for (std::size_t i = 0; i < values.size(); ++i) {
            values[i] = 0.25F * static_cast<float>(i % 17) - 2;
            gradients[i] = 0.125F * static_cast<float>(i % 23) - 1;
        }
        state = {averages.data(), squares.data()};
    }
    [[nodiscard]] joinable::UpdateRange<float> range() {
        return {values.size(), values.data(), gradients.data(), state, 1};
    }
};

} // namespace

int main() {
    joinable::Adam const rule;
    Model in_cu;
    rule.update(in_cu.range());
    Model by_one;
    rule.visit_update<float>(1, [&](auto const& update) {
        joinable::detail::update_registers<float, sizeof(float)>(update, by_one.range(), 0);
    });
    bool is_right = in_cu.values == by_one.values;
    using Update = joinable::detail::AdamUpdate<float, false>;
    auto* loop = &joinable::detail::update_avx2<float, Update>;
    asm("" : "+r"(loop)); // its address may be null
#if defined(WITH_CPP)
    Model in_cpp;
    step_in_cpp(rule, in_cpp.range());
    is_right = is_right && in_cpp.values == by_one.values && loop != nullptr;
#else
    is_right = is_right && loop == nullptr;
#endif
    std::puts(is_right ? "right" : "wrong");
    return is_right ? 0 : 1;
}
