// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cuda_runtime_api.h>
#include <future>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "join.hpp"

// ---- joinable/communicator/staged_collectives.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The collectives of a communicator that moves device memory and carries no words itself. wait() also
/// waits for everything else in flight on the communicator.
template <class Comm>
    requires(!reduces_host_memory<Comm> && gives_device<Comm> && !gives_host_words<Comm>)
class HostCollectives<Comm> {
public:
    /// wait() copies the result back. The host's buffer and the HostCollectives must stay where
    /// they are.
    class Work {
    public:
        Work(work_of<Comm> inner, HostCollectives& owner, Buffer host)
            : inner_{std::move(inner)}, owner_{owner}, host_{host} {}

        void wait() {
            if constexpr (requires { inner_.synchronize(); }) {
                inner_.synchronize(
                ); // with a deadline: wait() orders streams, and the host goes on
            }
            inner_.wait();
            if (!is_copied_ && host_.count != 0) {
                owner_.comm_.device_memory().download(
                    owner_.stagings_.back().device.data(), host_.data, host_.bytes()
                );
            }
            is_copied_ = true;
        }
        [[nodiscard]] bool test() { return inner_.test(); }
        [[nodiscard]] bool progress() { return make_progress(inner_); }

    private:
        work_of<Comm> inner_;
        HostCollectives& owner_;
        Buffer host_;
        bool is_copied_ = false;
    };

    explicit HostCollectives(Comm& comm) noexcept : comm_{comm} {}

    [[nodiscard]] Work all_reduce(Buffer buffer, ReduceOp op) {
        return {comm_.all_reduce(staged(buffer), op), *this, buffer};
    }
    [[nodiscard]] Work broadcast(Buffer buffer, int root) {
        return {comm_.broadcast(staged(buffer), root), *this, buffer};
    }

    void download(void const* from, void* to, std::size_t bytes) {
        comm_.device_memory().download(from, to, bytes);
    }

private:
    /// A few bytes that need no registration, so no arenas of the communicator. The device memory
    /// is freed first, which waits for all work of the device: a rank that fails may have a copy in
    /// flight.
    struct Staging {
        Arena host;
        Arena device;
    };

    Buffer staged(Buffer host) {
        constexpr std::size_t least = 1024;
        Device& memory = comm_.device_memory();
        std::size_t const given = stagings_.empty() ? 0 : stagings_.back().host.bytes();
        if (given < (std::max)(host.bytes(), least)) {
            std::size_t const bytes = (std::max)({host.bytes(), least, 2 * given});
            Arena copy = memory.allocate_staging(bytes);
            stagings_.push_back({std::move(copy), memory.allocate(bytes, Arena::default_alignment)}
            );
        }
        Staging const& staging = stagings_.back();
        if (host.count != 0) {
            std::memcpy(staging.host.data(), host.data, host.bytes());
            memory.upload(staging.host.data(), staging.device.data(), host.bytes());
        }
        return {staging.device.data(), host.count, host.dtype};
    }

    Comm& comm_;
    std::vector<Staging> stagings_; ///< the last one is in use; none is freed before the end
};

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

// ---- joinable/device/detail/transpose.hpp

#ifndef JOINABLE_DEVICE_DETAIL_TRANSPOSE_HPP_PART_1
#define JOINABLE_DEVICE_DETAIL_TRANSPOSE_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// A register as bytes, like Bytes16. Compilers find the instruction for larger elements by the
/// bytes that move together.
using Bytes32 [[gnu::vector_size(32)]] = unsigned char;
using Bytes64 [[gnu::vector_size(64)]] = unsigned char;
using Words16 [[gnu::vector_size(16)]] = std::uint64_t;
using Words32 [[gnu::vector_size(32)]] = std::uint64_t;

/// Interleaves elements of `size` bytes from the low or high halves of two registers. Returns which
/// byte of the two, one after the other, becomes byte i. A wider register is several registers of
/// 16 bytes side by side.
template <std::size_t width, std::size_t size, bool high>
constexpr int interleaved(std::size_t i) noexcept {
    std::size_t const element = i % 16 / size;
    std::size_t const start = i / 16 * 16 + (high ? 8 : 0);
    return static_cast<int>(start + element % 2 * width + element / 2 * size + i % size);
}

// Lists, because nvcc 13 loses the expansion of a pack in the arguments of this builtin.
template <std::size_t size, bool high>
[[gnu::always_inline]] inline void
interleave(Bytes16 const& a, Bytes16 const& b, Bytes16& result) noexcept {
    constexpr auto at = &interleaved<16, size, high>;
    // clang-format off
    result = __builtin_shufflevector(
        a, b,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10),
        at(11), at(12), at(13), at(14), at(15)
    );
    // clang-format on
}
template <std::size_t size, bool high>
[[gnu::always_inline]] inline void
interleave(Bytes32 const& a, Bytes32 const& b, Bytes32& result) noexcept {
    constexpr auto at = &interleaved<32, size, high>;
    // clang-format off
    result = __builtin_shufflevector(
        a, b,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10),
        at(11), at(12), at(13), at(14), at(15), at(16), at(17), at(18), at(19), at(20), at(21),
        at(22), at(23), at(24), at(25), at(26), at(27), at(28), at(29), at(30), at(31)
    );
    // clang-format on
}
template <std::size_t size, bool high>
[[gnu::always_inline]] inline void
interleave(Bytes64 const& a, Bytes64 const& b, Bytes64& result) noexcept {
    constexpr auto at = &interleaved<64, size, high>;
    // clang-format off
    result = __builtin_shufflevector(
        a, b,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10),
        at(11), at(12), at(13), at(14), at(15), at(16), at(17), at(18), at(19), at(20), at(21),
        at(22), at(23), at(24), at(25), at(26), at(27), at(28), at(29), at(30), at(31), at(32),
        at(33), at(34), at(35), at(36), at(37), at(38), at(39), at(40), at(41), at(42), at(43),
        at(44), at(45), at(46), at(47), at(48), at(49), at(50), at(51), at(52), at(53), at(54),
        at(55), at(56), at(57), at(58), at(59), at(60), at(61), at(62), at(63)
    );
    // clang-format on
}

/// Fills a register with 16 bytes from each of several places, which are `step` bytes apart.
[[gnu::always_inline]] inline void
load_pieces(std::byte const* from, std::size_t, Bytes16& result) noexcept {
    result = load<Bytes16>(from);
}
[[gnu::always_inline]] inline void
load_pieces(std::byte const* from, std::size_t step, Bytes32& result) noexcept {
    auto const low = load<Words16>(from);
    auto const high = load<Words16>(from + step);
    result = reinterpret_cast<Bytes32>(__builtin_shufflevector(low, high, 0, 1, 2, 3));
}
[[gnu::always_inline]] inline void
load_pieces(std::byte const* from, std::size_t step, Bytes64& result) noexcept {
    Bytes32 low;
    Bytes32 high;
    load_pieces(from, step, low);
    load_pieces(from + 2 * step, step, high);
    result = reinterpret_cast<Bytes64>(__builtin_shufflevector(
        reinterpret_cast<Words32>(low), reinterpret_cast<Words32>(high), 0, 1, 2, 3, 4, 5, 6, 7
    ));
}

/// Transposes squares. Each has as many rows as 16 bytes have elements. The squares below the first
/// one become its neighbours, as many as fill a register. Interleaving the first half of the rows
/// with the second half, log2(rows) times, is a perfect shuffle of all index bits.
template <class Bits, class Register, bool streams>
[[gnu::always_inline]] inline void transpose_squares(
    std::byte const* from, std::size_t from_step, std::byte* to, std::size_t to_step
) {
    constexpr std::size_t n = 16 / sizeof(Bits);
    std::array<Register, n> rows;
    JOINABLE_UNROLL
    for (Register& row : rows) {
        load_pieces(from, n * from_step, row);
        from += from_step;
        asm("" : "+r"(from)); // else compilers keep the addresses of all rows, on the stack
    }
    JOINABLE_UNROLL
    for (std::size_t done = 1; done < n; done *= 2) {
        std::array<Register, n> next;
        JOINABLE_UNROLL
        for (std::size_t i = 0; i < n / 2; ++i) {
            interleave<sizeof(Bits), false>(rows[i], rows[i + n / 2], next[2 * i]);
            interleave<sizeof(Bits), true>(rows[i], rows[i + n / 2], next[2 * i + 1]);
        }
        rows = next;
    }
    JOINABLE_UNROLL
    for (std::size_t i = 0; i < n; ++i) {
        Register const row = rows[i]; // no reference: it must stay in a register
        if constexpr (streams) {
            stream(to, row);
        } else {
            std::memcpy(to, &row, sizeof(row));
        }
        to += to_step;
        asm("" : "+r"(to));
    }
}

/// A plane: element (i, k) is read at `from + i * row_step + k * column_step` bytes and written to
/// `to + k * to_step + i * sizeof(Bits)`.
struct Plane {
    std::byte const* from;
    std::size_t row_step;
    std::size_t rows;
    std::size_t column_step;
    std::size_t columns;
    std::byte* to;
    std::size_t to_step;
};

/// Prefetches the memory of a plane that will be read soon. Inlined, because GCC drops calls of a
/// function that does nothing else.
[[gnu::always_inline]] inline void prefetch(Plane const& plane) noexcept {
    for (std::size_t i = 0; i < plane.rows; ++i) {
        for (std::size_t at = 0; at < plane.columns * plane.column_step; at += 64) {
            __builtin_prefetch(plane.from + i * plane.row_step + at);
        }
    }
}

/// Transposes the rows from `done` on that whole squares cover. Returns the number of rows done so
/// far.
template <class Bits, class Register, bool streams = false>
[[gnu::always_inline]] inline std::size_t transpose_rows(Plane const plane, std::size_t done) {
    constexpr std::size_t n = 16 / sizeof(Bits);
    constexpr std::size_t height = sizeof(Register) / sizeof(Bits);
    for (; done + height <= plane.rows; done += height) {
        for (std::size_t k = 0; k + n <= plane.columns; k += n) {
            transpose_squares<Bits, Register, streams>(
                plane.from + done * plane.row_step + k * sizeof(Bits),
                plane.row_step,
                plane.to + k * plane.to_step + done * sizeof(Bits),
                plane.to_step
            );
        }
    }
    return done;
}

/// Transposes a plane, with the widest registers first.
template <class Bits, class Register, bool streams = false>
[[gnu::always_inline]] inline void transpose_plane(Plane const plane) {
    std::size_t even_rows = 0;
    std::size_t even_columns = 0;
    if (plane.column_step == sizeof(Bits)) {
        even_rows = transpose_rows<Bits, Register, streams>(plane, 0);
        even_rows = transpose_rows<Bits, Bytes16>(plane, even_rows);
        even_columns = plane.columns * sizeof(Bits) / 16 * 16 / sizeof(Bits);
    }
    std::size_t const first = even_columns == plane.columns ? even_rows : 0;
    for (std::size_t i = first; i < plane.rows; ++i) {
        for (std::size_t k = i < even_rows ? even_columns : 0; k < plane.columns; ++k) {
            store<Bits>(
                plane.to + k * plane.to_step + i * sizeof(Bits),
                load<Bits>(plane.from + i * plane.row_step + k * plane.column_step)
            );
        }
    }
}

/// With `streams`, each row of the target starts at a multiple of 64 bytes.
template <class Bits, bool streams>
struct TransposeLoop {
    template <std::size_t width>
    [[gnu::always_inline]] static void
    run(Width<width>, std::size_t /*done*/, Plane const& plane) noexcept {
        using Register = std::
            conditional_t<width == 16, Bytes16, std::conditional_t<width == 32, Bytes32, Bytes64>>;
        transpose_plane<Bits, Register, streams>(plane);
        if constexpr (streams) {
            finish_streams();
        }
    }
    [[gnu::always_inline]] static std::size_t convert(Plane const&) noexcept { return 0; }
};
template <class Bits, bool streams = false>
using TransposeLoops = CompiledLoop<TransposeLoop<Bits, streams>, Plane>;

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/device/detail/loops.hpp

#ifndef JOINABLE_DEVICE_DETAIL_LOOPS_HPP_PART_1
#define JOINABLE_DEVICE_DETAIL_LOOPS_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// The order in which to visit the elements of two views of the same extents. The target's smallest
/// step is innermost, since writes cost more than reads. Dimensions of extent 1 are dropped, and
/// neighbours are merged if both views step through them evenly. Steps are in bytes.
class Loops {
public:
    Loops(Shape const& extents, Shape const& from, Shape const& to, std::size_t element_bytes) {
        Shape order;
        for (std::size_t d = 0; d < extents.size(); ++d) {
            if (extents[d] == 1) {
                continue;
            }
            order.push_back(d);
            for (std::size_t i = order.size() - 1; i > 0; --i) { // insertion sort of at most eight
                std::size_t const outer = order[i - 1];
                if (to[outer] > to[d] || (to[outer] == to[d] && from[outer] >= from[d])) {
                    break;
                }
                order[i] = outer;
                order[i - 1] = d;
            }
        }
        for (std::size_t const d : order) {
            std::size_t const from_step = from[d] * element_bytes;
            std::size_t const to_step = to[d] * element_bytes;
            if (rank_ != 0 && levels_[rank_ - 1].from == extents[d] * from_step &&
                levels_[rank_ - 1].to == extents[d] * to_step) {
                levels_[rank_ - 1] = {
                    levels_[rank_ - 1].extent * extents[d], from_step, to_step, 0
                };
            } else {
                levels_[rank_++] = {extents[d], from_step, to_step, 0};
            }
        }
        if (rank_ == 0) { // a single element
            levels_[rank_++] = {1, element_bytes, element_bytes, 0};
        }
        choose_tiles();
    }

    struct Level {
        std::size_t extent;
        std::size_t from;
        std::size_t to;
        std::size_t index;
    };

    /// Outermost first.
    [[nodiscard]] std::span<Level const> levels() const noexcept { return {levels_.data(), rank_}; }
    /// The innermost loop: a row.
    [[nodiscard]] Level const& inner() const noexcept { return levels_[rank_ - 1]; }

    /// Whether the source is read across its rows. The two innermost loops then run over tiles, and
    /// `across()` is the loop with small steps in the source.
    [[nodiscard]] bool has_tiles() const noexcept { return has_tiles_; }
    [[nodiscard]] Level const& across() const noexcept { return levels_[rank_ - 2]; }

    /// Calls `body(from, to)` at the start of every row, or of every plane if there are tiles.
    template <class Body>
    void for_each(std::byte const* from, std::byte* to, Body const& body) {
        std::size_t const outer = rank_ - (has_tiles_ ? 2 : 1);
        for (;;) {
            body(from, to);
            std::size_t d = outer;
            for (;; --d) { // an odometer
                if (d == 0) {
                    return;
                }
                Level& level = levels_[d - 1];
                from += level.from;
                to += level.to;
                if (++level.index < level.extent) {
                    break;
                }
                from -= level.from * level.extent;
                to -= level.to * level.extent;
                level.index = 0;
            }
        }
    }

private:
    void choose_tiles() noexcept {
        std::size_t across = rank_ - 1;
        for (std::size_t d = 0; d + 1 < rank_; ++d) { // a step of 0 reads nothing new
            if (levels_[d].from != 0 && levels_[d].from < levels_[across].from) {
                across = d;
            }
        }
        has_tiles_ = across != rank_ - 1;
        for (; across + 2 < rank_; ++across) { // to the place before the innermost one
            std::swap(levels_[across], levels_[across + 1]);
        }
    }

    std::array<Level, max_tensor_rank> levels_{}; ///< outermost first
    std::size_t rank_ = 0;
    bool has_tiles_ = false;
};

/// How a plane is transposed: in tiles of this many columns and rows.
struct Tiling {
    void (*transpose)(Plane);
    std::size_t columns;
    std::size_t rows;
    bool is_direct;   ///< writes to the target, else into a buffer
    bool is_in_cache; ///< fits in the second-level cache
};

/// The length of a buffered tile's sides, in elements. At this length the processor prefetches rows
/// on both sides. In cache, half of it is enough and stays in the first level.
template <class Bits>
inline constexpr std::size_t large_tile = sizeof(Bits) == 1 ? 256 : 512 / sizeof(Bits);

/// The tiling of `plane` for a processor. If elements are only moved, from a dense source to a
/// dense target, they go there directly in two cases: the plane fits in cache and its rows do not
/// evict each other, or it fits in no cache (memcpy then writes past the caches, too).
template <class Bits>
Tiling tiling_of(Plane const& plane, bool is_dense, InstructionSet set) noexcept {
    auto* const transpose = TransposeLoops<Bits>::of(set);
    bool const is_wide = set == InstructionSet::avx512;
    std::size_t const bytes = plane.rows * plane.columns * sizeof(Bits);
    bool const is_in_cache = bytes <= std::size_t{1} << 20U;
    // This many rows of the target keep their lines in a first-level cache of 8 ways of 4 KiB.
    std::size_t const power = std::size_t{1} << std::countr_zero(plane.to_step | 4096U);
    std::size_t const run = (std::min)((is_wide ? 128 : 64) / sizeof(Bits), 8 * 4096 / power);
    if (is_dense && is_in_cache && run * sizeof(Bits) >= 64) {
        return {transpose, run, plane.rows, true, true};
    }
    bool const is_aligned = (reinterpret_cast<std::uintptr_t>(plane.to) | plane.to_step) % 64 == 0;
    if (is_dense && is_wide && is_aligned && bytes >= std::size_t{16} << 20U) {
        return {
            &TransposeLoops<Bits, true>::avx512, 512 / sizeof(Bits), 256 / sizeof(Bits), true, false
        };
    }
    std::size_t const size = large_tile<Bits> / (is_in_cache ? 2 : 1);
    return {transpose, size, size, false, is_in_cache};
}

/// Calls f with an unsigned integer of `bytes` bytes: 1, 2, 4 or 8.
template <class F>
auto visit_bits(std::size_t bytes, F const& f) {
    switch (bytes) {
    case 1: return f(std::uint8_t{});
    case 2: return f(std::uint16_t{});
    case 4: return f(std::uint32_t{});
    default: return f(std::uint64_t{});
    }
}

/// An operation on rows, whose elements may have any type.
struct RowsOperation {
    RowsFunction* function;
    void const* operation;
    std::size_t element_bytes;
    bool only_moves;

    void operator()(
        Rows<std::byte const> from, Rows<std::byte> to, std::size_t count, std::size_t rows
    ) const {
        function(operation, from, to, count, rows);
    }
};

/// Applies `operation` to planes whose sources are read across. Tiles are first transposed, into a
/// buffer or directly to the target, so that each cache line is touched once.
inline void
for_all_tiles(Loops& loops, std::byte const* from, std::byte* to, RowsOperation const& operation) {
    constexpr std::size_t buffer_bytes =
        large_tile<std::uint16_t> * large_tile<std::uint16_t> * sizeof(std::uint16_t); // the most
    alignas(64) std::array<std::byte, buffer_bytes> buffer;
    Loops::Level const inner = loops.inner();
    Loops::Level const across = loops.across();
    std::size_t const size = operation.element_bytes;
    bool const is_dense = operation.only_moves && inner.to == size && across.from == size;
    loops.for_each(from, to, [&](std::byte const* source, std::byte* target) {
        Plane const plane{
            source, inner.from, inner.extent, across.from, across.extent, target, across.to
        };
        Tiling const tiling = visit_bits(size, [&]<class Bits>(Bits) {
            return tiling_of<Bits>(plane, is_dense, instruction_set());
        });
        auto const tile_at = [&](std::size_t i, std::size_t k) {
            Plane tile = plane;
            tile.from += i * plane.row_step + k * plane.column_step;
            tile.rows = (std::min)(tiling.rows, plane.rows - i);
            tile.columns = (std::min)(tiling.columns, plane.columns - k);
            tile.to += i * inner.to + k * plane.to_step;
            return tile;
        };
        for (std::size_t k = 0; k < plane.columns; k += tiling.columns) {
            for (std::size_t i = 0; i < plane.rows; i += tiling.rows) {
                Plane tile = tile_at(i, k);
                Rows<std::byte> const rows{tile.to, inner.to, tile.to_step};
                if (!tiling.is_direct) {
                    tile.to = buffer.data();
                    tile.to_step = tiling.rows * size;
                }
                tiling.transpose(tile);
                if (!tiling.is_in_cache && i + tiling.rows < plane.rows) {
                    prefetch(tile_at(i + tiling.rows, k)); // no processor predicts a step of rows
                }
                if (!tiling.is_direct) {
                    operation({tile.to, size, tile.to_step}, rows, tile.rows, tile.columns);
                }
            }
        }
    });
}

/// Applies `operation` to all elements of two views.
inline void
for_all_rows(Loops& loops, std::byte const* from, std::byte* to, RowsOperation const& operation) {
    if (loops.has_tiles()) {
        return for_all_tiles(loops, from, to, operation);
    }
    Loops::Level const inner = loops.inner();
    loops.for_each(from, to, [&](std::byte const* source, std::byte* target) {
        operation({source, inner.from}, {target, inner.to}, inner.extent, 1);
    });
}

}}} // namespace joinable::v0::detail

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

// ---- joinable/device/cuda/copy.hpp

namespace joinable { inline namespace v0 {

namespace detail {

/// A copy within a device's memory, times a factor, in the form that kernels take.
struct CudaCopy {
    /// A loop over elements. Steps are in elements.
    struct Level {
        std::size_t extent;
        std::size_t from;
        std::size_t to;
    };

    void const* from; ///< null: zeros
    void* to;
    double factor; ///< 1 copies bits; any other needs a floating-point dtype
    /// Null: `factor` counts. Else the kernel reads the factor here when it runs, in stream order;
    /// 0 then writes zeros, whatever the source holds.
    double const* factor_at;
    std::size_t count;
    DType dtype;
    std::uint8_t element_bytes;   ///< size_of(dtype), at most 8: a complex number is two elements
    std::uint8_t levels;          ///< at least one
    Level level[max_tensor_rank]; ///< innermost first; neighbours are merged where possible

    /// Whether the innermost loop is a row: contiguous in both places.
    [[nodiscard]] bool has_rows() const noexcept {
        return level[0].to == 1 && (from == nullptr || level[0].from == 1);
    }
};

/// A sum of the squares of a tensor's elements, in the form that kernels take.
struct CudaSquares {
    void const* from;
    double* sum;      ///< what is added to
    double* partials; ///< memory for the sum of each run of elements, see detail::square_blocks
    std::size_t count;
    detail::IndexOrder order;
    DType dtype;
};

} // namespace detail

/// Functions that run kernels, from a source file compiled by nvcc. See cuda_kernels.hpp.
struct CudaKernels {
    /// Runs all copies, which are independent, in the order of the stream. `copies` may change when
    /// this returns. The current device is the stream's.
    cudaError_t (*run)(detail::CudaCopy const* copies, std::size_t count, cudaStream_t stream);
    /// Whether update() knows a rule. Null: no rule.
    bool (*has_rule)(detail::DeviceRule const& rule) = nullptr;
    /// Steps elements by a rule, in the order of the stream. `rule` and `updates` may change when
    /// this returns. The current device is the stream's.
    cudaError_t (*update)(
        detail::DeviceRule const& rule,
        detail::DeviceUpdate const* updates,
        std::size_t count,
        cudaStream_t stream
    ) = nullptr;
    /// Computes all sums, in the order of the stream. `sums` may change when this returns. The
    /// current device is the stream's. Null: there are no such kernels.
    cudaError_t (*sum_squares)(
        detail::CudaSquares const* sums, std::size_t count, cudaStream_t stream
    ) = nullptr;
    /// Loads all kernels on the current device. CUDA else loads a kernel at its first launch, and
    /// may then wait for what runs on the device, such as a collective. Null: nothing to load.
    cudaError_t (*load)() = nullptr;
    /// Runs steps in the order of their kinds, and of the stream. `steps` may change when this returns. The current device is
    /// the stream's. Null: there are no such kernels.
    cudaError_t (*compute)(
        detail::DeviceStep const* steps, std::size_t count, cudaStream_t stream
    ) = nullptr;
};

namespace detail {

/// A copy of elements in the same order in both places. `from` null: zeros.
[[nodiscard]] inline CudaCopy
cuda_copy(void const* from, Shape const& from_strides, double factor, AnyView const& to) {
    auto const element_bytes = static_cast<std::uint8_t>(size_of(to.dtype()));
    CudaCopy copy{from, to.data(), factor, nullptr, to.numel(), to.dtype(), element_bytes, 0, {}};
    Loops const loops{to.extents(), from_strides, to.strides(), 1};
    auto const levels = loops.levels();
    for (std::size_t l = levels.size(); l-- > 0;) {
        copy.level[copy.levels++] = {levels[l].extent, levels[l].from, levels[l].to};
    }
    return copy;
}

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/device/cuda/detail/runtime_copies.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Runs a copy without kernels, as a minimal number of the runtime's copies of rows.
class CudaRuntimeCopies {
public:
    explicit CudaRuntimeCopies(cudaStream_t stream) noexcept : stream_{stream} {}

    /// @pre the factor is 1. One that only a kernel can read is refused: cudaErrorNotSupported.
    [[nodiscard]] cudaError_t run(CudaCopy const& copy) const {
        if (copy.factor_at != nullptr) {
            return cudaErrorNotSupported;
        }
        if (copy.count == 0) {
            return cudaSuccess;
        }
        std::size_t const size = size_of(copy.dtype);
        std::size_t const width = copy.has_rows() ? copy.level[0].extent * size : size;
        return loop(copy, copy.levels, copy.has_rows() ? 1 : 0, width, copy.from, copy.to);
    }

private:
    /// Runs the loops in [first, last), starting with the outermost one.
    cudaError_t loop(
        CudaCopy const& copy,
        std::size_t last,
        std::size_t first,
        std::size_t width,
        void const* from,
        void* to
    ) const {
        if (last == first) {
            return rows(from, width, to, width, width, 1);
        }
        std::size_t const size = size_of(copy.dtype);
        CudaCopy::Level const& level = copy.level[last - 1];
        std::size_t const from_step = level.from * size;
        std::size_t const to_step = level.to * size;
        if (last == first + 1 && is_pitch(to_step, width) &&
            (from == nullptr || is_pitch(from_step, width))) {
            return rows(from, from_step, to, to_step, width, level.extent);
        }
        for (std::size_t i = 0; i < level.extent; ++i) {
            auto const error = loop(
                copy,
                last - 1,
                first,
                width,
                from == nullptr ? from : static_cast<std::byte const*>(from) + i * from_step,
                static_cast<std::byte*>(to) + i * to_step
            );
            if (error != cudaSuccess) {
                return error;
            }
        }
        return cudaSuccess;
    }

    /// Whether the runtime accepts this distance of rows: at least their width, less than 2 GiB.
    static bool is_pitch(std::size_t step, std::size_t width) noexcept {
        return step >= width && step <= std::size_t{(std::numeric_limits<int>::max)()};
    }

    cudaError_t rows(
        void const* from,
        std::size_t from_step,
        void* to,
        std::size_t to_step,
        std::size_t width,
        std::size_t count
    ) const {
        if (from == nullptr) {
            return count == 1 ? cudaMemsetAsync(to, 0, width, stream_)
                              : cudaMemset2DAsync(to, to_step, 0, width, count, stream_);
        }
        return count == 1 ? cudaMemcpyAsync(to, from, width, cudaMemcpyDeviceToDevice, stream_)
                          : cudaMemcpy2DAsync(
                                to,
                                to_step,
                                from,
                                from_step,
                                width,
                                count,
                                cudaMemcpyDeviceToDevice,
                                stream_
                            );
    }

    cudaStream_t stream_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/device/cuda/runtime.hpp

/// @file
/// The common parts of calls of the CUDA runtime: their errors, the device on which they act, captures
/// of other threads, and memory that goes back.

namespace joinable { inline namespace v0 { namespace detail {

/// @throws CommunicationError
inline void require_cuda(cudaError_t error, std::string_view call) {
    if (error != cudaSuccess) {
        static_cast<void>(cudaGetLastError()); // or the next call that asks finds it
        throw CommunicationError{
            concat(call, " failed: ", cudaGetErrorName(error), ", ", cudaGetErrorString(error))
        };
    }
}

/// Whether an earlier call or launch of this thread failed, and nobody has asked for the error. That
/// something is not complete yet is no error.
[[nodiscard]] inline bool has_cuda_error() noexcept {
    cudaError_t const last = cudaPeekAtLastError();
    return last != cudaSuccess && last != cudaErrorNotReady;
}
/// Nothing else tells that a launch of the engine failed, and a query of work that is not complete would
/// replace the error. Forgets it. An error that stays is for the next call to tell.
/// @throws ContractViolation
inline void require_no_cuda_error() {
    if (!has_cuda_error()) {
        return;
    }
    cudaError_t const last = cudaGetLastError();
    if (cudaPeekAtLastError() == cudaSuccess) {
        throw ContractViolation{concat(
            "an earlier call of CUDA in this thread failed, or a launch, and nobody has asked for the "
            "error: ",
            cudaGetErrorString(last),
            "; ask cudaGetLastError() after launches"
        )};
    }
}

/// Every call of CUDA or NCCL is made while such an object lives, in any thread of an engine:
/// - A device is the current one of the thread. Events are made on it, the null stream is its own, and
///   NCCL launches kernels of one rank on it.
/// - A CUDA graph that another thread captures does not forbid calls that it does not concern, such as
///   queries of events, and they do not break it.
/// - The calls leave no error to the thread. An error of the engine from before stays, unless a call
///   replaces it: see require_no_cuda_error().
class CurrentCudaDevice {
public:
    /// @throws CommunicationError  the device cannot be used.
    explicit CurrentCudaDevice(int index) {
        require_cuda(cudaGetDevice(&before_), "cudaGetDevice");
        if (before_ != index) {
            require_cuda(cudaSetDevice(index), "cudaSetDevice");
            is_changed_ = true;
        }
        relax();
    }
    /// For calls that then fail themselves, or give things back: does what it can.
    CurrentCudaDevice(int index, std::nothrow_t) noexcept {
        is_changed_ = cudaGetDevice(&before_) == cudaSuccess && before_ != index &&
                      cudaSetDevice(index) == cudaSuccess;
        relax();
    }
    CurrentCudaDevice(CurrentCudaDevice const&) = delete;
    CurrentCudaDevice& operator=(CurrentCudaDevice const&) = delete;
    ~CurrentCudaDevice() {
        if (is_relaxed_) {
            static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
        }
        if (is_changed_) {
            static_cast<void>(cudaSetDevice(before_));
        }
        if (!leaves_error_ && cudaPeekAtLastError() != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
        }
    }

private:
    void relax() noexcept {
        is_relaxed_ = cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess;
    }

    bool leaves_error_ = has_cuda_error();
    int before_ = 0;
    bool is_changed_ = false;
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
    bool is_relaxed_ = false;
};

struct DestroysInCuda {
    void operator()(cudaEvent_t event) const noexcept {
        static_cast<void>(cudaEventDestroy(event));
    }
    void operator()(cudaStream_t stream) const noexcept {
        static_cast<void>(cudaStreamDestroy(stream));
    }
};
using CudaEvent = std::unique_ptr<CUevent_st, DestroysInCuda>;
using CudaStream = std::unique_ptr<CUstream_st, DestroysInCuda>;

/// An event that orders work; it measures no time.
[[nodiscard]] inline cudaError_t make_event(CudaEvent& event) noexcept {
    cudaEvent_t made = nullptr;
    cudaError_t const error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    event.reset(made);
    return error;
}
/// A stream that does not wait for the null stream.
[[nodiscard]] inline cudaError_t make_stream(CudaStream& stream) noexcept {
    cudaStream_t made = nullptr;
    cudaError_t const error = cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
    stream.reset(made);
    return error;
}

/// Whether work on the stream goes into a CUDA graph, or, on the null stream, cannot be: a stream that
/// waits for it captures one. @throws CommunicationError  the runtime refuses otherwise.
[[nodiscard]] inline bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status{};
    cudaError_t const error = cudaStreamIsCapturing(stream, &status);
    if (error == cudaErrorStreamCaptureImplicit) {
        static_cast<void>(cudaGetLastError());
        return true;
    }
    require_cuda(error, "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

/// Calls f(), which may never return, on a thread of its own. Returns the result, or nothing if `time`
/// passes before: the thread then goes on alone, and f keeps what it needs.
/// @throws std::system_error, std::bad_alloc  there is no thread; f() was not called.
template <class F>
[[nodiscard]] std::optional<std::invoke_result_t<F&>>
run_within(std::chrono::nanoseconds time, F f) {
    auto const task =
        std::make_shared<std::packaged_task<std::invoke_result_t<F&>()>>(std::move(f));
    auto result = task->get_future();
    std::thread{[task] { (*task)(); }}.detach();
    constexpr std::chrono::nanoseconds longest =
        std::chrono::hours{24 * 365}; // the clock's sum fits
    if (result.wait_for((std::min)(time, longest)) != std::future_status::ready) {
        return std::nullopt;
    }
    return result.get();
}

/// For a thread of our own, which ends soon: it works on a device, and leaves captures of others alone.
/// Another device that it set, even the one from before, would get a context.
inline void use_cuda_device(int index) noexcept {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    static_cast<void>(cudaSetDevice(index));
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
}

/// Waits for all work of the current device, on such a thread. cudaDeviceSynchronize() refuses in any mode while a
/// stream of the device captures, and breaks that capture. Freeing waits as well, and does neither.
inline void wait_for_cuda_device() noexcept {
    void* mark = nullptr;
    if (cudaMalloc(&mark, 1) == cudaSuccess) { // else the device is lost, or full
        static_cast<void>(cudaFree(mark));
    } else {
        static_cast<void>(cudaDeviceSynchronize());
    }
}

/// How many threads are still at give_back() after its deadline.
[[nodiscard]] inline std::atomic<int>& late_cuda_frees() noexcept {
    static std::atomic<int> threads{0};
    return threads;
}

/// Frees memory of a device by `free()`, at once if the device is idle. CUDA waits for all work of the
/// device then, and nothing but a bound ends that wait where a rank never joins a collective, of
/// whichever communicator. So `free()` runs on a thread of its own. At the deadline, after a second at
/// most, the host goes on: what keeps the device busy may need it. The thread frees the memory when the
/// device allows. The host waits for one such thread only.
template <class Free>
void give_back(int device, std::chrono::nanoseconds deadline, Free free) noexcept {
    enum State : int { running, late, over };
    try {
        bool const is_stuck = late_cuda_frees() > 0;
        auto const state = std::make_shared<std::atomic<int>>(running);
        auto const run = [=] {
            use_cuda_device(device);
            if (is_stuck) { // free() may rely on memory that was freed before
                wait_for_cuda_device();
            }
            free();
            late_cuda_frees() -= state->exchange(over) == late ? 1 : 0;
            return true;
        };
        constexpr std::chrono::nanoseconds longest = std::chrono::seconds{1};
        if (!run_within(
                is_stuck ? std::chrono::nanoseconds{0} : (std::min)(deadline, longest), run
            )) {
            ++late_cuda_frees(); // before the thread can see that it is late
            int expected = running;
            late_cuda_frees() -= state->compare_exchange_strong(expected, late) ? 0 : 1;
        }
    } catch (...) { // NOLINT(bugprone-empty-catch): there is no thread, so the memory stays
    }
}

/// A block of device or pinned memory, as the context of an arena, which may outlive its device.
struct CudaBlock {
    void* data;
    int device;
    std::chrono::nanoseconds deadline; ///< see give_back()
    cudaError_t (*free)(void*);

    /// That of an arena; null if it has another kind of memory.
    [[nodiscard]] static CudaBlock const* of(Arena const& arena) noexcept {
        return static_cast<CudaBlock const*>(arena.context_of(&release));
    }
    static void release(void* context, std::byte*, std::size_t) noexcept {
        std::unique_ptr<CudaBlock const> const block{static_cast<CudaBlock*>(context)};
        give_back(block->device, block->deadline, [data = block->data, free = block->free] {
            static_cast<void>(free(data));
        });
    }
};

}}} // namespace joinable::v0::detail

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

// ---- joinable/device/cuda/device.hpp

namespace joinable { inline namespace v0 {

/// Memory of a CUDA device, used by two streams. On the first, everything here runs in order with
/// the collectives of a communicator. On the second, the engine makes and uses gradients. They may
/// be the same stream; a communicator with its own streams then orders them.
///
/// Without kernels, copies go through the runtime, with one call for each two-dimensional block of
/// a tensor, only the communicator can scale (ScalesSums), and nothing steps parameters, sums
/// squares or compresses gradients. With kernels (use_kernels), a submission is a launch or a few, packing scales,
/// sharded optimizers step, and CastTo and PowerSgd compute.
class CudaDevice : public Device {
public:
    /// The streams are of device `index` and must outlive this object; null is the default stream.
    CudaDevice(int index, cudaStream_t stream, cudaStream_t engine_stream) noexcept
        : index_{index}, stream_{stream}, engine_stream_{engine_stream} {}

    [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }
    [[nodiscard]] cudaStream_t engine_stream() const noexcept { return engine_stream_; }
    /// Takes effect at the next submission. Submitted work stays on the old streams; the caller
    /// orders both.
    void set_streams(cudaStream_t stream, cudaStream_t engine_stream) noexcept {
        stream_ = stream;
        engine_stream_ = engine_stream;
    }
    /// For downloads, and for memory that is allocated later. Memory goes back when the device is idle; at
    /// this deadline the host no longer waits for that, and a thread frees the memory later. Collectives
    /// whose ranks never come keep a device busy for ever.
    void set_deadline(std::chrono::nanoseconds deadline) noexcept { deadline_ = deadline; }
    /// Call this before a reducer or an optimizer uses the device. See cuda_kernels(). Loads the
    /// kernels, so that no launch waits for a collective.
    /// @throws CommunicationError  the runtime cannot load them: no kernels are used.
    void use_kernels(CudaKernels const& kernels) {
        if (kernels.load != nullptr) {
            detail::CurrentCudaDevice const current{index_};
            detail::require_cuda(kernels.load(), "loading the kernels");
        }
        kernels_ = kernels;
    }
    [[nodiscard]] CudaKernels const& kernels() const noexcept { return kernels_; }

    [[nodiscard]] DeviceId id() const noexcept override { return {DeviceKind::cuda, index_}; }
    /// @throws CommunicationError  the runtime refuses.
    [[nodiscard]] DeviceId id_of(void const* memory) const override {
        detail::CurrentCudaDevice const current{index_};
        cudaPointerAttributes found{};
        detail::require_cuda(cudaPointerGetAttributes(&found, memory), "cudaPointerGetAttributes");
        // Pinned memory is the host's, although it has the device that was current when it was made.
        bool const is_host =
            found.type == cudaMemoryTypeHost || found.type == cudaMemoryTypeUnregistered;
        return is_host ? DeviceId{} : DeviceId{DeviceKind::cuda, found.device};
    }

    /// Uses cudaMalloc, not a pool: it is called once, and memory from a pool cannot be registered
    /// with a transport. It goes back when the device is idle: see set_deadline(). Blocks only until the memory is zeroed, because a stream may be waiting
    /// for a collective that a failed rank never joins.
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t alignment) override {
        detail::check_alignment(alignment);
        if (bytes == 0) {
            return {};
        }
        constexpr std::size_t given = 256; // cudaMalloc aligns to it
        std::size_t const room = alignment <= given ? 0 : alignment;
        detail::CurrentCudaDevice const current{index_};
        auto block = no_block(&cudaFree);
        detail::require_cuda(cudaMalloc(&block->data, bytes + room), "cudaMalloc");
        std::size_t space = bytes + room;
        void* data = block->data;
        std::align(alignment, bytes, data, space);
        Arena arena = arena_of(std::move(block), data, bytes);
        clear(data, bytes);
        return arena;
    }

    void copy(AnyView const& from, AnyView const& to) override { take("copy", from, 1.0, to); }
    /// @throws ContractViolation  also if there are no kernels and the factor is not 1.
    void scale_copy(AnyView const& from, double factor, AnyView const& to) override {
        if (factor != 1.0 && (!can_scale() || !detail::is_scalable(to.dtype()))) {
            throw ContractViolation{detail::concat(
                "scale_copy: a tensor of ",
                name_of(to.dtype()),
                " cannot be scaled by ",
                factor,
                can_scale() ? "; only floating-point and complex dtypes can"
                            : " without kernels; call CudaDevice::use_kernels first"
            )};
        }
        take("scale_copy", from, factor, to);
    }
    void fill_zero(AnyView const& to) override {
        require_here("fill_zero", to);
        AnyView const target = detail::as_reals(to);
        queue_.push_back(detail::cuda_copy(nullptr, target.strides(), 1.0, target));
    }
    [[nodiscard]] bool can_scale() const noexcept override { return kernels_.run != nullptr; }

    /// If it throws, what was requested before is forgotten: its memory may end.
    /// @throws ContractViolation  the engine's stream is capturing a graph: nothing was submitted.
    /// @throws CommunicationError  the runtime refuses.
    void submit() override {
        running_.clear();
        running_.swap(queue_);
        detail::CurrentCudaDevice const current{index_};
        if (detail::is_capturing(engine_stream_)) {
            throw ContractViolation{
                "gradients cannot be reduced while the engine's stream captures a CUDA graph; end "
                "the capture before the backward pass, or capture the passes without the reduction"
            };
        }
        order(engine_stream_, stream_);
        run(running_);
    }
    void finish() override {
        submit();
        detail::CurrentCudaDevice const current{index_};
        order(stream_, engine_stream_);
    }

    [[nodiscard]] bool can_update(detail::DeviceRule const& rule) const noexcept override {
        return kernels_.has_rule != nullptr && kernels_.has_rule(rule);
    }
    /// @throws ContractViolation  there are no kernels for the rule, or as submit().
    /// @throws CommunicationError  the runtime refuses.
    void
    update(detail::DeviceRule const& rule, std::span<detail::DeviceUpdate const> updates) override {
        if (!can_update(rule)) {
            throw ContractViolation{
                "update: there are no kernels for this rule; call CudaDevice::use_kernels first"
            };
        }
        submit();
        detail::CurrentCudaDevice const current{index_};
        detail::require_cuda(
            kernels_.update(rule, updates.data(), updates.size(), stream_), "a kernel of a rule"
        );
    }

    [[nodiscard]] bool can_sum_squares() const noexcept override {
        return kernels_.sum_squares != nullptr;
    }
    /// @throws ContractViolation  there are no kernels for it, or as submit().
    /// @throws CommunicationError  the runtime refuses.
    void sum_squares(std::span<detail::SquareSum const> sums) override {
        if (!can_sum_squares()) {
            throw ContractViolation{
                "sum_squares: there are no kernels for it; call CudaDevice::use_kernels first"
            };
        }
        std::size_t blocks = 0;
        for (detail::SquareSum const& one : sums) {
            require_here("sum_squares", one.tensor);
            blocks += detail::square_blocks(one.tensor.numel());
        }
        auto* partials = reinterpret_cast<double*>(partials_.data(blocks * sizeof(double)));
        std::vector<detail::CudaSquares> squares;
        for (auto const& [tensor, sum, on_host] : sums) {
            std::size_t const count = tensor.numel();
            detail::IndexOrder const order{tensor.extents(), tensor.strides()};
            squares.push_back({tensor.data(), sum, partials, count, order, tensor.dtype()});
            partials += detail::square_blocks(count);
        }
        submit();
        detail::CurrentCudaDevice const current{index_};
        detail::require_cuda(
            kernels_.sum_squares(squares.data(), squares.size(), stream_),
            "a kernel that sums squares"
        );
    }

    [[nodiscard]] bool can_compute() const noexcept override { return kernels_.compute != nullptr; }
    /// @throws ContractViolation  there are no kernels for it, or as submit().
    /// @throws CommunicationError  the runtime refuses.
    void compute(detail::DeviceStep const* steps, std::size_t count) override {
        if (!can_compute()) {
            throw ContractViolation{
                "compute: there are no kernels for it; call CudaDevice::use_kernels first"
            };
        }
        submit();
        detail::CurrentCudaDevice const current{index_};
        detail::require_cuda(kernels_.compute(steps, count, stream_), "a kernel of a reduction");
    }

    /// Uses a second arena as large as the first one, until the stream has come so far.
    void permute(Arena const& arena, std::vector<detail::Section>& sections) override {
        submit();
        Arena const other = arena.bytes() == 0 ? Arena{} : allocate_in_order(arena.bytes());
        for (detail::Section const& section : sections) {
            move(arena.data() + section.from, other.data() + section.to, section.bytes);
        }
        submit();
        for (detail::Section const& section : sections) {
            move(other.data() + section.to, arena.data() + section.to, section.bytes);
        }
        submit();
    }

    /// Pinned memory: copying from other memory, the runtime may wait for the stream without a
    /// deadline.
    [[nodiscard]] Arena allocate_staging(std::size_t bytes) override {
        if (bytes == 0) {
            return {};
        }
        detail::CurrentCudaDevice const current{index_};
        auto block = no_block(&cudaFreeHost);
        detail::require_cuda(cudaMallocHost(&block->data, bytes), "cudaMallocHost");
        void* const data = block->data;
        std::memset(data, 0, bytes);
        return arena_of(std::move(block), data, bytes);
    }
    void upload(void const* from, void* to, std::size_t bytes) override {
        detail::CurrentCudaDevice const current{index_};
        detail::require_cuda(
            cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync"
        );
    }
    /// @throws TimedOut  the stream has not come so far by the deadline. Nothing was copied.
    /// @throws CommunicationError  the runtime refuses.
    void download(void const* from, void* to, std::size_t bytes) override {
        detail::CurrentCudaDevice const current{index_};
        wait_for_stream(); // before the copy, which nothing could call back when `to` ends
        detail::require_cuda(
            cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync"
        );
        cudaError_t const waited = cudaStreamSynchronize(stream_);
        if (waited != cudaSuccess) { // the copy may still run, but `to` may end after a throw
            static_cast<void>(cudaStreamSynchronize(stream_));
        }
        detail::require_cuda(waited, "cudaStreamSynchronize");
    }

protected:
    /// Blocks the host until the stream has run what is on it, up to the deadline. A communicator's own device
    /// waits as the communicator does. @pre the device is the current one
    virtual void wait_for_stream() {
        constexpr std::chrono::microseconds spin{300}; // as a wait for a collective of NCCL
        constexpr std::chrono::microseconds nap{50};
        detail::require_no_cuda_error();
        auto const begun = std::chrono::steady_clock::now();
        for (;;) {
            cudaError_t const found = cudaStreamQuery(stream_);
            if (found != cudaErrorNotReady) {
                return detail::require_cuda(found, "cudaStreamQuery");
            }
            auto const waited = std::chrono::steady_clock::now() - begun;
            if (waited >= deadline_) {
                throw TimedOut{
                    {},
                    detail::concat(
                        detail::to_text(id()),
                        " has not finished its work within ",
                        std::chrono::duration<double>(deadline_).count(),
                        " s; a collective in it may wait for a rank that never comes"
                    )
                };
            }
            if (waited < spin) {
                std::this_thread::yield();
            } else {
                std::this_thread::sleep_for(nap);
            }
        }
    }

private:
    /// On a stream that waits for no other. @pre the device is the current one
    static void clear(void* data, std::size_t bytes) {
        detail::CudaStream stream;
        detail::require_cuda(detail::make_stream(stream), "cudaStreamCreateWithFlags");
        detail::require_cuda(cudaMemsetAsync(data, 0, bytes, stream.get()), "cudaMemsetAsync");
        detail::require_cuda(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    }
    /// For memory that is allocated next. Owns none: `free` is for the arena.
    [[nodiscard]] std::unique_ptr<detail::CudaBlock> no_block(cudaError_t (*free)(void*)) const {
        return std::make_unique<detail::CudaBlock>(
            detail::CudaBlock{nullptr, index_, deadline_, free}
        );
    }
    static Arena
    arena_of(std::unique_ptr<detail::CudaBlock> block, void* data, std::size_t bytes) noexcept {
        return {static_cast<std::byte*>(data), bytes, &detail::CudaBlock::release, block.release()};
    }
    /// Memory for operations of the next submissions, not zeroed. It is given and taken back in the
    /// order of the stream, so the host waits for nothing; for that the device needs pools. NCCL must
    /// not see it: it may access memory directly, which a pool would have to permit. The device
    /// outlives it.
    [[nodiscard]] Arena allocate_in_order(std::size_t bytes) {
        detail::CurrentCudaDevice const current{index_};
        int has_pools = 0;
        detail::require_cuda(
            cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, index_),
            "cudaDeviceGetAttribute"
        );
        if (has_pools == 0) {
            return allocate(bytes, Arena::default_alignment);
        }
        void* block = nullptr;
        detail::require_cuda(cudaMallocAsync(&block, bytes, stream_), "cudaMallocAsync");
        return {static_cast<std::byte*>(block), bytes, &free_in_order, this};
    }
    static void free_in_order(void* context, std::byte* data, std::size_t) noexcept {
        auto const& device = *static_cast<CudaDevice*>(context);
        detail::CurrentCudaDevice const current{device.index_, std::nothrow};
        static_cast<void>(cudaFreeAsync(data, device.stream_));
    }

    void require_here(std::string_view what, AnyView const& view) const {
        if (view.device() != id()) {
            throw ContractViolation{detail::concat(
                what,
                " on ",
                detail::to_text(id()),
                ": a tensor is on ",
                detail::to_text(view.device()),
                "; copy it there first, with the engine's own means"
            )};
        }
    }
    static AnyView without_device(AnyView const& view) {
        return view ? AnyView{view.data(), view.dtype(), view.extents(), view.strides()} : view;
    }
    void take(std::string_view what, AnyView const& from, double factor, AnyView const& to) {
        require_here(what, from);
        require_here(what, to);
        detail::check_pair(what, without_device(from), without_device(to));
        if (to.numel() != 0 && !(factor == 1.0 && detail::is_same_view(from, to))) {
            put(from, factor, to);
        }
    }
    /// Kernels know no complex numbers.
    void put(AnyView const& from, double factor, AnyView const& to) {
        if (detail::is_complex(to.dtype())) {
            return put(detail::as_reals(from), factor, detail::as_reals(to));
        }
        queue_.push_back(detail::cuda_copy(from.data(), from.strides(), factor, to));
    }
    void move(std::byte* from, std::byte* to, std::size_t bytes) {
        if (bytes != 0) {
            AnyView const target{to, DType::u8, {bytes}, {1}, id()};
            queue_.push_back(detail::cuda_copy(from, {1}, 1.0, target));
        }
    }

    /// Later work on `later` runs after earlier work on `earlier`.
    void order(cudaStream_t earlier, cudaStream_t later) {
        if (earlier != later) {
            if (event_ == nullptr) {
                detail::require_cuda(detail::make_event(event_), "cudaEventCreateWithFlags");
            }
            detail::require_cuda(cudaEventRecord(event_.get(), earlier), "cudaEventRecord");
            detail::require_cuda(
                cudaStreamWaitEvent(later, event_.get(), 0), "cudaStreamWaitEvent"
            );
        }
    }

    void run(std::vector<detail::CudaCopy> const& queue) const {
        if (kernels_.run != nullptr && !queue.empty()) {
            detail::require_cuda(kernels_.run(queue.data(), queue.size(), stream_), "a kernel");
        } else {
            for (detail::CudaCopy const& copy : queue) {
                detail::require_cuda(
                    detail::CudaRuntimeCopies{stream_}.run(copy), "a copy on the device"
                );
            }
        }
    }

    int index_;
    cudaStream_t stream_;
    cudaStream_t engine_stream_;
    std::chrono::nanoseconds deadline_ = std::chrono::minutes{5};
    detail::CudaEvent event_;
    CudaKernels kernels_{};
    std::vector<detail::CudaCopy> queue_;   ///< since the last submission
    std::vector<detail::CudaCopy> running_; ///< of the last submission
    detail::Scratch partials_{*this};       ///< of sums of squares
};

}} // namespace joinable::v0

// ---- joinable/device/cuda/shared_handle.hpp

namespace joinable { inline namespace v0 {

/// Names the elements of a SharedBuffer in memory of a CUDA device for other processes of this machine, as
/// SharedHandle does for host memory: `buffer.handle<CudaSharedHandle>()` makes it, and
/// `SharedBuffer<T>::open(handle)` opens it, on the current device of the thread. The memory is an arena that
/// CudaDevice::allocate() has made:
///
///     SharedBuffer<float> weights{device.allocate(count * sizeof(float), 256), count, device.id()};
///
/// A plain value of eleven numbers that models Tensor, as in `broadcast(comm, handle, 0)`. A process that has it may read and
/// write the elements, and other allocations in the same 2 MiB: CUDA asks for no secret and no user.
///
/// The buffer on which handle() was called must outlive all that were opened: CUDA calls it undefined to free
/// memory that another process still has open. Wait for the device (`cudaDeviceSynchronize()`) before an opened
/// buffer ends, as its destructor waits for a busy device a second at most; then a barrier orders their ends.
struct CudaSharedHandle {
    /// CUDA's handle of the allocation, where in it the elements begin, their number, and the bytes of one. Zeros: no
    /// handle.
    std::array<std::uint64_t, 11> words{};

    [[nodiscard]] std::size_t count() const noexcept { return static_cast<std::size_t>(words[9]); }
    [[nodiscard]] std::uint64_t element_bytes() const noexcept { return words[10]; }

    /// For SharedBuffer. Local.
    /// @throws ContractViolation   CudaDevice::allocate() has not made the memory, or another process has.
    /// @throws CommunicationError  CUDA refuses.
    [[nodiscard]] static CudaSharedHandle
    of(Arena const& memory, std::size_t count, std::size_t element_bytes) {
        auto const* const block = detail::CudaBlock::of(memory);
        if (block == nullptr || block->free != &cudaFree) {
            throw ContractViolation{
                count == 0
                    ? "SharedBuffer::handle(): the buffer has no elements, which no process can open"
                : block == nullptr || block->free != &close
                    ? "SharedBuffer::handle(): the elements are not of CudaDevice::allocate(); a handle of "
                      "host memory is SharedHandle"
                    : "SharedBuffer::handle(): another process has made the memory; take that one's handle"
            };
        }
        detail::CurrentCudaDevice const current{block->device};
        cudaIpcMemHandle_t of_allocation{};
        detail::require_cuda(
            cudaIpcGetMemHandle(&of_allocation, block->data), "cudaIpcGetMemHandle"
        );
        static_assert(sizeof of_allocation == 8 * sizeof(std::uint64_t));
        CudaSharedHandle handle;
        std::memcpy(handle.words.data(), &of_allocation, sizeof of_allocation);
        handle.words[8] =
            static_cast<std::uint64_t>(memory.data() - static_cast<std::byte const*>(block->data));
        handle.words[9] = count;
        handle.words[10] = element_bytes;
        return handle;
    }
    /// For SharedBuffer and share_parameters(): opens it `on` a device; the host stands for the current one. Local; CUDA
    /// waits for no other process. @pre the handle names elements of `element_bytes`
    [[nodiscard]] Arena
    open(std::size_t element_bytes, std::chrono::nanoseconds, DeviceId on = {}) const {
        int device = on.index;
        if (on.kind != DeviceKind::cuda) {
            detail::require_cuda(cudaGetDevice(&device), "cudaGetDevice");
        }
        detail::CurrentCudaDevice const current{device};
        cudaIpcMemHandle_t of_allocation{};
        std::memcpy(&of_allocation, words.data(), sizeof of_allocation);
        auto block = std::make_unique<detail::CudaBlock>(
            detail::CudaBlock{nullptr, device, std::chrono::minutes{5}, &close}
        );
        detail::require_cuda(
            cudaIpcOpenMemHandle(&block->data, of_allocation, cudaIpcMemLazyEnablePeerAccess),
            "cudaIpcOpenMemHandle, which opens memory of another process that has not freed it,"
        );
        std::byte* const data = static_cast<std::byte*>(block->data) + words[8];
        return {data, count() * element_bytes, &detail::CudaBlock::release, block.release()};
    }
    /// For SharedBuffer: where an arena of open() is.
    [[nodiscard]] static DeviceId device_of(Arena const& opened) noexcept {
        return {DeviceKind::cuda, detail::CudaBlock::of(opened)->device};
    }

private:
    /// Closing does not wait for work that uses the memory, as freeing does.
    static cudaError_t close(void* data) {
        detail::wait_for_cuda_device();
        return cudaIpcCloseMemHandle(data);
    }
};

template <>
struct tensor_traits<CudaSharedHandle> {
    using value_type = std::uint64_t;
    static std::uint64_t* data(CudaSharedHandle& handle) noexcept { return handle.words.data(); }
    static std::uint64_t const* data(CudaSharedHandle const& handle) noexcept {
        return handle.words.data();
    }
    static std::array<std::size_t, 1> extents(CudaSharedHandle const& handle) noexcept {
        return {{handle.words.size()}};
    }
};

}} // namespace joinable::v0

// ---- joinable/cuda.hpp

/// @file
/// Opt-in: memory of CUDA devices. Needs the CUDA Toolkit's headers and libcudart; any C++20
/// compiler. Tested over a fake CUDA runtime, and on an H100. Kernels are in cuda_kernels.hpp, which one source file
/// compiled by nvcc includes.
