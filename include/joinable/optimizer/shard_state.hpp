// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include <joinable/device/arena.hpp>
#include <joinable/optimizer/update_rule.hpp>
#include <joinable/reduction/arithmetic.hpp>
#include <joinable/reduction/halves.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 {

/// The state that the owner of a part keeps: an array for each name of the rule, and an array of
/// masters if the values have 16 bits. Empty if an engine's optimizer keeps its own state. Local.
class ShardState {
public:
    /// State for `count` elements of `dtype`, a floating-point type; zeros.
    ShardState(DType dtype, std::size_t count, std::size_t names, bool has_masters)
        : dtype_{dtype}, count_{count}, names_{names}, has_masters_{has_masters},
          memory_{count * element_bytes()} {}

    [[nodiscard]] bool has_masters() const noexcept { return has_masters_; }
    /// The rule's arrays, then the masters.
    [[nodiscard]] std::size_t arrays() const noexcept { return names_ + (has_masters() ? 1 : 0); }
    [[nodiscard]] std::size_t names() const noexcept { return names_; }
    [[nodiscard]] std::size_t bytes() const noexcept { return memory_.bytes(); }
    /// The dtype of all arrays.
    [[nodiscard]] DType computed_in() const noexcept { return has_masters() ? DType::f32 : dtype_; }
    /// The bytes of all arrays for one element.
    [[nodiscard]] std::size_t element_bytes() const noexcept {
        return arrays() * size_of(computed_in());
    }
    /// Array `k` from element `at` on.
    [[nodiscard]] std::byte* array(std::size_t k, std::size_t at = 0) const noexcept {
        return memory_.data() + (k * count_ + at) * size_of(computed_in());
    }

private:
    DType dtype_;
    std::size_t count_;
    std::size_t names_;
    bool has_masters_;
    Arena memory_;
};

namespace detail {

/// memcpy() that allows null pointers if there is nothing to copy.
inline void copy_bytes(std::byte* to, std::byte const* from, std::size_t bytes) noexcept {
    if (bytes != 0) {
        std::memcpy(to, from, bytes);
    }
}

/// The type that an optimizer computes in: numbers of 16 bits have a master copy of 32 bits.
template <class Stored>
using master_of = std::conditional_t<sixteen_bits<Stored>, float, Stored>;

inline constexpr std::size_t most_state_arrays = 8;

template <class Stored>
void widen_to(float* to, std::byte const* from, std::size_t count) noexcept {
    conversion_function<Widen<Stored>>(instruction_set())(
        from, reinterpret_cast<std::byte*>(to), count
    );
}
template <class Stored>
void narrow_to(std::byte* to, float const* from, std::size_t count) noexcept {
    conversion_function<Narrow<Stored>>(instruction_set())(
        reinterpret_cast<std::byte const*>(from), to, count
    );
}

/// Calls f with the floating-point dtype as a type.
template <class F>
void visit_floating(DType dtype, F const& f) {
    switch (dtype) {
    case DType::f16: return f(std::type_identity<Half>{});
    case DType::bf16: return f(std::type_identity<BFloat16>{});
    case DType::f64: return f(std::type_identity<double>{});
    default: return f(std::type_identity<float>{});
    }
}

/// Steps `size` elements, whose state begins at element `at` of the part. Values and gradients have
/// the part's dtype.
template <class Stored, class Rule>
void update_piece(
    Rule const& rule,
    std::byte* values,
    std::byte const* gradients,
    std::size_t size,
    ShardState const& state,
    std::size_t at,
    std::uint64_t step
) {
    using T = master_of<Stored>;
    std::array<T*, most_state_arrays> arrays{};
    auto const range = [&](std::size_t begin, std::size_t count, T* stepped, T const* by) {
        for (std::size_t k = 0; k < state.names(); ++k) {
            arrays[k] = reinterpret_cast<T*>(state.array(k, at + begin));
        }
        rule.update(UpdateRange<T>{count, stepped, by, std::span{arrays}.first(state.names()), step}
        );
    };
    if constexpr (sixteen_bits<Stored>) {
        constexpr std::size_t tile = 1024;
        std::array<float, tile> widened;
        for (std::size_t begin = 0; begin < size; begin += tile) {
            std::size_t const count = (std::min)(tile, size - begin);
            auto* const masters = reinterpret_cast<float*>(state.array(state.names(), at + begin));
            widen_to<Stored>(widened.data(), gradients + begin * sizeof(Stored), count);
            range(begin, count, masters, widened.data());
            narrow_to<Stored>(values + begin * sizeof(Stored), masters, count);
        }
    } else {
        range(0, size, reinterpret_cast<T*>(values), reinterpret_cast<T const*>(gradients));
    }
}

} // namespace detail

}} // namespace joinable::v0
