// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "join.hpp"

// ---- joinable/reduction/arithmetic.hpp

#ifndef JOINABLE_REDUCTION_ARITHMETIC_HPP_PART_1
#define JOINABLE_REDUCTION_ARITHMETIC_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

template <class T>
concept sixteen_bits = std::same_as<T, Half> || std::same_as<T, BFloat16>;

/// The unsigned integer of a size. Integers are added in it, because it wraps.
template <std::size_t Bytes>
    requires(Bytes == 1 || Bytes == 2 || Bytes == 4 || Bytes == 8)
using bits_of_size = std::conditional_t<
    Bytes <= 2,
    std::conditional_t<Bytes == 1, std::uint8_t, std::uint16_t>,
    std::conditional_t<Bytes == 4, std::uint32_t, std::uint64_t>>;

/// Applies an operation to the halves of two words, and returns a word of the two results.
template <class T, class Operation>
[[gnu::always_inline]] inline std::uint32_t
each_half(Operation const& operation, std::uint32_t source, std::uint32_t target) noexcept {
    using C = Conversion<T>;
    float low = C::widen(target & 0xffffU);
    float high = C::widen(target >> 16);
    operation.compute(C::widen(source & 0xffffU), low);
    operation.compute(C::widen(source >> 16), high);
    return C::narrow(low) | (C::narrow(high) << 16);
}

// An operation on elements. `Element` is the type in memory. `Word` is the type of one computation:
// one element, or two of 16 bits (a single one is then in the low half). The call takes a word of
// the source and the word of the target that it replaces. `compute` does the same to widened 16-bit
// numbers, to one or to a register full.

/// target = source * factor
template <class T>
struct Scale {
    using Element = T;
    using Word = T;
    T factor;

    explicit Scale(double number) noexcept : factor{static_cast<T>(number)} {}
    [[gnu::always_inline]] T operator()(T source, T) const noexcept { return source * factor; }
};

template <sixteen_bits T>
struct Scale<T> {
    using Element = std::uint16_t;
    using Word = std::uint32_t;
    using Number = T;
    float factor;

    explicit Scale(double number) noexcept : factor{static_cast<float>(number)} {}
    template <class Floats>
    [[gnu::always_inline]] void compute(Floats const& source, Floats& target) const noexcept {
        target = source * factor;
    }
    [[gnu::always_inline]] Word operator()(Word source, Word) const noexcept {
        return each_half<T>(*this, source, 0);
    }
};

/// target = target + source
template <class T>
struct Add {
    using Element = T;
    using Word = T;

    [[gnu::always_inline]] T operator()(T source, T target) const noexcept {
        return static_cast<T>(target + source);
    }
};

template <sixteen_bits T>
struct Add<T> {
    using Element = std::uint16_t;
    using Word = std::uint32_t;
    using Number = T;

    template <class Floats>
    [[gnu::always_inline]] void compute(Floats const& source, Floats& target) const noexcept {
        target = target + source;
    }
    [[gnu::always_inline]] Word operator()(Word source, Word target) const noexcept {
        return each_half<T>(*this, source, target);
    }
};

/// target = source; only the bits matter.
template <class Bits>
struct Assign {
    using Element = Bits;
    using Word = Bits;

    [[gnu::always_inline]] Bits operator()(Bits source, Bits) const noexcept { return source; }
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/reduction/rows.hpp

#ifndef JOINABLE_REDUCTION_ROWS_HPP_PART_1
#define JOINABLE_REDUCTION_ROWS_HPP_PART_1

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

#endif

// ---- joinable/reduction/halves.hpp

#ifndef JOINABLE_REDUCTION_HALVES_HPP_PART_1
#define JOINABLE_REDUCTION_HALVES_HPP_PART_1

/// @file
/// Converts rows of 16-bit numbers to float and back, with the same bits as Half and BFloat16.
/// Compiled for each instruction set. Rows do not overlap.

namespace joinable { inline namespace v0 { namespace detail {

template <sixteen_bits T>
struct Widen {
    static constexpr std::size_t from_bytes = sizeof(T);
    static constexpr std::size_t to_bytes = sizeof(float);
    static constexpr bool has_instruction = has_half_conversions && std::is_same_v<T, Half>;

    [[gnu::always_inline]] static void one(std::byte const* from, std::byte* to) noexcept {
        store<float>(to, Conversion<T>::widen(load<std::uint16_t>(from)));
    }
    JOINABLE_INLINE_AVX2 static void eight(std::byte const* from, std::byte* to) noexcept {
        EightFloats floats;
        widen(load<EightHalves>(from), floats);
        std::memcpy(to, &floats, sizeof(floats));
    }
};

template <sixteen_bits T>
struct Narrow {
    static constexpr std::size_t from_bytes = sizeof(float);
    static constexpr std::size_t to_bytes = sizeof(T);
    static constexpr bool has_instruction = has_half_conversions && std::is_same_v<T, Half>;

    [[gnu::always_inline]] static void one(std::byte const* from, std::byte* to) noexcept {
        store(to, static_cast<std::uint16_t>(Conversion<T>::narrow(load<float>(from))));
    }
    JOINABLE_INLINE_AVX2 static void eight(std::byte const* from, std::byte* to) noexcept {
        EightFloats floats;
        EightHalves halves;
        std::memcpy(&floats, from, sizeof(floats));
        narrow(floats, halves);
        store(to, halves);
    }
};

/// Converts a row. Uses the processor's instruction, if there is one.
template <class C>
struct ConvertLoop {
    [[gnu::always_inline]] static void
    run(std::size_t /*width*/,
        std::size_t done,
        std::byte const* __restrict from,
        std::byte* __restrict to,
        std::size_t count) noexcept {
        for (std::size_t i = done; i < count; ++i) {
            C::one(from + i * C::from_bytes, to + i * C::to_bytes);
        }
    }
    JOINABLE_INLINE_AVX2 static std::size_t
    convert(std::byte const* from, std::byte* to, std::size_t count) noexcept {
        std::size_t done = 0;
        if constexpr (C::has_instruction) {
            for (; done + 8 <= count; done += 8) {
                C::eight(from + done * C::from_bytes, to + done * C::to_bytes);
            }
        }
        return done;
    }
};
template <class C>
using ConvertLoops = CompiledLoop<ConvertLoop<C>, std::byte const*, std::byte*, std::size_t>;

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/bucket/compression/detail/numbers.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The type in which reductions compute with elements of a type: f64 for f64, else f32.
[[nodiscard]] constexpr DType number_dtype(DType dtype) noexcept {
    return dtype == DType::f64 ? DType::f64 : DType::f32;
}
[[nodiscard]] constexpr std::size_t number_size(DType dtype) noexcept {
    return size_of(number_dtype(dtype));
}
/// Calls f(T{}) with its type.
template <class F>
decltype(auto) visit_number(DType dtype, F const& f) {
    return number_dtype(dtype) == DType::f64 ? f(double{}) : f(float{});
}

/// Numbers times a factor, as numbers of another type. The memory may be the same if the types are.
template <class From, class To>
struct ScaleLoop {
    static std::size_t convert(std::byte const*, double, std::byte*, std::size_t) noexcept {
        return 0;
    }
    template <class Width>
    [[gnu::always_inline]] static void
    run(Width,
        std::size_t done,
        std::byte const* from,
        double factor,
        std::byte* to,
        std::size_t count) noexcept {
        using Number = std::common_type_t<From, To>;
        auto const scale = static_cast<Number>(factor);
        for (std::size_t i = done; i < count; ++i) {
            auto const number = static_cast<Number>(load<From>(from + i * sizeof(From)));
            store(to + i * sizeof(To), static_cast<To>(number * scale));
        }
    }
};
template <class From, class To>
using ScaleLoops =
    CompiledLoop<ScaleLoop<From, To>, std::byte const*, double, std::byte*, std::size_t>;

/// The same for elements: those of 16 bits become floats first, or last, so an f64 is rounded to float and then to 16 bits.
template <class From, class To>
void cast_elements(
    std::byte const* from, double factor, std::byte* to, std::size_t count
) noexcept {
    if constexpr (!sixteen_bits<From> && !sixteen_bits<To>) {
        ScaleLoops<From, To>::of()(from, factor, to, count);
    } else {
        constexpr std::size_t tile = 1024;
        std::array<std::byte, tile * sizeof(float)> floats;
        for (std::size_t done = 0; done < count; done += tile) {
            std::size_t const size = (std::min)(tile, count - done);
            std::byte const* numbers = from + done * sizeof(From);
            std::byte* const place = to + done * sizeof(To);
            if constexpr (sixteen_bits<From>) {
                ConvertLoops<Widen<From>>::of()(numbers, floats.data(), size);
                numbers = floats.data();
            }
            using Number = std::conditional_t<sixteen_bits<From>, float, From>;
            if constexpr (sixteen_bits<To>) {
                ScaleLoops<Number, float>::of()(numbers, factor, floats.data(), size);
                ConvertLoops<Narrow<To>>::of()(floats.data(), place, size);
            } else {
                ScaleLoops<Number, To>::of()(numbers, factor, place, size);
            }
        }
    }
}

/// Writes elements, times a factor, as elements of T: computed in f32, or in f64 if one of the types is that. The memory
/// may be the same if the types are.
template <class T>
void cast_to(Buffer from, double factor, T* to) {
    visit_floating(from.dtype, [&]<class From>(std::type_identity<From>) {
        cast_elements<From, T>(
            static_cast<std::byte const*>(from.data),
            factor,
            reinterpret_cast<std::byte*>(to),
            from.count
        );
    });
}
/// Writes numbers of T as elements of `to`.
template <class T>
void cast_from(T const* from, Buffer to) {
    visit_floating(to.dtype, [&]<class To>(std::type_identity<To>) {
        cast_elements<T, To>(
            reinterpret_cast<std::byte const*>(from),
            1.0,
            static_cast<std::byte*>(to.data),
            to.count
        );
    });
}

/// Whether a number is neither infinite nor NaN, by its bits: options such as -ffast-math do not change that.
template <class T>
[[nodiscard]] bool is_finite(T number) noexcept {
    using Bits = std::conditional_t<
        sizeof(T) == 8,
        std::uint64_t,
        std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>>;
    constexpr Bits exponent = sizeof(T) == 8          ? static_cast<Bits>(0x7ff0'0000'0000'0000U)
                              : sizeof(T) == 4        ? static_cast<Bits>(0x7f80'0000U)
                              : std::same_as<T, Half> ? Bits{0x7c00}
                                                      : Bits{0x7f80};
    Bits bits;
    std::memcpy(&bits, &number, sizeof(T));
    return (bits & exponent) != exponent;
}
[[nodiscard]] inline bool are_finite(Buffer buffer) {
    bool result = true;
    visit_floating(buffer.dtype, [&]<class T>(std::type_identity<T>) {
        auto const* const data = static_cast<std::byte const*>(buffer.data);
        for (std::size_t i = 0; i < buffer.count; ++i) {
            result = is_finite(load<T>(data + i * sizeof(T))) && result;
        }
    });
    return result;
}

}}} // namespace joinable::v0::detail

// ---- joinable/device/combined_terms.hpp

#ifndef JOINABLE_DEVICE_COMBINED_TERMS_HPP_PART_1
#define JOINABLE_DEVICE_COMBINED_TERMS_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

// The order of a sum of squares, which is the same on every device, and so are the bits. Elements
// count in the order of their indices, the last index changes fastest, wherever they lie in memory.
// The squares of each run of `square_block` elements are summed, then the sums of the runs, both in
// the same way: number i goes to lane i % square_lanes, a lane adds its numbers in order, and the
// upper half of the lanes is added to the lower half until one lane is left.

inline constexpr std::size_t square_lanes = 256;
inline constexpr std::size_t square_block = 8 * square_lanes;

/// The number of runs.
[[nodiscard]] JOINABLE_HOST_DEVICE constexpr std::size_t square_blocks(std::size_t elements
) noexcept {
    return (elements + square_block - 1) / square_block;
}

struct AddNumbers {
    JOINABLE_HOST_DEVICE double operator()(double a, double b) const { return a + b; }
};
/// NaN if a number is NaN.
struct LargerNumber {
    JOINABLE_HOST_DEVICE double operator()(double a, double b) const {
        return a >= b || a != a ? a : b;
    }
};

/// Lane `lane` of the lower half takes its number of the upper half.
template <class Combine = AddNumbers>
JOINABLE_HOST_DEVICE void
fold_lane(double* lanes, std::size_t half, std::size_t lane, Combine combine = {}) {
    lanes[lane] = combine(lanes[lane], lanes[lane + half]);
}

/// Where the elements of a tensor lie, in the order of their indices. Steps are in elements.
struct IndexOrder {
    struct Level {
        std::size_t extent;
        std::size_t step;
    };

    std::uint32_t levels;         ///< at least one
    Level level[max_tensor_rank]; ///< innermost first; neighbours are merged where possible

    IndexOrder(Shape const& extents, Shape const& strides);
    IndexOrder() = default;

    [[nodiscard]] JOINABLE_HOST_DEVICE std::size_t place_of(std::size_t element) const {
        std::size_t place = 0;
        for (std::uint32_t l = 0; l + 1 < levels; ++l) {
            place += element % level[l].extent * level[l].step;
            element /= level[l].extent;
        }
        return place + element * level[levels - 1].step;
    }
};

/// Numbers that are combined in lanes.
template <class Combine>
struct CombinedLanes {
    std::array<double, square_lanes> numbers{};

    [[nodiscard]] double total() noexcept {
        for (std::size_t half = square_lanes / 2; half != 0; half /= 2) {
            for (std::size_t lane = 0; lane < half; ++lane) {
                fold_lane(numbers.data(), half, lane, Combine{});
            }
        }
        return numbers.front();
    }
};

/// Combines term(element) for all elements, in the order above.
template <class Combine, class T, class Term>
[[nodiscard]] double
combine_terms(T const* first, std::size_t count, IndexOrder const& order, Term const& term) {
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    Combine const combine{};
    CombinedLanes<Combine> all;
    CombinedLanes<Combine> block;
    std::size_t blocks = 0;
    auto const close = [&] {
        double& lane = all.numbers[blocks++ % square_lanes];
        lane = combine(lane, block.total());
        block = {};
    };
    auto const [run, step] = order.level[0];
    std::size_t done = 0;
    for (std::size_t begin = 0; begin < count; begin += run) {
        T const* from = first + order.place_of(begin);
        for (std::size_t left = run; left != 0;) {
            std::size_t const lane = done % square_lanes;
            std::size_t const some = (std::min)(left, square_lanes - lane);
            for (std::size_t i = 0; i < some; ++i) {
                double& number = block.numbers[lane + i];
                number = combine(number, term(static_cast<Wide>(from[i * step])));
            }
            from += some * step;
            left -= some;
            done += some;
            if (done % square_block == 0) {
                close();
            }
        }
    }
    if (done % square_block != 0) {
        close();
    }
    return all.total();
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/device/impl/combined_terms.ipp

#if JOINABLE_HAS_DEFINITIONS
#ifndef JOINABLE_DEVICE_IMPL_COMBINED_TERMS_IPP_PART_1
#define JOINABLE_DEVICE_IMPL_COMBINED_TERMS_IPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION IndexOrder::IndexOrder(Shape const& extents, Shape const& strides)
    : levels{0}, level{} {
    for (std::size_t d = extents.size(); d-- > 0;) {
        if (extents[d] == 1) {
            continue;
        }
        if (levels != 0 && level[levels - 1].extent * level[levels - 1].step == strides[d]) {
            level[levels - 1].extent *= extents[d];
        } else {
            level[levels++] = {extents[d], strides[d]};
        }
    }
    if (levels == 0) { // a single element
        level[levels++] = {1, 1};
    }
}

}}} // namespace joinable::v0::detail

#endif
#endif

// ---- joinable/device/step.hpp

#ifndef JOINABLE_DEVICE_STEP_HPP_PART_1
#define JOINABLE_DEVICE_STEP_HPP_PART_1

/// @file
/// The steps of reductions that compute in the memory of a device. A matrix of rows x columns numbers is the product of
/// two thin ones: left (rank x rows) and right (rank x columns), each with one row of numbers for each rank of the
/// approximation. What all ranks compute from the same numbers has one order and rounds each product, so it has the same
/// bits on every processor and on every device.

namespace joinable { inline namespace v0 { namespace detail {

struct MatrixSize {
    std::size_t rows = 0;
    std::size_t columns = 0;
    std::size_t rank = 0; ///< of the approximation; 0: there is none
};

/// Elements `from` are of DeviceStep::from_dtype, and `to` of DeviceStep::dtype. Numbers are f64 where `dtype` is, else f32.
enum class StepKind : std::uint8_t {
    fill_random, ///< numbers to, from -1 to 1, follow from `seed` alone
    cast, ///< elements to = elements from x number, in the wider type; one without `from`: number
    orthogonalize,   ///< `rank` rows of `columns` numbers to, see orthogonalize()
    add,             ///< numbers to = elements from + numbers left
    multiply_right,  ///< numbers to (left) = numbers from (matrix) x right, in each device's order
    multiply_left,   ///< numbers to (right) = transposed numbers from (matrix) x left, alike
    multiply,        ///< elements to = left x right; zeros if only_if says no
    note_not_finite, ///< number of f64 to = 0 if elements from are not all finite
    keep_rows,       ///< `rank` rows of `columns` numbers to = from, but for rows of zeros
    subtract,        ///< numbers to = from - left x right
};
inline constexpr std::uint8_t step_kinds = 10;

/// The arguments of a step. Pointers are to memory of the device.
struct DeviceStep {
    StepKind kind;
    DType dtype;
    DType from_dtype = DType::f32;
    void const* from = nullptr;
    void* to = nullptr;
    void const* left = nullptr;
    void const* right = nullptr;
    double const* only_if =
        nullptr; ///< null, or a number; 0: keep_rows and subtract change nothing
    /// For multiply_left on a device: numbers_of_chunks() numbers. For multiply and subtract on the host: a row of numbers.
    void* room = nullptr;
    double number = 1; ///< a factor, or an epsilon
    std::uint64_t seed = 0;
    MatrixSize size = {};
    std::size_t count = 0; ///< of elements
};

/// On a device, multiply_left sums chunks of so many rows, and then the sums of chunks.
inline constexpr std::size_t rows_of_chunk = 256;
[[nodiscard]] JOINABLE_HOST_DEVICE constexpr std::size_t chunks_of(MatrixSize const& size
) noexcept {
    return (size.rows + rows_of_chunk - 1) / rows_of_chunk;
}
[[nodiscard]] constexpr std::size_t numbers_of_chunks(MatrixSize const& size) noexcept {
    return chunks_of(size) * size.rank * size.columns;
}

/// Number `i` that fill_random() writes.
template <class T>
[[nodiscard]] JOINABLE_HOST_DEVICE T random_number(std::uint64_t seed, std::size_t i) noexcept {
    std::uint64_t const state = seed + (i + 1) * splitmix_increment;
    return static_cast<T>(static_cast<double>(splitmix(state) >> 11U) * 0x1p-52 - 1.0);
}

/// A product in double: that of two floats is exact, so it need not be kept from being fused.
JOINABLE_HOST_DEVICE inline double wide_product(float a, float b) {
    return static_cast<double>(a) * static_cast<double>(b);
}
JOINABLE_HOST_DEVICE inline double wide_product(double a, double b) {
    double product;
    JOINABLE_ROUNDED_PRODUCT(product, a, b);
    return product;
}

// A block computes with as many threads as there are lanes. `block.each(count, f)` calls f(i) for all i, in the thread of
// lane i % square_lanes; `block.sum(count, term)` adds term(i) in double: a lane adds its terms in order, and then lanes are
// folded as in device/combined_terms.hpp.

/// The one of the host; of kernels, when the host tests them.
struct HostBlock {
    template <class F>
    JOINABLE_HOST_DEVICE void each(std::size_t count, F const& f) const {
        for (std::size_t i = 0; i < count; ++i) {
            f(i);
        }
    }
    template <class Term>
    JOINABLE_HOST_DEVICE double sum(std::size_t count, Term const& term) const {
        double lanes[square_lanes] = {};
        std::size_t done = 0;
        for (; done + square_lanes <= count; done += square_lanes) {
            for (std::size_t lane = 0; lane < square_lanes; ++lane) {
                lanes[lane] += term(done + lane);
            }
        }
        for (std::size_t i = done; i < count; ++i) {
            lanes[i - done] += term(i);
        }
        for (std::size_t half = square_lanes / 2; half != 0; half /= 2) {
            for (std::size_t lane = 0; lane < half; ++lane) {
                fold_lane(lanes, half, lane);
            }
        }
        return lanes[0];
    }
};

template <class Block, class T>
[[nodiscard]] JOINABLE_HOST_DEVICE double
inner_product(Block const& block, T const* a, T const* b, std::size_t count) {
    return block.sum(count, [=](std::size_t i) { return wide_product(a[i], b[i]); });
}

/// Makes `rank` rows of `count` numbers orthonormal, in order, as PyTorch's _orthogonalize does with an epsilon. Where the
/// rows before span a row, rounding errors are left of it, which need not be orthogonal: so each row is made so twice. Zeros
/// stay zeros.
/// Source: Giraud, Langou and Rozloznik, "The Loss of Orthogonality in the Gram-Schmidt Orthogonalization Process", 2005.
template <class Block, class T>
JOINABLE_HOST_DEVICE void
orthogonalize(Block const& block, T* rows, std::size_t rank, std::size_t count, double epsilon) {
    for (std::size_t r = 0; r < rank; ++r) {
        T* const row = rows + r * count;
        for (int pass = 0; pass < (r == 0 ? 1 : 2); ++pass) {
            for (std::size_t other = 0; other < r; ++other) {
                T const* const before = rows + other * count;
                // With an epsilon a row is shorter than 1, so its part is taken by its own length.
                double const squared = inner_product(block, before, before, count);
                double const part =
                    squared > 0 ? inner_product(block, before, row, count) / squared : 0;
                block.each(count, [=](std::size_t i) {
                    double product;
                    JOINABLE_ROUNDED_PRODUCT(product, static_cast<double>(before[i]), part);
                    row[i] = static_cast<T>(static_cast<double>(row[i]) - product);
                });
            }
            double const length = std::sqrt(inner_product(block, row, row, count)) + epsilon;
            if (length > 0) {
                block.each(count, [=](std::size_t i) {
                    row[i] = static_cast<T>(static_cast<double>(row[i]) / length);
                });
            }
        }
    }
}

/// Element i x columns + j of left x right.
template <class T>
[[nodiscard]] JOINABLE_HOST_DEVICE T
product_element(MatrixSize const& size, T const* left, T const* right, std::size_t element) {
    std::size_t const i = element / size.columns;
    std::size_t const j = element % size.columns;
    T sum = 0;
    for (std::size_t r = 0; r < size.rank; ++r) {
        T product;
        JOINABLE_ROUNDED_PRODUCT(product, right[r * size.columns + j], left[r * size.rows + i]);
        sum += product;
    }
    return sum;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/bucket/compression/detail/low_rank.hpp

/// @file
/// The products of device/step.hpp on the host, by its instruction sets.

namespace joinable { inline namespace v0 { namespace detail {

/// left = matrix x right, on this rank.
template <class T>
JOINABLE_LOOP void
multiply_right(MatrixSize size, T const* matrix, T const* right, T* left) noexcept {
    constexpr std::size_t lanes = 64 / sizeof(T);
    for (std::size_t i = 0; i < size.rows; ++i) {
        T const* const row = matrix + i * size.columns;
        for (std::size_t r = 0; r < size.rank; ++r) {
            T const* const column = right + r * size.columns;
            T sums[lanes] = {};
            std::size_t j = 0;
            for (; j + lanes <= size.columns; j += lanes) {
                for (std::size_t lane = 0; lane < lanes; ++lane) {
                    sums[lane] += row[j + lane] * column[j + lane];
                }
            }
            T sum = 0;
            for (; j < size.columns; ++j) {
                sum += row[j] * column[j];
            }
            for (T const part : sums) {
                sum += part;
            }
            left[r * size.rows + i] = sum;
        }
    }
}

/// right = the transposed matrix x left, on this rank.
template <class T>
JOINABLE_LOOP void
multiply_left(MatrixSize size, T const* matrix, T const* left, T* right) noexcept {
    for (std::size_t k = 0; k < size.rank * size.columns; ++k) {
        right[k] = 0;
    }
    for (std::size_t i = 0; i < size.rows; ++i) {
        T const* const row = matrix + i * size.columns;
        for (std::size_t r = 0; r < size.rank; ++r) {
            T const factor = left[r * size.rows + i];
            T* const sums = right + r * size.columns;
            for (std::size_t j = 0; j < size.columns; ++j) {
                sums[j] += row[j] * factor;
            }
        }
    }
}

/// Row `i` of left x right, one row of right after another, from column `done` on.
template <class T>
struct ProductRow {
    static std::size_t convert(MatrixSize, T const*, T const*, std::size_t, T*) noexcept {
        return 0;
    }
    template <std::size_t bytes>
    [[gnu::always_inline]] static void
    run(Width<bytes>,
        std::size_t done,
        MatrixSize size,
        T const* left,
        T const* right,
        std::size_t i,
        T* to) noexcept {
        constexpr std::size_t lanes = bytes / sizeof(T);
        using Register [[gnu::vector_size(bytes)]] = T;
        auto const* const rows = reinterpret_cast<std::byte const*>(right);
        auto* const results = reinterpret_cast<std::byte*>(to);
        std::size_t j = done;
        for (; j + lanes <= size.columns; j += lanes) {
            Register sum = {};
            for (std::size_t r = 0; r < size.rank; ++r) {
                Register row; // by value it would change the ABI of a function for every processor
                std::memcpy(&row, rows + (r * size.columns + j) * sizeof(T), sizeof row);
                Register product;
                JOINABLE_ROUNDED_PRODUCT(product, row, left[r * size.rows + i]);
                sum += product;
            }
            std::memcpy(results + j * sizeof(T), &sum, sizeof sum);
        }
        for (; j < size.columns; ++j) {
            T sum = 0;
            for (std::size_t r = 0; r < size.rank; ++r) {
                T product;
                JOINABLE_ROUNDED_PRODUCT(
                    product, right[r * size.columns + j], left[r * size.rows + i]
                );
                sum += product;
            }
            store<T>(results + j * sizeof(T), sum);
        }
    }
};
template <class T>
void product_row(
    MatrixSize size,
    T const* left,
    T const* right,
    std::size_t i,
    T* to,
    InstructionSet set = instruction_set()
) noexcept {
    CompiledLoop<ProductRow<T>, MatrixSize, T const*, T const*, std::size_t, T*>::of(set)(
        size, left, right, i, to
    );
}

}}} // namespace joinable::v0::detail

// ---- joinable/bucket/compression/detail/steps.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The host, or one device with kernels.
/// @throws ContractViolation
template <Communicator Comm>
[[nodiscard]] Device& computing_device(Comm& comm, std::string_view name) {
    Device& device = device_of(comm);
    if (device.id().kind == DeviceKind::several) {
        throw ContractViolation{concat(
            name,
            ": PerDevice has several devices, whose kernels it does not run; average by AllReduce, or make a "
            "model for each device"
        )};
    }
    if (!is_on_host(device) && !device.can_compute()) {
        throw ContractViolation{concat(
            name,
            ": the device of these gradients has no kernels; give its use_kernels() what "
            "joinable::cuda_kernels() returns, or use AllReduce"
        )};
    }
    return device;
}

template <class T>
JOINABLE_LOOP void orthogonalize_on_host(DeviceStep const& step) noexcept {
    auto const [rows, columns, rank] = step.size;
    static_cast<void>(rows);
    orthogonalize(HostBlock{}, static_cast<T*>(step.to), rank, columns, step.number);
}
template <class T>
JOINABLE_LOOP void keep_rows_on_host(DeviceStep const& step) noexcept {
    std::size_t const count = step.size.columns;
    for (std::size_t r = 0; r < step.size.rank; ++r) {
        T const* const row = static_cast<T const*>(step.from) + r * count;
        if (inner_product(HostBlock{}, row, row, count) > 0) {
            std::copy_n(row, count, static_cast<T*>(step.to) + r * count);
        }
    }
}
template <class T>
void multiply_on_host(DeviceStep const& step) {
    auto const* const left = static_cast<T const*>(step.left);
    auto const* const right = static_cast<T const*>(step.right);
    auto* const row = static_cast<T*>(step.room);
    std::size_t const columns = step.size.columns;
    std::size_t const row_bytes = columns * joinable::size_of(step.dtype);
    auto* at = static_cast<std::byte*>(step.to);
    for (std::size_t i = 0; i < step.size.rows; ++i, at += row_bytes) {
        if (size_of(step.dtype) == sizeof(T)) {
            product_row(step.size, left, right, i, reinterpret_cast<T*>(at));
        } else {
            product_row(step.size, left, right, i, row);
            cast_from(row, Buffer{at, columns, step.dtype});
        }
    }
}
template <class T>
void subtract_on_host(DeviceStep const& step) {
    auto* const row = static_cast<T*>(step.room);
    std::size_t const columns = step.size.columns;
    auto const* from = static_cast<T const*>(step.from);
    auto* to = static_cast<T*>(step.to);
    for (std::size_t i = 0; i < step.size.rows; ++i, from += columns, to += columns) {
        product_row(
            step.size, static_cast<T const*>(step.left), static_cast<T const*>(step.right), i, row
        );
        for (std::size_t j = 0; j < columns; ++j) {
            to[j] = from[j] - row[j];
        }
    }
}

/// Runs a step in host memory.
inline void compute_on_host(DeviceStep const& step) {
    bool const is_off = step.only_if != nullptr && *step.only_if == 0;
    Buffer const elements{const_cast<void*>(step.from), step.count, step.from_dtype};
    visit_number(step.dtype, [&]<class T>(T) {
        auto const* const from = static_cast<T const*>(step.from);
        auto* const to = static_cast<T*>(step.to);
        switch (step.kind) {
        case StepKind::cast:
            if (step.count == 0) { // of a tensor without elements, which may have no memory
                return;
            }
            visit_floating(step.dtype, [&]<class To>(std::type_identity<To>) {
                double const one = step.number;
                cast_to(
                    step.from == nullptr ? Buffer{const_cast<double*>(&one), 1, DType::f64}
                                         : elements,
                    step.from == nullptr ? 1.0 : step.number,
                    static_cast<To*>(step.to)
                );
            });
            return;
        case StepKind::fill_random:
            for (std::size_t i = 0; i < step.count; ++i) {
                to[i] = random_number<T>(step.seed, i);
            }
            return;
        case StepKind::orthogonalize: orthogonalize_on_host<T>(step); return;
        case StepKind::add: {
            auto const* const other = static_cast<T const*>(step.left);
            cast_to(elements, 1.0, to);
            for (std::size_t i = 0; i < step.count; ++i) {
                to[i] += other[i];
            }
            return;
        }
        case StepKind::multiply_right:
            multiply_right(step.size, from, static_cast<T const*>(step.right), to);
            return;
        case StepKind::multiply_left:
            multiply_left(step.size, from, static_cast<T const*>(step.left), to);
            return;
        case StepKind::multiply:
            if (is_off) {
                std::memset(
                    step.to, 0, step.size.rows * step.size.columns * joinable::size_of(step.dtype)
                );
            } else {
                multiply_on_host<T>(step);
            }
            return;
        case StepKind::note_not_finite:
            if (!are_finite(elements)) {
                *static_cast<double*>(step.to) = 0;
            }
            return;
        case StepKind::keep_rows:
            if (!is_off) {
                keep_rows_on_host<T>(step);
            }
            return;
        case StepKind::subtract:
            if (!is_off) {
                subtract_on_host<T>(step);
            }
            return;
        }
    });
}

/// Runs steps where their memory is: on the host in the order of the list, on a device as Device::compute().
inline void compute(Device& device, std::span<DeviceStep const> steps) {
    if (is_on_host(device)) {
        for (DeviceStep const& step : steps) {
            compute_on_host(step);
        }
    } else {
        device.compute(steps.data(), steps.size());
    }
}
inline void compute(Device& device, DeviceStep const& step) {
    compute(device, std::span{&step, 1});
}

[[nodiscard]] inline DeviceStep cast_step(Buffer from, double factor, Buffer to) {
    return {
        .kind = StepKind::cast,
        .dtype = to.dtype,
        .from_dtype = from.dtype,
        .from = from.data,
        .to = to.data,
        .number = factor,
        .count = to.count
    };
}

}}} // namespace joinable::v0::detail

// ---- joinable/bucket/compression/detail/feedback.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// @throws ContractViolation  the communicator moves memory of a device.
template <class Comm>
void require_host_buckets(Comm& comm, std::string_view name) {
    if (!is_on_host(device_of(comm))) {
        throw ContractViolation{concat(
            name,
            " computes on the host, but these gradients are on a device; use PowerSgd, Fp16Compression or "
            "AllReduce there"
        )};
    }
}

/// The element for a parameter. A list that is too short gets longer.
template <class T>
[[nodiscard]] T& of_parameter(std::vector<T>& list, std::size_t parameter) {
    if (list.size() <= parameter) {
        list.resize(parameter + 1);
    }
    return list[parameter];
}

/// Drops the elements for parameters that have no part any more.
template <class T>
void keep_parameters(std::vector<T>& list, BucketParts parts) {
    std::vector<T> kept(list.size());
    for (BucketPart const& part : parts) {
        if (part.parameter < list.size()) {
            kept[part.parameter] = std::move(list[part.parameter]);
        }
    }
    list = std::move(kept);
}

/// Memory that every run has to itself, because a bucket may travel in several runs.
class RunMemory {
public:
    /// Local. A run needs `of_run` bytes and `of_part(part)` for each part. `make(bytes)` returns an Arena.
    template <class F, class Make>
    void prepare(BucketParts parts, std::size_t of_run, F const& of_part, Make const& make) {
        begins_.clear();
        std::size_t bytes = 0;
        for (BucketPart const& part : parts) {
            of_parameter(begins_, part.parameter) = bytes;
            bytes += (of_run + of_part(part) + alignment - 1) / alignment * alignment;
        }
        if (arena_.bytes() < bytes) {
            arena_ = Arena{}; // not both at a time
            arena_ = make(bytes);
        }
    }
    /// For messages.
    template <Communicator Comm, class F>
    void prepare(Comm& comm, BucketParts parts, std::size_t of_run, F const& of_part) {
        prepare(parts, of_run, of_part, [&](std::size_t bytes) { return make_arena(comm, bytes); });
    }
    template <class T = std::byte>
    [[nodiscard]] T* of(BucketRun const& run) const noexcept {
        return reinterpret_cast<T*>(arena_.data() + begins_[run.parts[0].parameter]);
    }

private:
    static constexpr std::size_t alignment = Arena::default_alignment;

    Arena arena_;
    std::vector<std::size_t> begins_; ///< per parameter
};

/// The residuals: a reduction adds to this rank's next gradients the part of the last ones that it left out. A residual has a
/// number for each element, in the units of the average. Local.
class Feedback {
public:
    /// Keeps the residuals of parameters that it has, and drops those of others. All memory is the device's.
    void prepare(Device& device, BucketParts parts) {
        keep_parameters(residuals_, parts);
        device_ = &device;
        auto const make = [&](std::size_t bytes) {
            return device.allocate(bytes, Arena::default_alignment);
        };
        for (BucketPart const& part : parts) {
            Residual& mine = of_parameter(residuals_, part.parameter);
            if (mine.memory.bytes() != bytes_of(part)) {
                mine.memory = make(bytes_of(part));
            }
            mine.dtype = number_dtype(part.dtype);
            mine.extents = part.extents;
            mine.strides = part.strides;
        }
        inputs_.prepare(parts, 0, bytes_of, make);
    }

    /// Writes the sum of a part's gradient and residual to its place in inputs(). On the host, as all that follows but
    /// scale() and save().
    template <class T>
    T* add(BucketRun const& run, std::size_t k) {
        T* const to = inputs<T>(run, k);
        cast_to(run.part(k), 1.0, to);
        T const* const residual = this->residual<T>(run.parts[k].parameter);
        std::size_t const count = run.parts[k].count;
        for (std::size_t i = 0; i < count; ++i) {
            to[i] += residual[i];
        }
        return to;
    }
    /// The numbers of a run, from part `k` on.
    [[nodiscard]] std::byte* inputs(BucketRun const& run, std::size_t k) const noexcept {
        std::size_t const begin = run.parts[k].offset - run.parts[0].offset;
        return inputs_.of(run) + begin * number_size(run.buffer.dtype);
    }
    template <class T>
    [[nodiscard]] T* inputs(BucketRun const& run, std::size_t k = 0) const noexcept {
        return reinterpret_cast<T*>(inputs(run, k));
    }
    template <class T = std::byte>
    [[nodiscard]] T* residual(std::size_t parameter) const noexcept {
        return reinterpret_cast<T*>(residuals_[parameter].memory.data());
    }
    /// Makes what is left in the inputs of a part its residual.
    template <class T>
    void keep(BucketRun const& run, std::size_t k) {
        BucketPart const& part = run.parts[k];
        std::copy_n(inputs<T>(run, k), part.count, residual<T>(part.parameter));
    }
    /// The same for all parts of a run, provided that its averages are finite.
    template <class T>
    void keep_if_finite(BucketRun const& run) {
        if (are_finite(run.buffer)) {
            for (std::size_t k = 0; k < run.parts.size(); ++k) {
                keep<T>(run, k);
            }
        }
    }
    /// Multiplies all residuals.
    void scale(double factor) {
        for (Residual const& mine : residuals_) {
            std::size_t const count = mine.memory.bytes() / size_of(mine.dtype);
            Buffer const numbers{mine.memory.data(), count, mine.dtype};
            compute(*device_, cast_step(numbers, factor, numbers));
        }
    }
    /// Lists the residuals of parameters for which `is_kept(parameter)`.
    template <class F>
    void save(ReductionState& state, F const& is_kept) const {
        for (std::size_t parameter = 0; parameter < residuals_.size(); ++parameter) {
            auto const& [memory, dtype, extents, strides] = residuals_[parameter];
            if (memory.bytes() != 0 && is_kept(parameter)) {
                state.tensors.push_back(
                    {"residual",
                     parameter,
                     memory.data(),
                     dtype,
                     extents,
                     strides,
                     false,
                     device_->id()}
                );
            }
        }
    }
    void save(ReductionState& state) const {
        save(state, [](std::size_t) { return true; });
    }

private:
    static std::size_t bytes_of(BucketPart const& part) noexcept {
        return part.count * number_size(part.dtype);
    }

    struct Residual {
        Arena memory;
        DType dtype = DType::f32;
        Shape extents;
        Shape strides;
    };
    Device* device_ = nullptr;
    std::vector<Residual> residuals_; ///< per parameter
    RunMemory inputs_;
};

/// The gradients of a round to which no rank contributed.
inline void write_zeros(Buffer buffer) {
    std::memset(buffer.data, 0, buffer.bytes());
}

}}} // namespace joinable::v0::detail

// ---- joinable/bucket/compression/cast_to.hpp

namespace joinable { inline namespace v0 {

namespace detail {

inline constexpr std::array<std::string_view, 4> cast_names{
    "CastTo<f16>", "CastTo<bf16>", "CastTo<f32>", "CastTo<f64>"
};

} // namespace detail

/// Sends gradients as elements of another type, by the reduction `Next`: as f16 or bf16 they need half of the bytes of
/// f32, and 16-bit gradients as f32 are summed without rounding each sum. Each gradient is multiplied by the factor in
/// f32, or in f64 if one of the types is that, and rounded; the average is rounded again when it comes back. What rounding
/// loses is not kept. A number of f64 is rounded to f32 before it is rounded to f16 or bf16, so one that is within 2^-24 of
/// itself of the middle between two numbers of 16 bits may become the farther one. Allocates buckets of the other type
/// once. Buckets of a device are cast there, to the host's bits, by kernels (CudaDevice::use_kernels); without them the
/// model is refused when it is made.
/// Stream order: casts run on the device's stream, in order with the collectives; no call waits for them.
template <DType To, class Next = AllReduce>
struct CastTo {
    static_assert(is_floating_point(To), "CastTo: expected DType::f16, bf16, f32 or f64");
    static_assert( // one that keeps feedback sends numbers of f32
        !is_half_precision(To) || !requires(Next& next) { next.feedback; },
        "CastTo: PowerSgd, TopK and Int8Compression send the same bytes whatever a bucket holds; give them alone"
    );
    static_assert(
        detail::sends_runs<Next>,
        "CastTo: NoReduction sends nothing, so there is nothing to cast; give NoReduction alone"
    );

    static constexpr std::string_view name = detail::cast_names[static_cast<std::size_t>(To)];
    static constexpr bool delivers = Next::delivers;
    static constexpr bool rounds_factors = false; ///< it multiplies before the sum, in f32 or f64
    static constexpr std::size_t steps = detail::steps_of<Next>;

    Next next{};
    detail::RunMemory memory{};
    std::vector<BucketPart> parts{};     ///< of the other type
    std::vector<std::size_t> place_of{}; ///< per parameter: in parts
    Device* device = nullptr;            ///< of the buckets

    template <Communicator Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return true;
    }
    template <Communicator Comm>
    void prepare(Comm& comm, BucketParts given) {
        device = &detail::computing_device(comm, name);
        memory.prepare(comm, given, 0, [](BucketPart const& part) {
            return part.dtype == To ? 0 : part.count * size_of(To);
        });
        parts.assign(given.begin(), given.end());
        for (std::size_t k = 0; k < parts.size(); ++k) {
            detail::of_parameter(place_of, parts[k].parameter) = k;
            parts[k].dtype = To;
        }
        if constexpr (detail::prepares_runs<Next, Comm>) {
            next.prepare(comm, BucketParts{parts.data(), parts.size()});
        }
    }
    template <Communicator Comm>
    [[nodiscard]] auto start(Comm& comm, BucketRun const& run, double factor, bool contributes) {
        BucketRun const other = cast(run);
        detail::compute(*device, detail::cast_step(run.buffer, factor, other.buffer));
        return next.start(comm, other, 1.0, contributes);
    }
    template <Communicator Comm>
        requires(steps > 1)
    [[nodiscard]] auto advance(Comm& comm, BucketRun const& run, std::size_t step) {
        return next.advance(comm, cast(run), step);
    }
    template <Communicator Comm>
    void finish(Comm& comm, BucketRun const& run) {
        BucketRun const other = cast(run);
        next.finish(comm, other);
        if (other.buffer.data != run.buffer.data) {
            detail::compute(*device, detail::cast_step(other.buffer, 1.0, run.buffer));
        }
    }
    void end_iteration() {
        if constexpr (requires { next.end_iteration(); }) {
            next.end_iteration();
        }
    }
    void agree_on(AgreementList& list) const { detail::agree_on_reduction(list, next); }
    void save(ReductionState& state)
        requires detail::saves_state<Next>
    {
        next.save(state);
    }
    void load(ReductionState const& state)
        requires detail::saves_state<Next>
    {
        next.load(state);
    }

private:
    [[nodiscard]] BucketRun cast(BucketRun const& run) const {
        std::size_t const first = place_of[run.parts[0].parameter];
        void* const data = run.buffer.dtype == To ? run.buffer.data : memory.of(run);
        return {run.bucket, {data, run.buffer.count, To}, {parts.data() + first, run.parts.size()}};
    }
};

/// Sends f16, which PyTorch's fp16_compress_hook does: f32 gradients need half of the bytes. Numbers of more than 65,504
/// become infinite, and those below 6e-8 zero.
template <class Next = AllReduce>
using Fp16Compression = CastTo<DType::f16, Next>;
/// Sends bf16: half of the bytes of f32, its range, and 8 bits of its precision.
template <class Next = AllReduce>
using Bf16Compression = CastTo<DType::bf16, Next>;

}} // namespace joinable::v0

// ---- joinable/bucket/compression/detail/blocks.hpp

/// @file
/// Numbers as bytes: first the scale of each block, an f32, then an i8 for each number.

namespace joinable { inline namespace v0 { namespace detail {

inline constexpr std::size_t numbers_of_block = 256;

[[nodiscard]] constexpr std::size_t blocks_of(std::size_t count) noexcept {
    return (count + numbers_of_block - 1) / numbers_of_block;
}
[[nodiscard]] constexpr std::size_t bytes_of_blocks(std::size_t count) noexcept {
    return blocks_of(count) * sizeof(float) + count;
}

/// Writes numbers as bytes, and leaves of them what that loses. A block in which one is not finite becomes NaN.
template <class T>
JOINABLE_LOOP void write_blocks(T* numbers, std::size_t count, std::byte* to) noexcept {
    std::byte* bytes = to + blocks_of(count) * sizeof(float);
    for (std::size_t begin = 0; begin < count; begin += numbers_of_block) {
        T* const block = numbers + begin;
        std::size_t const size = (std::min)(numbers_of_block, count - begin);
        T most = 0;
        bool are_finite = true;
        for (std::size_t i = 0; i < size; ++i) {
            T const magnitude = block[i] < 0 ? -block[i] : block[i];
            most = magnitude > most ? magnitude : most;
            are_finite = is_finite(block[i]) && are_finite;
        }
        float const scale =
            are_finite ? static_cast<float>(most / 127) : std::numeric_limits<float>::quiet_NaN();
        std::memcpy(to, &scale, sizeof scale);
        to += sizeof scale;
        bool const is_zero = !(scale > 0); // or NaN
        T const divisor = is_zero ? T{1} : static_cast<T>(scale);
        for (std::size_t i = 0; i < size; ++i) {
            T const level = is_zero ? T{0} : block[i] / divisor;
            T const rounded =
                (std::min)((std::max)(level, T{-127}), T{127}) + (level < 0 ? T{-0.5} : T{0.5});
            auto const byte = static_cast<std::int8_t>(static_cast<std::int32_t>(rounded));
            std::memcpy(bytes + i, &byte, 1);
            block[i] -= static_cast<T>(byte) * static_cast<T>(scale);
        }
        bytes += size;
    }
}

/// Calls f(i, number) for each number.
template <class T, class F>
void read_blocks(std::byte const* from, std::size_t count, F const& f) {
    std::byte const* bytes = from + blocks_of(count) * sizeof(float);
    for (std::size_t begin = 0; begin < count; begin += numbers_of_block) {
        float scale;
        std::memcpy(&scale, from, sizeof scale);
        from += sizeof scale;
        std::size_t const end = (std::min)(begin + numbers_of_block, count);
        for (std::size_t i = begin; i < end; ++i) {
            std::int8_t byte;
            std::memcpy(&byte, bytes + i, 1);
            f(i, static_cast<T>(byte) * static_cast<T>(scale));
        }
    }
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/any_work.hpp

#ifndef JOINABLE_COMMUNICATOR_ANY_WORK_HPP_PART_1
#define JOINABLE_COMMUNICATOR_ANY_WORK_HPP_PART_1

namespace joinable { inline namespace v0 {

/// A collective of any communicator. Works of up to `capacity` bytes, such as those of all transports here, lie
/// within; larger ones on the heap.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] AnyWork {
public:
    static constexpr std::size_t capacity = 112;

    template <class W>
        requires(!std::same_as<std::remove_cvref_t<W>, AnyWork> && Work<std::remove_cvref_t<W>>)
    explicit AnyWork(W&& work) {
        using Given = std::remove_cvref_t<W>;
        if constexpr (fits<Held<Given>>) {
            work_ = ::new (static_cast<void*>(&storage_)) Held<Given>{std::forward<W>(work)};
        } else {
            work_ = ::new (static_cast<void*>(&storage_))
                Held<OnHeap<Given>>{OnHeap<Given>{std::make_unique<Given>(std::forward<W>(work))}};
        }
    }
    AnyWork(AnyWork&& other) noexcept : work_{other.work_->move_to(&storage_)} {}
    AnyWork& operator=(AnyWork&&) = delete;
    ~AnyWork() { work_->~Interface(); }

    /// @throws what the communicator's works throw.
    void wait() { work_->wait(); }
    /// Makes progress; true once wait() would return at once.
    [[nodiscard]] bool test() { return work_->test(); }
    /// test() without the deadline, for a rank that finally waits.
    [[nodiscard]] bool progress() { return work_->progress(); }

private:
    struct Interface {
        Interface() = default;
        Interface(Interface&&) noexcept = default;
        virtual ~Interface() = default;
        virtual Interface* move_to(void* place) noexcept = 0;
        virtual void wait() = 0;
        virtual bool test() = 0;
        virtual bool progress() = 0;
    };
    template <class W>
    struct Held final : Interface {
        explicit Held(W from) : work{std::move(from)} {}
        Interface* move_to(void* place) noexcept override {
            return ::new (place) Held{std::move(*this)};
        }
        void wait() override { work.wait(); }
        bool test() override { return work.test(); }
        bool progress() override { return detail::make_progress(work); }
        W work;
    };
    template <class W>
    struct OnHeap {
        void wait() { work->wait(); }
        [[nodiscard]] bool test() { return work->test(); }
        [[nodiscard]] bool progress() { return detail::make_progress(*work); }
        std::unique_ptr<W> work;
    };
    template <class H>
    static constexpr bool fits = sizeof(H) <= capacity && alignof(H) <= alignof(std::max_align_t) &&
                                 std::is_nothrow_move_constructible_v<H>;

    alignas(std::max_align_t) std::byte storage_[capacity];
    Interface* work_; ///< in storage_; after a move it holds a work that was moved from
};

}} // namespace joinable::v0

#endif

// ---- joinable/device/scratch.hpp

#ifndef JOINABLE_DEVICE_SCRATCH_HPP_PART_1
#define JOINABLE_DEVICE_SCRATCH_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// Memory of a device for a while, such as for a tensor whose elements have to be rearranged. It grows
/// on demand.
class Scratch {
public:
    explicit Scratch(Device& device) noexcept : device_{device} {}

    [[nodiscard]] std::byte* data(std::size_t bytes) {
        if (arena_.bytes() < bytes) {
            if (is_on_host(device_)) {
                arena_ = Arena{};
            } else { // freeing it would wait for the device
                bytes = (std::max)(bytes, 2 * arena_.bytes());
                former_.push_back(std::move(arena_));
            }
            arena_ = device_.allocate(bytes, Arena::default_alignment);
        }
        return arena_.data();
    }

private:
    Device& device_;
    Arena arena_;
    std::vector<Arena> former_;
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/bucket/compression/int8.hpp

namespace joinable { inline namespace v0 {

/// Sends one byte for each element, and an f32 for each block of 256: the largest absolute value of the block is 127. Each
/// rank gets one part of the bucket from all others, adds it up, and sends the sum in the same form, so an element needs 2
/// bytes however many ranks there are. What rounding loses is added to the next gradients: by each rank what its own lost,
/// and by the rank of a part what the sum of that lost. The averages delivered plus the residuals of all ranks are the sum
/// of the gradients, but for rounding. A bucket whose averages are not finite delivers them and leaves its residuals; so
/// does a round without contributors, which delivers zeros. A block with a number that is not finite, or above 4e40,
/// becomes NaN. For buckets in host memory: for others the model is refused when it is made.
/// Complexity: linear in the elements. Memory: two numbers and two bytes for each, and 284 bytes for each parameter and
/// rank.
struct Int8Compression {
    static constexpr std::string_view name = "Int8Compression";
    static constexpr bool delivers = true;
    static constexpr std::size_t steps = 2;

    detail::Feedback feedback{};
    detail::RunMemory outgoing{};
    detail::RunMemory incoming{};
    /// The bytes that a run sends to each rank, and gets from it, by its first parameter.
    std::vector<std::vector<std::size_t>> sent{};
    std::vector<std::vector<std::size_t>> received{};
    detail::Scratch sums{detail::the_host()}; ///< of this rank's part of a run
    std::size_t own_rank = 0;
    std::size_t ranks = 0;

    template <Communicator Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return false;
    }
    /// @throws ContractViolation  buckets are on a device.
    template <Communicator Comm>
    void prepare(Comm& comm, BucketParts parts) {
        static_assert(
            AllToAlls<Comm> && AllGathers<Comm>,
            "Int8Compression: this communicator has no all_to_all or no all_gather; give it both, or use "
            "Bf16Compression"
        );
        detail::require_host_buckets(comm, name);
        own_rank = static_cast<std::size_t>(comm.rank());
        ranks = static_cast<std::size_t>(comm.size());
        feedback.prepare(detail::the_host(), parts);
        auto const bytes = [](BucketPart const& part) {
            return detail::bytes_of_blocks(part.count);
        };
        outgoing.prepare(comm, parts, ranks * sizeof(Flag), bytes);
        // The parts of ranks differ by one block.
        std::size_t const more = sizeof(Flag) + detail::bytes_of_blocks(detail::numbers_of_block);
        incoming.prepare(comm, parts, ranks * more, bytes);
        prepare_counts(parts);
    }
    template <Communicator Comm>
    [[nodiscard]] AnyWork
    start(Comm& comm, BucketRun const& run, double /*factor*/, bool contributes) {
        std::byte* const message = outgoing.of(run);
        detail::visit_number(run.buffer.dtype, [&]<class T>(T) {
            write_parts<T>(run, contributes, message);
        });
        std::size_t const first = run.parts[0].parameter;
        std::size_t expected = 0;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            sent[first][rank] = bytes_of(run, rank);
            expected += received[first][rank] = bytes_of(run, own_rank);
        }
        return AnyWork{comm.all_to_all(
            ConstBuffer{message, total_of(run), DType::u8},
            Buffer{incoming.of(run), expected, DType::u8},
            std::span<std::size_t const>{sent[first]},
            std::span<std::size_t const>{received[first]}
        )};
    }
    template <Communicator Comm>
    [[nodiscard]] AnyWork advance(Comm& comm, BucketRun const& run, std::size_t /*step*/) {
        std::byte* const message = outgoing.of(run);
        detail::visit_number(run.buffer.dtype, [&]<class T>(T) { add_parts<T>(run, message); });
        std::size_t const first = run.parts[0].parameter;
        return AnyWork{comm.all_gather(
            ConstBuffer{message, bytes_of(run, own_rank), DType::u8},
            Buffer{incoming.of(run), total_of(run), DType::u8},
            std::span<std::size_t const>{sent[first]}
        )};
    }
    template <Communicator Comm>
    void finish(Comm&, BucketRun const& run) {
        detail::visit_number(run.buffer.dtype, [&]<class T>(T) { deliver<T>(run); });
    }

    /// Multiplies what this rank keeps, after the scale of the loss was multiplied by `factor`. Between rounds. Local.
    void scale_residuals(double factor) { feedback.scale(factor); }

    /// The residuals, for a Checkpoint.
    void save(ReductionState& state) const { feedback.save(state); }
    static void load(ReductionState const& /*state*/) noexcept {}

private:
    using Flag = std::uint32_t; ///< how many ranks contribute; before each part

    /// A rank's part of a run, in elements.
    struct Part {
        std::size_t begin;
        std::size_t count;
    };
    [[nodiscard]] Part part_of(BucketRun const& run, std::size_t rank) const noexcept {
        std::size_t const count = run.buffer.count;
        std::size_t const blocks = detail::blocks_of(count);
        auto const begin_of = [&](std::size_t of) {
            std::size_t const block = blocks / ranks * of + (std::min)(of, blocks % ranks);
            return (std::min)(block * detail::numbers_of_block, count);
        };
        return {begin_of(rank), begin_of(rank + 1) - begin_of(rank)};
    }
    [[nodiscard]] std::size_t bytes_of(BucketRun const& run, std::size_t rank) const noexcept {
        return sizeof(Flag) + detail::bytes_of_blocks(part_of(run, rank).count);
    }
    [[nodiscard]] std::size_t total_of(BucketRun const& run) const noexcept {
        return ranks * sizeof(Flag) + detail::bytes_of_blocks(run.buffer.count);
    }
    void prepare_counts(BucketParts parts) {
        std::size_t parameters = 0;
        std::size_t longest = 0; // of a bucket
        for (BucketPart const& part : parts) {
            parameters = (std::max)(parameters, part.parameter + 1);
            longest = (std::max)(longest, part.offset + part.count);
        }
        sent.assign(parameters, std::vector<std::size_t>(ranks));
        received.assign(parameters, std::vector<std::size_t>(ranks));
        static_cast<void>(sums.data( // rounds allocate nothing
            (longest / ranks + 2 * detail::numbers_of_block) * sizeof(double)
        ));
    }

    /// Step 0: a part for each rank. What rounding loses stays in the inputs.
    template <class T>
    void write_parts(BucketRun const& run, bool contributes, std::byte* message) {
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            feedback.add<T>(run, k);
        }
        T* const inputs = feedback.inputs<T>(run);
        Flag const flag = contributes ? 1 : 0;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            auto const [begin, count] = part_of(run, rank);
            std::memcpy(message, &flag, sizeof flag);
            detail::write_blocks(inputs + begin, count, message + sizeof flag);
            message += bytes_of(run, rank);
        }
    }
    /// Step 1: the sum of this rank's part, in rank order.
    template <class T>
    void add_parts(BucketRun const& run, std::byte* message) {
        auto const [begin, count] = part_of(run, own_rank);
        T* const sum = reinterpret_cast<T*>(sums.data(count * sizeof(T)));
        std::fill_n(sum, count, T{0});
        Flag contributors = 0;
        std::byte const* part = incoming.of(run);
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            contributors += flag_of(part);
            detail::read_blocks<T>(part + sizeof(Flag), count, [&](std::size_t i, T number) {
                sum[i] += number;
            });
            part += bytes_of(run, own_rank);
        }
        std::memcpy(message, &contributors, sizeof contributors);
        detail::write_blocks(sum, count, message + sizeof contributors);
        T* const lost = feedback.inputs<T>(run) + begin;
        for (std::size_t i = 0; i < count; ++i) {
            lost[i] += sum[i];
        }
    }
    template <class T>
    void deliver(BucketRun const& run) {
        std::byte const* part = incoming.of(run);
        if (flag_of(part) == 0) {
            detail::write_zeros(run.buffer);
            return;
        }
        auto* const to = static_cast<std::byte*>(run.buffer.data);
        detail::visit_floating(run.buffer.dtype, [&]<class E>(std::type_identity<E>) {
            for (std::size_t rank = 0; rank < ranks; ++rank) {
                auto const [begin, count] = part_of(run, rank);
                std::byte* const first = to + begin * sizeof(E);
                detail::read_blocks<T>(part + sizeof(Flag), count, [&](std::size_t i, T number) {
                    if constexpr (std::same_as<E, double>) {
                        detail::store<E>(first + i * sizeof(E), static_cast<E>(number));
                    } else {
                        detail::store<E>(
                            first + i * sizeof(E), static_cast<E>(static_cast<float>(number))
                        );
                    }
                });
                part += bytes_of(run, rank);
            }
        });
        feedback.keep_if_finite<T>(run);
    }
    [[nodiscard]] static Flag flag_of(std::byte const* part) noexcept {
        Flag flag;
        std::memcpy(&flag, part, sizeof flag);
        return flag;
    }
};

}} // namespace joinable::v0

// ---- joinable/bucket/compression/no_reduction.hpp

namespace joinable { inline namespace v0 {

/// Sends nothing: each rank keeps its own gradients, bit for bit, and steps by them. For local SGD, beside a
/// PeriodicAverage. Passes, buffers, guards and timelines are those of any model, and no bucket is told to a timeline,
/// because none travels. No map of used parameters and no ready order is sent either: `find_unused` and `static_graph`
/// concern the marks of each rank alone. Buckets have memory only with `gradient_as_bucket_view`.
///
/// Joined ranks, and those that skip(), keep what their gradients hold. A Step in such a guard runs on active ranks only.
///
/// There is no average, so what defines one is refused: weights, GradientKind::sum, the keyword
/// divide_by_initial_world_size, sharded optimizers; and what needs equal values, sync_at_end and verify_replicas.
struct NoReduction {
    static constexpr std::string_view name = "NoReduction";
    static constexpr bool delivers = false;
    static constexpr bool sends = false;

    /// So that no factor reaches a gradient.
    template <class Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return true;
    }
    template <class Comm>
    [[nodiscard]] static CompletedWork
    start(Comm&, BucketRun const&, double /*factor*/, bool /*contributes*/) noexcept {
        return {};
    }
    template <class Comm>
    static void finish(Comm&, BucketRun const&) noexcept {}
};

}} // namespace joinable::v0

// ---- joinable/bucket/compression/power_sgd.hpp

namespace joinable { inline namespace v0 {

namespace detail {

/// The matrices that PowerSgd keeps for a parameter.
struct LowRankFactors {
    MatrixSize size;          ///< of rank 0: it travels whole
    DType dtype = DType::f32; ///< of the matrices
    Arena right;              ///< of the last round, and of the next one: the same on all ranks
    Arena left;               ///< of this round, orthonormal: the same on all ranks
    Arena own_right;          ///< this rank's summand; before, the orthonormal matrix of this round
    Arena chunks;             ///< sums of chunks of rows, on a device
    bool is_started = false;
};

} // namespace detail

/// Sends each gradient as the product of two thin matrices: a gradient of n x m elements needs (n + m) x rank numbers, in
/// two sums. What the product leaves out is added to the rank's next gradient. Source: Vogels, Karimireddy and Jaggi,
/// "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019; the sums, and so the averages,
/// are those of PyTorch's powerSGD_hook. The rows of the matrix lie along the dimension of the largest stride.
/// Dimensions of extent 1 do not count. Gradients of one dimension, and those that would not get smaller by
/// `min_compression_rate`, travel whole, with the first sum. The averages delivered plus the residuals of all ranks are the
/// sum of the gradients, but for rounding. A bucket whose averages are not finite delivers them and leaves its residuals;
/// so does a round without contributors, which delivers zeros.
/// Buckets of a device are computed there by kernels (CudaDevice::use_kernels); without them the model is refused when it is
/// made. All memory is allocated by then.
/// Stream order: all of it runs on the device's stream, in order with the collectives; no call waits for it. Averages
/// differ from the host's by how this rank's products with its gradient are summed: in double. All else has the host's bits.
/// Complexity: 4 x PowerSgd::rank products for each element. Memory: two numbers for each element, and the thin matrices.
struct PowerSgd {
    static constexpr std::string_view name = "PowerSgd";
    static constexpr bool delivers = true;
    static constexpr std::size_t steps = 2;

    std::size_t rank = 1; ///< at least 1; at most as much as a matrix has
    /// Rounds that are summed whole before, shadowed ones, too.
    std::uint64_t start_iteration = 1000;
    double min_compression_rate = 2; ///< more than 0
    bool warm_start = true;          ///< each round begins with the result of the last one
    bool error_feedback = true;      ///< else what is left out is lost
    double epsilon = 1e-8; ///< added to the lengths by which vectors are divided; at least 0
    std::uint64_t seed = 0;

    std::uint64_t rounds = 0; ///< that were reduced
    detail::Feedback feedback{};
    detail::RunMemory messages{};
    /// Two numbers of f64 for a run: how many ranks contribute, and the same if the averages are finite, else 0.
    detail::RunMemory verdicts{};
    std::vector<detail::LowRankFactors> factors{}; ///< per parameter
    detail::Scratch row{detail::the_host()};       ///< of a product, on the host
    Device* device = nullptr;                      ///< of the buckets
    std::vector<detail::DeviceStep> listed{};      ///< what is computed next

    template <Communicator Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return false;
    }
    /// @throws ContractViolation  a setting is out of range, or buckets are on a device without kernels.
    template <Communicator Comm>
    void prepare(Comm& comm, BucketParts parts) {
        device = &detail::computing_device(comm, name);
        require_settings();
        feedback.prepare(*device, parts);
        detail::keep_parameters(factors, parts);
        for (BucketPart const& part : parts) {
            prepare_factors(part);
        }
        listed.reserve(6 * parts.size() + 2); // rounds allocate nothing
        verdicts.prepare(
            parts,
            2 * sizeof(double),
            [](BucketPart const&) { return std::size_t{0}; },
            [&](std::size_t bytes) { return allocate(bytes); }
        );
        messages.prepare(comm, parts, sizeof(double), [&](BucketPart const& part) {
            return numbers_of(part) * detail::number_size(part.dtype);
        });
    }
    template <Communicator Comm>
    [[nodiscard]] AnyWork
    start(Comm& comm, BucketRun const& run, double /*factor*/, bool contributes) {
        if (!is_compressing()) {
            return AnyWork{comm.all_reduce(run.buffer, ReduceOp::sum)};
        }
        Buffer const message{
            messages.of(run), write_lefts(run, contributes), detail::number_dtype(run.buffer.dtype)
        };
        return AnyWork{comm.all_reduce(message, ReduceOp::sum)};
    }
    template <Communicator Comm>
    [[nodiscard]] AnyWork advance(Comm& comm, BucketRun const& run, std::size_t /*step*/) {
        std::size_t const count = is_compressing() ? write_rights(run) : 0;
        Buffer const message{messages.of(run), count, detail::number_dtype(run.buffer.dtype)};
        return count == 0 ? AnyWork{CompletedWork{}}
                          : AnyWork{comm.all_reduce(message, ReduceOp::sum)};
    }
    template <Communicator Comm>
    void finish(Comm&, BucketRun const& run) {
        if (is_compressing()) {
            deliver(run);
        }
    }
    void end_iteration() noexcept { ++rounds; }
    void agree_on(AgreementList& list) const {
        list.add("PowerSgd::rank", rank);
        list.add("PowerSgd::start_iteration", start_iteration);
        list.add("PowerSgd::min_compression_rate", min_compression_rate);
        list.add("PowerSgd::warm_start", warm_start);
        list.add("PowerSgd::error_feedback", error_feedback);
        list.add("PowerSgd::epsilon", epsilon);
        list.add("PowerSgd::seed", seed);
        list.add("PowerSgd::rounds", rounds);
    }

    /// Multiplies what this rank keeps, after the scale of the loss was multiplied by `factor`. Between rounds. Local; on a
    /// device in the order of its stream.
    void scale_residuals(double factor) { feedback.scale(factor); }

    /// The residuals, the right matrices and the count of rounds, for a Checkpoint.
    void save(ReductionState& state) {
        state.counts.push_back({"PowerSgd::rounds", &rounds});
        if (error_feedback) {
            feedback.save(state, [&](std::size_t i) { return factors[i].size.rank != 0; });
        }
        for (std::size_t i = 0; warm_start && i < factors.size(); ++i) {
            Factors const& mine = factors[i];
            auto const [rows, columns, most] = mine.size;
            if (most != 0) {
                Shape const extents{most, columns};
                Shape const strides = row_major_strides(extents);
                state.tensors.push_back(
                    {"warm_start",
                     i,
                     mine.right.data(),
                     mine.dtype,
                     extents,
                     strides,
                     true,
                     device->id()}
                );
            }
        }
    }
    /// Zeros are of a matrix that no round has begun with.
    void load(ReductionState const& /*state*/) {
        for (Factors& mine : factors) {
            if (mine.right.bytes() == 0) {
                continue;
            }
            Arena const bytes = device->allocate_staging(mine.right.bytes());
            device->download(mine.right.data(), bytes.data(), bytes.bytes());
            mine.is_started =
                std::any_of(bytes.data(), bytes.data() + bytes.bytes(), [](std::byte byte) {
                    return byte != std::byte{0};
                });
        }
    }

private:
    using Factors = detail::LowRankFactors;

    void require_settings() const {
        auto const refuse = [](std::string_view option, auto value, std::string_view wanted) {
            throw ContractViolation{
                detail::concat("PowerSgd: ", option, " is ", value, "; give ", wanted)
            };
        };
        if (rank == 0) {
            refuse("rank", rank, "1 or more");
        }
        if (!(min_compression_rate > 0) || !detail::is_finite(min_compression_rate)) {
            refuse("min_compression_rate", min_compression_rate, "a number above 0");
        }
        if (!(epsilon >= 0) || !detail::is_finite(epsilon)) {
            refuse("epsilon", epsilon, "0 or more");
        }
    }
    [[nodiscard]] bool is_compressing() const noexcept { return rounds >= start_iteration; }

    [[nodiscard]] detail::MatrixSize size_of(BucketPart const& part) const {
        // Rows lie along the dimension of the largest stride; one of extent 1 has no stride.
        std::size_t rows = 1;
        std::size_t largest = 0;
        std::size_t dimensions = 0;
        for (std::size_t d = 0; d < part.extents.size(); ++d) {
            if (part.extents[d] == 1) {
                continue;
            }
            ++dimensions;
            if (part.strides[d] > largest) {
                largest = part.strides[d];
                rows = part.extents[d];
            }
        }
        if (dimensions < 2 || part.count == 0) {
            return {};
        }
        std::size_t const columns = part.count / rows;
        std::size_t const most = (std::min)({rank, rows, columns});
        double const sent = static_cast<double>(rows + columns) * static_cast<double>(most);
        bool const pays = sent * min_compression_rate < static_cast<double>(part.count);
        return pays ? detail::MatrixSize{rows, columns, most} : detail::MatrixSize{};
    }
    void prepare_factors(BucketPart const& part) {
        Factors& mine = detail::of_parameter(factors, part.parameter);
        auto const [rows, columns, most] = mine.size = size_of(part);
        mine.dtype = detail::number_dtype(part.dtype);
        std::size_t const size = detail::number_size(part.dtype);
        if (mine.right.bytes() != most * columns * size ||
            mine.left.bytes() != most * rows * size) {
            mine.right = allocate(most * columns * size);
            mine.own_right = allocate(most * columns * size);
            mine.left = allocate(most * rows * size);
            mine.is_started = false;
            if (!detail::is_on_host(*device)) {
                mine.chunks = allocate(detail::numbers_of_chunks(mine.size) * size);
            }
        }
        if (detail::is_on_host(*device)) {
            static_cast<void>(row.data(columns * size));
        }
    }
    [[nodiscard]] Arena allocate(std::size_t bytes) const {
        return device->allocate(bytes, Arena::default_alignment);
    }
    /// The most that a sum has of a parameter.
    [[nodiscard]] std::size_t numbers_of(BucketPart const& part) const noexcept {
        auto const [rows, columns, most] = factors[part.parameter].size;
        return most == 0 ? part.count : most * (std::max)(rows, columns);
    }

    using Kind = detail::StepKind;
    using Step = detail::DeviceStep;

    /// Where numbers lie in a message, one list after another.
    struct Message {
        std::byte* data;
        DType dtype;
        std::size_t count = 0;

        [[nodiscard]] Buffer next(std::size_t numbers) {
            std::size_t const begin = std::exchange(count, count + numbers);
            return {data + begin * joinable::size_of(dtype), numbers, dtype};
        }
    };
    [[nodiscard]] Message message_of(BucketRun const& run) const {
        return {messages.of(run), detail::number_dtype(run.buffer.dtype)};
    }
    static Buffer numbers(Factors const& mine, Arena const& arena) {
        return {arena.data(), arena.bytes() / joinable::size_of(mine.dtype), mine.dtype};
    }
    void compute_listed() {
        if (!listed.empty()) {
            detail::compute(*device, listed);
            listed.clear();
        }
    }

    /// Step 0: how many ranks contribute, what travels whole, and the left matrices. Returns the number of numbers.
    std::size_t write_lefts(BucketRun const& run, bool contributes) {
        listed.clear(); // those of a start that failed
        Message message = message_of(run);
        listed.push_back(detail::cast_step({}, contributes ? 1 : 0, message.next(1)));
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            BucketPart const& part = run.parts[k];
            Factors const& mine = factors[part.parameter];
            if (mine.size.rank == 0) {
                listed.push_back(detail::cast_step(run.part(k), 1.0, message.next(part.count)));
                continue;
            }
            Buffer const right = numbers(mine, mine.right);
            Buffer const direction = numbers(mine, mine.own_right); // until step 1
            if (!mine.is_started || !warm_start) {
                auto const number = detail::Hash{}.add(seed).add(part.parameter).add(rounds);
                listed.push_back(
                    {.kind = Kind::fill_random,
                     .dtype = mine.dtype,
                     .to = right.data,
                     .seed = number.value(),
                     .count = right.count}
                );
            }
            // If the averages are not finite, the next round begins with the same matrix.
            listed.push_back(detail::cast_step(right, 1.0, direction));
            listed.push_back(orthogonalize(mine, mine.own_right));
            std::byte* const inputs = feedback.inputs(run, k);
            listed.push_back(
                {.kind = Kind::add,
                 .dtype = mine.dtype,
                 .from_dtype = part.dtype,
                 .from = run.part(k).data,
                 .to = inputs,
                 .left = feedback.residual(part.parameter),
                 .count = part.count}
            );
            listed.push_back(
                {.kind = Kind::multiply_right,
                 .dtype = mine.dtype,
                 .from = inputs,
                 .to = message.next(mine.size.rank * mine.size.rows).data,
                 .right = direction.data,
                 .size = mine.size}
            );
        }
        compute_listed();
        for_compressed(run, [&](std::size_t, Factors& mine) { mine.is_started = true; });
        return message.count;
    }
    /// Step 1: takes what step 0 summed, and writes the right matrices.
    std::size_t write_rights(BucketRun const& run) {
        Message sums = message_of(run);
        Buffer const contributors = sums.next(1);
        auto* const verdict = verdicts.of<double>(run);
        for (std::size_t k = 0; k < 2; ++k) {
            listed.push_back(detail::cast_step(contributors, 1.0, {verdict + k, 1, DType::f64}));
        }
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            Factors const& mine = factors[run.parts[k].parameter];
            if (mine.size.rank == 0) {
                Buffer const to = run.part(k);
                listed.push_back(detail::cast_step(sums.next(to.count), 1.0, to));
                continue;
            }
            Buffer const left = numbers(mine, mine.left);
            listed.push_back(detail::cast_step(sums.next(left.count), 1.0, left));
            listed.push_back(orthogonalize(mine, mine.left));
            listed.push_back(
                {.kind = Kind::multiply_left,
                 .dtype = mine.dtype,
                 .from = feedback.inputs(run, k),
                 .to = mine.own_right.data(),
                 .left = left.data,
                 .room = mine.chunks.data(),
                 .size = mine.size}
            );
        }
        compute_listed();
        Message message = message_of(run);
        for_compressed(run, [&](std::size_t, Factors const& mine) {
            Buffer const right = numbers(mine, mine.own_right);
            listed.push_back(detail::cast_step(right, 1.0, message.next(right.count)));
        });
        compute_listed();
        return message.count;
    }
    /// The products of the sums, and this rank's residuals.
    void deliver(BucketRun const& run) {
        auto* const verdict = verdicts.of<double>(run);
        Message sums = message_of(run);
        for_compressed(run, [&](std::size_t k, Factors const& mine) {
            Step product = product_step(mine, sums.next(mine.size.rank * mine.size.columns).data);
            product.kind = Kind::multiply;
            product.dtype = run.buffer.dtype;
            product.to = run.part(k).data;
            product.only_if = verdict;
            listed.push_back(product);
        });
        if (listed.empty()) {
            return;
        }
        listed.push_back(
            {.kind = Kind::note_not_finite,
             .dtype = DType::f64,
             .from_dtype = run.buffer.dtype,
             .from = run.buffer.data,
             .to = verdict + 1,
             .count = run.buffer.count}
        );
        sums = message_of(run);
        for_compressed(run, [&](std::size_t k, Factors const& mine) {
            // From zeros no later round would find a direction.
            listed.push_back(
                {.kind = Kind::keep_rows,
                 .dtype = mine.dtype,
                 .from = sums.next(mine.size.rank * mine.size.columns).data,
                 .to = mine.right.data(),
                 .only_if = verdict + 1,
                 .size = mine.size}
            );
            if (error_feedback) {
                Step rest = product_step(mine, mine.own_right.data());
                rest.kind = Kind::subtract;
                rest.from = feedback.inputs(run, k);
                rest.to = feedback.residual(run.parts[k].parameter);
                rest.only_if = verdict + 1;
                listed.push_back(rest);
            }
        });
        compute_listed();
    }
    template <class F>
    void for_compressed(BucketRun const& run, F const& f) {
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            if (Factors& mine = factors[run.parts[k].parameter]; mine.size.rank != 0) {
                f(k, mine);
            }
        }
    }
    [[nodiscard]] Step orthogonalize(Factors const& mine, Arena const& matrix) const {
        std::size_t const count = numbers(mine, matrix).count;
        return {
            .kind = Kind::orthogonalize,
            .dtype = mine.dtype,
            .to = matrix.data(),
            .number = epsilon,
            .size = {1, count / mine.size.rank, mine.size.rank}
        };
    }
    /// The left matrix times a right one; the kind and the target are missing.
    [[nodiscard]] Step product_step(Factors const& mine, void const* right) {
        bool const needs_row = detail::is_on_host(*device);
        return {
            .kind = Kind::multiply,
            .dtype = mine.dtype,
            .left = mine.left.data(),
            .right = right,
            .room =
                needs_row ? row.data(mine.size.columns * joinable::size_of(mine.dtype)) : nullptr,
            .size = mine.size,
            .count = mine.size.rows * mine.size.columns
        };
    }
};

}} // namespace joinable::v0

// ---- joinable/bucket/compression/reduce_by.hpp

namespace joinable { inline namespace v0 {

namespace detail {

template <class F>
struct ReduceBy {
    static constexpr bool delivers = true;

    std::string_view name;
    F function;

    template <class Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return false;
    }
    template <class Comm>
    [[nodiscard]] auto
    start(Comm& comm, BucketRun const& run, double /*factor*/, bool /*contributes*/) {
        return function(comm, run);
    }
    template <class Comm>
    static void finish(Comm&, BucketRun const&) noexcept {}
};

} // namespace detail

/// A BucketReduction of one function: `function(comm, run)` starts the collective that makes `run.buffer` the sum over all
/// ranks, and returns its work. It is the same on all ranks, contributing or not. Gradients are multiplied by the factor
/// as they are packed. Ranks compare `name`, whose characters must outlive the reduction.
template <class F>
[[nodiscard]] detail::ReduceBy<F> reduce_by(std::string_view name, F function) {
    return {name, std::move(function)};
}

}} // namespace joinable::v0

// ---- joinable/bucket/compression/top_k.hpp

namespace joinable { inline namespace v0 {

/// Sends of each gradient only the elements that are largest in absolute value, with their indices, by one all-gather. All
/// others are added to the rank's next gradient. Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", 2018.
/// Of n elements it sends max(1, density x n), as 8 bytes each (12 of f64); a number that is not finite counts as the
/// largest. Entries are added in rank order. A bucket for which that would be more bytes than its own, from all ranks
/// together, travels whole. The averages delivered plus the residuals of all ranks are the sum of the gradients, but for
/// rounding. A bucket whose averages are not finite delivers them and leaves its residuals; so does a round without
/// contributors, which delivers zeros; but a bucket that travels whole sends what is left of a time when it did not. For
/// buckets in host memory: for others the model is refused when it is made.
/// Complexity: linear in the elements. Memory: two numbers and an index for each.
struct TopK {
    static constexpr std::string_view name = "TopK";
    static constexpr bool delivers = true;

    double density = 0.01; ///< in (0, 1]

    detail::Feedback feedback{};
    detail::RunMemory sent{};
    detail::RunMemory received{};
    std::vector<bool> is_sparse{};            ///< per bucket
    std::vector<std::size_t> kept{};          ///< per parameter: how many of its elements are sent
    std::vector<std::uint32_t> order{};       ///< of the elements of one gradient
    detail::Scratch sums{detail::the_host()}; ///< of a gradient

    template <Communicator Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return false;
    }
    /// @throws ContractViolation  the density is out of range, a gradient has 2^32 elements or more, or buckets are on a
    ///         device.
    template <Communicator Comm>
    void prepare(Comm& comm, BucketParts parts) {
        static_assert(
            AllGathers<Comm>,
            "TopK: this communicator has no all_gather; give it one, or use PowerSgd"
        );
        detail::require_host_buckets(comm, name);
        if (!(density > 0 && density <= 1)) {
            throw ContractViolation{detail::concat(
                "TopK: density is ",
                density,
                "; give the part of the elements that is sent, above 0 and at most 1"
            )};
        }
        std::size_t longest = 0;
        for (BucketPart const& part : parts) {
            longest = (std::max)(longest, part.count);
        }
        if (longest > UINT32_MAX) {
            throw ContractViolation{
                "TopK: a gradient has more elements than 32 bits can count; use PowerSgd"
            };
        }
        feedback.prepare(detail::the_host(), parts);
        auto const ranks = static_cast<std::size_t>(comm.size());
        find_kept(parts, ranks);
        auto const words = [&](BucketPart const& part) {
            return is_sparse[part.bucket] ? words_of(part) * sizeof(Word) : 0;
        };
        sent.prepare(comm, parts, sizeof(Word), words);
        received.prepare(comm, parts, ranks * sizeof(Word), [&](BucketPart const& part) {
            return ranks * words(part);
        });
        order.resize(longest);
        static_cast<void>(sums.data(longest * sizeof(double))); // rounds allocate nothing
    }
    template <Communicator Comm>
    [[nodiscard]] AnyWork
    start(Comm& comm, BucketRun const& run, double /*factor*/, bool contributes) {
        if (!is_sparse[run.bucket]) {
            detail::visit_number(run.buffer.dtype, [&]<class T>(T) { write_all<T>(run); });
            return AnyWork{comm.all_reduce(run.buffer, ReduceOp::sum)};
        }
        auto* const message = sent.of<Word>(run);
        std::size_t count = 0;
        detail::visit_number(run.buffer.dtype, [&]<class T>(T) {
            count = write_largest<T>(run, contributes, message);
        });
        auto const ranks = static_cast<std::size_t>(comm.size());
        return AnyWork{comm.all_gather(
            ConstBuffer{message, count, DType::u32},
            Buffer{received.of(run), ranks * count, DType::u32}
        )};
    }
    template <Communicator Comm>
    void finish(Comm& comm, BucketRun const& run) {
        detail::visit_number(run.buffer.dtype, [&]<class T>(T) {
            deliver<T>(run, static_cast<std::size_t>(comm.size()));
        });
    }
    void agree_on(AgreementList& list) const { list.add("density", density); }

    /// Multiplies what this rank keeps, after the scale of the loss was multiplied by `factor`. Between rounds. Local.
    void scale_residuals(double factor) { feedback.scale(factor); }

    /// The residuals, for a Checkpoint.
    void save(ReductionState& state) const { feedback.save(state); }
    static void load(ReductionState const& /*state*/) noexcept {}

private:
    using Word = std::uint32_t;

    template <class T>
    static constexpr std::size_t words_of_entry = 1 + sizeof(T) / sizeof(Word);

    [[nodiscard]] std::size_t kept_of(BucketPart const& part) const noexcept {
        return kept[part.parameter];
    }
    [[nodiscard]] std::size_t words_of(BucketPart const& part) const noexcept {
        return kept_of(part) * (1 + detail::number_size(part.dtype) / sizeof(Word));
    }
    /// From sizes alone. A density that changes later counts from the next call on.
    void find_kept(BucketParts parts, std::size_t ranks) {
        for (BucketPart const& part : parts) {
            auto const wanted = static_cast<std::size_t>(density * static_cast<double>(part.count));
            detail::of_parameter(kept, part.parameter) =
                (std::min)((std::max)(wanted, std::size_t{1}), part.count);
        }
        is_sparse.clear();
        for (std::size_t k = 0; k < parts.size();) {
            std::size_t const bucket = parts[k].bucket;
            std::size_t entries = 0;
            std::size_t whole = 0;
            for (; k < parts.size() && parts[k].bucket == bucket; ++k) {
                entries += words_of(parts[k]) * sizeof(Word);
                whole += parts[k].count * size_of(parts[k].dtype);
            }
            is_sparse.push_back(ranks * entries < whole);
        }
    }

    /// A bucket that travels whole takes what was left out while it was cut otherwise.
    template <class T>
    void write_all(BucketRun const& run) {
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            detail::cast_from<T>(feedback.add<T>(run, k), run.part(k));
        }
    }
    /// Whether this rank contributes, then an index and a number for each entry. Returns the number of words.
    template <class T>
    std::size_t write_largest(BucketRun const& run, bool contributes, Word* message) {
        std::size_t at = 0;
        message[at++] = contributes ? 1 : 0;
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            T const* const inputs = feedback.add<T>(run, k);
            std::size_t const entries = kept_of(run.parts[k]);
            auto const begin = order.begin();
            auto const end = begin + static_cast<std::ptrdiff_t>(run.parts[k].count);
            std::iota(begin, end, Word{0});
            auto const key_of = [&](Word i) { // numbers that are not finite have the largest bits
                using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
                Bits bits;
                std::memcpy(&bits, inputs + i, sizeof(T));
                return static_cast<Bits>(bits << 1);
            };
            auto const middle = begin + static_cast<std::ptrdiff_t>(entries);
            if (middle != end) {
                std::nth_element(begin, middle, end, [&](Word a, Word b) {
                    auto const of_a = key_of(a);
                    auto const of_b = key_of(b);
                    return of_a != of_b ? of_a > of_b : a < b;
                });
            }
            for (std::size_t e = 0; e < entries; ++e, at += words_of_entry<T>) {
                message[at] = order[e];
                std::memcpy(message + at + 1, inputs + order[e], sizeof(T));
            }
        }
        return at;
    }
    template <class T>
    void deliver(BucketRun const& run, std::size_t ranks) {
        if (!is_sparse[run.bucket]) {
            std::fill_n(feedback.inputs<T>(run), run.buffer.count, T{0});
            feedback.keep_if_finite<T>(run);
            return;
        }
        Word const* const message = received.of<Word>(run);
        std::size_t words = 1;
        for (BucketPart const& part : run.parts) {
            words += kept_of(part) * words_of_entry<T>;
        }
        std::size_t contributors = 0;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            contributors += message[rank * words];
        }
        if (contributors == 0) {
            detail::write_zeros(run.buffer);
            return;
        }
        Word const* const own = sent.of<Word>(run);
        std::size_t at = 1;
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            std::size_t const entries = kept_of(run.parts[k]);
            add_entries<T>(run.part(k), message + at, words, ranks, entries);
            T* const inputs = feedback.inputs<T>(run, k);
            for (std::size_t e = 0; e < entries; ++e, at += words_of_entry<T>) {
                inputs[own[at]] = 0; // it was sent
            }
        }
        feedback.keep_if_finite<T>(run);
    }
    template <class T>
    void add_entries(
        Buffer to, Word const* first, std::size_t words, std::size_t ranks, std::size_t entries
    ) {
        T* const result = reinterpret_cast<T*>(sums.data(to.count * sizeof(T)));
        std::fill_n(result, to.count, T{0});
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            for (std::size_t e = 0; e < entries; ++e) {
                Word const* const entry = first + rank * words + e * words_of_entry<T>;
                T number;
                std::memcpy(&number, entry + 1, sizeof(T));
                result[entry[0]] += number;
            }
        }
        detail::cast_from<T>(result, to);
    }
};

}} // namespace joinable::v0

// ---- joinable/participant/periodic_average.hpp

namespace joinable { inline namespace v0 {

struct PeriodicAverageOptions {
    std::uint64_t start = 0;  ///< rounds without an average before the first period begins
    std::uint64_t period = 4; ///< rounds from one average to the next; at least 1
    std::size_t bucket_bytes = std::size_t{25} << 20U; ///< of the values that travel together
};

/// Averages the values of a model now and then, in place of its gradients in each round: local SGD. Each rank steps by its
/// own gradients. Source: Stich, "Local SGD Converges Fast and Communicates Little", 2019. PyTorch's
/// PeriodicModelAverager counts from its warm-up on, and does not weigh.
///
/// Active ranks call step() once in every training round, after their optimizer. Every `period`-th round, after the first
/// `start`, all ranks get the average of the values, each rank's weighted by how often it stepped since the last average:
/// the first one comes after `start + period` rounds. Joined ranks receive it, and contribute what they stepped before they
/// joined. finish() of a guard averages what is left; after a guard that is not enabled or ended early, and outside of
/// guards, average() does. Frozen parameters are not averaged, nor is the state of an optimizer. Parameters need no
/// gradients. Values of 16 bits are rounded when they are weighted, and again as a sum. Memory: the values once more.
template <Communicator Comm>
class PeriodicAverage {
public:
    /// Collective. All ranks agree on parameters and options, then take rank 0's values. `parameters` is a range that
    /// joinable::parameters() takes, or its result; `comm` and what it refers to must outlive this.
    /// @throws ContractViolation  the period is 0, a value is missing or on another device, a trained one is of
    ///         integers, thread ranks train the same memory, or the device has no kernels that scale; the other ranks
    ///         throw PeerFailed.
    /// @throws Mismatch  ranks have different options or models.
    template <class Parameters>
    PeriodicAverage(Comm& comm, Parameters&& parameters, PeriodicAverageOptions const& options = {})
        : comm_{comm}, options_{options}, control_{comm} {
        detail::require_unguarded(detail::identity_of(comm), "a PeriodicAverage that is made");
        detail::ModelEntry entry{comm};
        AgreementList compared;
        std::optional<detail::CoalescedBroadcast> values;
        std::exception_ptr const error = detail::exception_of([&] {
            parameters_ = joinable::parameters(std::forward<Parameters>(parameters));
            check();
            listed_.emplace(parameters_, true);
            compared.begin_section("options differ: ");
            compare_options(compared);
            model_ = detail::agree_on_model(compared, parameters_, detail::device_of(comm));
            layout_ = BucketLayout{
                parameters_,
                detail::expected_ready_order(parameters_),
                std::vector<std::size_t>{options.bucket_bytes},
                detail::BufferMemory{comm},
                [](ParameterList const& list, std::size_t i) { return list[i].value(); }
            };
            works_ = std::vector<std::optional<work_of<Comm>>>(layout_.buckets().size());
            values.emplace(
                detail::values_of(parameters_),
                options.bucket_bytes,
                "value",
                detail::BufferMemory{comm}
            );
            entry.enter(parameters_, false);
        });
        detail::agree(control_, compared, error);
        entry.leave();
        values->run(comm, 0);
    }

    /// This rank has stepped. Collective in a round that averages; else only the notification.
    /// It counts, also if it throws. After an error other than the following one go on with skip().
    /// @throws ContractViolation  a parameter that was frozen when this was made is trained now, or a value has another
    ///         dtype, other extents or another device; the other ranks throw PeerFailed. Call average() before such a
    ///         change, then make a new one. Outside of an enabled guard this aborts the communicator.
    /// @throws what the communicator throws.
    void step() { take_part(1); }
    /// The same for a rank that has not stepped in this round, because its batch failed.
    void skip() { take_part(0); }

    /// Averages what ranks have stepped since the last average, before its turn. Collective; outside of guards, or in
    /// one that is not enabled.
    /// @throws ContractViolation  the communicator is in an enabled guard, whose finish() does it; or a value has another
    ///         dtype, other extents or another device, then the other ranks throw PeerFailed and the communicator is aborted.
    void average() {
        detail::require_unguarded(detail::identity_of(comm_), "PeriodicAverage::average()");
        detail::abort_if_throws(comm_, [&] { average_values(); });
    }

    /// Rounds in which active ranks called step() or skip().
    [[nodiscard]] std::uint64_t rounds() const noexcept { return rounds_; }

    class Hook {
    public:
        using runs_after = labels_of<labels::gradients, labels::step>;

        explicit Hook(PeriodicAverage& average) noexcept : average_{average} {}
        static bool takes_part(Round const& round) noexcept {
            return round.phase() == Phase::train;
        }
        void main_hook() { average_.end_round(); }
        void post_hook(bool) { average_.average_values(); }

    private:
        PeriodicAverage& average_;
    };

    [[nodiscard]] Hook join_hook(arguments<keywords<>> const&) noexcept { return Hook{*this}; }
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }
    [[nodiscard]] std::string_view join_name() const noexcept { return "PeriodicAverage"; }
    static constexpr std::string_view join_verb = "step() or skip()";
    void agree_on(AgreementList& list) const {
        compare_options(list);
        list.add("rounds", rounds_);
        list.add("model", model_);
    }
    void list_claims(ParameterClaims& claims) const { claims.add_averaged_values(parameters_); }
    /// For guards: a Step beside it runs on active ranks only.
    [[nodiscard]] static constexpr bool leaves_gradients_local() noexcept { return true; }

private:
    void check() const {
        if (options_.period == 0) {
            throw ContractViolation{
                "PeriodicAverage: period is 0; give the rounds from one average to the next"
            };
        }
        detail::check_parameters(parameters_, detail::device_of(comm_).id());
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            AnyParameter const& parameter = parameters_[i];
            if (parameter.requires_grad() && !is_floating_point(parameter.value().dtype())) {
                throw ContractViolation{detail::concat(
                    detail::describe_parameter(parameters_, i),
                    " is of ",
                    name_of(parameter.value().dtype()),
                    ": values are averaged, which needs floating point; set its requires_grad to false"
                )};
            }
        }
        if (!detail::device_of(comm_).can_scale()) {
            throw ContractViolation{
                "PeriodicAverage multiplies values, but the kernels of the device are missing; give it its kernels, see "
                "Device"
            };
        }
    }
    void compare_options(AgreementList& list) const {
        list.add("PeriodicAverage::start", options_.start);
        list.add("PeriodicAverage::period", options_.period);
        list.add("PeriodicAverage::bucket_bytes", options_.bucket_bytes);
    }

    void take_part(std::uint64_t steps) {
        steps_ += steps; // the optimizer has stepped, whatever comes
        auto const require_same = [&] { listed_->require_same(join_name(), false); };
        auto const take_turn = [&] {
            Round const round = notify_join_context(*this);
            detail::run_part(*this, round, [&] { end_round(); });
        };
        if (detail::session_of(state_) != nullptr) {
            detail::run_then(*this, require_same, take_turn);
        } else { // no roll call tells the others
            detail::abort_if_throws(comm_, require_same);
            take_turn();
        }
    }
    void end_round() {
        ++rounds_;
        if (rounds_ > options_.start && (rounds_ - options_.start) % options_.period == 0) {
            average_values();
        }
    }
    /// All ranks get the average over those that stepped. Nothing, if none did.
    void average_values() {
        for (Bucket const& bucket : layout_.buckets()) { // before others write an average
            for (std::size_t const i : bucket.parameters) {
                if (!parameters_[i].is_as(listed_->listed()[i])) {
                    listed_->require_same(i, join_name(), false);
                }
            }
        }
        std::uint64_t total = steps_;
        control_.sum({&total, 1});
        if (total == 0) {
            return;
        }
        double const factor = static_cast<double>(steps_) / static_cast<double>(total);
        Device& device = detail::device_of(comm_);
        std::vector<Bucket> const& buckets = layout_.buckets();
        for (std::size_t b = 0; b < buckets.size(); ++b) {
            for (std::size_t k = 0; k < buckets[b].views.size(); ++k) {
                AnyView const& place = buckets[b].views[k];
                if (steps_ == 0) { // whatever its values are
                    device.fill_zero(place);
                } else {
                    device.scale_copy(value_of(buckets[b], k), factor, place);
                }
            }
            device.submit();
            static_cast<void>(works_[b].emplace(comm_.all_reduce(buckets[b].buffer, ReduceOp::sum))
            );
        }
        for (std::size_t b = 0; b < buckets.size(); ++b) {
            works_[b]->wait();
            works_[b].reset();
            for (std::size_t k = 0; k < buckets[b].views.size(); ++k) {
                device.copy(buckets[b].views[k], value_of(buckets[b], k));
            }
        }
        device.finish();
        steps_ = 0;
    }
    [[nodiscard]] AnyView value_of(Bucket const& bucket, std::size_t k) const {
        return parameters_[bucket.parameters[k]].value();
    }

    Comm& comm_;
    PeriodicAverageOptions options_;
    ParameterList parameters_;
    std::optional<detail::ListedModel> listed_;
    std::string model_; ///< in the form that guards compare
    BucketLayout layout_;
    std::uint64_t rounds_ = 0;
    std::uint64_t steps_ = 0; ///< of this rank, since the last average
    JoinState state_;
    // Destroyed first, because they use the memory of the members above.
    detail::ControlOver<Comm&> control_;
    std::vector<std::optional<work_of<Comm>>> works_;
};

template <class Comm, class Parameters>
PeriodicAverage(Comm&, Parameters&&, PeriodicAverageOptions = {}) -> PeriodicAverage<Comm>;

}} // namespace joinable::v0

// ---- joinable/compression.hpp

/// @file
/// Training that sends less: reductions to give to a DistributedDataParallel, and values that are averaged now and then in
/// place of gradients. In addition to <joinable/join.hpp>.
