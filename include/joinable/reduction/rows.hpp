// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include <joinable/config.hpp>
#include <joinable/reduction/arithmetic.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Rows of elements at equal distances, in bytes.
template <class Byte>
struct Rows {
    Byte* data;
    std::size_t step;     ///< from element to element
    std::size_t next = 0; ///< from row to row
};

/// Memory is read and written as bytes, so no engine's element type can alias.
template <class T>
[[gnu::always_inline]] inline T load(std::byte const* from) noexcept {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}
template <class T>
[[gnu::always_inline]] inline void store(std::byte* to, T value) noexcept {
    std::memcpy(to, &value, sizeof(T));
}

/// Writes a register past the caches, to a multiple of 16 bytes, if the processor can. Other
/// threads see the data after `finish_streams()`.
using Bytes16 [[gnu::vector_size(16)]] = unsigned char;
template <class Register>
[[gnu::always_inline]] inline void stream(std::byte* to, Register const& value) noexcept {
    if constexpr (has_streaming_stores) {
        std::array<Bytes16, sizeof(Register) / 16> pieces;
        std::memcpy(&pieces, &value, sizeof(Register));
        for (Bytes16 const& piece : pieces) {
            asm volatile("movntdq %1, %0" : "=m"(*reinterpret_cast<Bytes16*>(to)) : "x"(piece));
            to += sizeof(piece);
        }
    }
}
template <bool exist = has_streaming_stores>
[[gnu::always_inline]] inline void finish_streams() noexcept {
    if constexpr (exist) {
        asm volatile("sfence" : : : "memory");
    }
}

/// The bytes of a register, for loops that need to know.
template <std::size_t bytes>
using Width = std::integral_constant<std::size_t, bytes>;

/// A loop over elements, compiled for each instruction set. `Loop::run(width, done, arguments...)` goes
/// from element `done` on, with registers of at most `width` bytes. Where there is AVX2, `done` is what
/// `Loop::convert(arguments...)` has done before, because only a function for AVX2 can inline its
/// conversions.
template <class Loop, class... Arguments>
struct CompiledLoop {
    JOINABLE_LOOP static void baseline(Arguments... arguments) noexcept {
        Loop::run(Width<16>{}, 0, arguments...);
    }
    JOINABLE_LOOP_AVX2 static void avx2(Arguments... arguments) noexcept {
        Loop::run(Width<32>{}, Loop::convert(arguments...), arguments...);
    }
    JOINABLE_LOOP_AVX512 static void avx512(Arguments... arguments) noexcept {
        Loop::run(Width<64>{}, Loop::convert(arguments...), arguments...);
    }
    /// The function for this processor, or for an instruction set that it has.
    [[nodiscard]] static auto* of(InstructionSet set = instruction_set()) noexcept {
        switch (set) {
        case InstructionSet::avx512: return &avx512;
        case InstructionSet::avx2: return &avx2;
        case InstructionSet::baseline: break;
        }
        return &baseline;
    }
};

/// Rows without gaps, which are the same or do not overlap.
template <class Operation>
[[gnu::always_inline]] inline void
words(Operation const& operation, std::byte const* from, std::byte* to, std::size_t count) {
    using Word = typename Operation::Word;
    JOINABLE_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        std::size_t const at = i * sizeof(Word);
        store<Word>(to + at, operation(load<Word>(from + at), load<Word>(to + at)));
    }
}
template <class Bits>
void words(Assign<Bits> const&, std::byte const* from, std::byte* to, std::size_t count) {
    std::memmove(to, from, count * sizeof(Bits));
}

/// One row, compiled for the caller's instruction set. The rows are the same or do not overlap.
template <class Operation>
[[gnu::always_inline]] inline void apply(
    Operation const operation,
    Rows<std::byte const> const& from,
    Rows<std::byte> const& to,
    std::size_t count
) {
    using Element = typename Operation::Element;
    using Word = typename Operation::Word;
    std::size_t done = 0;
    if (from.step == sizeof(Element) && to.step == sizeof(Element)) {
        std::size_t const whole = count * sizeof(Element) / sizeof(Word);
        words(operation, from.data, to.data, whole);
        done = whole * sizeof(Word) / sizeof(Element);
    }
    for (std::size_t i = done; i < count; ++i) {
        std::byte* const target = to.data + i * to.step;
        Word const result =
            operation(load<Element>(from.data + i * from.step), load<Element>(target));
        store<Element>(target, static_cast<Element>(result));
    }
}

template <class Operation>
concept is_of_halves = std::same_as<typename Operation::Number, Half>;

using RowsFunction =
    void(void const*, Rows<std::byte const>, Rows<std::byte>, std::size_t, std::size_t) noexcept;
template <class Loop>
using RowsLoop = CompiledLoop<
    Loop,
    void const*,
    Rows<std::byte const>,
    Rows<std::byte>,
    std::size_t,
    std::size_t>;

/// Applies the operation at an address to rows: one type of function for all operations.
template <class Operation>
struct ApplyLoop {
    [[gnu::always_inline]] static void
    run([[maybe_unused]] std::size_t width,
        [[maybe_unused]] std::size_t done,
        void const* operation,
        Rows<std::byte const> from,
        Rows<std::byte> to,
        std::size_t count,
        std::size_t rows) {
        if constexpr (has_half_conversions && is_of_halves<Operation>) {
            if (width > 16) { // at most seven are left: compiled once for all instruction sets
                from.data += done * from.step;
                to.data += done * to.step;
                if (done < count) {
                    RowsLoop<ApplyLoop>::baseline(operation, from, to, count - done, rows);
                }
                return;
            }
        }
        for (; rows != 0; --rows, from.data += from.next, to.data += to.next) {
            apply(*static_cast<Operation const*>(operation), from, to, count);
        }
    }
    /// The f16 numbers of each row, as far as the processor converts eight at a time.
    template <bool is_dense = false>
    JOINABLE_INLINE_AVX2 static std::size_t convert(
        void const* operation,
        Rows<std::byte const> from,
        Rows<std::byte> to,
        std::size_t count,
        std::size_t rows
    ) {
        if constexpr (has_half_conversions && is_of_halves<Operation>) {
            if (!is_dense && from.step == sizeof(Half) && to.step == sizeof(Half)) {
                return convert<true>(operation, from, to, count, rows);
            }
            auto const computes = *static_cast<Operation const*>(operation);
            for (; rows != 0; --rows, from.data += from.next, to.data += to.next) {
                for (std::size_t i = 0; i + 8 <= count; i += 8) {
                    std::byte const* const source = from.data + i * from.step;
                    std::byte* const target = to.data + i * to.step;
                    auto a = is_dense ? load<EightHalves>(source) : EightHalves{};
                    auto b = is_dense ? load<EightHalves>(target) : EightHalves{};
                    for (std::size_t k = is_dense ? 8 : 0; k < 8; ++k) {
                        a[k] = load<short>(source + k * from.step);
                        b[k] = load<short>(target + k * to.step);
                    }
                    EightFloats x;
                    EightFloats y;
                    widen(a, x);
                    widen(b, y);
                    computes.compute(x, y);
                    narrow(y, b);
                    if (is_dense) {
                        store(target, b);
                    }
                    for (std::size_t k = is_dense ? 8 : 0; k < 8; ++k) {
                        store<short>(target + k * to.step, b[k]);
                    }
                }
            }
            return count / 8 * 8;
        }
        return 0;
    }
};
template <class Operation>
using ApplyLoops = RowsLoop<ApplyLoop<Operation>>;

}}} // namespace joinable::v0::detail
