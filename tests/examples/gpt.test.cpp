// SPDX-License-Identifier: BSL-1.0
#include "../../examples/engines/gpt/gpt.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace {

constexpr auto not_ready = [](std::size_t) {};

/// Small, so that every number can be moved, and with numbers large enough for every part of the
/// passes to matter.
gpt::Gpt<double> make_model() {
    gpt::Gpt<double> model{{.layers = 2, .heads = 2, .width = 8, .context = 5, .symbols = 7}, 3};
    for (std::size_t i = 0; i < model.values().size(); ++i) {
        model.values()[i] = 3 * model.values()[i] + 0.1 * std::sin(static_cast<double>(i));
    }
    return model;
}

/// Sequences of different lengths, the shortest predicts one byte.
std::vector<std::uint8_t> const text{3, 6, 3, 3, 0, 1, 2, 5, 6, 6, 4, 3};
gpt::Batch const batch{
    std::span{text}.first(6), std::span{text}.subspan(6, 2), std::span{text}.subspan(8)
};

} // namespace

TEST_CASE("the gradients of the GPT are the limits of difference quotients") {
    auto model = make_model();
    model.forward(batch);
    model.backward(not_ready);
    std::vector<double> const gradients = model.gradients();
    REQUIRE(gradients.size() == model.values().size());
    double greatest = 0;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
        auto const loss_at = [&](double distance) {
            double& number = model.values()[i];
            double const before = std::exchange(number, number + distance);
            double const loss = model.forward(batch);
            number = before;
            return loss;
        };
        double const near = loss_at(1e-4) - loss_at(-1e-4);
        double const far = loss_at(2e-4) - loss_at(-2e-4);
        double const quotient = (8 * near - far) / 12e-4; // without the third derivative
        CAPTURE(i);
        CHECK(std::abs(quotient - gradients[i]) < 1e-9);
        greatest = std::max(greatest, std::abs(gradients[i]));
    }
    CHECK(greatest > 0.1);
}

TEST_CASE("each gradient of the GPT is final when it is said to be, and each is said once") {
    auto model = make_model();
    model.forward(batch);
    std::vector<int> times(model.sizes().size());
    std::vector<double> when_ready(model.values().size());
    model.backward([&](std::size_t parameter) {
        ++times[parameter];
        std::size_t begin = 0;
        for (std::size_t i = 0; i < parameter; ++i) {
            begin += model.sizes()[i];
        }
        std::copy_n(&model.gradients()[begin], model.sizes()[parameter], &when_ready[begin]);
    });
    CHECK(times == std::vector<int>(times.size(), 1));
    CHECK(when_ready == model.gradients());
}

TEST_CASE("a prediction of the GPT depends on the bytes before it alone") {
    auto model = make_model();
    double sum = 0;
    for (std::size_t length = 2; length <= 6; ++length) {
        auto const start = std::span{text}.first(length);
        model.forward({start});
        sum -= std::log(model.last_probabilities()[start.back()]);
    }
    CHECK(std::abs(model.forward({std::span{text}.first(6)}) - sum / 5) < 1e-14);
}

TEST_CASE("the loss of a batch is the mean over its bytes, however they are cut into batches") {
    auto model = make_model();
    double sum = 0;
    for (auto const& sequence : batch) {
        sum += model.forward({sequence}) * static_cast<double>(sequence.size() - 1);
    }
    CHECK(
        std::abs(model.forward(batch) - sum / static_cast<double>(gpt::tokens_of(batch))) < 1e-14
    );
    std::fill(model.values().begin(), model.values().end(), 0.0);
    CHECK(std::abs(model.forward(batch) - std::log(7.0)) < 1e-14);
}
