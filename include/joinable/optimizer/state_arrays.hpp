// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/host.hpp>
#include <joinable/device/update.hpp>
#include <joinable/optimizer/update_rule.hpp>
#include <joinable/reduction/arithmetic.hpp>
#include <joinable/reduction/halves.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The state that the owner of a part keeps: an array for each name of the rule, and an array of
/// masters if the values have 16 bits. Empty if an engine's optimizer keeps its own state. Local.
class StateArrays {
public:
    /// State for `count` elements of `dtype`, a floating-point type; zeros, in memory of `device`.
    StateArrays(
        DType dtype,
        std::size_t count,
        std::size_t names,
        bool has_masters,
        Device& device = detail::the_host()
    )
        : dtype_{dtype}, count_{count}, names_{names}, has_masters_{has_masters},
          memory_{device.allocate(count * element_bytes(), Arena::default_alignment)} {}

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
    /// A step of `count` elements, whose state begins at element `at`. Values and gradients have
    /// the dtype of the state.
    [[nodiscard]] DeviceUpdate update(
        std::byte* values,
        std::byte const* gradients,
        std::size_t count,
        std::size_t at,
        std::uint64_t step
    ) const noexcept {
        void* const masters = has_masters() ? array(names_, at) : nullptr;
        void* const state = names_ != 0 ? array(0, at) : nullptr;
        return {values, gradients, masters, state, count_, count, step, dtype_};
    }

private:
    DType dtype_;
    std::size_t count_;
    std::size_t names_;
    bool has_masters_;
    Arena memory_;
};

/// memcpy() that allows null pointers if there is nothing to copy.
inline void copy_bytes(std::byte* to, std::byte const* from, std::size_t bytes) noexcept {
    if (bytes != 0) {
        std::memcpy(to, from, bytes);
    }
}

/// The type that an optimizer computes in: numbers of 16 bits have a master copy of 32 bits.
template <class Stored>
using master_of = std::conditional_t<sixteen_bits<Stored>, float, Stored>;

template <class Stored>
void widen_to(float* to, std::byte const* from, std::size_t count) noexcept {
    ConvertLoops<Widen<Stored>>::of()(from, reinterpret_cast<std::byte*>(to), count);
}
template <class Stored>
void narrow_to(std::byte* to, float const* from, std::size_t count) noexcept {
    ConvertLoops<Narrow<Stored>>::of()(reinterpret_cast<std::byte const*>(from), to, count);
}

/// Steps elements in host memory.
template <class Stored, class Rule>
void update_as(Rule const& rule, DeviceUpdate const& update) {
    using T = master_of<Stored>;
    std::array<T*, most_state_arrays> arrays{};
    std::size_t const names = rule.state_names().size();
    auto const range = [&](std::size_t begin, std::size_t count, T* stepped, T const* by) {
        for (std::size_t k = 0; k < names; ++k) {
            arrays[k] = static_cast<T*>(update.state) + k * update.stride + begin;
        }
        rule.update(UpdateRange<T>{count, stepped, by, std::span{arrays}.first(names), update.step}
        );
    };
    if constexpr (sixteen_bits<Stored>) {
        constexpr std::size_t tile = 1024;
        auto* const values = static_cast<std::byte*>(update.values);
        auto const* const gradients = static_cast<std::byte const*>(update.gradients);
        std::array<float, tile> widened;
        for (std::size_t begin = 0; begin < update.count; begin += tile) {
            std::size_t const count = (std::min)(tile, update.count - begin);
            float* const masters = static_cast<float*>(update.masters) + begin;
            widen_to<Stored>(widened.data(), gradients + begin * sizeof(Stored), count);
            range(begin, count, masters, widened.data());
            narrow_to<Stored>(values + begin * sizeof(Stored), masters, count);
        }
    } else {
        range(
            0, update.count, static_cast<T*>(update.values), static_cast<T const*>(update.gradients)
        );
    }
}
template <class Rule>
void update_on_host(void const* settings, DeviceUpdate const& update) {
    visit_floating(update.dtype, [&]<class Stored>(std::type_identity<Stored>) {
        update_as<Stored>(*static_cast<Rule const*>(settings), update);
    });
}

/// "Steps" to the gradient: with the values as gradients, copies values of 16 bits into masters.
struct LoadMasters {
    template <class T>
    struct Update {
        static constexpr std::size_t state_count = 0;

        JOINABLE_HOST_DEVICE void operator()(T& value, T const& gradient, T*) const noexcept {
            value = gradient;
        }
    };

    [[nodiscard]] static std::span<std::string_view const> state_names() noexcept { return {}; }
    template <class T>
    void update(UpdateRange<T> const& range) const {
        std::copy_n(range.gradients, range.size, range.values);
    }
    template <class T, class F>
    decltype(auto) visit_update(std::uint64_t, F const& f) const {
        return f(Update<T>{});
    }
};

/// A rule as devices take it; refers to it.
template <class Rule>
[[nodiscard]] DeviceRule device_rule(Rule const& rule) noexcept {
    return {&rule_id<Rule>, &rule, sizeof(Rule), &update_on_host<Rule>};
}

}}} // namespace joinable::v0::detail
