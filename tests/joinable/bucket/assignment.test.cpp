// SPDX-License-Identifier: BSL-1.0
#include <joinable/bucket/assignment.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/tensor_sizes.hpp>

#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace {

using joinable::AnyView;
using joinable::compute_bucket_assignment_by_size;
using joinable::DType;
using Buckets = std::vector<std::vector<std::size_t>>;
using Limits = std::vector<std::size_t>;

/// Tensors that exist as shapes only: assignment reads no element.
std::vector<AnyView>
tensors(std::initializer_list<std::pair<std::size_t, DType>> shapes, int devices = 1) {
    std::vector<AnyView> views;
    for (auto const& [numel, dtype] : shapes) {
        int const device = static_cast<int>(views.size()) % devices;
        views.emplace_back(
            nullptr,
            dtype,
            joinable::Shape{numel},
            joinable::Shape{1},
            joinable::DeviceId{joinable::DeviceKind::cuda, device}
        );
    }
    return views;
}
std::vector<AnyView> floats(std::initializer_list<std::size_t> sizes) {
    std::vector<AnyView> views;
    for (std::size_t const numel : sizes) {
        views.emplace_back(nullptr, DType::f32, joinable::Shape{numel}, joinable::Shape{1});
    }
    return views;
}
std::vector<AnyView> alternating() {
    using enum DType;
    return tensors({{50, f32}, {25, f64}, {50, f32}, {25, f64}, {50, f32}, {25, f64}});
}

TEST_CASE("upstream's table: one limit, one dtype") {
    auto const result = compute_bucket_assignment_by_size(floats({100, 200, 100, 50}), {400});
    CHECK(result.buckets == Buckets{{0}, {1}, {2}, {3}});
    CHECK(result.limits == Limits{400, 400, 400, 400});
}
TEST_CASE("upstream's table: one limit, several dtypes") {
    auto const result = compute_bucket_assignment_by_size(alternating(), {400});
    CHECK(result.buckets == Buckets{{0, 2}, {1, 3}, {4}, {5}});
    CHECK(result.limits == Limits{400, 400, 400, 400});
}
TEST_CASE("upstream's table: several limits, one dtype") {
    auto const result = compute_bucket_assignment_by_size(floats({10, 10, 10, 10}), {40, 80});
    CHECK(result.buckets == Buckets{{0}, {1, 2}, {3}});
    CHECK(result.limits == Limits{40, 80, 80});
}
TEST_CASE("upstream's table: several limits, several dtypes") {
    auto const result = compute_bucket_assignment_by_size(alternating(), {200, 400});
    CHECK(result.buckets == Buckets{{0}, {1}, {2, 4}, {3, 5}});
    CHECK(result.limits == Limits{200, 200, 400, 400});
}
TEST_CASE("a bucket closes with the tensor that reaches the limit exactly") {
    auto const result = compute_bucket_assignment_by_size(floats({10, 10, 5}), {80});
    CHECK(result.buckets == Buckets{{0, 1}, {2}});
    CHECK(result.limits == Limits{80, 80});
}
TEST_CASE("a tensor above the limit closes the bucket it is in") {
    CHECK(compute_bucket_assignment_by_size(floats({1000, 1}), {40}).buckets == Buckets{{0}, {1}});
}
TEST_CASE("a sparse tensor is alone, with the limit 0") {
    auto const result = compute_bucket_assignment_by_size(
        floats({10, 10, 10, 10}), {80}, {false, true, false, false}
    );
    CHECK(result.buckets == Buckets{{0, 2}, {1}, {3}});
    CHECK(result.limits == Limits{80, 0, 80});
}
TEST_CASE("sparse flags belong to tensors, not to places in the order") {
    auto const result = compute_bucket_assignment_by_size(
        floats({10, 10, 10, 10}), {80}, {false, true, false, false}, {3, 2, 1, 0}
    );
    CHECK(result.buckets == Buckets{{3, 2}, {1}, {0}});
    CHECK(result.limits == Limits{80, 0, 80});
}
TEST_CASE("with indices tensors are taken in their order, and buckets are not sorted") {
    auto const result =
        compute_bucket_assignment_by_size(floats({10, 10, 10, 10}), {40, 80}, {}, {3, 2, 1, 0});
    CHECK(result.buckets == Buckets{{3}, {2, 1}, {0}});
    CHECK(result.limits == Limits{40, 80, 80});
    CHECK(
        compute_bucket_assignment_by_size(floats({10, 10, 10, 10, 10}), {80}, {}, {4, 0, 3, 1, 2})
            .buckets == Buckets{{4, 0}, {3, 1}, {2}}
    );
}
TEST_CASE("tensors of two devices do not share a bucket") {
    using enum DType;
    auto const result = compute_bucket_assignment_by_size(
        tensors({{10, f32}, {10, f32}, {10, f32}, {10, f32}}, 2), {80}
    );
    CHECK(result.buckets == Buckets{{0, 2}, {1, 3}});
}
TEST_CASE("a limit of 0 gives every tensor a bucket of its own") {
    auto const result = compute_bucket_assignment_by_size(floats({10, 0, 5}), {0});
    CHECK(result.buckets == Buckets{{0}, {1}, {2}});
    CHECK(result.limits == Limits{0, 0, 0});
}
TEST_CASE("a tensor without elements joins the open bucket") {
    CHECK(compute_bucket_assignment_by_size(floats({0, 10}), {40}).buckets == Buckets{{0, 1}});
}
TEST_CASE("without a real limit there is one bucket per dtype") {
    CHECK(
        compute_bucket_assignment_by_size(alternating(), {std::numeric_limits<std::size_t>::max()})
            .buckets == Buckets{{0, 2, 4}, {1, 3, 5}}
    );
}
TEST_CASE("the default caps of data-parallel training") {
    auto const result = compute_bucket_assignment_by_size(
        floats({262144, 262144, 6553600, 1}), {std::size_t{1} << 20U, std::size_t{25} << 20U}
    );
    CHECK(result.buckets == Buckets{{0}, {1, 2}, {3}});
}
TEST_CASE("what is left open with indices comes in the order in which dtypes were first seen") {
    using enum DType;
    auto const result = compute_bucket_assignment_by_size(
        tensors({{1, f32}, {1, f64}, {1, i32}}), {100}, {}, {2, 0, 1}
    );
    CHECK(result.buckets == Buckets{{2}, {0}, {1}});
}
TEST_CASE("nothing to assign, sizes that differ and indices that are no permutation are refused") {
    using joinable::ContractViolation;
    CHECK_THROWS_AS((void)compute_bucket_assignment_by_size(floats({}), {1}), ContractViolation);
    CHECK_THROWS_AS(
        (void)compute_bucket_assignment_by_size(floats({1}), std::initializer_list<std::size_t>{}),
        ContractViolation
    );
    CHECK_THROWS_AS(
        (void)compute_bucket_assignment_by_size(floats({1, 2}), {1}, {true}), ContractViolation
    );
    CHECK_THROWS_AS(
        (void)compute_bucket_assignment_by_size(floats({1, 2}), {1}, {}, {0}), ContractViolation
    );
    CHECK_THROWS_AS(
        (void)compute_bucket_assignment_by_size(floats({1, 2}), {1}, {}, {0, 2}), ContractViolation
    );
    CHECK_THROWS_AS(
        (void)compute_bucket_assignment_by_size(floats({1, 2}), {1}, {}, {1, 1}), ContractViolation
    );
}

TEST_CASE("each dtype's buckets hold its tensors in order, each full with its last, but for the end"
) {
    CHECK(rc::check([] {
        auto const sizes = *rc::gen::nonEmpty(
            rc::gen::container<std::vector<std::size_t>>(rc::gen::inRange<std::size_t>(0, 50))
        );
        auto const limits = *rc::gen::nonEmpty(
            rc::gen::container<std::vector<std::size_t>>(rc::gen::inRange<std::size_t>(0, 300))
        );
        std::vector<AnyView> views;
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            views.emplace_back(
                nullptr,
                i % 3 == 0 ? DType::f64 : DType::f32,
                joinable::Shape{sizes[i]},
                joinable::Shape{1}
            );
        }
        auto const result =
            compute_bucket_assignment_by_size(views, std::span<std::size_t const>{limits});
        RC_ASSERT(result.buckets.size() == result.limits.size());
        for (std::size_t b = 1; b < result.buckets.size(); ++b) {
            RC_ASSERT(result.buckets[b - 1].front() < result.buckets[b].front());
        }
        for (DType const dtype : {DType::f32, DType::f64}) {
            std::vector<std::size_t> members;
            std::size_t number = 0; // of this dtype's buckets so far
            bool was_full = true;
            for (std::size_t b = 0; b < result.buckets.size(); ++b) {
                auto const& bucket = result.buckets[b];
                RC_ASSERT(!bucket.empty());
                if (views[bucket.front()].dtype() != dtype) {
                    continue;
                }
                RC_ASSERT(was_full); // only the last one may be open
                RC_ASSERT(result.limits[b] == limits[std::min(number, limits.size() - 1)]);
                std::size_t bytes = 0;
                for (std::size_t const member : bucket) {
                    RC_ASSERT(member == bucket.front() || bytes < result.limits[b]);
                    bytes += sizes[member] * joinable::size_of(dtype);
                    members.push_back(member);
                }
                was_full = bytes >= result.limits[b];
                ++number;
            }
            std::vector<std::size_t> expected;
            for (std::size_t i = 0; i < views.size(); ++i) {
                if (views[i].dtype() == dtype) {
                    expected.push_back(i);
                }
            }
            RC_ASSERT(members == expected);
        }
    }));
}

/// The rule said the other way round: each kind of tensor is cut on its own, and then the buckets
/// are put in the order in which they were closed, or that of their lowest tensors.
joinable::BucketAssignment cut_kind_by_kind(joinable_tests::AssignmentInput const& input) {
    struct Cut {
        std::size_t closed_at;
        std::vector<std::size_t> members;
        std::size_t limit;
    };
    std::size_t const n = input.sizes.size();
    std::vector<Cut> cuts;
    std::vector<joinable::TensorSize> kinds; // of dense tensors, as they come
    auto const tensor_at = [&](std::size_t place) {
        return input.indices.empty() ? place : input.indices[place];
    };
    for (std::size_t place = 0; place < n; ++place) {
        auto const& size = input.sizes[tensor_at(place)];
        if (input.is_sparse(tensor_at(place))) {
            cuts.push_back({place, {tensor_at(place)}, 0});
        } else if (std::none_of(kinds.begin(), kinds.end(), [&](auto const& kind) {
                       return kind.dtype == size.dtype && kind.device == size.device;
                   })) {
            kinds.push_back(size);
        }
    }
    for (std::size_t k = 0; k < kinds.size(); ++k) {
        Cut open{n + k, {}, 0}; // what stays open is closed at the end
        std::size_t bytes = 0;
        std::size_t number = 0;
        for (std::size_t place = 0; place < n; ++place) {
            auto const& size = input.sizes[tensor_at(place)];
            if (input.is_sparse(tensor_at(place)) || size.dtype != kinds[k].dtype ||
                size.device != kinds[k].device) {
                continue;
            }
            open.limit = input.limits[std::min(number, input.limits.size() - 1)];
            open.members.push_back(tensor_at(place));
            bytes += size.numel * joinable::size_of(size.dtype);
            if (bytes >= open.limit) {
                open.closed_at = place;
                cuts.push_back(std::exchange(open, Cut{n + k, {}, 0}));
                bytes = 0;
                ++number;
            }
        }
        if (!open.members.empty()) {
            cuts.push_back(open);
        }
    }
    std::sort(cuts.begin(), cuts.end(), [&](Cut const& a, Cut const& b) {
        return input.indices.empty() ? a.members.front() < b.members.front()
                                     : a.closed_at < b.closed_at;
    });
    joinable::BucketAssignment result;
    for (Cut const& cut : cuts) {
        result.buckets.push_back(cut.members);
        result.limits.push_back(cut.limit);
    }
    return result;
}

TEST_CASE("tensors of any dtypes and devices, sparse or not, in any order, are cut kind by kind") {
    CHECK(rc::check([] {
        joinable_tests::AssignmentInput const input;
        auto const result = input.assign();
        auto const expected = cut_kind_by_kind(input);
        RC_ASSERT(result.buckets == expected.buckets);
        RC_ASSERT(result.limits == expected.limits);
    }));
}

// ---- the same tables in constant expressions ----------------------------------------------------

using joinable::TensorSize;
using Flags = std::initializer_list<bool>;
using Indices = std::initializer_list<std::size_t>;

template <std::size_t N>
constexpr bool gives(
    std::array<TensorSize, N> const& sizes,
    std::initializer_list<std::size_t> limits,
    Buckets const& buckets,
    Limits const& cut_by,
    Flags sparse = {},
    Indices indices = {}
) {
    auto const result = compute_bucket_assignment_by_size(sizes, limits, sparse, indices);
    return result.buckets == buckets && result.limits == cut_by;
}
template <class... Numels>
constexpr std::array<TensorSize, sizeof...(Numels)> f32(Numels... numels) {
    return {{TensorSize{static_cast<std::size_t>(numels)}...}};
}
constexpr std::array<TensorSize, 6> two_dtypes{
    {{50, DType::f32},
     {25, DType::f64},
     {50, DType::f32},
     {25, DType::f64},
     {50, DType::f32},
     {25, DType::f64}}
};
constexpr joinable::DeviceId other_device{joinable::DeviceKind::cuda, 1};
constexpr std::array<TensorSize, 4> two_devices{
    {{10}, {10, DType::f32, other_device}, {10}, {10, DType::f32, other_device}}
};
constexpr std::size_t mebibyte = std::size_t{1} << 20U;

constexpr bool test_single_limit_single_dtype() {
    return gives(f32(100, 200, 100, 50), {400}, {{0}, {1}, {2}, {3}}, {400, 400, 400, 400});
}
constexpr bool test_single_limit_multi_dtype() {
    return gives(two_dtypes, {400}, {{0, 2}, {1, 3}, {4}, {5}}, {400, 400, 400, 400});
}
constexpr bool test_multi_limit_single_dtype() {
    return gives(f32(10, 10, 10, 10), {40, 80}, {{0}, {1, 2}, {3}}, {40, 80, 80});
}
constexpr bool test_multi_limit_multi_dtype() {
    return gives(two_dtypes, {200, 400}, {{0}, {1}, {2, 4}, {3, 5}}, {200, 200, 400, 400});
}
constexpr bool test_boundaries() {
    return gives(f32(10, 10, 5), {80}, {{0, 1}, {2}}, {80, 80}) &&
           gives(f32(1000, 1), {40}, {{0}, {1}}, {40, 40}) &&
           gives(f32(10, 0, 5), {0}, {{0}, {1}, {2}}, {0, 0, 0}) &&
           gives(f32(0, 10), {40}, {{0, 1}}, {40}) &&
           gives(two_dtypes, {SIZE_MAX}, {{0, 2, 4}, {1, 3, 5}}, {SIZE_MAX, SIZE_MAX});
}
constexpr bool test_flags_and_indices() {
    Flags const second{false, true, false, false};
    auto const four = f32(10, 10, 10, 10);
    return gives(four, {80}, {{0, 2}, {1}, {3}}, {80, 0, 80}, second) &&
           gives(four, {80}, {{3, 2}, {1}, {0}}, {80, 0, 80}, second, {3, 2, 1, 0}) &&
           gives(four, {40, 80}, {{3}, {2, 1}, {0}}, {40, 80, 80}, {}, {3, 2, 1, 0}) &&
           gives(
               f32(10, 10, 10, 10, 10),
               {80},
               {{4, 0}, {3, 1}, {2}},
               {80, 80, 80},
               {},
               {4, 0, 3, 1, 2}
           );
}
constexpr bool test_devices_and_default_caps() {
    return gives(two_devices, {80}, {{0, 2}, {1, 3}}, {80, 80}) &&
           gives(
               f32(262144, 262144, 6553600, 1),
               {mebibyte, 25 * mebibyte},
               {{0}, {1, 2}, {3}},
               {mebibyte, 25 * mebibyte, 25 * mebibyte}
           );
}
static_assert(test_single_limit_single_dtype());
static_assert(test_single_limit_multi_dtype());
static_assert(test_multi_limit_single_dtype());
static_assert(test_multi_limit_multi_dtype());
static_assert(test_boundaries());
static_assert(test_flags_and_indices());
static_assert(test_devices_and_default_caps());

TEST_CASE("parameters are assigned by their values") {
    struct Weight {
        std::vector<float> value;
        std::vector<float> grad;
    };
    std::vector<Weight> weights{{std::vector<float>(10), {}}, {std::vector<float>(5), {}}};
    CHECK(compute_bucket_assignment_by_size(weights, {40}).buckets == Buckets{{0}, {1}});
    auto const list = joinable::parameters(weights);
    CHECK(compute_bucket_assignment_by_size(list, {60}).buckets == Buckets{{0, 1}});
}

TEST_CASE("any range of tensors is assigned, whatever their type") {
    std::vector<std::vector<double>> const vectors{
        std::vector<double>(5), std::vector<double>(5), std::vector<double>(1)
    };
    CHECK(compute_bucket_assignment_by_size(vectors, {80}).buckets == Buckets{{0, 1}, {2}});
    std::vector<float> storage(8);
    std::array<joinable::StridedView<float>, 2> const columns{
        joinable::as_strided(storage, {4}, {2}), joinable::as_strided(storage, {4}, {2}, 1)
    };
    Limits const limits{16};
    CHECK(compute_bucket_assignment_by_size(columns, limits).buckets == Buckets{{0}, {1}});
}

} // namespace
