// SPDX-License-Identifier: BSL-1.0
#include <joinable/data/shard.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <numeric>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/counting.hpp>
#include <support/ranks.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/data/shard_by_weight.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/tensor/strided_view.hpp>

namespace {

using joinable::shard;
using joinable::Share;
using joinable::Shuffle;
using joinable_tests::Counting;
using Positions = std::vector<std::size_t>;

template <class Shard>
constexpr Positions indices_of(Shard const& of_rank) {
    Positions indices;
    for (auto it = of_rank.begin(); it != of_rank.end(); ++it) {
        indices.push_back(it.index());
    }
    return indices;
}

// ---- what it models -----------------------------------------------------------------------------

using OfNamed = decltype(shard(std::declval<std::vector<int>&>(), Share{0, 1}));
using OfConst = decltype(shard(std::declval<std::vector<int> const&>(), Share{0, 1}));
using OfTemporary = decltype(shard(std::declval<std::vector<int>>(), Share{0, 1}));
using OfSpan = decltype(shard(std::declval<std::span<int>&>(), Share{0, 1}));
using OfMade = decltype(shard(Counting{}, Share{0, 1}));
using Shuffled = decltype(shard(std::declval<std::vector<int>&>(), Share{0, 1}, Shuffle{}));

template <class Shard, class Reference>
constexpr bool models =
    std::ranges::random_access_range<Shard const> && std::ranges::sized_range<Shard const> &&
    std::ranges::common_range<Shard const> &&
    std::random_access_iterator<typename Shard::iterator> &&
    std::same_as<std::ranges::range_reference_t<Shard const>, Reference>;
static_assert(models<OfNamed, int&> && models<OfConst, int const&> && models<OfSpan, int&>);
static_assert(models<OfTemporary, int const&> && models<OfMade, std::size_t>);
static_assert(models<Shuffled, int&>);
static_assert(std::ranges::view<OfNamed> && std::ranges::view<OfSpan> && std::ranges::view<OfMade>);
static_assert(!std::ranges::view<OfTemporary> && !std::ranges::view<Shuffled>);
static_assert(std::ranges::borrowed_range<OfNamed> && std::ranges::borrowed_range<OfSpan>);
static_assert(!std::ranges::borrowed_range<OfTemporary> && !std::ranges::borrowed_range<Shuffled>);
static_assert(sizeof(OfNamed) <= 4 * sizeof(void*), "no list");

// An iterator's old category promises references to elements.
template <class Shard>
using category = typename std::iterator_traits<typename Shard::iterator>::iterator_category;
static_assert(std::same_as<category<OfNamed>, std::random_access_iterator_tag>);
static_assert(std::same_as<category<OfMade>, std::input_iterator_tag>);

// Whatever has a rank and a size.
static_assert(std::convertible_to<joinable::SelfCommunicator&, Share>);
static_assert(std::convertible_to<joinable::ThreadCommunicator&, Share>);
static_assert(!std::convertible_to<int, Share> && !std::convertible_to<std::vector<int>, Share>);

constexpr bool test_arithmetic() {
    std::array<int, 8> const data{10, 11, 12, 13, 14, 15, 16, 17};
    auto const own = shard(data, {1, 3});
    auto it = own.begin();
    return own.size() == 3 && !own.empty() && own[0] == 11 && own[1] == 14 && own[2] == 17 &&
           own.index(2) == 7 && *(it + 2) == 17 && *(2 + it) == 17 && it[1] == 14 && *it++ == 11 &&
           *it-- == 14 && *it == 11 && own.end() - it == 3 && *(own.end() - 3) == 11 &&
           *--own.end() == 17 && it < own.end() && it.index() == 1 && (it -= -1) > own.begin() &&
           *it == 14;
}
static_assert(test_arithmetic());

constexpr bool test_none() {
    OfNamed const none{};
    OfConst const none_either{};
    return none.empty() && none.begin() == none.end() && none_either.begin() == none_either.end();
}
static_assert(test_none());

// ---- how elements are dealt ---------------------------------------------------------------------

TEST_CASE("seven elements are dealt to three ranks one by one") {
    CHECK(test_arithmetic());
    std::vector<char> const data{'a', 'b', 'c', 'd', 'e', 'f', 'g'};
    std::vector<std::string> dealt;
    for (int rank = 0; rank < 3; ++rank) {
        auto const own = shard(data, {rank, 3});
        dealt.emplace_back(own.begin(), own.end());
    }
    CHECK(dealt == std::vector<std::string>{"adg", "be", "cf"});
}

TEST_CASE("every element is one rank's, and no rank has two more than another, shuffled or not") {
    CHECK(rc::check([] {
        auto const count = *rc::gen::inRange<std::size_t>(0, 100);
        auto const size = *rc::gen::inRange(1, 12);
        Shuffle const shuffle{*rc::gen::arbitrary<std::uint64_t>(), 0};
        Positions owners(count);
        Positions shuffled_owners(count);
        for (int rank = 0; rank < size; ++rank) {
            auto const own = shard(Counting{count}, {rank, size});
            auto const shuffled = shard(Counting{count}, {rank, size}, shuffle);
            auto const fair = count / static_cast<std::size_t>(size);
            RC_ASSERT(own.size() == fair || own.size() == fair + 1);
            RC_ASSERT(shuffled.size() == own.size());
            RC_ASSERT(own.empty() == (own.begin() == own.end()));
            RC_ASSERT(own.end() - own.begin() == static_cast<std::ptrdiff_t>(own.size()));
            for (std::size_t i = 0; i < own.size(); ++i) {
                RC_ASSERT(own[i] == own.index(i) && shuffled[i] == shuffled.index(i));
                ++owners[own[i]];
                ++shuffled_owners[shuffled[i]];
            }
        }
        RC_ASSERT(owners == Positions(count, 1));
        RC_ASSERT(shuffled_owners == Positions(count, 1));
    }));
}

TEST_CASE("round by round the ranks take the elements in the order of one rank") {
    for (int const size : {1, 2, 3, 4, 8}) {
        for (bool const shuffles : {false, true}) {
            Positions expected = shuffles ? joinable::permutation(21, {.seed = 5}) : Positions(21);
            if (!shuffles) {
                std::iota(expected.begin(), expected.end(), std::size_t{0});
            }
            Positions taken;
            for (std::size_t round = 0; taken.size() < 21; ++round) {
                for (int rank = 0; rank < size; ++rank) {
                    auto const own =
                        shuffles ? indices_of(shard(Counting{21}, {rank, size}, {.seed = 5}))
                                 : indices_of(shard(Counting{21}, {rank, size}));
                    if (round < own.size()) {
                        taken.push_back(own[round]);
                    }
                }
            }
            CHECK(taken == expected);
        }
    }
}

TEST_CASE("fewer elements than ranks, none at all, more than 32 bits can count") {
    std::vector<int> const one{7};
    CHECK(indices_of(shard(one, {0, 8})) == Positions{0});
    CHECK(shard(one, {1, 8}).empty());
    CHECK(shard(one, {7, 8}, {.seed = 1}).empty());
    std::vector<int> const none;
    CHECK(shard(none, {0, 1}).empty());
    CHECK(shard(none, {2, 3}, {.seed = 1}).empty());

    constexpr std::size_t many = (std::size_t{1} << 40) + 1;
    auto const own = shard(Counting{many}, {0, 3});
    CHECK(own.size() == many / 3 + 1); // 2^40 + 1 = 2 mod 3
    CHECK(own[own.size() - 1] == many - 2);
    auto const of_many = shard(Counting{many}, {2'147'483'646, 2'147'483'647});
    CHECK(of_many.size() == 512);
    CHECK(of_many[511] == 2'147'483'646 + std::size_t{511} * 2'147'483'647);
}

TEST_CASE("a rank that does not exist is refused") {
    for (auto const& [rank, size] : {std::pair{3, 3}, {-1, 3}, {0, 0}, {0, -1}}) {
        CHECK_THROWS_AS((Share{rank, size}), joinable::ContractViolation);
    }
    CHECK_THROWS_WITH(
        (void)shard(Counting{3}, {3, 3}),
        "a shard is for a rank from 0 to the number of ranks - 1, but got rank 3 of 3"
    );
}

// ---- what is dealt ------------------------------------------------------------------------------

TEST_CASE("named ranges are referred to, views copied and temporary containers owned") {
    std::vector<int> named{0, 1, 2, 3};
    for (int& element : shard(named, {1, 2})) {
        element = -1;
    }
    for (int& element : shard(std::span{named}.first(2), {0, 2}, {.seed = 1})) {
        element = -2;
    }
    CHECK(std::count(named.begin(), named.end(), -2) == 1);
    CHECK((named[2] == 2 && named[3] == -1));
    named.assign(100, 5); // where it lies may change
    auto const own = shard(named, {0, 2});
    CHECK((own.size() == 50 && own[49] == 5));

    int array[] = {0, 1, 2, 3};
    shard(array, {0, 4})[0] = 9;
    CHECK(array[0] == 9);
    std::deque<std::string> const words{"a", "bc", "def"};
    CHECK(shard(words, {2, 3}).begin()->size() == 3);
    CHECK(shard(joinable::as_strided(named, {4}, {2}), {1, 2}).size() == 2);

    int expected = 1;
    for (auto const& element : shard(std::vector<std::unique_ptr<int>>(3), {1, 2})) {
        --expected;
        CHECK(element == nullptr);
    }
    CHECK(expected == 0);
    auto owner = shard(std::vector{1, 2, 3}, {0, 2}, {});
    auto const copy = owner;
    auto const moved = std::move(owner);
    CHECK(std::equal(copy.begin(), copy.end(), moved.begin(), moved.end()));
    CHECK(moved.size() == 2);
}

TEST_CASE("a rank's workers share its shard, in one step or in two") {
    Positions owners(23);
    for (int rank = 0; rank < 3; ++rank) {
        auto const of_rank = shard(Counting{23}, {rank, 3}, {.seed = 2});
        for (int worker = 0; worker < 2; ++worker) {
            for (std::size_t const element : shard(of_rank, {worker, 2})) {
                ++owners[element];
            }
        }
        auto const plain = shard(Counting{23}, {rank, 3});
        static_assert(std::ranges::view<decltype(shard(plain, {0, 2}))>);
        Positions const nested = indices_of(shard(plain, {1, 2}));
        CHECK(nested.size() == indices_of(shard(Counting{23}, {3 + rank, 6})).size());
    }
    CHECK(owners == Positions(23, 1));
}

#if !defined(__clang__) || __clang_major__ > 15 // older ones refuse libstdc++'s views
TEST_CASE("the standard library's ranges are dealt, and take shards into pipelines") {
    auto const even = std::views::iota(std::uint64_t{0}, std::uint64_t{9}) |
                      std::views::transform([](std::uint64_t i) { return 2 * i; });
    auto const own = shard(even, {1, 4});
    CHECK(std::vector<std::uint64_t>(own.begin(), own.end()) == std::vector<std::uint64_t>{2, 10});
    std::vector<int> const data{1, 2, 3, 4, 5};
    auto negated =
        shard(data, {0, 2}) | std::views::reverse | std::views::transform([](int i) { return -i; });
    CHECK(std::vector<int>(negated.begin(), negated.end()) == std::vector{-5, -3, -1});
    auto shuffled = shard(data, {0, 1}, {.seed = 1}) | std::views::transform(std::negate{});
    CHECK(std::accumulate(shuffled.begin(), shuffled.end(), 0) == -15);
    std::vector<int> sorted{3, 9, 2, 9, 1, 9, 0, 9};
    std::ranges::sort(shard(sorted, {0, 2})); // random access, and elements can be swapped
    CHECK(sorted == std::vector{0, 9, 1, 9, 2, 9, 3, 9});
}
#endif

// ---- ranks --------------------------------------------------------------------------------------

/// What a guarded loop over a shard adds up over all ranks, and how many rounds that takes.
template <class MakeShard>
std::pair<std::uint64_t, std::size_t>
sum_over_ranks(joinable::ThreadCommunicator& comm, MakeShard const& make_shard) {
    std::uint64_t sum = 0;
    auto const add = [&](std::uint64_t value) {
        std::array<std::uint64_t, 1> sums{value};
        joinable::all_reduce(comm, sums).wait();
        sum += sums[0];
    };
    joinable::Action action{comm, add, [&] { add(0); }};
    joinable::Join guard{joinable::participants(action)};
    for (std::uint64_t const value : make_shard(comm)) {
        action(value);
    }
    return {sum, guard.finish().rounds};
}

TEST_CASE("under a guard the shards of all ranks add up to what one rank adds up") {
    for (std::size_t const count : {0U, 1U, 3U, 29U}) {
        std::vector<std::uint64_t> data(count);
        std::uint64_t serial = 0;
        for (std::size_t i = 0; i < count; ++i) {
            data[i] = i * i * i + 1;
            serial += data[i];
        }
        joinable_tests::run_ranks({1, 2, 3, 4, 8}, [&](joinable::ThreadCommunicator& comm) {
            auto const size = static_cast<std::size_t>(comm.size());
            std::pair const expected{serial, (count + size - 1) / size};
            CHECK(sum_over_ranks(comm, [&](auto& c) { return shard(data, c); }) == expected);
            for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
                CHECK(sum_over_ranks(comm, [&](auto& c) {
                          return shard(data, c, {.seed = 7, .epoch = epoch});
                      }) == expected);
            }
            auto const weight = [](std::uint64_t value) { return value; };
            CHECK(sum_over_ranks(comm, [&](auto& c) {
                      return joinable::shard_by_weight(data, c, weight);
                  }).first == serial);
        });
    }
}

} // namespace
