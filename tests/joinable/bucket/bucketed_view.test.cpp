// SPDX-License-Identifier: BSL-1.0
#include <joinable/bucket/bucketed_view.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <forward_list>
#include <initializer_list>
#include <iterator>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/tensor_sizes.hpp>

#include <joinable/bucket/assignment.hpp>
#include <joinable/tensor/parameters.hpp>

namespace {

/// A tensor that notes in a common place that somebody asked for its size.
struct Watched {
    std::size_t index = 0;
    joinable::TensorSize size;
    std::size_t* read_end = nullptr; ///< after the last tensor that was ever asked
};

} // namespace

template <>
struct joinable::tensor_traits<Watched> {
    static DType dtype(Watched const& t) { return t.size.dtype; }
    static DeviceId device(Watched const& t) { return t.size.device; }
    static void const* data(Watched const&) { return nullptr; }
    static std::array<std::size_t, 1> extents(Watched const& t) {
        *t.read_end = std::max(*t.read_end, t.index + 1);
        return {{t.size.numel}};
    }
};

namespace {

using joinable::compute_bucket_assignment_by_size;
using joinable::DType;
using joinable::TensorSize;
using joinable::views::bucketed;
using Buckets = std::vector<std::vector<std::size_t>>;
using Limits = std::vector<std::size_t>;

template <class Bucket>
constexpr std::vector<std::size_t> indices_of(Bucket const& bucket) {
    std::vector<std::size_t> indices;
    for (auto it = bucket.begin(); it != bucket.end(); ++it) {
        indices.push_back(it.index());
    }
    return indices;
}
template <class View>
constexpr Buckets buckets_of(View const& view) {
    Buckets buckets;
    for (auto const& bucket : view) {
        buckets.push_back(indices_of(bucket));
    }
    return buckets;
}
template <class View>
constexpr Limits limits_of(View const& view) {
    Limits limits;
    for (auto const& bucket : view) {
        limits.push_back(bucket.limit());
    }
    return limits;
}

// ---- upstream's tables, and the cases of the rule that need neither flags nor indices -----------

constexpr bool gives(
    std::vector<TensorSize> const& sizes,
    Limits const& limits,
    Buckets const& buckets,
    Limits const& cut_by
) {
    auto const view = sizes | bucketed(std::span<std::size_t const>{limits});
    return buckets_of(view) == buckets && limits_of(view) == cut_by;
}
constexpr std::vector<TensorSize> floats(std::initializer_list<std::size_t> numels) {
    std::vector<TensorSize> sizes;
    for (std::size_t const numel : numels) {
        sizes.push_back({numel});
    }
    return sizes;
}
constexpr std::vector<TensorSize> alternating() {
    using enum DType;
    return {{50, f32}, {25, f64}, {50, f32}, {25, f64}, {50, f32}, {25, f64}};
}
constexpr std::vector<TensorSize> on_two_devices() {
    joinable::DeviceId const a{};
    joinable::DeviceId const b{joinable::DeviceKind::cuda, 1};
    return {{10, DType::f32, a}, {10, DType::f32, b}, {10, DType::f32, a}, {10, DType::f32, b}};
}
constexpr bool test_tables() {
    return gives(floats({100, 200, 100, 50}), {400}, {{0}, {1}, {2}, {3}}, {400, 400, 400, 400}) &&
           gives(alternating(), {400}, {{0, 2}, {1, 3}, {4}, {5}}, {400, 400, 400, 400}) &&
           gives(floats({10, 10, 10, 10}), {40, 80}, {{0}, {1, 2}, {3}}, {40, 80, 80}) &&
           gives(alternating(), {200, 400}, {{0}, {1}, {2, 4}, {3, 5}}, {200, 200, 400, 400});
}
constexpr bool test_rule() {
    return gives(floats({10, 10, 5}), {80}, {{0, 1}, {2}}, {80, 80}) &&
           gives(floats({1000, 1}), {40}, {{0}, {1}}, {40, 40}) &&
           gives(on_two_devices(), {80}, {{0, 2}, {1, 3}}, {80, 80}) &&
           gives(floats({10, 0, 5}), {0}, {{0}, {1}, {2}}, {0, 0, 0}) &&
           gives(floats({0, 10}), {40}, {{0, 1}}, {40}) &&
           gives(alternating(), {1'000'000}, {{0, 2, 4}, {1, 3, 5}}, {1'000'000, 1'000'000});
}
static_assert(test_tables());
#if !defined(__CUDACC__) // nvcc 13 forgets to destroy some temporaries here
static_assert(test_rule());
#endif
TEST_CASE("the lazy buckets of upstream's tables, in order, also when the program runs") {
    CHECK(test_tables());
    CHECK(test_rule());
}

// ---- against the eager assignment ---------------------------------------------------------------

TEST_CASE("the lazy buckets are those of the eager assignment") {
    CHECK(rc::check([] {
        auto const sizes = joinable_tests::random_sizes();
        auto const limits = joinable_tests::random_limits();
        std::span<std::size_t const> const span{limits};
        auto const expected = compute_bucket_assignment_by_size(sizes, span);
        auto const view = sizes | bucketed(span);
        RC_ASSERT(buckets_of(view) == expected.buckets);
        RC_ASSERT(limits_of(view) == expected.limits);
        RC_ASSERT(buckets_of(view) == expected.buckets); // a second pass
    }));
}

TEST_CASE("nothing is read before it is needed") {
    CHECK(rc::check([] {
        auto const sizes = joinable_tests::random_sizes();
        auto const limits = joinable_tests::random_limits();
        std::span<std::size_t const> const span{limits};
        auto const expected = compute_bucket_assignment_by_size(sizes, span);
        std::size_t read_end = 0;
        std::vector<Watched> tensors;
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            tensors.push_back({i, sizes[i], &read_end});
        }
        auto const view = tensors | bucketed(span);
        auto it = view.begin();
        RC_ASSERT(read_end == 0U);
        std::size_t needed = 0; // by the buckets so far
        for (std::size_t b = 0; b < expected.buckets.size(); ++b) {
            auto const bucket = *it; // known from its first tensor
            RC_ASSERT(read_end <= std::max(needed, expected.buckets[b].front()) + 1);
            std::size_t bytes = 0;
            for (auto member = bucket.begin(); member != bucket.end(); ++member) {
                bytes += sizes[member.index()].bytes();
                needed = std::max(needed, member.index() + 1);
                RC_ASSERT(read_end <= std::max(needed, expected.buckets[b].front() + 1) + 1);
                if (bytes >= bucket.limit()) {
                    RC_ASSERT(member.index() == expected.buckets[b].back());
                }
            }
            if (bytes < bucket.limit()) {
                needed = sizes.size(); // only the end of the range says that it stays open
            }
            ++it;
            RC_ASSERT(read_end <= needed + 1);
        }
        RC_ASSERT(it == view.end());
    }));
}

TEST_CASE("the first bucket is cut while the others have not been looked at") {
    std::size_t read_end = 0;
    std::vector<Watched> tensors;
    for (std::size_t i = 0; i < 100; ++i) {
        tensors.push_back({i, {10}, &read_end});
    }
    auto const view = tensors | bucketed({80});
    auto it = view.begin();
    CHECK(read_end == 0);
    CHECK(indices_of(*it) == std::vector<std::size_t>{0, 1});
    CHECK(read_end == 2);
    ++it;
    CHECK(read_end == 3); // where the next one begins
    CHECK(indices_of(*it) == std::vector<std::size_t>{2, 3});
    CHECK(read_end == 4);
}

// ---- what it takes, and who keeps it ------------------------------------------------------------

struct Weight {
    std::vector<float> value;
    std::vector<float> grad;
    std::string name;
};

TEST_CASE("the elements of a bucket are the parameters themselves") {
    std::vector<Weight> weights{
        {std::vector<float>(10), {}, "a"},
        {std::vector<float>(10), {}, "b"},
        {std::vector<float>(5), {}, "c"}
    };
    std::vector<std::string> names;
    for (auto const& bucket : weights | bucketed({80})) {
        names.emplace_back();
        for (Weight& weight : bucket) {
            names.back() += weight.name;
            weight.name = "seen";
        }
    }
    CHECK(names == std::vector<std::string>{"ab", "c"});
    CHECK(weights[2].name == "seen");
    CHECK(buckets_of(std::as_const(weights) | bucketed({80})) == Buckets{{0, 1}, {2}});
}
TEST_CASE("a temporary list of parameters lives as long as its view") {
    std::vector<Weight> weights{{std::vector<float>(10), {}, "a"}};
    struct Wide {
        std::vector<double> value;
        std::vector<double> grad;
    };
    std::array<Wide, 1> wide{{{std::vector<double>(10), {}}}};
    auto const view = joinable::parameters(weights, wide) | bucketed({40});
    CHECK(buckets_of(view) == Buckets{{0}, {1}});
    CHECK((*view.begin()).dtype() == DType::f32);
    CHECK((*std::next(view.begin())).dtype() == DType::f64);
}
TEST_CASE("tensors in a range without random access are cut") {
    std::forward_list<std::vector<float>> const tensors{
        std::vector<float>(10), std::vector<float>(10), std::vector<float>(1)
    };
    CHECK(buckets_of(tensors | bucketed({80})) == Buckets{{0, 1}, {2}});
}
TEST_CASE("an empty range has no buckets, and no limits are refused") {
    std::vector<TensorSize> const none;
    CHECK(buckets_of(none | bucketed({80})).empty());
    CHECK_THROWS_AS(
        (void)(none | bucketed(std::span<std::size_t const>{})), joinable::ContractViolation
    );
}
TEST_CASE("copies of an iterator go on independently") {
    auto const sizes = floats({10, 10, 10});
    auto const view = sizes | bucketed({40});
    auto it = view.begin();
    auto const old = it++;
    CHECK(indices_of(*old) == std::vector<std::size_t>{0});
    CHECK(indices_of(*it) == std::vector<std::size_t>{1});
    ++it;
    CHECK(indices_of(*old) == std::vector<std::size_t>{0});
    CHECK(old == view.begin());
    CHECK(it != view.end());
    CHECK(++it == view.end());
}

using OfNamed = decltype(std::declval<std::vector<TensorSize>&>() | bucketed({1}));
using OfTemporary = decltype(std::declval<std::vector<TensorSize>>() | bucketed({1}));
using OfSpan = decltype(std::declval<std::span<TensorSize>&>() | bucketed({1}));
static_assert(std::forward_iterator<OfNamed::iterator>);
static_assert(std::forward_iterator<std::remove_cvref_t<decltype(*OfNamed{}.begin())>::iterator>);
static_assert(std::ranges::enable_view<OfNamed> && std::ranges::enable_view<OfSpan>);
static_assert(!std::ranges::enable_view<OfTemporary>, "copying it copies the tensors");
static_assert(sizeof(OfNamed) <= sizeof(OfTemporary), "a named range is referred to, not copied");

} // namespace
