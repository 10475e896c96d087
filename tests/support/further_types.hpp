// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <joinable/communicator/collectives.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>

/// @file
/// What every transport of host memory does with elements that are no numbers of a register: bodies of
/// tests, run by each rank.

namespace joinable_tests {

/// A number that each element type holds, another one for each rank and place where it can be.
template <class T>
T further_element(int rank, std::size_t i) {
    auto const number = static_cast<int>(i % 11) + 16 * rank;
    if constexpr (joinable::detail::complex_number<T>) {
        using Real = typename T::value_type;
        return {static_cast<Real>(number), static_cast<Real>(-rank - 1)};
    } else {
        return static_cast<T>(number % 3 == 0 ? 0 : number);
    }
}

template <class T, class Comm>
void move_further_type(Comm& comm) {
    constexpr joinable::DType dtype = joinable::dtype_of<T>;
    CAPTURE(joinable::name_of(dtype));
    auto const world = static_cast<std::size_t>(comm.size());
    for (std::size_t const count : {0U, 1U, 3U, 1000U, 20'011U}) {
        CAPTURE(count);
        auto const mine = std::make_unique<T[]>(count); // no bits, if it is bool
        auto const all = std::make_unique<T[]>(count * world);
        auto const fill = [&] {
            for (std::size_t i = 0; i < count; ++i) {
                mine[i] = further_element<T>(comm.rank(), i);
            }
        };
        auto const wrong = [&](T const* elements, int rank) {
            std::size_t number = 0;
            for (std::size_t i = 0; i < count; ++i) {
                number += elements[i] == further_element<T>(rank, i) ? 0U : 1U;
            }
            return number;
        };
        fill();
        for (int root = 0; root < comm.size(); ++root) {
            fill();
            comm.broadcast({mine.get(), count, dtype}, root).wait();
            CHECK(wrong(mine.get(), root) == 0);
        }
        if constexpr (joinable::AllGathers<Comm>) {
            fill();
            comm.all_gather({mine.get(), count, dtype}, {all.get(), count * world, dtype}).wait();
            for (int rank = 0; rank < comm.size(); ++rank) {
                CHECK(wrong(all.get() + static_cast<std::size_t>(rank) * count, rank) == 0);
            }
            std::vector<std::size_t> counts(world, count); // all of rank 0, one fewer of the others
            for (std::size_t rank = 1; rank < world && count != 0; ++rank) {
                --counts[rank];
            }
            std::size_t total = 0;
            for (std::size_t const part : counts) {
                total += part;
            }
            comm.all_gather(
                    {mine.get(), counts[static_cast<std::size_t>(comm.rank())], dtype},
                    {all.get(), total, dtype},
                    counts
            )
                .wait();
            std::size_t at = 0;
            std::size_t missed = 0;
            for (std::size_t rank = 0; rank < world; ++rank) {
                for (std::size_t i = 0; i < counts[rank]; ++i) {
                    T const expected = further_element<T>(static_cast<int>(rank), i);
                    missed += all[at++] == expected ? 0U : 1U;
                }
            }
            CHECK(missed == 0);
        }
    }
}

/// Sums, averages and products, whose numbers are small and whole, so that nothing rounds.
template <class Real, class Comm>
void reduce_complex(Comm& comm, bool has_product) {
    using Number = std::complex<Real>;
    constexpr joinable::DType dtype = joinable::dtype_of<Number>;
    CAPTURE(joinable::name_of(dtype));
    auto const world = static_cast<std::size_t>(comm.size());
    auto const ranks = static_cast<Real>(comm.size());
    Real const sum_of_ranks = ranks * (ranks - 1) / 2;
    for (std::size_t const count : {0U, 1U, 2U, 5U, 1000U, 20'011U}) {
        CAPTURE(count);
        std::vector<Number> values(count);
        std::vector<Number> whole(count * world);
        auto const of_rank = [&](std::size_t i, int rank) {
            return Number{
                static_cast<Real>(i % 7) + static_cast<Real>(rank), static_cast<Real>(-2 * rank)
            };
        };
        auto const fill = [&](std::vector<Number>& to) {
            for (std::size_t i = 0; i < to.size(); ++i) {
                to[i] = of_rank(i, comm.rank());
            }
        };
        auto const wrong = [&](std::vector<Number> const& result, std::size_t first, Real factor) {
            std::size_t number = 0;
            for (std::size_t i = 0; i < result.size(); ++i) {
                Number const sum{
                    ranks * static_cast<Real>((first + i) % 7) + sum_of_ranks, -2 * sum_of_ranks
                };
                number += result[i] == factor * sum ? 0U : 1U;
            }
            return number;
        };
        joinable::Buffer const buffer{values.data(), count, dtype};
        fill(values);
        comm.all_reduce(buffer, joinable::ReduceOp::sum).wait();
        CHECK(wrong(values, 0, 1) == 0);
        if constexpr (requires { comm.all_reduce(buffer, joinable::ReduceOp::sum, 0.5); }) {
            fill(values);
            comm.all_reduce(buffer, joinable::ReduceOp::sum, 0.5).wait();
            CHECK(wrong(values, 0, static_cast<Real>(0.5)) == 0);
        }
        if constexpr (requires { comm.reduce_scatter(buffer, buffer, joinable::ReduceOp::sum); }) {
            fill(whole);
            comm.reduce_scatter(
                    {whole.data(), whole.size(), dtype}, buffer, joinable::ReduceOp::sum
            )
                .wait();
            CHECK(wrong(values, static_cast<std::size_t>(comm.rank()) * count, 1) == 0);
        }
        for (Number& value : values) { // each rank turns by 90 degrees, and doubles
            value = {0, 2};
        }
        if (has_product) {
            comm.all_reduce(buffer, joinable::ReduceOp::product).wait();
            constexpr int turns[][2] = {{1, 0}, {0, 1}, {-1, 0}, {0, -1}};
            auto const length = static_cast<Real>(1U << static_cast<unsigned>(comm.size()));
            auto const& turn = turns[comm.size() % 4];
            Number const expected{
                length * static_cast<Real>(turn[0]), length * static_cast<Real>(turn[1])
            };
            CHECK(values == std::vector<Number>(count, expected));
        }
    }
}

/// All ranks throw the same before anything moves, and the communicator is as before.
template <class Comm>
void refuse_further_reductions(Comm& comm) {
    using joinable::DType;
    using joinable::ReduceOp;
    std::array<std::uint64_t, 6> memory{1, 2, 3, 4, 5, 6};
    auto const before = memory;
    auto const refuses = [&](DType dtype, ReduceOp op, char const* text) {
        CAPTURE(joinable::name_of(dtype));
        CAPTURE(joinable::name_of(op));
        CHECK_THROWS_WITH_AS(
            (void)comm.all_reduce({memory.data(), 3, dtype}, op), text, joinable::ContractViolation
        );
    };
    refuses(
        DType::i16,
        ReduceOp::sum,
        "a reduction is of integers of 8, 32 or 64 bits, but was given sum of i16; convert the elements "
        "to i32"
    );
    refuses(
        DType::u16,
        ReduceOp::bit_or,
        "a reduction is of integers of 8, 32 or 64 bits, but was given bit_or of u16; convert the "
        "elements to i32"
    );
    refuses(
        DType::boolean,
        ReduceOp::sum,
        "a reduction of booleans is min, max, bit_and or bit_or, but was given sum of boolean; convert "
        "the elements to i32 to count them"
    );
    for (DType const dtype : {DType::c64, DType::c128}) {
        for (ReduceOp const op :
             {ReduceOp::min, ReduceOp::max, ReduceOp::bit_and, ReduceOp::bit_or}) {
            std::string const text = joinable::detail::concat(
                "a reduction of complex numbers is a sum or a product, but was given ",
                joinable::name_of(op),
                " of ",
                joinable::name_of(dtype),
                "; reduce their magnitudes instead"
            );
            refuses(dtype, op, text.c_str());
        }
    }
    CHECK(memory == before);
    CHECK(!comm.is_aborted());
    int one = 1;
    comm.all_reduce({&one, 1, DType::i32}, ReduceOp::sum).wait();
    CHECK(one == comm.size());
}

template <class Comm>
void combine_booleans(Comm& comm) {
    using joinable::ReduceOp;
    for (ReduceOp const op : {ReduceOp::max, ReduceOp::bit_or, ReduceOp::min, ReduceOp::bit_and}) {
        CAPTURE(joinable::name_of(op));
        bool const is_first = comm.rank() == 0;
        std::array<bool, 4> bits{false, is_first, !is_first, true};
        comm.all_reduce({bits.data(), bits.size(), joinable::DType::boolean}, op).wait();
        bool const is_or = op == ReduceOp::max || op == ReduceOp::bit_or;
        bool const alone = comm.size() == 1;
        CHECK((bits == std::array{false, is_or || alone, is_or && !alone, true}));
    }
}

template <class Comm>
void check_further_types(Comm& comm) {
    move_further_type<bool>(comm);
    move_further_type<std::int16_t>(comm);
    move_further_type<std::uint16_t>(comm);
    move_further_type<std::complex<float>>(comm);
    move_further_type<std::complex<double>>(comm);
    reduce_complex<float>(comm, true);
    reduce_complex<double>(comm, true);
    combine_booleans(comm);
    refuse_further_reductions(comm);
}

} // namespace joinable_tests
