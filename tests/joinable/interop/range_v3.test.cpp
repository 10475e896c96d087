// SPDX-License-Identifier: BSL-1.0
#include <joinable/interop/range_v3.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <forward_list>
#include <iterator>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <range/v3/algorithm/copy.hpp>
#include <range/v3/algorithm/equal.hpp>
#include <range/v3/algorithm/for_each.hpp>
#include <range/v3/iterator/insert_iterators.hpp>
#include <range/v3/numeric/accumulate.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/reverse.hpp>
#include <range/v3/view/take.hpp>
#include <rapidcheck.h>
#include <support/all_reducer.hpp>
#include <support/linear_model.hpp>
#include <support/ranks.hpp>
#include <support/tensor_sizes.hpp>

#include <joinable/join/guard.hpp>

namespace {

namespace rv = ranges::views;
using joinable::BucketLayout;
using joinable::BucketSlot;
using joinable::StridedView;
using joinable::TensorSize;
using joinable::views::active_ranks;
using joinable::views::bucket_slots;
using joinable::views::bucketed;
using joinable::views::contiguous_shard;
using joinable::views::rounds;
using joinable::views::strided_shard;

using Slots = std::vector<BucketSlot>;

/// Not ranges::to: of an input range it makes g++ 12 at -O3 see an uninitialised variant of range-v3.
template <class Range>
Slots all_of(Range&& slots) {
    Slots result;
    ranges::copy(slots, ranges::back_inserter(result));
    return result;
}

// ---- the library's views ------------------------------------------------------------------------

static_assert(ranges::random_access_range<StridedView<float>>);
static_assert(ranges::sized_range<StridedView<float> const>);
static_assert(ranges::view_<StridedView<float>> && ranges::view_<StridedView<float const>>);
static_assert(!ranges::borrowed_range<StridedView<float>>, "its iterators refer to the view");

using OfNamed = decltype(std::declval<std::vector<TensorSize>&>() | bucketed({1}));
using OfTemporary = decltype(std::declval<std::vector<TensorSize>>() | bucketed({1}));
using OneBucket = std::remove_cvref_t<decltype(*OfNamed{}.begin())>;
static_assert(ranges::view_<OfNamed> && ranges::forward_range<OfNamed const>);
static_assert(!ranges::view_<OfTemporary>, "copying it copies the tensors");
static_assert(ranges::forward_range<OfTemporary const>);
static_assert(ranges::view_<OneBucket> && ranges::forward_range<OneBucket const>);
static_assert(ranges::borrowed_range<OneBucket>);

using Dealt = decltype(joinable::shard(std::declval<std::vector<int>&>(), {0, 2}));
using Shuffled = decltype(joinable::shard(std::declval<std::vector<int>&>(), {0, 2}, {}));
using DealtView = decltype(joinable::shard(rv::iota(0, 7) | rv::reverse, {0, 2}));
static_assert(ranges::view_<Dealt> && ranges::view_<DealtView>);
static_assert(ranges::random_access_range<Dealt const> && ranges::sized_range<Dealt const>);
static_assert(!ranges::view_<Shuffled>, "copying it copies its positions");
static_assert(ranges::random_access_range<Shuffled const>);

TEST_CASE("a strided view flows through a pipeline, named or not, and is written through one") {
    std::vector<int> storage = rv::iota(0, 6) | ranges::to<std::vector>;
    auto const columns = joinable::as_strided(storage, {3, 2}, {1, 3});
    CHECK((columns | ranges::to<std::vector>) == std::vector{0, 3, 1, 4, 2, 5});
    CHECK(
        (joinable::narrow(columns, 0, 1, 2) | rv::reverse | ranges::to<std::vector>) ==
        std::vector{5, 2, 4, 1}
    );
    ranges::for_each(columns | rv::stride(2), [](int& element) { element = -1; });
    CHECK(storage == std::vector{-1, -1, -1, 3, 4, 5});
}

TEST_CASE("lazy buckets flow through a pipeline as views") {
    std::vector<TensorSize> const sizes{{10}, {10}, {5, joinable::DType::f64}, {1}};
    auto const bytes_of = [](auto const& bucket) {
        return ranges::accumulate(bucket | rv::transform(&TensorSize::bytes), std::size_t{0});
    };
    CHECK(
        (sizes | bucketed({80}) | rv::transform(bytes_of) | ranges::to<std::vector>) ==
        std::vector<std::size_t>{80, 40, 4}
    );
}

TEST_CASE("a pipeline is cut into buckets, and goes on") {
    std::vector<TensorSize> const sizes{{1}, {5, joinable::DType::f64}, {10}, {10}};
    auto const names = sizes | rv::reverse | bucketed({80}) | rv::transform([](auto const& bucket) {
                           return joinable::name_of(bucket.dtype());
                       });
    CHECK((names | ranges::to<std::vector>) == std::vector<std::string_view>{"f32", "f64", "f32"});
    CHECK(
        all_of(bucket_slots(sizes | rv::reverse | bucketed({80}))) ==
        Slots{{0, 0, 0, 10}, {0, 1, 10, 10}, {1, 2, 0, 5}, {2, 3, 0, 1}}
    );
}

TEST_CASE("shards are views of pipelines, and flow through them") {
    auto const squares = rv::iota(0, 7) | rv::transform([](int i) { return i * i; });
    CHECK(
        (joinable::shard(squares, {1, 3}) | rv::reverse | ranges::to<std::vector>) ==
        std::vector{16, 1}
    );
    auto const shuffled = joinable::shard(squares, {0, 1}, {.seed = 7});
    CHECK(ranges::accumulate(shuffled | rv::stride(1), 0) == 91);
}

// ---- slots --------------------------------------------------------------------------------------

TEST_CASE("each slot begins where the one before it in the bucket ends") {
    std::vector<TensorSize> const sizes{{10}, {10}, {5, joinable::DType::f64}, {0}, {1}};
    Slots const expected{{0, 0, 0, 10}, {0, 1, 10, 10}, {1, 2, 0, 5}, {2, 3, 0, 0}, {2, 4, 0, 1}};
    CHECK(all_of(bucket_slots(sizes | bucketed({80}))) == expected);
}

TEST_CASE("no parameters, no slots") {
    std::vector<TensorSize> const none;
    CHECK(all_of(bucket_slots(none | bucketed({80}))).empty());
    BucketLayout const layout;
    CHECK(all_of(bucket_slots(layout)).empty());
}

TEST_CASE("the slots of a layout are where its views point") {
    CHECK(rc::check([] {
        auto const numels = *rc::gen::nonEmpty(
            rc::gen::container<std::vector<std::size_t>>(rc::gen::inRange<std::size_t>(0, 50))
        );
        auto params =
            numels |
            rv::transform([](std::size_t numel) { return joinable_tests::Param<float>{numel}; }) |
            ranges::to<std::vector>;
        auto const cap = *rc::gen::inRange<std::size_t>(0, 400);
        BucketLayout const layout = joinable::make_bucket_layout(
            joinable::parameters(params), {.bucket_cap_bytes = cap, .first_bucket_bytes = cap / 2}
        );
        Slots const slots = all_of(bucket_slots(layout));
        // A permutation, and launched last one first.
        RC_ASSERT(ranges::equal(
            slots | rv::transform(&BucketSlot::parameter),
            rv::iota(std::size_t{0}, numels.size()) | rv::reverse
        ));
        RC_ASSERT(ranges::equal(slots | rv::transform(&BucketSlot::length), numels | rv::reverse));
        auto const pointers = layout.buckets() | rv::transform(&joinable::Bucket::views) |
                              rv::join | rv::transform([](joinable::AnyView const& view) {
                                  return static_cast<float const*>(view.data());
                              });
        RC_ASSERT(ranges::equal(
            slots | rv::transform([&](BucketSlot const& slot) {
                auto const* base =
                    static_cast<float const*>(layout.buckets()[slot.bucket].buffer.data);
                return base == nullptr ? base : base + slot.offset;
            }),
            pointers
        ));
        // The lazy buckets of the same parameters in launch order need no memory for that.
        auto const launched = numels | rv::reverse |
                              rv::transform([](std::size_t n) { return TensorSize{n}; }) |
                              ranges::to<std::vector>;
        RC_ASSERT(ranges::equal(
            bucket_slots(launched | bucketed({cap / 2, cap})),
            slots,
            {},
            {},
            [&](BucketSlot slot) {
                slot.parameter = numels.size() - 1 - slot.parameter;
                return slot;
            }
        ));
    }));
}

template <class T>
concept has_slots = requires(T&& argument) {
    { bucket_slots(std::forward<T>(argument)) } -> ranges::input_range;
};
static_assert(has_slots<BucketLayout&> && has_slots<BucketLayout const&>);
static_assert(!has_slots<BucketLayout>, "it would be destroyed before its slots are read");

// ---- shards -------------------------------------------------------------------------------------

TEST_CASE("shards of 7 elements for 3 ranks, in blocks and one by one") {
    constexpr std::array<int, 7> data{0, 1, 2, 3, 4, 5, 6};
    std::vector<std::vector<int>> const blocks{{0, 1, 2}, {3, 4}, {5, 6}};
    std::vector<std::vector<int>> const dealt{{0, 3, 6}, {1, 4}, {2, 5}};
    for (auto const& [rank, block, hand] : rv::zip(rv::iota(0), blocks, dealt)) {
        CHECK((data | contiguous_shard(rank, 3) | ranges::to<std::vector>) == block);
        CHECK((data | strided_shard(rank, 3) | ranges::to<std::vector>) == hand);
    }
}

TEST_CASE("shards deal every element once, and none has two more than another") {
    CHECK(rc::check([] {
        auto const n = *rc::gen::inRange(0, 100);
        auto const world = *rc::gen::inRange(1, 12);
        auto const data = rv::iota(0, n);
        auto const of_ranks = [&](auto shard) {
            return rv::iota(0, world) | rv::transform([&](int rank) {
                       return data | shard(rank, world) | ranges::to<std::vector>;
                   }) |
                   ranges::to<std::vector>;
        };
        auto const blocks = of_ranks(contiguous_shard);
        auto const dealt = of_ranks(strided_shard);
        RC_ASSERT(ranges::equal(blocks | rv::join, data));
        RC_ASSERT(ranges::equal(data, rv::iota(0, n), {}, [&](int i) {
            return dealt[static_cast<std::size_t>(i % world)][static_cast<std::size_t>(i / world)];
        }));
        auto const sizes = rv::iota(0, world) | rv::transform([&](int rank) {
                               return static_cast<std::size_t>(n / world + (rank < n % world));
                           });
        RC_ASSERT(ranges::equal(blocks | rv::transform(&std::vector<int>::size), sizes));
        RC_ASSERT(ranges::equal(dealt | rv::transform(&std::vector<int>::size), sizes));
    }));
}

TEST_CASE("a range without a size is dealt one by one, and shards are written through") {
    std::forward_list<int> list{0, 1, 2, 3, 4};
    ranges::for_each(list | strided_shard(1, 2), [](int& element) { element = -1; });
    CHECK((list | ranges::to<std::vector>) == std::vector{0, -1, 2, -1, 4});
}

TEST_CASE("a shard is for a rank that exists") {
    CHECK_THROWS_WITH_AS(
        (void)contiguous_shard(3, 3),
        "a shard is for a rank from 0 to the number of ranks - 1, but got rank 3 of 3",
        joinable::ContractViolation
    );
    CHECK_THROWS_AS((void)contiguous_shard(-1, 3), joinable::ContractViolation);
    CHECK_THROWS_AS((void)strided_shard(0, 0), joinable::ContractViolation);
}

// ---- rounds -------------------------------------------------------------------------------------

using Ranks = std::vector<int>;

TEST_CASE("ranks are active in as many rounds as they have inputs, and shadow the others") {
    std::array<std::size_t, 4> const lengths{1, 3, 0, 2};
    CHECK(
        (rounds(lengths) | rv::transform(ranges::to<Ranks>()) | ranges::to<std::vector>) ==
        std::vector<Ranks>{{0, 1, 3}, {1, 3}, {1}}
    );
    CHECK((active_ranks(lengths, 3) | ranges::to<Ranks>).empty());
    CHECK(ranges::size(rounds(std::span<std::size_t const>{})) == 0);
}

TEST_CASE("the rounds of given lengths are those that a guard opens") {
    joinable_tests::run_ranks({1, 2, 3, 4, 8}, [](joinable::ThreadCommunicator& comm) {
        constexpr std::size_t pattern[] = {2, 0, 5, 3, 2, 1, 4, 0};
        auto const lengths = pattern | rv::take(comm.size()) | ranges::to<std::vector>;
        joinable_tests::AllReducer reducer{comm};
        std::vector<Ranks> seen;
        joinable::Join guard{joinable::participants(reducer)};
        for (std::size_t i = 0; i < lengths[static_cast<std::size_t>(comm.rank())]; ++i) {
            reducer();
            seen.push_back(
                rv::iota(0, comm.size()) |
                rv::filter([&](int rank) { return guard.round().is_active(rank); }) |
                ranges::to<std::vector>
            );
        }
        auto const result = guard.finish();
        auto const expected = rounds(result.rounds_per_rank);
        CHECK(result.rounds_per_rank == lengths);
        CHECK(ranges::size(expected) == result.rounds);
        CHECK(ranges::equal(
            seen,
            expected | rv::take_exactly(static_cast<std::ptrdiff_t>(seen.size())),
            ranges::equal
        ));
    });
}

template <class T>
concept has_rounds = requires(T&& lengths) {
    rounds(std::forward<T>(lengths));
    active_ranks(std::forward<T>(lengths), 0);
};
static_assert(has_rounds<std::vector<std::size_t>&> && has_rounds<std::span<std::size_t const>>);
static_assert(
    !has_rounds<std::vector<std::size_t>>, "guard.finish().rounds_per_rank would be destroyed"
);

} // namespace
