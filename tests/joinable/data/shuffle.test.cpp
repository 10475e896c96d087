// SPDX-License-Identifier: BSL-1.0
#include <joinable/data/shuffle.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>

namespace {

using joinable::permutation;
using joinable::detail::SplitMix64;
using Order = std::vector<std::size_t>;

constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max();

/// The outputs that Vigna's C code gives for this seed, as other implementations quote them.
constexpr bool test_generator() {
    SplitMix64 random{1234567};
    return random() == 6457827717110365317U && random() == 3203168211198807973U &&
           random() == 9817491932198370423U && random() == 4593380528125082431U &&
           random() == 16408922859458223821U;
}
static_assert(test_generator());

/// From a second program, in Python, that multiplies and divides integers without a limit: with such
/// bounds a half and a quarter of all draws are refused. The last number is what is drawn next.
constexpr bool test_bounded_draws() {
    SplitMix64 half{1};
    SplitMix64 quarter{1};
    std::uint64_t const bound = (std::uint64_t{3} << 62) + 12345;
    return half.below((std::uint64_t{1} << 63) + 1) == 8955919645141445295U &&
           half.below((std::uint64_t{1} << 63) + 1) == 4098490376910890117U &&
           half.below((std::uint64_t{1} << 63) + 1) == 4097618618563484380U &&
           half.below((std::uint64_t{1} << 63) + 1) == 7036458801432265024U &&
           half() == 16184226688143867045U && //
           quarter.below(bound) == 7838412284400623842U &&
           quarter.below(bound) == 10317933908299830595U &&
           quarter.below(bound) == 13433879467712179929U &&
           quarter.below(bound) == 6147735565366340661U && quarter() == 8195237237126968761U;
}
static_assert(test_bounded_draws());

/// From the same program.
bool test_orders() {
    return permutation(10, {}) == Order{4, 7, 0, 5, 9, 3, 6, 2, 8, 1} &&
           permutation(10, {.seed = 7}) == Order{4, 1, 9, 2, 5, 8, 0, 7, 3, 6} &&
           permutation(10, {.seed = 7, .epoch = 1}) == Order{8, 4, 6, 5, 7, 3, 2, 9, 0, 1} &&
           permutation(10, {.seed = 8}) == Order{6, 4, 1, 8, 9, 5, 0, 2, 3, 7} &&
           permutation(5, {.seed = largest, .epoch = 3}) == Order{1, 2, 3, 4, 0} &&
           permutation(2, {}) == Order{1, 0} && permutation(1, {}) == Order{0} &&
           permutation(0, {}).empty();
}

} // namespace

TEST_CASE("the generator draws what its authors' does, also below a bound") {
    CHECK(test_generator());
    CHECK(test_bounded_draws());
}

TEST_CASE("orders are those of another program, and so the same wherever this runs") {
    CHECK(test_orders());
    Order const order = permutation(100'000, {.seed = 42, .epoch = 9});
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
        sum += i * order[i];
    }
    CHECK(sum == 249908273452026U);
    CHECK(Order(order.begin(), order.begin() + 5) == Order{74798, 42043, 40871, 22797, 55316});
    CHECK(Order(order.end() - 5, order.end()) == Order{17657, 84471, 72754, 71576, 93254});
}

TEST_CASE("an order has every number once, is repeated by its seed and epoch, and by no other") {
    CHECK(rc::check([] {
        joinable::Shuffle const shuffle{
            *rc::gen::arbitrary<std::uint64_t>(), *rc::gen::arbitrary<std::uint64_t>()
        };
        auto const count = *rc::gen::inRange<std::size_t>(30, 300);
        Order const order = permutation(count, shuffle);
        RC_ASSERT(permutation(count, shuffle) == order);
        RC_ASSERT(permutation(count, {shuffle.seed, shuffle.epoch + 1}) != order);
        RC_ASSERT(permutation(count, {shuffle.seed + 1, shuffle.epoch}) != order);
        RC_ASSERT(permutation(count, {shuffle.seed + 1, shuffle.epoch - 1}) != order);
        Order sorted = order;
        std::sort(sorted.begin(), sorted.end());
        Order all(count);
        std::iota(all.begin(), all.end(), std::size_t{0});
        RC_ASSERT(sorted == all);
    }));
}

TEST_CASE("all orders of four elements are about equally frequent") {
    constexpr int epochs = 24'000;
    std::vector<int> counts(256);
    for (std::uint64_t epoch = 0; epoch < epochs; ++epoch) {
        Order const order = permutation(4, {.seed = 3, .epoch = epoch});
        ++counts[order[0] * 64 + order[1] * 16 + order[2] * 4 + order[3]];
    }
    double chi_squared = 0;
    int orders = 0;
    for (int const count : counts) {
        orders += count != 0 ? 1 : 0;
        chi_squared += count != 0 ? (count - 1000.0) * (count - 1000.0) / 1000.0 : 0.0;
    }
    CHECK(orders == 24);
    CHECK(chi_squared < 49.7); // 23 degrees of freedom: one seed in a thousand would exceed it
}
