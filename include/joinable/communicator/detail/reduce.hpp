// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/text.hpp>
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

[[nodiscard]] constexpr bool is_floating(DType dtype) noexcept {
    return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 ||
           dtype == DType::f64;
}

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
                std::size_t const n = std::min(tile_size, count - begin);
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

/// @throws ContractViolation  a bit operation on floating-point elements, or memory that is
/// missing.
inline void check_reduction(ConstBuffer buffer, ReduceOp op) {
    if ((op == ReduceOp::bit_and || op == ReduceOp::bit_or) && is_floating(buffer.dtype)) {
        throw ContractViolation{concat(
            "a reduction with ",
            name_of(op),
            " needs integers, but the elements are ",
            name_of(buffer.dtype)
        )};
    }
}

inline void check_memory(ConstBuffer buffer) {
    if (buffer.data == nullptr && buffer.count != 0) {
        throw ContractViolation{
            concat("a collective was given a null pointer for ", buffer.count, " elements")
        };
    }
}

inline void check_root(int root, int size) {
    if (root < 0 || root >= size) {
        throw ContractViolation{
            concat("root ", root, " is no rank of a communicator of ", size, " ranks")
        };
    }
}

/// `whole` must be `size` times as many elements as `part`, of the same dtype.
inline void check_share(ConstBuffer part, ConstBuffer whole, int size) {
    check_memory(part);
    check_memory(whole);
    if (part.dtype != whole.dtype || whole.count != part.count * static_cast<std::size_t>(size)) {
        throw ContractViolation{concat(
            "a collective over ",
            size,
            " ranks needs one buffer of ",
            size,
            " times the elements of the other and the same dtype, but got ",
            part.count,
            " of ",
            name_of(part.dtype),
            " and ",
            whole.count,
            " of ",
            name_of(whole.dtype)
        )};
    }
}

} // namespace joinable::inline v0::detail
