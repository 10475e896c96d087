// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include <joinable/config.hpp>
#include <joinable/optimizer/update_rule.hpp>

/// @file
/// Update rules over registers of elements. Every product is rounded before it is added, and
/// registers of any width do the same, including single elements. So the result has the same bits
/// wherever an element lies in a range and whichever processor steps it. Kernels call an update
/// with single elements. So an update computes with `V`, which is a register or a number, by
/// + - * / and the functions here: `V{1}` would set one lane of a register alone.

namespace joinable { inline namespace v0 { namespace detail {

/// The square root of each element of a register of `T`, by the processor's instruction. Compilers
/// call a function instead, to set errno. Clang accepts at most 16 bytes in a function that may be
/// compiled for any processor. With GCC such pieces would go through memory.
template <class T, class Register>
[[gnu::always_inline]] inline void take_root(Register& result, Register const& from) noexcept {
#if defined(__x86_64__)
#if defined(__clang__)
    using Piece [[gnu::vector_size(16)]] = T;
#else
    using Piece = Register;
#endif
    constexpr bool is_float = sizeof(T) == sizeof(float);
    Piece pieces[sizeof(Register) / sizeof(Piece)];
    __builtin_memcpy(&pieces, &from, sizeof(Register));
    for (Piece& piece : pieces) {
        if constexpr (sizeof(Register) == 16) { // on a processor that has nothing larger
            if constexpr (is_float) {
                asm("sqrtps %0, %0" : "+x"(piece));
            } else {
                asm("sqrtpd %0, %0" : "+x"(piece));
            }
        } else if constexpr (is_float) {
            asm("vsqrtps %0, %0" : "+x"(piece));
        } else {
            asm("vsqrtpd %0, %0" : "+x"(piece));
        }
    }
    __builtin_memcpy(&result, &pieces, sizeof(Register));
#else
    for (std::size_t i = 0; i < sizeof(Register) / sizeof(T); ++i) {
        result[i] = __builtin_sqrt(from[i]);
    }
#endif
}

/// As many elements as fit into `width` bytes: a register or a single number.
template <class T, std::size_t width>
struct register_of {
    using type [[gnu::vector_size(width)]] = T;
};
template <class T>
struct register_of<T, sizeof(T)> {
    using type = T;
};

/// result = a * b, rounded.
template <class V, class Factor>
[[gnu::always_inline]] JOINABLE_HOST_DEVICE inline void
multiply(V& result, V const& a, Factor const& b) noexcept {
    JOINABLE_ROUNDED_PRODUCT(result, a, b);
}

/// result = result + a * b, rounded twice.
template <class V, class Factor>
[[gnu::always_inline]] JOINABLE_HOST_DEVICE inline void
add_product(V& result, V const& a, Factor const& b) noexcept {
    V product;
    multiply(product, a, b);
    result = result + product;
}

/// The square root of each element, rounded.
template <class T, class V>
[[gnu::always_inline]] JOINABLE_HOST_DEVICE inline void root(V& result, V const& from) noexcept {
    if constexpr (std::is_same_v<V, T>) {
        result = std::sqrt(from);
    } else {
        take_root<T>(result, from);
    }
}

/// Steps elements from `at` on while they fill registers. Returns where it stopped.
template <class T, std::size_t width, class Update>
[[gnu::always_inline]] inline std::size_t
update_registers(Update const& update, UpdateRange<T> const& range, std::size_t at) noexcept {
    using V = typename register_of<T, width>::type;
    constexpr std::size_t lanes = width / sizeof(T);
    constexpr std::size_t arrays = Update::state_count; // constant, so that they stay in registers
    for (; at + lanes <= range.size; at += lanes) {
        V value;
        V gradient;
        V state[arrays == 0 ? 1 : arrays];
        std::memcpy(&value, range.values + at, width);
        std::memcpy(&gradient, range.gradients + at, width);
        JOINABLE_UNROLL
        for (std::size_t k = 0; k != arrays; ++k) { // not <: nvcc warns that nothing is below 0
            std::memcpy(&state[k], range.state[k] + at, width);
        }
        update(value, gradient, state);
        std::memcpy(range.values + at, &value, width);
        JOINABLE_UNROLL
        for (std::size_t k = 0; k != arrays; ++k) {
            std::memcpy(range.state[k] + at, &state[k], width);
        }
    }
    return at;
}
template <class T, std::size_t width, class Update>
[[gnu::always_inline]] inline void
update_elements(Update const& update, UpdateRange<T> const& range) noexcept {
    std::size_t const at = update_registers<T, width>(update, range, 0);
    update_registers<T, sizeof(T)>(update, range, at);
}

// Variants for each instruction set. AVX-512 would gain nothing, because a step is limited by
// memory. nvcc compiles no registers of the host in functions that kernels call, so it takes these
// loops from another file of the program. Where no file has them their addresses are null.
#if defined(__CUDACC__)
template <class T, class Update>
[[gnu::weak]] void update_baseline(Update const& update, UpdateRange<T> const& range) noexcept;
template <class T, class Update>
[[gnu::weak]] void update_avx2(Update const& update, UpdateRange<T> const& range) noexcept;
#else
template <class T, class Update>
JOINABLE_LOOP void update_baseline(Update const& update, UpdateRange<T> const& range) noexcept {
    update_elements<T, 16>(update, range);
}
template <class T, class Update>
JOINABLE_LOOP_AVX2 void update_avx2(Update const& update, UpdateRange<T> const& range) noexcept {
    update_elements<T, 32>(update, range);
}
#endif

/// Steps a range. `Update` is called with registers or single elements: update(value, gradient,
/// state).
template <class T, class Update>
void run_update(
    Update const& update, UpdateRange<T> const& range, InstructionSet set = instruction_set()
) noexcept {
    auto* loop =
        set == InstructionSet::baseline ? &update_baseline<T, Update> : &update_avx2<T, Update>;
    asm("" : "+r"(loop)); // else compilers believe that a function has an address
    if (loop != nullptr) {
        loop(update, range);
    } else {
        update_registers<T, sizeof(T)>(update, range, 0);
    }
}

}}} // namespace joinable::v0::detail
