// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/reduction/reduce.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include <joinable/reduction/halves.hpp>
#include <joinable/reduction/lanes.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// One pass of a reduction. It reads every input once, in order, and writes every output. An output
/// may be one of the inputs; otherwise they do not overlap.
struct ReductionPass {
    std::span<std::byte const* const> inputs;
    std::span<std::byte* const> outputs;
    std::size_t bytes;
    double const* factors = nullptr; ///< for each input, for PlusScaled
    std::uint64_t flip = 0;          ///< flipped_bits(), for operations that have it

    static constexpr std::size_t most = 16; ///< of inputs, of outputs: more would overload a cache
};

template <class T, class Operation, class L>
[[gnu::always_inline]] inline void
load_input(L& lanes, ReductionPass const& pass, std::size_t input, std::size_t at) noexcept {
    lanes.load(pass.inputs[input] + at);
    if constexpr (std::is_same_v<Operation, PlusScaled>) {
        lanes.scale(static_cast<T>(pass.factors[input]));
    } else if constexpr (flips_bits<Operation>) {
        lanes.flip(pass.flip);
    }
}

/// Reduces from byte `at` of every input as long as there are whole lanes. It reads all inputs of a
/// lane before it writes. Returns the byte at which it stopped.
template <class T, class L, class Operation>
[[gnu::always_inline]] inline std::size_t
reduce_lanes(Operation const& operation, ReductionPass const& pass, std::size_t at) noexcept {
    for (; at + L::bytes <= pass.bytes; at += L::bytes) {
        L result;
        load_input<T, Operation>(result, pass, 0, at);
        for (std::size_t i = 1; i < pass.inputs.size(); ++i) {
            L next;
            load_input<T, Operation>(next, pass, i, at);
            result.combine(operation, next);
        }
        if constexpr (flips_bits<Operation>) {
            result.flip(pass.flip);
        }
        for (std::byte* const output : pass.outputs) {
            result.store(output + at);
        }
    }
    return at;
}

template <class T, std::size_t width, class Operation>
[[gnu::always_inline]] inline void reduce_bytes(ReductionPass const& pass) noexcept {
    Operation operation{};
    if constexpr (flips_bits<Operation>) {
        operation.flip = pass.flip;
    }
    std::size_t at = reduce_lanes<T, EightLanes<Lanes<T, width>>>(operation, pass, 0);
    at = reduce_lanes<T, Lanes<T, width>>(operation, pass, at);
    if constexpr (width > 16) {
        at = reduce_lanes<T, Lanes<T, 16>>(operation, pass, at);
    }
    reduce_lanes<T, Lanes<T, sizeof(T)>>(operation, pass, at);
}

// The same loop for each instruction set. AVX-512 is only for float, the type of gradients and of
// widened 16-bit numbers: it helps in cache, and every further function takes time to compile.
template <class T, class Operation>
JOINABLE_LOOP void reduce_baseline(ReductionPass const& pass) noexcept {
    reduce_bytes<T, 16, Operation>(pass);
}
template <class T, class Operation>
JOINABLE_LOOP_AVX2 void reduce_avx2(ReductionPass const& pass) noexcept {
    reduce_bytes<T, 32, Operation>(pass);
}

template <class Operation>
JOINABLE_LOOP_AVX512 void reduce_avx512(ReductionPass const& pass) noexcept {
    reduce_bytes<float, 64, Operation>(pass);
}

/// The type in which a reduction computes: 16-bit numbers are widened first.
template <class T>
using accumulator_of = std::conditional_t<sixteen_bits<T>, float, T>;

/// A function that runs passes, and the bits that it is to flip.
struct PassFunction {
    void (*run)(ReductionPass const&) noexcept = nullptr;
    std::uint64_t flip = 0;
};

/// Nothing is compiled for reductions that are refused.
/// @pre is_reducible(dtype, Operation::op)
template <class Operation>
PassFunction pass_function(DType dtype, ReduceOp op, InstructionSet set) {
    return visit_dtype(dtype, [&]<class Stored>(std::type_identity<Stored>) -> PassFunction {
        if constexpr (is_reducible(dtype_of<Stored>, Operation::op)) {
            using T = typename Operation::template Number<accumulator_of<Stored>>;
            if constexpr (complex_number<T>) {
                return {&reduce_baseline<T, Operation>};
            } else {
                std::uint64_t flip = 0;
                if constexpr (flips_bits<Operation>) {
                    flip = flipped_bits<accumulator_of<Stored>>(op);
                }
                if constexpr (std::is_same_v<T, float>) {
                    if (set == InstructionSet::avx512) {
                        return {&reduce_avx512<Operation>, flip};
                    }
                }
                return {
                    set == InstructionSet::baseline ? &reduce_baseline<T, Operation>
                                                    : &reduce_avx2<T, Operation>,
                    flip
                };
            }
        } else {
            return {};
        }
    });
}

/// The function that runs passes of this reduction, scaled or not.
inline PassFunction pass_function(DType dtype, ReduceOp op, bool is_scaled, InstructionSet set) {
    switch (op) {
    case ReduceOp::sum:
        return is_scaled ? pass_function<PlusScaled>(dtype, op, set)
                         : pass_function<Plus>(dtype, op, set);
    case ReduceOp::product: return pass_function<Times>(dtype, op, set);
    case ReduceOp::min:
    case ReduceOp::max: return pass_function<Lesser>(dtype, op, set);
    case ReduceOp::bit_and:
    case ReduceOp::bit_or: break;
    }
    return pass_function<BitOr>(dtype, op, set);
}

/// A reduction of `bytes` bytes to every output, computed tile by tile in the first-level cache. It
/// is for more inputs or outputs than one pass takes, and for 16-bit numbers, which accumulate in
/// float and are rounded once.
class TiledReduction {
public:
    TiledReduction(DType dtype, ReduceOp op, Factors const& factors, InstructionSet set)
        : factors_{factors} {
        if (is_half_precision(dtype)) {
            bool const is_half = dtype == DType::f16;
            widen_ = is_half ? ConvertLoops<Widen<Half>>::of(set)
                             : ConvertLoops<Widen<BFloat16>>::of(set);
            narrow_ = is_half ? ConvertLoops<Narrow<Half>>::of(set)
                              : ConvertLoops<Narrow<BFloat16>>::of(set);
            dtype = DType::f32;
        }
        pass_ = pass_function(dtype, op, factors.size() != 0, set);
    }

    void run(Places const& inputs, Places const& outputs, std::size_t bytes) {
        for (std::size_t at = 0; at < bytes; at += tile_bytes) {
            std::size_t const n = (std::min)(tile_bytes, bytes - at);
            std::byte const* const sum = reduce_tile(inputs, at, n);
            std::byte* const first = outputs[0] + at;
            if (narrow_ != nullptr) {
                narrow_(sum, first, n / sizeof(Half));
            } else {
                std::memcpy(first, sum, n);
            }
            for (std::size_t i = 1; i < outputs.size(); ++i) {
                std::memcpy(outputs[i] + at, first, n);
            }
        }
    }

private:
    static constexpr std::size_t tile_bytes = 2048;
    using Tile = std::array<std::byte, 2 * tile_bytes>; // room for widened numbers

    /// Returns the unrounded result, in the first tile.
    std::byte const* reduce_tile(Places const& inputs, std::size_t at, std::size_t n) {
        bool const widens = widen_ != nullptr;
        std::byte* const sum = tiles_[0].data();
        std::array<std::byte const*, ReductionPass::most> from;
        std::array<double, ReductionPass::most> factors;
        std::size_t filled = 0;
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            from[filled] = inputs[i] + at;
            factors[filled] = factors_.size() == 0 ? 1.0 : factors_[i];
            if (widens) {
                widen_(from[filled], tiles_[filled].data(), n / sizeof(Half));
                from[filled] = tiles_[filled].data();
            }
            ++filled;
            if (filled == from.size() || i + 1 == inputs.size()) {
                pass_.run(
                    {{from.data(), filled},
                     {&sum, 1},
                     widens ? 2 * n : n,
                     factors.data(),
                     pass_.flip}
                );
                from[0] = sum;
                factors[0] = 1.0;
                filled = 1;
            }
        }
        return sum;
    }

    Factors factors_;
    PassFunction pass_;
    void (*widen_)(std::byte const*, std::byte*, std::size_t) noexcept = nullptr;
    void (*narrow_)(std::byte const*, std::byte*, std::size_t) noexcept = nullptr;
    alignas(64) std::array<Tile, ReductionPass::most> tiles_;
};

JOINABLE_DEFINITION void reduce_to(
    DType dtype,
    ReduceOp op,
    Places const& inputs,
    Places const& outputs,
    std::size_t count,
    Factors const& factors,
    InstructionSet set
) {
    std::size_t const bytes = count * size_of(dtype);
    std::array<std::byte const*, ReductionPass::most> from;
    std::array<std::byte*, ReductionPass::most> to;
    if (is_half_precision(dtype) || inputs.size() > from.size() || outputs.size() > to.size()) {
        return TiledReduction{dtype, op, factors, set}.run(inputs, outputs, bytes);
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        from[i] = inputs[i];
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        to[i] = outputs[i];
    }
    std::array<double, ReductionPass::most> by;
    for (std::size_t i = 0; i < factors.size(); ++i) {
        by[i] = factors[i];
    }
    PassFunction const pass = pass_function(dtype, op, factors.size() != 0, set);
    pass.run(
        {{from.data(), inputs.size()}, {to.data(), outputs.size()}, bytes, by.data(), pass.flip}
    );
}

}}} // namespace joinable::v0::detail
