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

/// Says of its strides what it is told, as a mistaken adapter does.
struct Claimed {
    std::vector<double> storage = std::vector<double>(6);
    std::array<std::size_t, 2> extents{2, 3};
    std::array<std::size_t, 2> strides{3, 1};
};

} // namespace

template <>
struct joinable::tensor_traits<Claimed> {
    using value_type = double;
    static double* data(Claimed& t) { return t.storage.data(); }
    static double const* data(Claimed const& t) { return t.storage.data(); }
    static auto extents(Claimed const& t) { return t.extents; }
    static auto strides(Claimed const& t) { return t.strides; }
    static std::size_t storage_bytes(Claimed const& t) { return t.storage.size() * sizeof(double); }
};

namespace {

TEST_CASE("strides that lead out of the memory of a tensor are refused, such as those in bytes") {
    Claimed right;
    CHECK(AnyView{right}.numel() == 6);
    Claimed transposed{.extents = {3, 2}, .strides = {1, 3}};
    CHECK(AnyView{transposed}.numel() == 6);
    Claimed in_bytes{.strides = {24, 8}};
    CHECK_THROWS_WITH_AS(
        static_cast<void>(AnyView{in_bytes}),
        "a tensor of extents (2, 3) and strides (24, 8) spans 328 bytes, but its memory has 48; strides "
        "are in elements of 8 bytes, not in bytes",
        ContractViolation
    );
    Claimed one_more{.extents = {2, 3}, .strides = {4, 1}};
    CHECK_THROWS_AS(static_cast<void>(AnyView{one_more}), ContractViolation);
    Claimed empty{.storage = {}, .extents = {0, 3}};
    CHECK(AnyView{empty}.numel() == 0);
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
