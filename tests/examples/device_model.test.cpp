// SPDX-License-Identifier: BSL-1.0
#include "../../examples/train_text/device_model.hpp"

#include "../../examples/train_text/train.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <joinable/join.hpp>

// The kernels, run by the host: the same functions that a GPU runs. The oracle is the model of the
// host, whose gradients are tested against difference quotients.

namespace {

using namespace train_text;

std::vector<std::uint8_t> const text{3, 200, 3, 3, 17, 200, 9, 9, 3, 17, 0, 255, 17, 3};

double relative_error(std::vector<float> const& found, std::vector<float> const& expected) {
    REQUIRE(found.size() == expected.size());
    double off = 0;
    double length = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
        off += std::pow(double{found[i]} - expected[i], 2);
        length += std::pow(double{expected[i]}, 2);
    }
    return std::sqrt(off / length);
}

std::vector<float> numbers(DeviceModel<HostLoop>& model, joinable::AnyView const& tensor) {
    return model.read<float>(tensor.data(), tensor.numel());
}

} // namespace

TEST_CASE("kernels compute the loss and the gradients that the model of the host computes") {
    joinable::HostDevice memory;
    for (std::uint64_t const seed : {1U, 2U, 3U}) {
        Model expected{seed};
        DeviceModel model{memory, HostLoop{}, Model{seed}};
        auto const loaded = model.load(text);
        // Batches that grow and shrink, the last with a position that is there twice.
        for (std::vector<std::size_t> const& positions :
             {std::vector<std::size_t>{0, 2, 5}, {7}, {0, 2, 5, 7, 11, 13}, {13, 13, 1}}) {
            expected.forward(text, positions);
            expected.backward([](std::size_t) {});
            model.forward(loaded, positions);
            CHECK(model.loss() == doctest::Approx(expected.loss()).epsilon(1e-6));
            model.backward([](std::size_t) {});
            for (std::size_t p = 0; p < model.parameters().size(); ++p) {
                CAPTURE(model.parameters()[p].name);
                CHECK(
                    relative_error(
                        numbers(model, model.parameters()[p].grad),
                        expected.parameters()[p].grad.numbers
                    ) < 1e-5
                );
            }
        }
    }
}

TEST_CASE("the optimizer's kernels take the steps that the optimizer of the host takes") {
    joinable::HostDevice memory;
    Model expected{7};
    DeviceModel model{memory, HostLoop{}, Model{7}};
    Sgd sgd{expected.parameters(), {0.5F, 4}, 0.9F};
    DeviceSgd kernels{memory, HostLoop{}, model.parameters(), {0.5F, 4}, 0.9F};
    auto const loaded = model.load(text);
    std::vector<std::size_t> const positions{1, 3, 8, 12};
    auto const before = state_of(model, kernels);
    for (int step = 0; step < 3; ++step) {
        expected.forward(text, positions);
        expected.backward([](std::size_t) {});
        sgd.step(expected.parameters());
        model.forward(loaded, positions);
        model.backward([](std::size_t) {});
        kernels.step(model.parameters());
    }
    auto const found = state_of(model, kernels);
    auto const wanted = state_of(expected, sgd);
    REQUIRE(found.size() == wanted.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
        CHECK(found[i] != before[i]);
        CHECK(relative_error(found[i], wanted[i]) < 1e-4);
    }
}

TEST_CASE("a gradient is said to be ready as soon as its kernel is launched, and once") {
    joinable::HostDevice memory;
    int launched = 0;
    auto const counting = [&launched](std::size_t count, auto const& kernel) {
        HostLoop{}(count, kernel);
        ++launched;
    };
    DeviceModel model{memory, counting, Model{1}};
    auto const loaded = model.load(text);
    model.forward(loaded, {1, 4});
    launched = 0;
    std::vector<std::vector<float>> when_ready(model.parameters().size());
    std::vector<int> launched_before;
    auto const gradient = [&](std::size_t p) {
        joinable::AnyView const& grad = model.parameters()[p].grad;
        return model.read<float>(grad.data(), grad.numel());
    };
    model.backward([&](std::size_t p) {
        CHECK(when_ready[p].empty());
        when_ready[p] = gradient(p);
        launched_before.push_back(launched);
    });
    CHECK(launched_before == std::vector<int>{1, 2, 4, 5, 7}); // two only lead to other gradients
    for (std::size_t p = 0; p < when_ready.size(); ++p) {
        CHECK(when_ready[p] == gradient(p));
    }
}
