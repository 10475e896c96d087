// SPDX-License-Identifier: BSL-1.0
#include <joinable/tensor/overlap.hpp>

#include <algorithm>
#include <cstddef>
#include <set>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/offsets.hpp>

#include <joinable/tensor/any_view.hpp>

namespace {

using joinable::AnyView;
using joinable::ContractViolation;
using joinable::DeviceId;
using joinable::DeviceKind;
using joinable::DType;
using joinable::is_overlapping;
using joinable::Shape;
using joinable::share_memory;
using joinable_tests::offsets_of;

TEST_CASE("non-overlapping and dense: no gaps, no overlap, any order of dimensions") {
    using joinable::is_non_overlapping_and_dense;
    CHECK(is_non_overlapping_and_dense({2, 3}, {3, 1}));
    CHECK(is_non_overlapping_and_dense({2, 3}, {1, 2}));
    CHECK(is_non_overlapping_and_dense({2, 3, 4}, {1, 8, 2}));
    CHECK(is_non_overlapping_and_dense({1, 3}, {99, 1}));
    CHECK(is_non_overlapping_and_dense({}, {}));
    CHECK(is_non_overlapping_and_dense({0, 3}, {7, 7}));
    CHECK_FALSE(is_non_overlapping_and_dense({2, 3}, {4, 1}));
    CHECK_FALSE(is_non_overlapping_and_dense({3}, {0}));
    CHECK_FALSE(is_non_overlapping_and_dense({2, 3}, {1, 1}));
}

struct Layout {
    Shape extents;
    Shape strides;
};

/// Any number of the range from the first case on: rapidcheck would begin with small ones.
std::size_t pick(std::size_t low, std::size_t high) {
    return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange(low, high));
}

Layout random_layout() {
    Layout layout;
    for (std::size_t d = pick(0, 6); d > 0; --d) {
        layout.extents.push_back(pick(0, 20) == 0 ? 0 : pick(1, 5));
        layout.strides.push_back(pick(0, 16));
    }
    return layout;
}

TEST_CASE("a view overlaps itself where listing all of its offsets finds one twice") {
    int overlapping = 0;
    CHECK(rc::check([&] {
        Layout const layout = random_layout();
        auto const offsets = offsets_of(layout.extents, layout.strides);
        bool const expected =
            std::set<std::size_t>(offsets.begin(), offsets.end()).size() != offsets.size();
        std::vector<float> storage(1000);
        AnyView const view{storage.data(), DType::f32, layout.extents, layout.strides};
        RC_ASSERT(is_overlapping(view) == expected);
        overlapping += expected ? 1 : 0;
    }));
    CHECK(overlapping > 5); // both answers were asked for
    CHECK(overlapping < 95);
}

TEST_CASE("two views share memory where listing their bytes finds a common element") {
    int sharing = 0;
    CHECK(rc::check([&] {
        std::vector<float> storage(1500);
        Layout const a = random_layout();
        Layout const b = random_layout();
        DType const dtype = *rc::gen::element(DType::i32, DType::f16, DType::u8, DType::f64);
        auto const start_a = 4 * pick(0, 40); // in bytes
        auto const start_b = dtype == DType::i32 ? 4 * pick(0, 40) : pick(0, 160);
        auto* const memory = reinterpret_cast<std::byte*>(storage.data());
        AnyView const view_a{memory + start_a, DType::f32, a.extents, a.strides};
        AnyView const view_b{memory + start_b, dtype, b.extents, b.strides};
        std::set<std::size_t> bytes;
        for (std::size_t const offset : offsets_of(a.extents, a.strides)) {
            for (std::size_t byte = 0; byte < 4; ++byte) {
                bytes.insert(start_a + 4 * offset + byte);
            }
        }
        bool expected = false;
        for (std::size_t const offset : offsets_of(b.extents, b.strides)) {
            for (std::size_t byte = 0; byte < size_of(dtype); ++byte) {
                expected |= bytes.count(start_b + size_of(dtype) * offset + byte) != 0;
            }
        }
        RC_ASSERT(share_memory(view_a, view_b) == expected);
        RC_ASSERT(share_memory(view_b, view_a) == expected);
        sharing += expected ? 1 : 0;
    }));
    CHECK(sharing > 5);
    CHECK(sharing < 95);
}

TEST_CASE(
    "interleaved views share no memory, whatever the sizes of their elements, nor do views of other devices"
) {
    std::vector<double> storage(16);
    double* const data = storage.data();
    AnyView const even{data, DType::f64, {8}, {2}};
    AnyView const odd{data + 1, DType::f64, {8}, {2}};
    CHECK_FALSE(share_memory(even, odd));
    CHECK(share_memory(even, even));
    CHECK_FALSE(share_memory(even, AnyView{data + 1, DType::f64, {}, {}}));
    CHECK(share_memory(even, AnyView{data + 2, DType::f64, {}, {}}));
    CHECK_FALSE(share_memory(even, AnyView{data, DType::f64, {0}, {2}}));     // has no element
    CHECK_FALSE(share_memory(even, AnyView{data + 1, DType::f32, {8}, {4}})); // in the gaps
    CHECK(share_memory(even, AnyView{data + 1, DType::f32, {8}, {3}}));
    CHECK_FALSE(share_memory(even, AnyView{reinterpret_cast<char*>(data) + 8, DType::u8, {8}, {1}})
    );
    CHECK(share_memory(even, AnyView{reinterpret_cast<char*>(data) + 8, DType::u8, {9}, {1}}));
    CHECK(share_memory(even, AnyView{reinterpret_cast<char*>(data) + 4, DType::f64, {2}, {1}}));
    DeviceId const device{DeviceKind::cuda, 0};
    CHECK_FALSE(share_memory(even, AnyView{data, DType::f64, {8}, {2}, device}));
    CHECK_FALSE(share_memory(storage, std::vector<float>(3)));
    CHECK(share_memory(storage, odd));
}

TEST_CASE("layouts that tensors have are decided exactly, however large") {
    auto const layout = [](Shape const& extents, Shape const& strides) {
        return AnyView{nullptr, DType::u8, extents, strides};
    };
    std::size_t const large = std::size_t{1} << 40U;
    CHECK_FALSE(is_overlapping(layout({large, 3}, {4, 1}))); // padded rows
    CHECK_FALSE(is_overlapping(layout({3, large}, {1, 3})));
    CHECK_FALSE(is_overlapping(layout({2, large}, {1, 2})));
    CHECK(is_overlapping(layout({large, 3}, {2, 1}))); // windows
    CHECK(is_overlapping(layout({large, 2}, {1, 0})));
    CHECK_FALSE(is_overlapping(layout({large, 1}, {1, 0})));
    CHECK_FALSE(is_overlapping(layout({2, 3}, {3, 2}))); // interleaved, but 0 2 4 3 5 7
    CHECK_FALSE(is_overlapping(layout({large, 3}, {3, large * 3 + 1})));
}

TEST_CASE("a layout that would take too long to decide counts as overlapping") {
    // Strides near each other leave many choices at every level, and none of 5^8 sums is 0.
    Shape const extents{3, 3, 3, 3, 3, 3, 3, 3};
    Shape const strides{
        1'000'141'093,
        1'002'718'281,
        1'003'141'593,
        1'004'669'201,
        1'005'772'157,
        1'006'618'033,
        1'007'071'067,
        1'009'732'051
    };
    auto const offsets = offsets_of(extents, strides);
    CHECK(std::set<std::size_t>(offsets.begin(), offsets.end()).size() == offsets.size());
    CHECK(is_overlapping(AnyView{nullptr, DType::u8, extents, strides}));
}

TEST_CASE("what is no view is refused") {
    CHECK_THROWS_AS((void)is_overlapping(AnyView{nullptr, DType::u8, {2}, {}}), ContractViolation);
}

} // namespace
