// SPDX-License-Identifier: BSL-1.0
#include <joinable/tensor/any_view.hpp>

#include <array>
#include <vector>

#include <doctest/doctest.h>

namespace {

using joinable::AnyView;
using joinable::ContractViolation;
using joinable::DType;

static_assert(joinable::WritableTensor<AnyView const>); // a view: shallow const

TEST_CASE("a view of any dtype knows its own, and refuses another") {
    std::vector<double> storage(6, 1.5);
    AnyView const view{storage};
    CHECK(view);
    CHECK_FALSE(AnyView{});
    CHECK(view.dtype() == DType::f64);
    CHECK(view.as<double>()(5) == 1.5);
    CHECK_THROWS_WITH_AS(
        (void)view.as<float>(),
        "a tensor of f64 was asked for its elements as f32",
        ContractViolation
    );
}

TEST_CASE("an empty view is no tensor, and has no elements that something could read") {
    AnyView const none;
    CHECK_FALSE(none);
    CHECK(none.numel() == 0);
    CHECK(joinable::to_buffer(none).count == 0);
    CHECK(none.as<float>().begin() == none.as<float>().end());
    std::vector<float> nothing;
    CHECK(AnyView{nothing}); // a tensor all the same
    CHECK(AnyView{nothing}.numel() == 0);
}

TEST_CASE("a view of a strided tensor keeps its layout and its device") {
    std::vector<int> storage(12);
    storage[5] = 7;
    auto const columns = joinable::as_strided(storage, {4, 3}, {1, 4});
    AnyView const view{columns};
    CHECK(view.extents() == joinable::Shape{4, 3});
    CHECK(view.strides() == joinable::Shape{1, 4});
    CHECK_FALSE(view.is_contiguous());
    CHECK(view.as<int>()(1, 1) == 7);
    joinable::DeviceId const second{joinable::DeviceKind::cuda, 1};
    CHECK(AnyView{nullptr, DType::f16, {2}, {1}, second}.device() == second);
}

TEST_CASE("one stride per extent is needed") {
    std::array<float, 6> storage{};
    CHECK_THROWS_WITH_AS(
        (void)AnyView(storage.data(), DType::f32, {2, 3}, {1}),
        "a view needs one stride per extent, but got 2 extents and 1 strides",
        ContractViolation
    );
}

} // namespace
