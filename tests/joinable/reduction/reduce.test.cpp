// SPDX-License-Identifier: BSL-1.0
// Reductions of memory: every dtype, operation, instruction set and number of ranks, at odd sizes and
// offsets. The oracle is a scalar loop in rank order, whose bits every way to compute has to give.
#include <joinable/reduction/reduce.hpp>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <support/for_each_type.hpp>
#include <support/volume.hpp>

#include <joinable/tensor/dtype.hpp>

namespace {

using namespace joinable;
using detail::InstructionSet;
using Bytes = std::vector<std::byte>;

std::vector<ReduceOp> operations_of(DType dtype) {
    std::vector<ReduceOp> all{ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max};
    if (!is_floating_point(dtype)) {
        all.insert(all.end(), {ReduceOp::bit_and, ReduceOp::bit_or});
    }
    return size_of(dtype) == 2 && !is_floating_point(dtype) ? std::vector<ReduceOp>{} : all;
}

/// The sets that this processor has.
std::vector<InstructionSet> instruction_sets() {
    std::vector<InstructionSet> sets{InstructionSet::baseline};
    for (auto const set : {InstructionSet::avx2, InstructionSet::avx512}) {
        if (detail::instruction_set() >= set) {
            sets.push_back(set);
        }
    }
    return sets;
}

template <class T>
T at(Bytes const& memory, std::size_t i) {
    T value;
    std::memcpy(&value, memory.data() + i * sizeof(T), sizeof(T));
    return value;
}

template <class A>
A combine(ReduceOp op, A a, A b) {
    if constexpr (std::is_integral_v<A>) {
        // Arithmetic modulo 2^64, of which the low bits are kept: defined for every pair.
        auto const x = static_cast<std::uint64_t>(a);
        auto const y = static_cast<std::uint64_t>(b);
        switch (op) {
        case ReduceOp::sum: return static_cast<A>(x + y);
        case ReduceOp::product: return static_cast<A>(x * y);
        case ReduceOp::bit_and: return static_cast<A>(x & y);
        case ReduceOp::bit_or: return static_cast<A>(x | y);
        default: break;
        }
    }
    if constexpr (std::is_floating_point_v<A>) {
        if (op == ReduceOp::min || op == ReduceOp::max) {
            if (std::isnan(a) || std::isnan(b)) {
                return std::numeric_limits<A>::quiet_NaN();
            }
            if (a == b) { // zeros may have two signs
                return std::signbit(a) == (op == ReduceOp::min) ? a : b;
            }
        }
    }
    switch (op) {
    case ReduceOp::sum: return static_cast<A>(a + b);
    case ReduceOp::product: return static_cast<A>(a * b);
    case ReduceOp::min: return std::min(a, b);
    default: return std::max(a, b);
    }
}

/// What all ranks' elements from `offset` on give, one by one. Numbers of 16 bits in float.
template <class T>
Bytes reduced(
    ReduceOp op, std::vector<Bytes> const& inputs, std::size_t offset, std::size_t count
) {
    using A = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
    Bytes result(count * sizeof(T));
    for (std::size_t i = 0; i < count; ++i) {
        auto sum = static_cast<A>(at<T>(inputs[0], offset + i));
        for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
            sum = combine(op, sum, static_cast<A>(at<T>(inputs[rank], offset + i)));
        }
        T const rounded = static_cast<T>(sum);
        std::memcpy(result.data() + i * sizeof(T), &rounded, sizeof(T));
    }
    return result;
}

/// The same bits, but one NaN is as good as another: which of two is kept is up to the compiler. A min or
/// max has the same bits for every NaN.
template <class T>
bool same(Bytes const& a, Bytes const& b, ReduceOp op = ReduceOp::sum) {
    if (op == ReduceOp::min || op == ReduceOp::max) {
        return a == b;
    }
    for (std::size_t i = 0; i < a.size() / sizeof(T); ++i) {
        if (std::memcmp(a.data() + i * sizeof(T), b.data() + i * sizeof(T), sizeof(T)) == 0) {
            continue;
        }
        if constexpr (!std::is_integral_v<T>) {
            if (std::isnan(static_cast<double>(static_cast<float>(at<T>(a, i)))) &&
                std::isnan(static_cast<double>(static_cast<float>(at<T>(b, i))))) {
                continue;
            }
        }
        return false;
    }
    return a.size() == b.size();
}

/// Integers of any bits; floating-point numbers of all magnitudes around 1, and now and then any bits:
/// infinities, NaNs, subnormals.
template <class T>
Bytes elements(std::size_t count, std::mt19937_64& random) {
    Bytes memory(count * sizeof(T));
    for (std::size_t i = 0; i < count; ++i) {
        std::uint64_t const bits = random();
        T value;
        std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
        if constexpr (!std::is_integral_v<T>) {
            if (bits >> 60U != 0) {
                using A = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
                auto const fraction = static_cast<A>(static_cast<std::int32_t>(bits));
                value =
                    static_cast<T>(std::ldexp(fraction, static_cast<int>(bits >> 56U) % 16 - 39));
            }
        }
        std::memcpy(memory.data() + i * sizeof(T), &value, sizeof(T));
    }
    return memory;
}

struct Case {
    DType dtype;
    ReduceOp op;
    InstructionSet set;
    std::size_t ranks;
    std::size_t offset;
    std::size_t count;
};

template <class T>
void check(Case const& c, std::vector<Bytes> const& inputs) {
    Bytes const expected = reduced<T>(c.op, inputs, c.offset, c.count);
    std::size_t const first = c.offset * sizeof(T);
    auto const part = [&](Bytes const& memory) {
        auto const begin = memory.begin() + static_cast<std::ptrdiff_t>(first);
        return Bytes(begin, begin + static_cast<std::ptrdiff_t>(expected.size()));
    };

    std::vector<Bytes> in_place = inputs;
    auto const place = [&](std::size_t rank) { return in_place[rank].data() + first; };
    reduce_to(c.dtype, c.op, {c.ranks, place}, {c.ranks, place}, c.count, {}, c.set);
    for (std::size_t rank = 0; rank < c.ranks; ++rank) {
        CHECK(same<T>(part(in_place[rank]), expected, c.op));
        Bytes around = in_place[rank];
        std::copy(
            inputs[rank].begin() + static_cast<std::ptrdiff_t>(first),
            inputs[rank].begin() + static_cast<std::ptrdiff_t>(first + expected.size()),
            around.begin() + static_cast<std::ptrdiff_t>(first)
        );
        CHECK(around == inputs[rank]);
    }

    Bytes out(expected.size() + 2, std::byte{0x5a}); // starts at odd addresses, too
    auto const input = [&](std::size_t rank) {
        return const_cast<std::byte*>(inputs[rank].data()) + first; // only read
    };
    auto const output = [&](std::size_t) { return out.data() + 1; };
    reduce_to(c.dtype, c.op, {c.ranks, input}, {1, output}, c.count, {}, c.set);
    CHECK(same<T>(Bytes(out.begin() + 1, out.end() - 1), expected, c.op));
    CHECK((out.front() == std::byte{0x5a} && out.back() == std::byte{0x5a}));
}

void check_all(
    std::vector<std::size_t> const& rank_counts, std::vector<std::size_t> const& counts
) {
    std::mt19937_64 random{7};
    std::size_t const most = *std::max_element(counts.begin(), counts.end());
    for (std::size_t index = 0; index < dtype_count; ++index) {
        auto const dtype = static_cast<DType>(index);
        CAPTURE(name_of(dtype));
        joinable_tests::visit_real(dtype, [&]<class T>(std::type_identity<T>) {
            std::vector<Bytes> inputs;
            for (std::size_t const ranks : rank_counts) {
                CAPTURE(ranks);
                for (std::size_t number = 0; std::size_t const count : counts) {
                    if (joinable_tests::is_left_out(number++, 3, ranks)) {
                        continue;
                    }
                    CAPTURE(count);
                    std::size_t const offset = count % 4;
                    inputs.resize(ranks);
                    for (Bytes& input : inputs) {
                        input = elements<T>((std::min)(most, count) + offset + 1, random);
                    }
                    for (ReduceOp const op : operations_of(dtype)) {
                        CAPTURE(name_of(op));
                        for (InstructionSet const set : instruction_sets()) {
                            check<T>({dtype, op, set, ranks, offset, count}, inputs);
                        }
                    }
                }
            }
        });
    }
}

} // namespace

TEST_CASE("a reduction gives the bits of a scalar loop in rank order, for every dtype and operation"
) {
    check_all({1, 2, 3, 4, 5, 6, 7, 8, 9}, {0, 1, 2, 3, 5, 14, 15, 16, 17, 33, 63, 129, 258, 517});
}

TEST_CASE("a min or max of floats is NaN if a number is, and orders -0 before 0, on any rank") {
    for (DType const dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
        CAPTURE(name_of(dtype));
        joinable_tests::visit_real(dtype, [&]<class T>(std::type_identity<T>) {
            if constexpr (!std::is_integral_v<T>) {
                using A = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
                using Limits = std::numeric_limits<A>;
                T const numbers[] = {
                    T{Limits::quiet_NaN()},
                    T{-Limits::quiet_NaN()},
                    T{Limits::infinity()},
                    T{-Limits::infinity()},
                    T{A{0}},
                    T{-A{0}},
                    T{A{1}},
                    T{-A{1}},
                };
                constexpr std::size_t number = std::size(numbers);
                constexpr std::size_t copies = 9; // fill registers, and leave a rest
                std::vector<Bytes> inputs(3, Bytes(copies * number * number * number * sizeof(T)));
                for (std::size_t i = 0; i < copies * number * number * number; ++i) {
                    for (std::size_t rank = 0, left = i; rank < 3; ++rank, left /= number) {
                        T const value = numbers[left % number];
                        std::memcpy(inputs[rank].data() + i * sizeof(T), &value, sizeof(T));
                    }
                }
                std::size_t const count = inputs[0].size() / sizeof(T);
                for (ReduceOp const op : {ReduceOp::min, ReduceOp::max}) {
                    CAPTURE(name_of(op));
                    for (InstructionSet const set : instruction_sets()) {
                        check<T>({dtype, op, set, 2, 0, count}, {inputs[0], inputs[1]});
                        check<T>({dtype, op, set, 3, 0, count}, inputs);
                        check<T>({dtype, op, set, 3, count - 7, 7}, inputs);
                    }
                }
            }
        });
    }
}

TEST_CASE("a reduction of more ranks than a pass takes gives the same bits") {
    check_all({15, 16, 17, 31, 32, 47}, {1, 6, 131, 2053});
}

TEST_CASE("a reduction of 16-bit numbers is rounded once, however many tiles and passes it takes") {
    // 2048 + 1 is 2048 in f16, so a sum that was rounded after each rank would stay there.
    constexpr std::size_t ranks = 41;
    constexpr std::size_t count = 3001;
    std::vector<std::vector<Half>> data(ranks, std::vector<Half>(count, Half{1.0F}));
    data[0].assign(count, Half{2048.0F});
    auto const place = [&](std::size_t rank) {
        return reinterpret_cast<std::byte*>(data[rank].data());
    };
    detail::reduce_to(DType::f16, ReduceOp::sum, {ranks, place}, {ranks, place}, count);
    for (auto const& rank : data) {
        CHECK(std::count(rank.begin(), rank.end(), Half{2088.0F}) == count);
    }
}

TEST_CASE("a scaled sum rounds every product, as a loop does that multiplies before it adds") {
    std::mt19937_64 random{3};
    auto const factor_of = [](std::size_t rank) { return 1.0 / (3.0 + static_cast<double>(rank)); };
    for (DType const dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
        CAPTURE(name_of(dtype));
        joinable_tests::visit_real(dtype, [&]<class T>(std::type_identity<T>) {
            using A = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
            for (std::size_t const ranks : {1U, 2U, 3U, 4U, 8U, 16U, 17U, 40U}) {
                for (std::size_t number = 0;
                     std::size_t const count : {0U, 1U, 3U, 15U, 16U, 129U, 2053U}) {
                    if (joinable_tests::is_left_out(number++, 3, ranks)) {
                        continue;
                    }
                    std::vector<Bytes> inputs(ranks);
                    for (Bytes& input : inputs) {
                        input = elements<T>(count, random);
                    }
                    Bytes expected(count * sizeof(T));
                    for (std::size_t i = 0; i < count; ++i) {
                        A sum = 0;
                        for (std::size_t rank = 0; rank < ranks; ++rank) {
                            A const volatile product = static_cast<A>(at<T>(inputs[rank], i)) *
                                                       static_cast<A>(factor_of(rank));
                            sum = rank == 0 ? product : sum + product;
                        }
                        T const rounded = static_cast<T>(sum);
                        std::memcpy(expected.data() + i * sizeof(T), &rounded, sizeof(T));
                    }
                    for (InstructionSet const set : instruction_sets()) {
                        std::vector<Bytes> data = inputs;
                        auto const place = [&](std::size_t rank) { return data[rank].data(); };
                        detail::reduce_to(
                            dtype,
                            ReduceOp::sum,
                            {ranks, place},
                            {ranks, place},
                            count,
                            {ranks, factor_of},
                            set
                        );
                        for (Bytes const& result : data) {
                            CHECK(same<T>(result, expected));
                        }
                    }
                }
            }
        });
    }
}

TEST_CASE("a reduction does not depend on how it was cut") {
    std::mt19937_64 random{11};
    constexpr std::size_t count = 5000;
    for (DType const dtype : {DType::f32, DType::bf16, DType::f64}) {
        joinable_tests::visit_real(dtype, [&]<class T>(std::type_identity<T>) {
            std::vector<Bytes> inputs;
            for (int rank = 0; rank < 3; ++rank) {
                inputs.push_back(elements<T>(count, random));
            }
            auto const reduce = [&](std::size_t chunk) {
                std::vector<Bytes> data = inputs;
                for (std::size_t begin = 0; begin < count; begin += chunk) {
                    auto const place = [&](std::size_t rank) {
                        return data[rank].data() + begin * sizeof(T);
                    };
                    std::size_t const n = (std::min)(chunk, count - begin);
                    detail::reduce_to(dtype, ReduceOp::sum, {3, place}, {3, place}, n);
                }
                CHECK(data[1] == data[0]);
                CHECK(data[2] == data[0]);
                return data[0];
            };
            Bytes const whole = reduce(count);
            for (std::size_t const chunk : {1U, 7U, 64U, 1023U, 4096U}) {
                CHECK(same<T>(reduce(chunk), whole));
            }
        });
    }
}

namespace {

/// Reduces ranks' memory to its own places, with each instruction set, and checks each place's bytes.
template <class T>
void check_places(
    ReduceOp op,
    std::vector<std::vector<T>> const& inputs,
    std::vector<T> const& expected,
    detail::Factors const& factors = {}
) {
    for (InstructionSet const set : instruction_sets()) {
        auto data = inputs;
        auto const place = [&](std::size_t rank) {
            return reinterpret_cast<std::byte*>(data[rank].data());
        };
        detail::reduce_to(
            dtype_of<T>,
            op,
            {data.size(), place},
            {data.size(), place},
            expected.size(),
            factors,
            set
        );
        for (auto const& rank : data) {
            CHECK(rank == expected);
        }
    }
}

template <class Real>
void check_complex() {
    using Number = std::complex<Real>;
    for (std::size_t const ranks : {1U, 2U, 3U, 4U, 8U, 17U}) {
        CAPTURE(ranks);
        for (std::size_t const count : {0U, 1U, 2U, 7U, 64U, 1031U}) {
            std::vector<std::vector<Number>> inputs(ranks, std::vector<Number>(count));
            std::vector<Number> sum(count);
            std::vector<Number> scaled(count);
            std::vector<Number> product(count, Number{1});
            for (std::size_t rank = 0; rank < ranks; ++rank) {
                for (std::size_t i = 0; i < count; ++i) { // small whole numbers, so nothing rounds
                    auto const at = static_cast<Real>(i % 5);
                    Number const number{at - static_cast<Real>(rank), at + 1};
                    inputs[rank][i] = number;
                    sum[i] += number;
                    scaled[i] += static_cast<Real>(0.5) * number;
                }
            }
            check_places(ReduceOp::sum, inputs, sum);
            check_places(ReduceOp::sum, inputs, scaled, {ranks, [](std::size_t) { return 0.5; }});
            for (std::size_t rank = 0; rank < ranks; ++rank) { // powers of i: turns by 90 degrees
                for (std::size_t i = 0; i < count; ++i) {
                    constexpr int turns[][2] = {{1, 0}, {0, 1}, {-1, 0}, {0, -1}};
                    auto const& turn = turns[(i + rank) % 4];
                    inputs[rank][i] = {
                        2 * static_cast<Real>(turn[0]), 2 * static_cast<Real>(turn[1])
                    };
                }
            }
            for (std::size_t i = 0; i < count; ++i) {
                std::size_t const turns = ranks * i + ranks * (ranks - 1) / 2;
                auto const length = std::ldexp(Real{1}, static_cast<int>(ranks));
                product[i] = turns % 4 == 0   ? Number{length, 0}
                             : turns % 4 == 1 ? Number{0, length}
                             : turns % 4 == 2 ? Number{-length, 0}
                                              : Number{0, -length};
            }
            check_places(ReduceOp::product, inputs, product);
        }
    }
}

} // namespace

TEST_CASE("complex numbers are added, scaled and multiplied, each as the pair of reals that it is"
) {
    check_complex<float>();
    check_complex<double>();
}

TEST_CASE("booleans have an or and an and, under two names each") {
    constexpr std::size_t ranks = 3;
    constexpr std::size_t count = 8 * 33;
    std::vector<std::vector<std::uint8_t>> inputs(ranks, std::vector<std::uint8_t>(count));
    std::vector<std::uint8_t> any(count);
    std::vector<std::uint8_t> all(count);
    for (std::size_t i = 0; i < count; ++i) {
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            inputs[rank][i] = static_cast<std::uint8_t>(i >> rank & 1U);
        }
        any[i] = i % 8 != 0 ? 1 : 0;
        all[i] = i % 8 == 7 ? 1 : 0;
    }
    for (ReduceOp const op : {ReduceOp::max, ReduceOp::bit_or, ReduceOp::min, ReduceOp::bit_and}) {
        auto data = inputs;
        auto const place = [&](std::size_t rank) {
            return reinterpret_cast<std::byte*>(data[rank].data());
        };
        detail::reduce_to(DType::boolean, op, {ranks, place}, {ranks, place}, count);
        bool const is_or = op == ReduceOp::max || op == ReduceOp::bit_or;
        CHECK((data[2] == (is_or ? any : all)));
    }
}
