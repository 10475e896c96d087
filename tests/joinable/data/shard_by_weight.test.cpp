// SPDX-License-Identifier: BSL-1.0
#include <joinable/data/shard_by_weight.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <joinable/communicator/self.hpp>

namespace {

using joinable::shard_by_weight;
using joinable::Shuffle;
using Weights = std::vector<std::uint64_t>;
using Positions = std::vector<std::size_t>;

constexpr auto itself = [](auto number) { return number; };

template <class Shard>
Positions indices_of(Shard const& own) {
    Positions indices;
    for (std::size_t i = 0; i < own.size(); ++i) {
        indices.push_back(own.index(i));
    }
    return indices;
}

template <class W>
std::vector<Positions> deal(std::vector<W> const& weights, int size) {
    std::vector<Positions> dealt;
    for (int rank = 0; rank < size; ++rank) {
        dealt.push_back(indices_of(shard_by_weight(weights, {rank, size}, itself)));
    }
    return dealt;
}

std::vector<std::uint64_t> loads_of(std::vector<Positions> const& dealt, Weights const& weights) {
    std::vector<std::uint64_t> loads;
    for (Positions const& own : dealt) {
        loads.push_back(0);
        for (std::size_t const element : own) {
            loads.back() += weights[element];
        }
    }
    return loads;
}

/// The least that the most loaded rank can have, by trying every way to deal.
std::uint64_t
best_of_all(Weights const& weights, std::vector<std::uint64_t>& loads, std::size_t i) {
    if (i == weights.size()) {
        return *std::max_element(loads.begin(), loads.end());
    }
    std::uint64_t best = std::numeric_limits<std::uint64_t>::max();
    for (std::uint64_t& load : loads) {
        load += weights[i];
        best = std::min(best, best_of_all(weights, loads, i + 1));
        load -= weights[i];
    }
    return best;
}

Weights some_weights(int most) {
    return *rc::gen::resize(
        most, rc::gen::container<Weights>(rc::gen::inRange<std::uint64_t>(0, 40))
    );
}

struct File {
    std::string name;
    std::size_t bytes = 0;
};

} // namespace

TEST_CASE("files go to ranks by their sizes, the largest first, and stay in order") {
    std::vector<File> const files{{"a", 2}, {"b", 9}, {"c", 3}, {"d", 4}, {"e", 4}};
    // b to 0, d to 1, e to 2, c to 1 (of two ranks with 4 and one file the lower), a to 2
    std::vector<std::string> names;
    for (int rank = 0; rank < 3; ++rank) {
        names.emplace_back();
        for (File const& file : shard_by_weight(files, {rank, 3}, &File::bytes)) {
            names.back() += file.name;
        }
    }
    CHECK(names == std::vector<std::string>{"b", "cd", "ae"});
}

TEST_CASE("Graham's worst case for two and for three ranks") {
    // The paper's: 2m+1 elements of 2m-1, 2m-1, ..., m+1, m+1, m, m, m. The bound is attained.
    CHECK(
        deal(Weights{3, 3, 2, 2, 2}, 2) == std::vector<Positions>{{0, 2, 4}, {1, 3}}
    ); // 7, 6 is best
    Weights const three{5, 5, 4, 4, 3, 3, 3};
    auto const loads = loads_of(deal(three, 3), three);
    CHECK(*std::max_element(loads.begin(), loads.end()) == 11); // 9 is best, and 4/3 - 1/9 = 11/9
}

TEST_CASE("no rank has more than Graham's bound times what is best, and every element is dealt once"
) {
    CHECK(rc::check([] {
        auto const weights = some_weights(8);
        auto const size = *rc::gen::inRange(1, 5);
        RC_PRE(weights.size() <= 8U);
        auto const dealt = deal(weights, size);
        auto const loads = loads_of(dealt, weights);
        std::vector<std::uint64_t> tried(static_cast<std::size_t>(size));
        auto const best = best_of_all(weights, tried, 0);
        auto const m = static_cast<std::uint64_t>(size);
        RC_ASSERT(3 * m * *std::max_element(loads.begin(), loads.end()) <= (4 * m - 1) * best);
        Positions all;
        for (Positions const& own : dealt) {
            RC_ASSERT(std::is_sorted(own.begin(), own.end()));
            all.insert(all.end(), own.begin(), own.end());
        }
        std::sort(all.begin(), all.end());
        Positions expected(weights.size());
        std::iota(expected.begin(), expected.end(), std::size_t{0});
        RC_ASSERT(all == expected);
    }));
}

TEST_CASE("each element went to a rank that had the least of the heavier ones") {
    // The rule once more, without a heap: a search through all ranks for every element.
    CHECK(rc::check([] {
        auto const weights = some_weights(100);
        auto const size = *rc::gen::inRange<std::size_t>(1, 9);
        Positions order(weights.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
            return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
        });
        std::vector<Positions> expected(size);
        std::vector<std::uint64_t> loads(size);
        for (std::size_t const element : order) {
            std::size_t least = 0;
            for (std::size_t rank = 1; rank < size; ++rank) {
                if (loads[rank] < loads[least] ||
                    (loads[rank] == loads[least] && expected[rank].size() < expected[least].size()
                    )) {
                    least = rank;
                }
            }
            loads[least] += weights[element];
            expected[least].push_back(element);
        }
        for (Positions& own : expected) {
            std::sort(own.begin(), own.end());
        }
        RC_ASSERT(deal(weights, static_cast<int>(size)) == expected);
    }));
}

TEST_CASE("in every epoch the ranks' loads are the same, and elements are dealt once") {
    CHECK(rc::check([] {
        auto const weights = some_weights(60);
        auto const size = *rc::gen::inRange(1, 6);
        Shuffle const shuffle{1, *rc::gen::arbitrary<std::uint64_t>()};
        auto const order = joinable::permutation(weights.size(), shuffle);
        std::vector<Positions> dealt;
        Positions times(weights.size());
        for (int rank = 0; rank < size; ++rank) {
            dealt.push_back(indices_of(shard_by_weight(weights, {rank, size}, itself, shuffle)));
            auto place = order.begin(); // elements come in the order of the epoch
            for (std::size_t const element : dealt.back()) {
                ++times[element];
                place = std::find(place, order.end(), element);
                RC_ASSERT(place != order.end());
            }
        }
        RC_ASSERT(times == Positions(weights.size(), 1));
        RC_ASSERT(loads_of(dealt, weights) == loads_of(deal(weights, size), weights));
    }));
}

TEST_CASE("elements without a weight are spread, and of one weight as shard deals them") {
    CHECK(deal(Weights{0, 0, 0, 0, 0}, 2) == std::vector<Positions>{{0, 2, 4}, {1, 3}});
    CHECK(deal(Weights{6, 6, 6, 6, 6}, 2) == std::vector<Positions>{{0, 2, 4}, {1, 3}});
    CHECK(deal(Weights{}, 2) == std::vector<Positions>{{}, {}});
    CHECK(deal(Weights{5}, 3) == std::vector<Positions>{{0}, {}, {}});
    CHECK(deal(std::vector<double>{0.5, 0.25, 0.25}, 2) == std::vector<Positions>{{0}, {1, 2}});
    CHECK(deal(std::vector<float>{0.F, -0.F}, 2) == std::vector<Positions>{{0}, {1}});
}

TEST_CASE("integers are added exactly, up to the largest") {
    constexpr auto largest = std::numeric_limits<std::uint64_t>::max();
    // 2^53 and 2^53 + 1 are one double
    Weights const large{std::uint64_t{1} << 53, (std::uint64_t{1} << 53) + 1, 1, 1};
    CHECK(deal(large, 2) == std::vector<Positions>{{1, 3}, {0, 2}});
    CHECK(deal(Weights{1, largest - 1}, 2) == std::vector<Positions>{{1}, {0}});
    CHECK_THROWS_WITH_AS(
        (void)shard_by_weight(Weights{1, largest - 1, 0, 1}, {0, 2}, itself),
        "shard_by_weight: the weights up to element 3 add up to more than 18446744073709551615; "
        "give "
        "them in a larger unit",
        joinable::ContractViolation
    );
    CHECK_THROWS_AS(
        (void)shard_by_weight(std::vector<double>{1.5e308, 1.5e308}, {0, 2}, itself),
        joinable::ContractViolation
    );
}

TEST_CASE("a weight that is negative or not finite is refused, and its element named") {
    CHECK_THROWS_WITH_AS(
        (void)shard_by_weight(std::vector{3, 0, -2}, {0, 1}, itself),
        "shard_by_weight: the weight of an element must be finite and not negative, but that of "
        "element 2 is -2",
        joinable::ContractViolation
    );
    for (double const wrong : {-0.5, std::nan(""), HUGE_VAL}) {
        std::string text;
        try {
            (void)shard_by_weight(std::vector{1.0, wrong}, {0, 1}, itself, {.seed = 1});
        } catch (joinable::ContractViolation const& error) {
            text = error.what();
        }
        CAPTURE(wrong);
        CHECK(text.find("element 1 is ") != std::string::npos);
    }
}

TEST_CASE("a weight is asked for once per element, in order, and a temporary container is owned") {
    Positions asked;
    joinable::SelfCommunicator comm;
    auto const own = shard_by_weight(std::vector<std::size_t>{4, 5, 6}, comm, [&](std::size_t e) {
        asked.push_back(e);
        return static_cast<unsigned char>(e);
    });
    CHECK(asked == Positions{4, 5, 6});
    CHECK(Positions(own.begin(), own.end()) == Positions{4, 5, 6});
}
