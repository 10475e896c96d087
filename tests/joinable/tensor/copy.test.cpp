// SPDX-License-Identifier: BSL-1.0
#include <joinable/tensor/copy.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>

namespace {

using joinable::AnyView;
using joinable::ContractViolation;
using joinable::DType;
using joinable::Shape;

/// A random layout of `extents`: permuted dense strides, times a random gap.
Shape random_strides(Shape const& extents) {
    Shape strides = extents;
    std::vector<std::size_t> order(extents.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::size_t i = order.size(); i > 1; --i) {
        std::swap(order[i - 1], order[*rc::gen::inRange<std::size_t>(0, i)]);
    }
    std::size_t stride = *rc::gen::inRange<std::size_t>(1, 3);
    for (std::size_t const d : order) {
        strides[d] = stride;
        stride *= std::max<std::size_t>(extents[d], 1) + *rc::gen::inRange<std::size_t>(0, 2);
    }
    return strides;
}

TEST_CASE("copies between any two layouts equal a loop over all indices") {
    CHECK(rc::check([] {
        Shape extents;
        for (int d = *rc::gen::inRange(0, 5); d > 0; --d) {
            extents.push_back(*rc::gen::inRange<std::size_t>(0, 5));
        }
        Shape const from_strides = random_strides(extents);
        Shape const to_strides =
            *rc::gen::arbitrary<bool>() ? from_strides : random_strides(extents);
        std::vector<float> from(4096);
        std::iota(from.begin(), from.end(), 1.0F);
        AnyView const source{from.data(), DType::f32, extents, from_strides};
        for (double const factor : {1.0, 0.25}) {
            std::vector<float> to(4096, -1.0F);
            std::vector<float> expected = to;
            AnyView const target{to.data(), DType::f32, extents, to_strides};
            std::size_t const count = joinable::numel(extents);
            for (std::size_t k = 0; k < count; ++k) { // indices of element k, last one fastest
                std::size_t rest = k;
                std::size_t a = 0;
                std::size_t b = 0;
                for (std::size_t d = extents.size(); d-- > 0;) {
                    a += rest % extents[d] * from_strides[d];
                    b += rest % extents[d] * to_strides[d];
                    rest /= extents[d];
                }
                expected[b] = from[a] * static_cast<float>(factor);
            }
            joinable::scale_copy(source, factor, target);
            RC_ASSERT(to == expected);
            joinable::fill_zero(target);
            for (std::size_t i = 0; i < to.size(); ++i) {
                RC_ASSERT(to[i] == (expected[i] == -1.0F ? -1.0F : 0.0F));
            }
        }
    }));
}

TEST_CASE("an empty view has no elements to clear, and nothing is copied from it") {
    AnyView const none;
    CHECK(none.numel() == 0);
    joinable::fill_zero(none);
    CHECK_THROWS_AS(joinable::copy(none, none), ContractViolation);
}

template <class T>
void check_bits_survive() {
    std::vector<T> from(6);
    auto* const bytes = reinterpret_cast<unsigned char*>(from.data());
    for (std::size_t i = 0; i < 6 * sizeof(T); ++i) {
        bytes[i] = static_cast<unsigned char>(37 * i + 255); // NaN patterns among them
    }
    DType const dtype = joinable::dtype_of<T>;
    std::vector<T> to(12);
    AnyView const source{from.data(), dtype, {2, 3}, {3, 1}};
    AnyView const columns{to.data(), dtype, {2, 3}, {2, 4}};
    joinable::copy(source, columns);
    std::vector<T> back(6);
    joinable::copy(columns, AnyView{back.data(), dtype, {2, 3}, {3, 1}});
    CHECK(std::memcmp(back.data(), from.data(), 6 * sizeof(T)) == 0);
    joinable::fill_zero(columns);
    auto const* const cleared = reinterpret_cast<unsigned char const*>(to.data());
    CHECK(std::all_of(cleared, cleared + 12 * sizeof(T), [](auto byte) { return byte == 0; }));
}

TEST_CASE("a copy keeps all bits of all dtypes") {
    for (int i = 0; i < 10; ++i) {
        joinable::visit_dtype(static_cast<DType>(i), []<class T>(std::type_identity<T>) {
            check_bits_survive<T>();
        });
    }
}

TEST_CASE("f64 is scaled in double, f32 in float, f16 in float with one rounding") {
    std::vector<double> wide{1.0};
    joinable::scale_copy(AnyView{wide}, 1.0 / 3.0, AnyView{wide});
    CHECK(wide[0] == 1.0 / 3.0);
    std::vector<float> single{3.0F};
    joinable::scale_copy(AnyView{single}, 1.0 / 3.0, AnyView{single});
    CHECK(single[0] == 3.0F * (1.0F / 3.0F));
    std::vector<joinable::Half> half{joinable::Half{2049.0F / 1024.0F}}; // rounds to 2
    joinable::scale_copy(AnyView{half}, 1.0 / 3.0, AnyView{half});
    CHECK(half[0] == joinable::Half{2.0F * (1.0F / 3.0F)});
}

TEST_CASE("scaling rounds once in 16 bits, works in place, and refuses integers") {
    std::vector<joinable::BFloat16> small(3, joinable::BFloat16{3.0F});
    joinable::scale_copy(AnyView{small}, 0.5, AnyView{small});
    CHECK(static_cast<float>(small[2]) == 1.5F);
    std::vector<int> numbers(3, 4);
    joinable::scale_copy(AnyView{numbers}, 1.0, AnyView{numbers});
    CHECK_THROWS_AS(
        joinable::scale_copy(AnyView{numbers}, 0.5, AnyView{numbers}), ContractViolation
    );
    std::vector<float> other(3);
    CHECK_THROWS_AS(joinable::copy(AnyView{numbers}, AnyView{other}), ContractViolation);
    CHECK_THROWS_AS(joinable::copy(AnyView{}, AnyView{other}), ContractViolation);
}

} // namespace
