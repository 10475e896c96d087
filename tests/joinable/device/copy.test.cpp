// SPDX-License-Identifier: BSL-1.0
#include <joinable/device/copy.hpp>
#include <joinable/device/detail/loops.hpp>
#include <joinable/device/detail/transpose.hpp>
#include <joinable/reduction/arithmetic.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/offsets.hpp>
#include <support/volume.hpp>

namespace {

using joinable::AnyView;
using joinable::ContractViolation;
using joinable::DType;
using joinable::Shape;
using joinable_tests::offsets_of;

/// Any number of the range from the first case on: rapidcheck would begin with small ones.
std::size_t pick(std::size_t low, std::size_t high) {
    return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange(low, high));
}

/// A random layout of `extents`: permuted dense strides, times a random gap.
Shape random_strides(Shape const& extents) {
    Shape strides = extents;
    std::vector<std::size_t> order(extents.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::size_t i = order.size(); i > 1; --i) {
        std::swap(order[i - 1], order[pick(0, i)]);
    }
    std::size_t stride = pick(1, 3);
    for (std::size_t const d : order) {
        strides[d] = stride;
        stride *= std::max<std::size_t>(extents[d], 1) + pick(0, 2);
    }
    return strides;
}

template <class T>
std::vector<std::uint8_t> bytes_of(std::vector<T> const& elements) {
    std::vector<std::uint8_t> bytes(elements.size() * sizeof(T));
    if (!bytes.empty()) {
        std::memcpy(bytes.data(), elements.data(), bytes.size());
    }
    return bytes;
}

/// What an element becomes by the language's own arithmetic; in 16 bits by that of float.
template <class T>
T scaled(T value, double factor) {
    if constexpr (joinable::detail::complex_number<T>) {
        return {{scaled(value.real(), factor), scaled(value.imag(), factor)}};
    } else if constexpr (sizeof(T) == 2) {
        return T{static_cast<float>(value) * static_cast<float>(factor)};
    } else {
        return static_cast<T>(value * static_cast<T>(factor));
    }
}
template <class T>
T sum(T a, T b) {
    if constexpr (joinable::detail::complex_number<T>) {
        return {{a.real() + b.real(), a.imag() + b.imag()}};
    } else if constexpr (sizeof(T) == 2) {
        return T{static_cast<float>(a) + static_cast<float>(b)};
    } else if constexpr (std::is_integral_v<T>) {
        return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
    } else {
        return a + b;
    }
}

template <class T>
bool is_nan(T value) {
    if constexpr (std::is_integral_v<T>) {
        return false;
    } else {
        return std::isnan(static_cast<double>(static_cast<float>(value)));
    }
}

/// Any bits that are no NaN: its payload after arithmetic is the processor's choice.
template <class T>
std::vector<T> numbers(std::size_t count, std::uint64_t seed) {
    std::vector<T> values(count);
    if constexpr (joinable::detail::complex_number<T>) {
        auto const parts = numbers<typename T::value_type>(2 * count, seed);
        std::memcpy(values.data(), parts.data(), count * sizeof(T));
        return values;
    } else {
        for (T& value : values) {
            do {
                seed = seed * 6364136223846793005U + 1442695040888963407U; // Knuth's MMIX generator
                using Bits = joinable::detail::bits_of_size<sizeof(T)>;
                value = std::bit_cast<T>(static_cast<Bits>(seed >> (64 - 8 * sizeof(T))));
            } while (is_nan(value));
        }
        return values;
    }
}

/// Every kernel against one that visits one index after another.
template <class T>
void check_kernels(Shape const& extents, Shape const& from_strides, Shape const& to_strides) {
    auto const reads = offsets_of(extents, from_strides);
    auto const writes = offsets_of(extents, to_strides);
    auto const storage = [](std::vector<std::size_t> const& offsets) {
        return offsets.empty() ? 3 : *std::max_element(offsets.begin(), offsets.end()) + 4;
    };
    std::vector<T> from = numbers<T>(storage(reads), 1);
    std::vector<T> const before = numbers<T>(storage(writes), 2);
    DType const dtype = joinable::dtype_of<T>;
    AnyView const source{from.data() + 1, dtype, extents, from_strides};
    auto const check = [&](char const* what, auto const& kernel, auto const& element) {
        std::vector<T> to = before;
        std::vector<T> expected = before;
        for (std::size_t k = 0; k < writes.size(); ++k) {
            T& target = expected[writes[k] + 1];
            target = element(from[reads[k] + 1], target);
        }
        kernel(AnyView{to.data() + 1, dtype, extents, to_strides});
        INFO(what << " of " << joinable::name_of(dtype));
        CHECK(bytes_of(to) == bytes_of(expected)); // and nothing between the elements was written
    };
    check("copy", [&](auto const& to) { joinable::copy(source, to); }, [](T a, T) { return a; });
    if constexpr (!std::is_integral_v<T> || sizeof(T) != 2) {
        check(
            "add",
            [&](auto const& to) { joinable::add(source, to); },
            [](T a, T b) { return sum(b, a); }
        );
    }
    check("fill_zero", [&](auto const& to) { joinable::fill_zero(to); }, [](T, T) { return T{}; });
    if constexpr (!std::is_integral_v<T>) {
        check(
            "scale_copy",
            [&](auto const& to) { joinable::scale_copy(source, 0.3, to); },
            [](T a, T) { return scaled(a, 0.3); }
        );
    }
}

void check_kernels_of_all_dtypes(Shape const& extents, Shape const& from, Shape const& to) {
    for (std::size_t i = 0; i < joinable::dtype_count; ++i) {
        joinable::visit_dtype(static_cast<DType>(i), [&]<class T>(std::type_identity<T>) {
            if constexpr (!std::is_same_v<T, bool>) { // has no bits of its own: see below
                check_kernels<T>(extents, from, to);
            }
        });
    }
}

TEST_CASE("booleans are copied, and like i16 and u16 neither added nor scaled") {
    std::array<bool, 6> const from{true, false, true, true, false, false};
    std::array<bool, 6> to{};
    joinable::copy(
        joinable::as_strided(from, {2, 3}, {3, 1}), joinable::as_strided(to, {2, 3}, {1, 2})
    );
    CHECK((to == std::array{true, true, false, false, true, false}));
    joinable::fill_zero(AnyView{to});
    CHECK((to == std::array<bool, 6>{}));
    CHECK_THROWS_WITH_AS(
        joinable::add(AnyView{to}, AnyView{to}),
        "add: a tensor of boolean cannot be added; convert it to i32",
        joinable::ContractViolation
    );
    std::array<std::uint16_t, 2> words{1, 2};
    CHECK_THROWS_WITH_AS(
        joinable::scale_copy(AnyView{words}, 0.5, AnyView{words}),
        "scale_copy: a tensor of u16 cannot be scaled by 0.5; only floating-point and complex dtypes can",
        joinable::ContractViolation
    );
}

TEST_CASE("a complex tensor of 8 dimensions is refused where its parts would be a ninth") {
    std::array<std::complex<double>, 1> number{};
    joinable::AnyView const view{
        number.data(), DType::c128, {1, 1, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1, 1, 1}
    };
    CHECK_THROWS_WITH_AS(
        joinable::fill_zero(view),
        "a tensor of complex numbers has at most 7 dimensions here, because its parts are one more, but "
        "this one has 8; merge two of them",
        joinable::ContractViolation
    );
}

TEST_CASE("kernels between any two layouts equal a loop over all indices") {
    CHECK(rc::check([] {
        Shape extents;
        for (std::size_t d = pick(0, 6); d > 0; --d) {
            extents.push_back(pick(0, 30) == 0 ? 0 : pick(1, 6));
        }
        Shape const to = random_strides(extents);
        Shape from = pick(0, 3) == 0 ? to : random_strides(extents);
        if (!from.empty() && pick(0, 4) == 0) {
            from[pick(0, from.size())] = 0; // a source may be broadcast
        }
        check_kernels_of_all_dtypes(extents, from, to);
    }));
}

TEST_CASE("kernels over planes of several tiles equal a loop over all indices") {
    for (std::size_t turn = 0; std::size_t const rows : {1U, 15U, 64U, 131U}) {
        for (std::size_t const columns : {7U, 128U, 150U}) {
            Shape const extents{rows, 2, columns};
            Shape const dense{2 * columns, columns, 1};
            Shape const turned{1, rows * columns, rows};
            std::pair<Shape, Shape> const layouts[] = {
                {dense, dense},
                {dense, turned},
                {{1, rows * columns + 3, rows}, dense},
                {{3, 3 * rows * columns, 3 * rows}, dense},
                {{4 * columns, 2 * columns, 2}, {1, rows, 2 * rows}},
                {{0, columns, 1}, turned},
            };
            for (std::size_t k = 0; auto const& [from, to] : layouts) {
                if (!joinable_tests::is_left_out(k++, 3, turn)) {
                    check_kernels_of_all_dtypes(extents, from, to);
                }
            }
            ++turn;
        }
        ++turn; // so that each layout meets each number of columns
    }
}

TEST_CASE("kernels over planes of more than a megabyte equal a loop over all indices") {
    // By tiles of 256 elements of one byte, and of 64 of eight.
    check_kernels<std::int8_t>({1030, 1031}, {1, 1030}, {1031, 1});
    check_kernels<double>({390, 341}, {1, 390}, {341, 1});
}

/// Transposes a plane, and expects each element in its place and nothing written beside them.
template <class Bits, class Transpose>
void check_transposition(
    Transpose const& transpose,
    std::size_t rows,
    std::size_t columns,
    std::size_t column_step,
    std::size_t gap,
    std::size_t offset
) {
    std::size_t const row_step = columns * column_step + gap;
    std::size_t const to_step = (rows + 63) / 64 * 64 + gap;
    std::vector<Bits> const from = numbers<Bits>(rows * row_step + offset, 1);
    std::vector<Bits> to = numbers<Bits>(columns * to_step + 64 + offset, 2);
    auto const address = reinterpret_cast<std::uintptr_t>(to.data());
    std::size_t const start = (64 - address % 64) % 64 / sizeof(Bits) + offset; // 64 bytes, at 0
    std::vector<Bits> expected = to;
    for (std::size_t i = 0; i < rows; ++i) {
        for (std::size_t k = 0; k < columns; ++k) {
            expected[start + k * to_step + i] = from[offset + i * row_step + k * column_step];
        }
    }
    transpose(joinable::detail::Plane{
        reinterpret_cast<std::byte const*>(from.data() + offset),
        row_step * sizeof(Bits),
        rows,
        column_step * sizeof(Bits),
        columns,
        reinterpret_cast<std::byte*>(to.data() + start),
        to_step * sizeof(Bits)
    });
    INFO(
        rows << " x " << columns << " of " << sizeof(Bits) << " bytes, " << column_step << " apart"
    );
    CHECK(to == expected);
}

template <class Bits>
void check_transpositions(joinable::detail::InstructionSet set) {
    auto* const transpose = joinable::detail::TransposeLoops<Bits>::of(set);
    for (std::size_t const rows : {0U, 1U, 5U, 16U, 31U, 64U, 113U, 131U}) {
        for (std::size_t const columns : {1U, 3U, 16U, 37U, 66U}) {
            for (std::size_t const offset : {0U, 1U, 3U}) {
                check_transposition<Bits>(transpose, rows, columns, 1, offset, offset);
                check_transposition<Bits>(transpose, rows, columns, 2, offset, offset);
            }
            if (set == joinable::detail::InstructionSet::avx512) {
                auto* const streams = &joinable::detail::TransposeLoops<Bits, true>::avx512;
                check_transposition<Bits>(streams, rows, columns, 1, 0, 0);
                check_transposition<Bits>(streams, rows, columns, 1, 64, 0);
            }
        }
    }
}

TEST_CASE("planes of any size are transposed alike in every instruction set") {
    using joinable::detail::InstructionSet;
    for (auto const set :
         {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
        if (set <= joinable::detail::instruction_set()) {
            check_transpositions<std::uint8_t>(set);
            check_transpositions<std::uint16_t>(set);
            check_transpositions<std::uint32_t>(set);
            check_transpositions<std::uint64_t>(set);
        }
    }
}

TEST_CASE("dense planes are written directly in cache unless rows conflict, and past it in lines") {
    namespace detail = joinable::detail;
    using enum detail::InstructionSet;
    using Bits = std::uint32_t;
    auto* const line = reinterpret_cast<std::byte*>(std::uintptr_t{4096}); // never read or written
    detail::Plane const small{line, 1024, 256, 4, 256, line, 1024};
    detail::Plane const large{line, 8192, 2048, 4, 2048, line, 8192};
    detail::Plane const conflicting{line, 256, 1024, 4, 64, line, 4096};
    detail::Plane const odd{line, 8192, 2048, 4, 2048, line + 4, 8192};
    detail::Plane const ragged{line, 8192, 2048, 4, 2048, line, 8196};
    auto* const streams = &detail::TransposeLoops<Bits, true>::avx512;
    for (auto const set : {baseline, avx2, avx512}) {
        CHECK(detail::tiling_of<Bits>(small, true, set).is_direct);
        CHECK_FALSE(detail::tiling_of<Bits>(small, false, set).is_direct);
        auto const is_streamed = [&](detail::Plane const& plane) {
            return detail::tiling_of<Bits>(plane, true, set).transpose == streams;
        };
        CHECK_FALSE(is_streamed(small));
        CHECK_FALSE(detail::tiling_of<Bits>(conflicting, true, set).is_direct);
        CHECK(is_streamed(large) == (set == avx512));
        for (auto const& [plane, is_dense] :
             {std::pair{large, false}, std::pair{odd, true}, std::pair{ragged, true}}) {
            CHECK_FALSE(detail::tiling_of<Bits>(plane, is_dense, set).is_direct);
        }
    }
}

TEST_CASE("a plane that fits into no cache is copied to whole cache lines element by element") {
    auto const check = []<class T>(std::type_identity<T>, std::size_t rows, std::size_t columns) {
        std::vector<T> const from = numbers<T>(rows * columns, 1);
        std::vector<T> memory = numbers<T>(rows * columns + 64, 2);
        std::size_t const past = reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
        T* const to = memory.data() + (64 - past) % 64 / sizeof(T);
        joinable::copy(
            AnyView{const_cast<T*>(from.data()), joinable::dtype_of<T>, {rows, columns}, {1, rows}},
            AnyView{to, joinable::dtype_of<T>, {rows, columns}, {columns, 1}}
        );
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < rows; ++i) {
            for (std::size_t k = 0; k < columns; ++k) {
                wrong += to[i * columns + k] == from[k * rows + i] ? 0U : 1U;
            }
        }
        CHECK(wrong == 0);
    };
    check(std::type_identity<std::int8_t>{}, 4099, 4160);
    check(std::type_identity<double>{}, 1031, 2056);
}

/// Applies an operation to all 16-bit patterns in one row, as the given instruction set does. Of
/// `gap` patterns in memory one is in the row.
template <class Operation>
std::vector<std::uint16_t> row_of_all_halves(
    Operation const& operation,
    joinable::detail::InstructionSet set,
    std::uint16_t target,
    std::size_t gap
) {
    namespace detail = joinable::detail;
    std::vector<std::uint16_t> from(65536 * gap);
    for (std::size_t i = 0; i < 65536; ++i) {
        from[i * gap] = static_cast<std::uint16_t>(i);
    }
    std::vector<std::uint16_t> to(from.size(), target);
    detail::ApplyLoops<Operation>::of(set)(
        &operation,
        detail::Rows<std::byte const>{reinterpret_cast<std::byte const*>(from.data()), 2 * gap},
        detail::Rows<std::byte>{reinterpret_cast<std::byte*>(to.data()), 2 * gap},
        65537 - gap, // with gaps, six numbers are left after the last eight
        1
    );
    for (std::size_t i = 0; i < 65537 - gap; ++i) {
        to[i] = to[i * gap];
    }
    to.resize(65537 - gap);
    return to;
}

template <class T>
void check_all_halves(joinable::detail::InstructionSet set) {
    for (std::size_t const gap : {1U, 3U}) {
        for (float const factor : {1.0F, 0.3F, -1024.0F, 0x1p-15F, 1e-30F}) {
            auto const products =
                row_of_all_halves(joinable::detail::Scale<T>{factor}, set, 0, gap);
            T const other{factor};
            auto const sums = row_of_all_halves(joinable::detail::Add<T>{}, set, other.bits, gap);
            int wrong = 0;
            for (std::size_t i = 0; i < products.size(); ++i) {
                auto const value = std::bit_cast<T>(static_cast<std::uint16_t>(i));
                wrong += products[i] == scaled(value, factor).bits ? 0 : 1;
                wrong += sums[i] == sum(other, value).bits ? 0 : 1;
            }
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("all 65,536 patterns of f16 and bf16 scale and add alike in every instruction set") {
    using joinable::detail::InstructionSet;
    for (auto const set :
         {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
        if (set <= joinable::detail::instruction_set()) {
            check_all_halves<joinable::Half>(set);
            check_all_halves<joinable::BFloat16>(set);
        }
    }
}

TEST_CASE("a target in which indices share elements is refused, a source or zeros are not") {
    std::vector<float> numbers{1, 2, 3, 4};
    AnyView const row{numbers.data(), DType::f32, {2, 2}, {0, 1}};
    std::vector<float> other{5, 6, 7, 8};
    AnyView const dense{other.data(), DType::f32, {2, 2}, {2, 1}};
    CHECK_THROWS_WITH_AS(
        joinable::copy(dense, row),
        "copy: elements of the target share memory (extents (2, 2), strides (0, 1)); write to a "
        "view in which each index has its own element",
        ContractViolation
    );
    CHECK_THROWS_AS(joinable::scale_copy(dense, 2, row), ContractViolation);
    CHECK_THROWS_AS(joinable::add(dense, row), ContractViolation);
    CHECK_THROWS_AS(joinable::add(row, row), ContractViolation);
    CHECK(numbers == std::vector<float>{1, 2, 3, 4}); // nothing was written
    joinable::copy(row, dense);
    CHECK(other == std::vector<float>{1, 2, 1, 2});
    joinable::fill_zero(row);
    CHECK(numbers == std::vector<float>{0, 0, 3, 4});
}

TEST_CASE("views that overlap are refused, the same view and interleaved ones are not") {
    std::vector<float> numbers{1, 2, 3, 4, 5, 6};
    float* const data = numbers.data();
    AnyView const low{data, DType::f32, {4}, {1}};
    AnyView const high{data + 2, DType::f32, {4}, {1}};
    CHECK_THROWS_WITH_AS(
        joinable::copy(low, high),
        "copy: source and target overlap in memory and are not the same view; go through a copy "
        "of the source",
        ContractViolation
    );
    CHECK_THROWS_AS(joinable::scale_copy(high, 2, low), ContractViolation);
    CHECK_THROWS_AS(joinable::add(high, low), ContractViolation);
    AnyView const square{data, DType::f32, {2, 2}, {2, 1}};
    CHECK_THROWS_AS( // a transposition in place
        joinable::copy(AnyView{data, DType::f32, {2, 2}, {1, 2}}, square),
        ContractViolation
    );
    CHECK(numbers == std::vector<float>{1, 2, 3, 4, 5, 6});
    joinable::copy(square, square);
    joinable::scale_copy(square, 2, square);
    joinable::add(square, square);
    CHECK(numbers == std::vector<float>{4, 8, 12, 16, 5, 6});
    AnyView const even{data, DType::f32, {3}, {2}};
    AnyView const odd{data + 1, DType::f32, {3}, {2}};
    joinable::copy(even, odd);
    CHECK(numbers == std::vector<float>{4, 4, 12, 12, 5, 5});
}

TEST_CASE("memory of a device, and memory that is missing, is refused before anything moves") {
    std::vector<float> host{1, 2, 3};
    joinable::DeviceId const cuda{joinable::DeviceKind::cuda, 1};
    AnyView const device{host.data(), DType::f32, {3}, {1}, cuda};
    std::vector<float> target{7, 8, 9};
    CHECK_THROWS_WITH_AS(
        joinable::copy(device, AnyView{target}),
        "copy: the source is on CUDA device 1, but this runs on the host; copy it to host memory "
        "first, with the engine's own means",
        ContractViolation
    );
    CHECK_THROWS_AS(joinable::copy(AnyView{target}, device), ContractViolation);
    CHECK_THROWS_AS(joinable::copy(device, device), ContractViolation);
    CHECK_THROWS_AS(joinable::scale_copy(device, 2, AnyView{target}), ContractViolation);
    CHECK_THROWS_AS(joinable::add(AnyView{target}, device), ContractViolation);
    CHECK_THROWS_AS(joinable::fill_zero(device), ContractViolation);
    AnyView const missing{nullptr, DType::f32, {3}, {1}};
    CHECK_THROWS_WITH_AS(
        joinable::copy(AnyView{target}, missing),
        "copy: the target is a null pointer for 3 elements; give it memory first",
        ContractViolation
    );
    CHECK_THROWS_AS(joinable::fill_zero(missing), ContractViolation);
    CHECK(host == std::vector<float>{1, 2, 3});
    CHECK(target == std::vector<float>{7, 8, 9});
}

TEST_CASE("views with typed elements are taken as they are, sources also const") {
    std::vector<double> const from{1, 2, 3, 4, 5, 6};
    std::vector<double> to(6);
    auto const columns = joinable::as_strided(from, {3, 2}, {1, 3});
    auto const rows = joinable::as_strided(to, {3, 2}, {2, 1});
    joinable::copy(columns, rows);
    CHECK(to == std::vector<double>{1, 4, 2, 5, 3, 6});
    joinable::scale_copy(columns, 0.5, rows);
    joinable::add(columns, rows);
    CHECK(to == std::vector<double>{1.5, 6, 3, 7.5, 4.5, 9});
    joinable::fill_zero(joinable::narrow(rows, 1, 0, 1));
    CHECK(to == std::vector<double>{0, 6, 0, 7.5, 0, 9});
}

TEST_CASE("an empty view has no elements to clear, and nothing is copied from it") {
    AnyView const none;
    CHECK(none.numel() == 0);
    joinable::fill_zero(none);
    CHECK_THROWS_AS(joinable::copy(none, none), ContractViolation);
}

template <class T>
void check_bits_survive() {
    std::vector<std::uint8_t> from(6 * sizeof(T));
    for (std::size_t i = 0; i < 6 * sizeof(T); ++i) {
        from[i] = static_cast<unsigned char>(37 * i + 255); // NaN patterns among them
    }
    DType const dtype = joinable::dtype_of<T>;
    std::vector<std::uint8_t> to(12 * sizeof(T));
    AnyView const source{from.data(), dtype, {2, 3}, {3, 1}};
    AnyView const columns{to.data(), dtype, {2, 3}, {2, 4}};
    joinable::copy(source, columns);
    std::vector<std::uint8_t> back(6 * sizeof(T));
    joinable::copy(columns, AnyView{back.data(), dtype, {2, 3}, {3, 1}});
    CHECK(back == from);
    joinable::fill_zero(columns);
    CHECK(to == std::vector<std::uint8_t>(12 * sizeof(T)));
}

TEST_CASE("a copy keeps all bits of all dtypes") {
    for (std::size_t i = 0; i < joinable::dtype_count; ++i) {
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
