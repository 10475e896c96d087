// SPDX-License-Identifier: BSL-1.0
// Sums of squares. The oracles: sums of numbers that are exact in any order, and the order as its
// description says it, over a list of numbers.
#include <joinable/device/squares.hpp>

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <support/layouts.hpp>
#include <support/numbers.hpp>

#include <joinable/device/host.hpp>

namespace {

using joinable::AnyView;
using joinable::DType;
using joinable::detail::sum_of_squares;
using namespace joinable_tests;

/// Numbers dealt to 256 lanes, of which the upper half is added to the lower one until one is left.
double sum_in_lanes(Numbers const& numbers) {
    Numbers lanes(256, 0.0);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        lanes[i % 256] += numbers[i];
    }
    while (lanes.size() > 1) {
        Numbers half(lanes.size() / 2);
        for (std::size_t i = 0; i < half.size(); ++i) {
            half[i] = lanes[i] + lanes[i + half.size()];
        }
        lanes = half;
    }
    return lanes.front();
}
double sum_in_order(Numbers const& numbers) {
    Numbers runs;
    for (std::size_t begin = 0; begin < numbers.size(); begin += 2048) {
        Numbers squares;
        for (std::size_t i = begin; i < numbers.size() && i < begin + 2048; ++i) {
            squares.push_back(numbers[i] * numbers[i]);
        }
        runs.push_back(sum_in_lanes(squares));
    }
    return sum_in_lanes(runs);
}

/// Of many magnitudes, so that each order of adding rounds otherwise.
Numbers rough(std::size_t count) {
    Numbers numbers;
    for (std::size_t i = 0; i < count; ++i) {
        numbers.push_back(std::sin(static_cast<double>(i + 1)) * std::pow(2.0, i * 7 % 11));
    }
    return numbers;
}

std::vector<DType> const floats{DType::f16, DType::bf16, DType::f32, DType::f64};

} // namespace

TEST_CASE("squares are summed in the order that is described, around the sizes of lanes and runs") {
    for (std::size_t const count :
         {std::size_t{0},
          std::size_t{1},
          std::size_t{255},
          std::size_t{256},
          std::size_t{257},
          std::size_t{2047},
          std::size_t{2048},
          std::size_t{2049},
          std::size_t{5000},
          std::size_t{2048} * 256 + 2049}) {
        CAPTURE(count);
        for (DType const dtype : floats) {
            OwnedTensor const tensor{dtype, {count}, {1}};
            write(tensor.view(), rough(count));
            Numbers const stored = read(tensor.view());
            CHECK(sum_of_squares(tensor.view()) == sum_in_order(stored));
        }
    }
}

TEST_CASE("the order matters to these numbers, and the sum is right to rounding") {
    OwnedTensor const tensor{DType::f64, {5000}, {1}};
    Numbers const numbers = rough(5000);
    write(tensor.view(), numbers);
    double one_by_one = 0;
    long double exact = 0;
    for (double const number : numbers) {
        one_by_one += number * number;
        exact += static_cast<long double>(number) * static_cast<long double>(number);
    }
    double const sum = sum_of_squares(tensor.view());
    CHECK(sum != one_by_one);
    CHECK(sum == doctest::Approx(static_cast<double>(exact)).epsilon(1e-14));
}

TEST_CASE("elements count in the order of their indices, wherever they lie") {
    for (DType const dtype : floats) {
        for (Layout const& layout : layouts()) {
            std::size_t const count = joinable::numel(layout.extents);
            OwnedTensor const tensor{dtype, layout.extents, layout.to};
            OwnedTensor const dense{dtype, {count}, {1}};
            write(tensor.view(), rough(count));
            write(dense.view(), rough(count));
            CHECK(sum_of_squares(tensor.view()) == sum_in_order(read(dense.view())));
        }
    }
}

TEST_CASE("a sum is not finite if an element is not") {
    for (DType const dtype : floats) {
        OwnedTensor const tensor{dtype, {3000}, {1}};
        Numbers numbers(3000, 1.0);
        for (double const bad :
             {std::numeric_limits<double>::infinity(),
              -std::numeric_limits<double>::infinity(),
              std::numeric_limits<double>::quiet_NaN()}) {
            numbers[2999] = bad;
            write(tensor.view(), numbers);
            CHECK(!std::isfinite(sum_of_squares(tensor.view())));
        }
        numbers[2999] = 1.0;
        write(tensor.view(), numbers);
        CHECK(sum_of_squares(tensor.view()) == 3000.0);
    }
}

TEST_CASE("the host's device adds each sum to its number") {
    OwnedTensor const first{DType::f32, {4}, {1}};
    OwnedTensor const second{DType::f64, {2, 2}, {1, 2}};
    write(first.view(), {1, 2, 3, 4});
    write(second.view(), {5, 6, 7, 8});
    double sums[] = {0, 1};
    joinable::HostDevice host;
    CHECK(host.can_sum_squares());
    joinable::detail::SquareSum const both[] = {
        {first.view(), &sums[0], &sum_of_squares}, {second.view(), &sums[1], &sum_of_squares}
    };
    host.sum_squares(both);
    CHECK(sums[0] == 30.0);
    CHECK(sums[1] == 175.0);
}
