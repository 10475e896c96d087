// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

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

}}} // namespace joinable::v0::detail
