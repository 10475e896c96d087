// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <type_traits>

#include <joinable/communicator/communicator.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable::inline v0::detail {

/// What a reduction of `T` computes in: f16 and bf16 accumulate in float and round once.
template <class T>
using accumulator_of =
    std::conditional_t<std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>, float, T>;

/// What sums and products of `A` are computed in: unsigned for integers, which wrap around.
/// Overflow of signed integers is undefined, and the reduced value of a rank's data must not be.
template <class A>
struct wrapping {
    using type = A;
};
template <std::integral A>
struct wrapping<A> : std::make_unsigned<A> {};

/// Calls `function(combine)` with the binary operation as a type of its own, so that loops over it
/// vectorise. Bit operations are called for integers only.
template <class A, class F>
void visit_op(ReduceOp op, F const& function) {
    using W = typename wrapping<A>::type;
    switch (op) {
    case ReduceOp::sum: return function([](A a, A b) { return static_cast<A>(W(a) + W(b)); });
    case ReduceOp::product: return function([](A a, A b) { return static_cast<A>(W(a) * W(b)); });
    case ReduceOp::min: return function([](A a, A b) { return b < a ? b : a; });
    case ReduceOp::max: return function([](A a, A b) { return a < b ? b : a; });
    case ReduceOp::bit_and:
        if constexpr (std::is_integral_v<A>) {
            function([](A a, A b) { return static_cast<A>(a & b); });
        }
        return;
    case ReduceOp::bit_or:
        if constexpr (std::is_integral_v<A>) {
            function([](A a, A b) { return static_cast<A>(a | b); });
        }
        return;
    }
}

/// Combines `count` elements of all `ranks` in rank order, whoever computes it and however it was
/// cut: for each tile `input(rank)` points to that rank's elements, and `output(tile, begin, n)`
/// receives the result. Neither arrival nor tuning changes a bit.
template <class Input, class Output>
void reduce_in_rank_order(
    DType dtype, ReduceOp op, int ranks, std::size_t count, Input const& input, Output const& output
) {
    visit_dtype(dtype, [&]<class T>(std::type_identity<T>) {
        using A = accumulator_of<T>;
        visit_op<A>(op, [&](auto const combine) {
            constexpr std::size_t tile_size = 4096 / sizeof(A); // stays in the first-level cache
            std::array<A, tile_size> tile;
            for (std::size_t begin = 0; begin < count; begin += tile_size) {
                std::size_t const n = (std::min)(tile_size, count - begin);
                auto const* const first = static_cast<T const*>(input(0)) + begin;
                for (std::size_t i = 0; i < n; ++i) {
                    tile[i] = static_cast<A>(first[i]);
                }
                for (int rank = 1; rank < ranks; ++rank) {
                    auto const* const next = static_cast<T const*>(input(rank)) + begin;
                    for (std::size_t i = 0; i < n; ++i) {
                        tile[i] = combine(tile[i], static_cast<A>(next[i]));
                    }
                }
                if constexpr (std::is_same_v<A, T>) {
                    output(static_cast<void const*>(tile.data()), begin, n);
                } else {
                    std::array<T, tile_size> rounded;
                    for (std::size_t i = 0; i < n; ++i) {
                        rounded[i] = T{tile[i]};
                    }
                    output(static_cast<void const*>(rounded.data()), begin, n);
                }
            }
        });
    });
}

} // namespace joinable::inline v0::detail
