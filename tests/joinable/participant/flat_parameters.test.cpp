// SPDX-License-Identifier: BSL-1.0
// An engine that keeps all values in one memory and all gradients in another trains as one with separate
// tensors does.
#include <joinable/tensor/flat_parameters.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::flat_parameters;

std::array<int, 6> const sizes{3, 0, 1, 40, 0, 7}; // as an engine counts
constexpr std::size_t all = 51;

/// As llm.c has them: places are offsets, and there is room behind the last one.
struct Flat {
    std::vector<float> values = std::vector<float>(all + 2);
    std::vector<float> gradients = std::vector<float>(all + 2);

    [[nodiscard]] auto parameters() { return flat_parameters(values, gradients, sizes); }
    [[nodiscard]] float& value(std::size_t at) { return values[at]; }
    [[nodiscard]] float& gradient(std::size_t at) { return gradients[at]; }
};

struct Separate {
    struct Parameter {
        std::vector<float> value;
        std::vector<float> grad;
    };
    std::vector<Parameter> list;

    Separate() {
        for (int const size : sizes) {
            list.push_back(
                {std::vector<float>(static_cast<std::size_t>(size)),
                 std::vector<float>(static_cast<std::size_t>(size))}
            );
        }
    }
    [[nodiscard]] auto& parameters() { return list; }
    [[nodiscard]] float& value(std::size_t at) { return element(at, &Parameter::value); }
    [[nodiscard]] float& gradient(std::size_t at) { return element(at, &Parameter::grad); }

private:
    [[nodiscard]] float& element(std::size_t at, std::vector<float> Parameter::* member) {
        std::size_t i = 0;
        for (; at >= (list[i].*member).size(); ++i) {
            at -= (list[i].*member).size();
        }
        return (list[i].*member)[at];
    }
};

/// Two epochs; rank r has r + 1 batches in the first one, the others more in the second. Returns the values.
template <class Model>
std::vector<float> train(RankCommunicator& comm) {
    Model model;
    for (std::size_t at = 0; at < all; ++at) {
        model.value(at) = 0.1F * static_cast<float>(at + 1) + static_cast<float>(comm.rank());
    }
    joinable::DistributedDataParallel ddp{
        comm, model.parameters(), {.bucket_cap_bytes = 24, .first_bucket_bytes = 8}
    };
    joinable::Step step{comm, [&] {
                            for (std::size_t at = 0; at < all; ++at) {
                                model.value(at) -= 0.3F * model.gradient(at);
                                model.gradient(at) = 0;
                            }
                        }};
    for (int const batches : {comm.rank() + 1, comm.size() - comm.rank()}) {
        joinable::Join guard{joinable::participants(ddp, step)};
        for (int batch = 0; batch < batches; ++batch) {
            ddp.forward([] {}, {.weight = static_cast<std::uint64_t>(1 + comm.rank() % 2 + batch)});
            ddp.backward([&](auto ready) {
                std::size_t end = all;
                for (std::size_t i = sizes.size(); i-- > 0;) {
                    auto const size = static_cast<std::size_t>(sizes[i]);
                    for (std::size_t at = end - size; at < end; ++at) {
                        model.gradient(at) +=
                            0.7F * model.value(at) - static_cast<float>(comm.rank() + batch) / 3.0F;
                    }
                    end -= size;
                    ready(i);
                }
            });
            step.step();
        }
        guard.finish();
    }
    std::vector<float> values;
    for (std::size_t at = 0; at < all; ++at) {
        values.push_back(model.value(at));
    }
    return values;
}

TEST_CASE("parameters in one flat memory train to the bits of separate ones, with uneven inputs") {
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        std::vector<float> const separate = train<Separate>(comm);
        CHECK(train<Flat>(comm) == separate);
        CHECK(separate[0] != 0.1F); // it did train
    });
}

TEST_CASE("flat parameters lie one behind the other, and the last one may end before the memory") {
    std::vector<double> values(6);
    std::array<double, 7> gradients{};
    auto const list = flat_parameters(std::span{values}, gradients, std::vector<long>{2, 0, 3});
    REQUIRE(list.size() == 3);
    CHECK(list[0].value().data() == values.data());
    CHECK(list[1].value().numel() == 0);
    CHECK(list[1].value()); // it is there, and has no elements
    CHECK(list[2].value().data() == values.data() + 2);
    CHECK(list[2].grad().data() == gradients.data() + 2);
    CHECK(list[2].grad().extents() == joinable::Shape{3});
    CHECK(list[2].value().dtype() == joinable::DType::f64);
    CHECK(list[2].requires_grad());
    CHECK_FALSE(list[2].can_set_grad());
    CHECK(flat_parameters(values, gradients, std::array{6}).size() == 1); // all of it
}

TEST_CASE("flat parameters are on the device that is named") {
    std::vector<float> memory(4);
    joinable::DeviceId const device{joinable::DeviceKind::cuda, 1};
    auto const list = flat_parameters(memory, memory, std::array{4}, device);
    CHECK(list[0].value().device() == device);
    CHECK(list[0].grad().device() == device);
}

TEST_CASE("sizes that reach beyond either memory are refused with all numbers") {
    std::vector<float> const zeros(10);
    std::vector<float> ten = zeros;
    std::vector<float> eight(8);
    CHECK_THROWS_WITH_AS(
        (void)flat_parameters(ten, eight, std::array{6, 3}),
        "flat_parameters: parameter 1 has 3 elements from 6 on, but there are 10 values and 8 gradients; "
        "give sizes in elements, in the order in which parameters lie",
        joinable::ContractViolation
    );
    CHECK_THROWS_AS(
        (void)flat_parameters(eight, ten, std::array{6, 3}), joinable::ContractViolation
    );
    CHECK_THROWS_AS(
        (void)flat_parameters(ten, ten, std::array{6, -3}), joinable::ContractViolation
    );
    std::array const sum_overflows{std::size_t{6}, static_cast<std::size_t>(-2)};
    CHECK_THROWS_AS((void)flat_parameters(ten, ten, sum_overflows), joinable::ContractViolation);
}

TEST_CASE("gradients as bucket views are refused where gradients have their places") {
    over_ranks({1, 2}, [&](RankCommunicator& comm) {
        Flat model;
        CHECK_THROWS_WITH_AS(
            (joinable::DistributedDataParallel{
                comm, model.parameters(), {.gradient_as_bucket_view = true}
            }),
            doctest::Contains("set_grad"),
            joinable::ContractViolation
        );
    });
}

} // namespace
