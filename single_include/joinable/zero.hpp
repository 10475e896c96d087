// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "join.hpp"

// ---- joinable/optimizer/before_step.hpp

namespace joinable { inline namespace v0 {

/// The gradient of a piece that this rank steps: a whole parameter or a run of its elements.
struct ShardGradient {
    std::size_t parameter; ///< its index
    AnyView view;
};

namespace detail {

/// The part of a sharded optimizer that ShardGradients calls on all ranks. Collective.
class ShardSums {
public:
    ShardSums() = default;
    ShardSums(ShardSums const&) = delete;
    ShardSums& operator=(ShardSums const&) = delete;

    virtual void sum(std::span<double> numbers) = 0;
    virtual void max(std::span<double> numbers) = 0;
    virtual void
    sum_powers(double power, std::span<ShardGradient const> pieces, std::span<double> sums) = 0;

protected:
    ~ShardSums() = default;
};

/// The sum of `power`-th powers of magnitudes, computed in double, for a tensor in host memory; 0 for one
/// without elements. With an infinite power the largest magnitude, NaN if an element is NaN. @pre power > 0
[[nodiscard]] double sum_of_powers(AnyView const& tensor, double power);

} // namespace detail

/// The gradients that a rank is about to step by, and sums and maxima over all ranks. Code that gets
/// it runs on every rank, also on joined ones, and must call the collective members in the same
/// order on each. Gradients may be in the memory of a device: then kernels that change them go on
/// the stream on which the engine makes gradients.
class ShardGradients {
public:
    ShardGradients(
        std::span<ShardGradient const> pieces,
        std::size_t parameters,
        Device& device,
        detail::ShardSums& sums,
        bool has_f16 = false
    ) noexcept
        : pieces_{pieces}, parameters_{parameters}, device_{device}, sums_{sums},
          has_f16_{has_f16} {}

    [[nodiscard]] auto begin() const noexcept { return pieces_.begin(); }
    [[nodiscard]] auto end() const noexcept { return pieces_.end(); }
    /// Where the gradients are, also if this rank has none.
    [[nodiscard]] DeviceId device() const noexcept { return device_.id(); }
    /// The number of parameters in all groups, on all ranks.
    [[nodiscard]] std::size_t parameter_count() const noexcept { return parameters_; }
    /// Whether gradients of some rank are f16. The same on every rank.
    [[nodiscard]] bool has_f16() const noexcept { return has_f16_; }

    /// Sums numbers over all ranks, in place, such as results from each rank's own gradients. With
    /// Sharding::none each rank has all gradients, and the numbers stay as they are. Where groups share the state, this and
    /// the following are over the group of rank 0, whose results all ranks get. Collective; the same count on every rank.
    void sum(std::span<double> numbers) const { sums_.sum(numbers); }
    [[nodiscard]] double sum(double number) const {
        sums_.sum({&number, 1});
        return number;
    }
    /// The largest of all ranks' numbers, in place, with every Sharding: NaN if a number is NaN, and -0
    /// is less than 0, over every transport. Collective; the same count on every rank.
    void max(std::span<double> numbers) const { sums_.max(numbers); }
    [[nodiscard]] double max(double number) const {
        max({&number, 1});
        return number;
    }
    /// Gives the sum of the squares of each parameter's gradient on all ranks, computed in double.
    /// `squares` has parameter_count() numbers; a frozen parameter has 0. If parameters are owned
    /// whole, the bits are the same for any number of ranks and on every device. A number is not
    /// finite if one of the gradient's elements is not, or one of f64 is beyond 1e154. Collective;
    /// the host waits for it.
    /// @throws ContractViolation  `squares` has another size, or the device has no kernels for it;
    ///         nothing was sent.
    void sum_squares(std::span<double> squares) const { sum_powers(2, squares); }
    /// The same for magnitudes to the power of `power`, a number above 0. If it is infinite the
    /// result is each parameter's largest magnitude, NaN if an element is NaN. A number is infinite
    /// where a power is beyond the range of double. Gradients on a device are copied to the host, one after another,
    /// unless the power is 2. Collective.
    /// @throws ContractViolation  also if the power is not above 0; nothing was sent.
    void sum_powers(double power, std::span<double> sums) const;
    /// Multiplies all gradients by a factor, in the type that they are computed in: f16 and bf16 in
    /// float. Local.
    void scale(double factor) const;
    /// Moves elements outside [-limit, limit] to the nearer end, rounded to their type. NaN stays. Local.
    /// @throws ContractViolation  the limit is negative or NaN, or the gradients are not in host
    ///         memory; nothing was changed.
    void clamp(double limit) const;

private:
    std::span<ShardGradient const> pieces_;
    std::size_t parameters_;
    Device& device_;
    detail::ShardSums& sums_;
    bool has_f16_;
};

/// Options of a ClipNorm. They must be the same on every rank.
struct ClipNormOptions {
    /// Above 0: the norm is the root of this degree of the sum of such powers of magnitudes. Infinity:
    /// the largest magnitude.
    double norm_type = 2;
    /// Whether to throw where the norm is not finite, instead of scaling by the factor that it gives.
    bool error_if_nonfinite = false;
};

/// Scales gradients so that the norm of all of them is at most `max_norm`: PyTorch's
/// clip_grad_norm_, as ZeroOptions::before_step. Powers are summed in double, first for each
/// parameter, then in the order of parameters. If parameters are owned whole, the bits are the same
/// for any number of ranks, and on a device those of the host.
class ClipNorm {
public:
    /// @throws ContractViolation  the norm's type is not above 0.
    explicit ClipNorm(double max_norm, ClipNormOptions const& options = {});

    /// Collective.
    /// @throws ContractViolation  the gradients are on a device without kernels.
    /// @throws Error  on all ranks: the norm is not finite, and the options refuse it. No gradient was
    ///         changed.
    bool operator()(ShardGradients const& gradients);

    /// The norm before the last step was clipped.
    [[nodiscard]] double norm() const noexcept { return norm_; }

private:
    double max_norm_;
    ClipNormOptions options_;
    double norm_ = 0;
    std::vector<double> sums_;
};

/// Clips each element of the gradients to [-limit, limit]: PyTorch's clip_grad_value_, as
/// ZeroOptions::before_step. The same limit on every rank. Local, so no rank waits for others.
struct ClipValue {
    double limit;

    /// @throws ContractViolation  what ShardGradients::clamp() throws.
    bool operator()(ShardGradients const& gradients) const {
        gradients.clamp(limit);
        return true;
    }
};

/// The scale of a loss, without which what a pass computes in f16 would be too small for that type: the rule of PyTorch's
/// GradScaler. The engine multiplies its loss by `scale`. As ZeroOptions::before_step, `std::ref(scaler)` beside
/// `.shared = {scaler}`, it divides the averages by it, or skips the step on all ranks where one is not finite. As there,
/// gradients of f16 are refused: the quotients would be rounded to f16, and those that the scale has kept become 0. In a
/// Step there are the same averages on all ranks: there the body calls update().
struct LossScaler {
    double scale = 65536; ///< above 0
    double growth = 2;    ///< of the scale, after `interval` steps by finite gradients; at least 1
    double backoff = 0.5; ///< of the scale, where a gradient is not finite; above 0 and below 1
    std::uint64_t interval = 2000; ///< at least 1
    std::uint64_t steps = 0;       ///< by finite gradients, since the scale changed

    /// Collective. Allocates a number for each parameter.
    /// @throws ContractViolation  what update() throws; gradients are f16, on all ranks if on one; they are on a device
    ///         without kernels. Nothing was changed.
    bool operator()(ShardGradients const& gradients);
    /// Changes the scale as the rule says, and returns `are_finite`, which is whether to step. Local; all ranks say the
    /// same.
    /// @throws ContractViolation  a member is out of range. Nothing was changed.
    bool update(bool are_finite);
};

}} // namespace joinable::v0

// ---- joinable/device/combined_terms.hpp

#if JOINABLE_HAS_DEFINITIONS
#ifndef JOINABLE_DEVICE_COMBINED_TERMS_HPP_PART_1
#define JOINABLE_DEVICE_COMBINED_TERMS_HPP_PART_1

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

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

// ---- joinable/device/squares.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// A square has the same bits whether a compiler fuses it with the following sum or not: that of a
/// float is exact in double.
JOINABLE_HOST_DEVICE inline double square_of(float number) {
    double const wide = static_cast<double>(number);
    return wide * wide;
}
JOINABLE_HOST_DEVICE inline double square_of(double number) {
    double square;
    JOINABLE_ROUNDED_PRODUCT(square, number, number);
    return square;
}

/// The sum of the squares of all elements, computed in double, for a tensor in host memory; 0 for one
/// without elements.
[[nodiscard]] double sum_of_squares(AnyView const& tensor);

}}} // namespace joinable::v0::detail

// ---- joinable/device/impl/squares.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <type_traits>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION double sum_of_squares(AnyView const& tensor) {
    IndexOrder const order{tensor.extents(), tensor.strides()};
    double result = 0;
    visit_floating(tensor.dtype(), [&]<class T>(std::type_identity<T>) {
        auto const* const first = static_cast<T const*>(tensor.data());
        result = combine_terms<AddNumbers>(first, tensor.numel(), order, [](auto number) {
            return square_of(number);
        });
    });
    return result;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/optimizer/impl/before_step.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <string_view>
#include <type_traits>

namespace joinable { inline namespace v0 {

namespace detail {

JOINABLE_DEFINITION double sum_of_powers(AnyView const& tensor, double power) {
    if (power == 2) {
        return sum_of_squares(tensor);
    }
    std::size_t const count = tensor.numel();
    IndexOrder const order{tensor.extents(), tensor.strides()};
    double result = 0;
    visit_floating(tensor.dtype(), [&]<class T>(std::type_identity<T>) {
        auto const* const first = static_cast<T const*>(tensor.data());
        auto const magnitude = [](auto number) { return std::abs(static_cast<double>(number)); };
        if (std::isinf(power)) {
            result = combine_terms<LargerNumber>(first, count, order, magnitude);
        } else {
            result = combine_terms<AddNumbers>(first, count, order, [&](auto number) {
                return std::pow(magnitude(number), power);
            });
        }
    });
    return result;
}

inline void check_power(std::string_view what, double power) {
    if (!(power > 0)) {
        throw ContractViolation{
            concat(what, " is ", power, "; give a number above 0, or infinity for the maximum")
        };
    }
}

template <class T>
void clamp_elements(T* first, std::size_t count, IndexOrder const& order, double limit) {
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    auto const nearest = static_cast<T>(static_cast<Wide>(limit));
    auto const opposite = static_cast<T>(static_cast<Wide>(-limit));
    for (std::size_t i = 0; i < count; ++i) {
        T& element = first[order.place_of(i)];
        auto const number = static_cast<double>(static_cast<Wide>(element));
        if (number > limit) {
            element = nearest;
        } else if (number < -limit) {
            element = opposite;
        }
    }
}

} // namespace detail

JOINABLE_DEFINITION void ShardGradients::sum_powers(double power, std::span<double> sums) const {
    detail::check_power("the power of sum_powers", power);
    if (sums.size() != parameters_) {
        throw ContractViolation{detail::concat(
            power == 2 ? "sum_squares" : "sum_powers",
            " gives a number for each of ",
            parameters_,
            " parameters, but was given room for ",
            sums.size(),
            "; give as many as parameter_count()"
        )};
    }
    if (!device_.can_sum_squares()) {
        throw ContractViolation{detail::concat(
            detail::to_text(device_.id()),
            " has no kernels that sum the squares of gradients; give the communicator's "
            "device_memory().use_kernels() what joinable::cuda_kernels() returns"
        )};
    }
    if (parameters_ != 0) {
        sums_.sum_powers(power, pieces_, sums);
    }
}

JOINABLE_DEFINITION void ShardGradients::scale(double factor) const {
    for (ShardGradient const& piece : pieces_) {
        device_.scale_copy(piece.view, factor, piece.view);
    }
    device_.finish(); // later kernels of the engine see it
}

JOINABLE_DEFINITION void ShardGradients::clamp(double limit) const {
    if (!(limit >= 0)) {
        throw ContractViolation{detail::concat(
            "gradients cannot be clipped to a magnitude of ", limit, "; give 0 or more"
        )};
    }
    if (!detail::is_on_host(device_)) {
        throw ContractViolation{detail::concat(
            "gradients are clipped by value in host memory alone, but these are on ",
            detail::to_text(device_.id()),
            "; launch a kernel of yours for each view, on the engine's stream"
        )};
    }
    for (ShardGradient const& piece : pieces_) {
        detail::IndexOrder const order{piece.view.extents(), piece.view.strides()};
        detail::visit_floating(piece.view.dtype(), [&]<class T>(std::type_identity<T>) {
            detail::clamp_elements(
                static_cast<T*>(piece.view.data()), piece.view.numel(), order, limit
            );
        });
    }
}

JOINABLE_DEFINITION ClipNorm::ClipNorm(double max_norm, ClipNormOptions const& options)
    : max_norm_{max_norm}, options_{options} {
    detail::check_power("ClipNorm: norm_type", options.norm_type);
}

JOINABLE_DEFINITION bool ClipNorm::operator()(ShardGradients const& gradients) {
    double const power = options_.norm_type;
    sums_.resize(gradients.parameter_count());
    gradients.sum_powers(power, sums_);
    if (std::isinf(power)) {
        norm_ = std::accumulate(sums_.begin(), sums_.end(), 0.0, detail::LargerNumber{});
    } else {
        double const sum = std::accumulate(sums_.begin(), sums_.end(), 0.0);
        norm_ = power == 2 ? std::sqrt(sum) : std::pow(sum, 1 / power);
    }
    if (options_.error_if_nonfinite && !std::isfinite(norm_)) {
        throw Error{detail::concat(
            "the norm of type ",
            power,
            " of all gradients is ",
            norm_,
            ", so they cannot be clipped; skip such steps, or leave out error_if_nonfinite"
        )};
    }
    double const factor = max_norm_ / (norm_ + 1e-6);
    if (!(factor >= 1.0)) { // also for NaN: it spreads to the gradients, as in PyTorch
        gradients.scale(factor);
    }
    return true;
}

namespace detail {

inline void check_scaler(LossScaler const& scaler) {
    auto const require =
        [](bool is_right, std::string_view member, auto value, std::string_view wanted) {
            if (!is_right) {
                throw ContractViolation{
                    concat("LossScaler: ", member, " is ", value, "; give ", wanted)
                };
            }
        };
    require(
        scaler.scale > 0 && std::isfinite(scaler.scale), "scale", scaler.scale, "a number above 0"
    );
    require(
        scaler.growth >= 1 && std::isfinite(scaler.growth),
        "growth",
        scaler.growth,
        "a number of at least 1"
    );
    require(
        scaler.backoff > 0 && scaler.backoff < 1,
        "backoff",
        scaler.backoff,
        "a number above 0 and below 1"
    );
    require(
        scaler.interval != 0, "interval", scaler.interval, "the steps after which the scale grows"
    );
}

} // namespace detail

JOINABLE_DEFINITION bool LossScaler::operator()(ShardGradients const& gradients) {
    detail::check_scaler(*this);
    if (gradients.has_f16()) {
        throw ContractViolation{
            "LossScaler: gradients of f16 would be rounded to f16 after the division, so those that the scale has kept "
            "would become 0; train values of f32, or of bf16, which need no scale"
        };
    }
    std::vector<double> squares(gradients.parameter_count());
    gradients.sum_squares(squares);
    bool const are_finite = std::all_of(squares.begin(), squares.end(), [](double square) {
        return std::isfinite(square);
    });
    if (are_finite) {
        gradients.scale(1.0 / scale);
    }
    return update(are_finite);
}

JOINABLE_DEFINITION bool LossScaler::update(bool are_finite) {
    detail::check_scaler(*this);
    if (!are_finite) {
        scale *= backoff;
        steps = 0;
    } else if (++steps == interval) {
        scale = std::isfinite(scale * growth) ? scale * growth : scale;
        steps = 0;
    }
    return are_finite;
}

}} // namespace joinable::v0

#endif

// ---- joinable/optimizer/update_rule.hpp

namespace joinable { inline namespace v0 {

/// Elements of one parameter that an update rule steps. The arrays do not overlap.
template <std::floating_point T>
struct UpdateRange {
    std::size_t size; ///< elements of each array
    T* values;
    T const* gradients;
    std::span<T* const>
        state; ///< one array for each of the rule's state_names(), zeros before the first step
    std::uint64_t step; ///< of this parameter, counted from 1
};

namespace detail {

/// Stands for any member of an aggregate.
struct AnyMember {
    template <class T>
    operator T() const noexcept;
};
/// Stands for a member that is a pointer.
struct PointerMember {
    template <class T>
    operator T*() const noexcept;
};
/// Converts to nothing. A class that can be made from it accepts more than pointers, so it is no
/// pointer.
struct NoMember {};
template <std::size_t>
using AnyMemberAt = AnyMember;

template <class T, std::size_t... Before>
consteval bool is_pointer_after(std::index_sequence<Before...>) {
    return requires { T{AnyMemberAt<Before>{}..., PointerMember{}}; } &&
           !requires { T{AnyMemberAt<Before>{}..., NoMember{}}; };
}
template <class T, std::size_t... Counts>
consteval bool has_pointer_after_any(std::index_sequence<Counts...>) {
    return (is_pointer_after<T>(std::make_index_sequence<Counts>{}) || ...);
}

/// Whether T is a pointer, has a reference (then nothing can be assigned to it), or is an aggregate
/// with a pointer among its first 16 members. A compiler cannot see a pointer in other classes or in
/// members of members.
template <class T>
consteval bool has_address() {
    if constexpr (!std::is_copy_assignable_v<T>) {
        return true;
    } else if constexpr (std::is_aggregate_v<T> && std::is_trivially_copyable_v<T>) {
        return has_pointer_after_any<T>(std::make_index_sequence<16>{});
    } else {
        return std::is_pointer_v<T>;
    }
}

template <class R>
concept has_state_names = requires(R const& rule) {
    { rule.state_names() } -> std::convertible_to<std::span<std::string_view const>>;
};
/// A span of an array that is returned by value would outlive the array.
template <class Names>
concept outlives_the_call = std::is_lvalue_reference_v<Names> ||
                            std::ranges::enable_borrowed_range<std::remove_cvref_t<Names>>;
template <class R>
concept has_lasting_state_names =
    requires(R const& rule) { requires outlives_the_call<decltype(rule.state_names())>; };
template <class R>
concept has_update =
    requires(R const& rule, UpdateRange<float> const& floats, UpdateRange<double> const& doubles) {
        rule.update(floats);
        rule.update(doubles);
    };

/// Stands for the function that a rule gives its update to.
struct AnyUpdateTaker {
    template <class Update>
    void operator()(Update const&) const noexcept {}
};
template <class R>
concept has_visit_update = requires(R const& rule, AnyUpdateTaker const& f) {
    rule.template visit_update<float>(std::uint64_t{1}, f);
    rule.template visit_update<double>(std::uint64_t{1}, f);
};

inline constexpr std::size_t most_state_arrays = 8;

/// Whether a rule with these settings may step only the rows that have a gradient.
template <class R>
[[nodiscard]] bool leaves_other_rows(R const& rule) {
    if constexpr (requires { requires R::steps_rows; }) {
        double value = 1;
        double const gradient = 0;
        if (rule.state_names().empty()) {
            rule.update(UpdateRange<double>{1, &value, &gradient, {}, 1});
            return value == 1;
        }
    }
    return false;
}

/// @throws ContractViolation
template <class R>
void check_rule(R const& rule) {
    if constexpr (has_state_names<R>) {
        if (std::size_t const names = rule.state_names().size(); names > most_state_arrays) {
            throw ContractViolation{concat(
                "a rule keeps at most ",
                most_state_arrays,
                " numbers for each element, but its state_names() are ",
                names,
                "; keep fewer, or step by a LocalOptimizer, which keeps its state itself"
            )};
        }
    }
    if constexpr (requires { rule.check(); }) {
        rule.check();
    }
}

} // namespace detail

/// The settings of an optimizer, and how it steps an element. The new value of an element depends
/// only on that element, so any rank may step any range. All members are local.
///
/// `rule` is a const lvalue of `R`.
/// | expression             | result                             | meaning                                  |
/// |------------------------|------------------------------------|------------------------------------------|
/// | `rule.state_names()`   | std::span<std::string_view const>  | names of the numbers that it keeps for   |
/// |                        |                                    | each element, at most 8; as many at every|
/// |                        |                                    | step; not of an array returned by value  |
/// | `rule.update(range)`   |                                    | steps an UpdateRange of float or double  |
/// | `rule.check()`         |                                    | optional; throws ContractViolation if    |
/// |                        |                                    | the settings are invalid                 |
/// | `rule.agree_on(list)`  |                                    | optional; adds its settings, as members, |
/// |                        |                                    | to an AgreementList: ranks compare them, |
/// |                        |                                    | and a Checkpoint stores and sets them    |
/// | `R::steps_rows`        | static constexpr bool              | optional; true: where state_names() is   |
/// |                        |                                    | empty and the settings leave an element  |
/// |                        |                                    | whose gradient is 0 as it is, only rows  |
/// |                        |                                    | with gradients are stepped               |
///
/// To step in the memory of a device, R has one more member, `template <class T, class F>
/// decltype(auto) visit_update(std::uint64_t step, F const& f) const`, for T float and double. It
/// returns `f(update)`, where `update` does to one element what update(range) does at that step:
/// `update(T& value, T& gradient, T* state)`, a `__host__ __device__` const member, may also change
/// the gradient. It is trivially copyable and has a static constexpr `state_count`, the number of
/// state_names(). One source file that nvcc compiles names the rule: `cuda_kernels<R>()`.
///
/// R is trivially copyable and can be assigned, because settings are sent to other ranks as bytes.
/// No member is a pointer or a reference, because addresses are not valid on another rank; pointers
/// are found among the first 16 members of an aggregate.
/// Not checkable, but required: no pointer within a member, no std::span, no std::string_view.
template <class R>
concept UpdateRule =
    std::is_trivially_copyable_v<R> && detail::has_state_names<R> &&
    detail::has_lasting_state_names<R> && detail::has_update<R> && !detail::has_address<R>();

/// Says in one sentence why a class is not an UpdateRule.
template <class R>
consteval bool models_update_rule() {
    static_assert(
        std::is_trivially_copyable_v<R>,
        "UpdateRule: the settings have to be trivially copyable, because they travel from rank to rank; "
        "keep numbers in it, and no vectors or pointers"
    );
    static_assert(
        detail::has_state_names<R>,
        "UpdateRule: expected a const member 'std::span<std::string_view const> state_names()'; a rule "
        "without state returns {}"
    );
    static_assert(
        !detail::has_state_names<R> || detail::has_lasting_state_names<R>,
        "UpdateRule: state_names() returns an array by value, which dies before its span is read; return a "
        "span of a static array, or a reference to it"
    );
    static_assert(
        !detail::has_address<R>(),
        "UpdateRule: a member is a pointer, a reference or const, but settings travel from rank to rank, "
        "where an address leads nowhere; keep numbers in it"
    );
    static_assert(
        detail::has_update<R>,
        "UpdateRule: expected a const member 'template <class T> void update(joinable::UpdateRange<T> "
        "const& range)' for float and double"
    );
    return UpdateRule<R>;
}

}} // namespace joinable::v0

// ---- joinable/optimizer/local_optimizer.hpp

namespace joinable { inline namespace v0 {

/// A parameter that an engine's optimizer steps.
struct WholeParameter {
    std::size_t index; ///< in the order in which parameters were given, across all groups
    AnyView value;
    AnyView gradient;   ///< averaged over ranks; it has the value's dtype and extents
    std::uint64_t step; ///< of this parameter, counted from 1
    /// The arrays of the optimizer's state_names(), with the value's dtype and extents: zeros before the first
    /// step, then what the optimizer wrote, or what a Checkpoint has read.
    std::vector<AnyView> state = {};
};

namespace detail {

template <class O>
concept has_step =
    requires(O& optimizer, WholeParameter const& parameter) { optimizer.step(parameter); };
template <class O>
concept steps_all_at_once = requires(O& optimizer, std::span<WholeParameter const> parameters) {
    optimizer.step(parameters);
};
template <class O>
concept takes_parameters = requires(O& optimizer, std::span<WholeParameter const> parameters) {
    optimizer.take(parameters);
};
template <class O>
concept has_settings = requires(O& optimizer) {
    { optimizer.settings() };
    requires std::is_lvalue_reference_v<decltype(optimizer.settings())>;
    requires !std::is_const_v<std::remove_reference_t<decltype(optimizer.settings())>>;
    requires std::is_trivially_copyable_v<std::remove_cvref_t<decltype(optimizer.settings())>>;
};

template <class O>
concept has_settings_without_address = requires(O& optimizer) {
    requires !has_address<std::remove_cvref_t<decltype(optimizer.settings())>>();
};

} // namespace detail

/// An engine's optimizer that steps one whole parameter at a time and keeps its own state. It may
/// read all of a parameter, as LAMB does for its norm (You et al., 2020), so parameters are dealt
/// out whole: Partition::by_parameters. All members are local.
///
/// `optimizer` is an lvalue of `O`, `constant` a const one.
/// | expression                  | result | meaning                                                         |
/// |-----------------------------|--------|-----------------------------------------------------------------|
/// | `optimizer.step(parameter)` |        | steps a WholeParameter; called on its owner, in the same order  |
/// |                             |        | in every step                                                   |
/// | `optimizer.step(span)`      |        | in its place: steps all of a `std::span<WholeParameter const>`  |
/// |                             |        | at once, before any value is sent; not with step_in_backward    |
/// | `optimizer.settings()`      | `S&`   | learning rate and other settings that change between steps;     |
/// |                             |        | joined owners get those of the lowest active rank. `S` is       |
/// |                             |        | trivially copyable and has no pointer, reference, std::span or   |
/// |                             |        | std::string_view: addresses are not valid on another rank       |
/// | `optimizer.apply_settings()` |       | optional; settings() has got those of another rank or of a file |
/// | `optimizer.take(span)`      |        | optional; called once with what this rank steps, values alone,  |
/// |                             |        | before ranks compare settings                                   |
/// | `constant.state_names()`    | `std::span<std::string_view const>` | optional; names the arrays of      |
/// |                             |        | WholeParameter::state, so that a Checkpoint takes the optimizer.|
/// |                             |        | `S` then has state_names() and agree_on(list), too              |
/// | `constant.check()`          |        | optional; throws ContractViolation if the settings are invalid  |
/// | `constant.agree_on(list)`   |        | optional; adds its settings to an AgreementList, for ranks to   |
/// |                             |        | compare                                                         |
///
/// O is movable and not an UpdateRule.
template <class O>
concept LocalOptimizer =
    std::movable<O> && !UpdateRule<O> && (detail::has_step<O> || detail::steps_all_at_once<O>) &&
    detail::has_settings<O> && detail::has_settings_without_address<O>;

/// Says in one sentence why a class is not a LocalOptimizer.
template <class O>
consteval bool models_local_optimizer() {
    static_assert(
        std::movable<O>,
        "LocalOptimizer: the optimizer has to be movable, because groups are kept in a list"
    );
    static_assert(
        detail::has_step<O> || detail::steps_all_at_once<O>,
        "LocalOptimizer: expected a member 'void step(joinable::WholeParameter const& parameter)'"
    );
    static_assert(
        detail::has_settings<O>,
        "LocalOptimizer: expected a member 'S& settings()' with a trivially copyable S, such as a struct "
        "with the learning rate: joined ranks get the settings of the others"
    );
    static_assert(
        !detail::has_settings<O> || detail::has_settings_without_address<O>,
        "LocalOptimizer: settings() has a pointer or a reference, but settings travel from rank to rank, where an address "
        "leads nowhere; keep numbers in it"
    );
    return LocalOptimizer<O>;
}

namespace detail {

/// Says in one sentence why a class cannot step shards. Its members show which of the two concepts
/// it means to model.
template <class R>
consteval bool steps_shards() {
    constexpr bool is_local = has_step<R> || steps_all_at_once<R> || has_settings<R>;
    constexpr bool is_rule = has_state_names<R> || has_update<R>;
    static_assert(
        is_local || is_rule,
        "sharded optimizer: after the parameters comes the optimizer itself: an UpdateRule, with "
        "state_names() and update(range), or a LocalOptimizer, with step(parameter) and settings()"
    );
    if constexpr (is_local) {
        return models_local_optimizer<R>();
    } else if constexpr (is_rule) {
        return models_update_rule<R>();
    } else {
        return false;
    }
}

/// The settings of a rule or of an engine's optimizer that are sent to other ranks.
template <class R>
auto& settings_of(R& rule) {
    if constexpr (LocalOptimizer<R>) {
        return rule.settings();
    } else {
        return rule;
    }
}
template <class R>
using SettingsOf = std::remove_cvref_t<decltype(settings_of(std::declval<R&>()))>;
/// After those of another rank or of a file were written there.
template <class R>
void apply_settings_of(R& rule) {
    if constexpr (requires { rule.apply_settings(); }) {
        rule.apply_settings();
    }
}

/// The names of the state that a rule, or its settings, keep with the shard. An engine's optimizer may keep its own
/// state.
template <class R>
std::span<std::string_view const> state_names_of(R const& rule) {
    if constexpr (has_state_names<R>) {
        return rule.state_names();
    } else {
        return {};
    }
}
/// Whether a file can have what an engine's optimizer keeps.
template <class R>
concept keeps_state_with_shard =
    LocalOptimizer<R> && has_state_names<R> && has_state_names<SettingsOf<R>>;

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/optimizer/optimizer_state.hpp

namespace joinable { inline namespace v0 {

/// State of an optimizer for one parameter, under one name. It has one element for each of the
/// parameter's, in row-major order, whatever the layout of the value.
struct StateTensor {
    std::string name; ///< of the rule's state_names(), or "master"
    DType dtype;
    Shape extents;
    std::vector<std::byte> elements;
};

/// The whole state of an optimizer, independent of the number of ranks.
template <class Rule>
struct OptimizerState {
    struct Parameter {
        std::uint64_t steps = 0;
        std::vector<StateTensor> tensors; ///< none if the parameter needs no gradient
    };

    std::vector<Rule> rules;           ///< of the groups
    std::vector<Parameter> parameters; ///< of all groups, one after another
};

}} // namespace joinable::v0

// ---- joinable/optimizer/partition.hpp

namespace joinable { inline namespace v0 {

/// How the elements of a model are dealt out to ranks. The owner of an element keeps its optimizer
/// state and steps it.
enum class Partition : std::uint8_t {
    /// Whole parameters. From the largest to the smallest, each goes to the rank that owns the
    /// fewest elements so far; the lowest such rank wins ties.
    by_parameters,
    /// The same number of elements for each rank, across parameter boundaries, in the order in which
    /// they lie in memory. An owner copies a value that is not dense, and a gradient that is not laid
    /// out as its value, whole with each step; ZeroOptions::before_step refuses such gradients.
    flat,
};

/// The unit that is divided among the ranks.
enum class Sharding : std::uint8_t {
    /// Nothing. Each rank steps the whole model with the averages that all ranks have and with its
    /// own settings, which must be the same.
    none,
    /// The optimizer state: the first stage of ZeRO. A round sends one and a half times as many
    /// bytes as with `gradients`.
    optimizer,
    gradients, ///< also the averaged gradients, each only at its owner: the second stage
    /// Also the values; a pass gathers them while it uses them: the third stage. Needs `set_value`
    /// and `release_value` in parameter_traits.
    parameters,
};

[[nodiscard]] constexpr std::string_view name_of(Sharding sharding) noexcept {
    constexpr std::string_view names[] = {"none", "optimizer", "gradients", "parameters"};
    return names[static_cast<std::size_t>(sharding)];
}

namespace detail {

/// Whether the average of a gradient goes only to its owner.
[[nodiscard]] constexpr bool reduces_to_owners(Sharding sharding) noexcept {
    return sharding == Sharding::gradients || sharding == Sharding::parameters;
}

/// A run of elements of one parameter that one rank owns, in memory order.
struct ShardPiece {
    std::size_t parameter; ///< its index
    std::size_t begin;     ///< first element
    std::size_t size;      ///< number of elements
    int owner;
    std::size_t offset; ///< in the bucket, in elements
};

/// The unit of exchange: parameters of one dtype, in one part per rank, in rank order. A flat part
/// may end with padding that no rank owns, so that all parts are equal.
struct ShardBucket {
    DType dtype;
    std::vector<std::size_t> counts;     ///< elements of each rank's part
    std::vector<ShardPiece> pieces;      ///< by offset
    bool is_rows = false;                ///< of one parameter, whose gradients are rows
    std::size_t alone = std::size_t(-1); ///< bytes from which a piece travels alone, if all do not

    [[nodiscard]] std::size_t count() const noexcept {
        return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    }
    /// The element at which a rank's part begins.
    [[nodiscard]] std::size_t offset_of(int rank) const noexcept {
        return std::accumulate(counts.begin(), counts.begin() + rank, std::size_t{0});
    }
};

/// An owner for each parameter, by the rule of Partition::by_parameters. `loads` holds the elements
/// of each rank and is updated. Complexity: O(n (log n + ranks)).
std::vector<int>
owners_by_size(std::span<std::size_t const> sizes, std::vector<std::size_t>& loads);

/// A parameter of at least this size travels alone if it has one owner: it is sent from where it
/// is, which saves two copies. A smaller one would wait longer for its turn than the copies take. Between threads, a
/// piece of a flat bucket does so, too.
inline constexpr std::size_t lone_bytes = std::size_t{64} << 10U;

/// Runs of parameters of one dtype, in list order, that reach `cap` bytes; `chosen` are indices. A
/// parameter of `alone` bytes or more, or whose gradients are rows, is a run of its own.
std::vector<std::vector<std::size_t>> runs_by_size(
    ParameterList const& parameters,
    std::span<std::size_t const> chosen,
    std::size_t cap,
    std::size_t alone
);

/// Cuts parts by the owners of whole parameters; `owners` has one entry for each parameter of the
/// list.
ShardBucket bucket_by_owners(
    ParameterList const& parameters,
    std::vector<std::size_t> run,
    std::span<int const> owners,
    std::size_t ranks
);

/// Cuts equal parts of whole cache lines.
ShardBucket flat_bucket(
    ParameterList const& parameters, std::vector<std::size_t> const& run, std::size_t ranks
);

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/optimizer/impl/partition.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::vector<int>
owners_by_size(std::span<std::size_t const> sizes, std::vector<std::size_t>& loads) {
    std::vector<std::size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return sizes[a] != sizes[b] ? sizes[a] > sizes[b] : a < b;
    });
    std::vector<int> owners(sizes.size());
    for (std::size_t const i : order) {
        auto const least = std::min_element(loads.begin(), loads.end());
        owners[i] = static_cast<int>(least - loads.begin());
        *least += sizes[i];
    }
    return owners;
}

JOINABLE_DEFINITION std::vector<std::vector<std::size_t>> runs_by_size(
    ParameterList const& parameters,
    std::span<std::size_t const> chosen,
    std::size_t cap,
    std::size_t alone
) {
    std::vector<std::vector<std::size_t>> runs;
    for (std::size_t dtype = 0; dtype < dtype_count; ++dtype) {
        std::vector<std::size_t> run;
        std::size_t bytes = 0;
        for (std::size_t const i : chosen) {
            AnyView const value = parameters[i].value();
            if (static_cast<std::size_t>(value.dtype()) != dtype) {
                continue;
            }
            std::size_t const own = value.numel() * size_of(value.dtype());
            if (own >= alone || parameters[i].is_sparse()) {
                runs.push_back({i});
                continue;
            }
            run.push_back(i);
            bytes += own;
            if (bytes >= cap) {
                runs.push_back(std::exchange(run, {}));
                bytes = 0;
            }
        }
        if (!run.empty()) {
            runs.push_back(std::move(run));
        }
    }
    return runs;
}

JOINABLE_DEFINITION ShardBucket bucket_by_owners(
    ParameterList const& parameters,
    std::vector<std::size_t> run,
    std::span<int const> owners,
    std::size_t ranks
) {
    std::sort(run.begin(), run.end(), [&](std::size_t a, std::size_t b) {
        return owners[a] != owners[b] ? owners[a] < owners[b] : a < b;
    });
    ShardBucket bucket{
        parameters[run.front()].value().dtype(), {}, {}, parameters[run.front()].is_sparse()
    };
    bucket.counts.resize(ranks);
    std::size_t offset = 0;
    for (std::size_t const i : run) {
        std::size_t const size = parameters[i].value().numel();
        bucket.pieces.push_back({i, 0, size, owners[i], offset});
        bucket.counts[static_cast<std::size_t>(owners[i])] += size;
        offset += size;
    }
    return bucket;
}

JOINABLE_DEFINITION ShardBucket flat_bucket(
    ParameterList const& parameters, std::vector<std::size_t> const& run, std::size_t ranks
) {
    ShardBucket bucket{parameters[run.front()].value().dtype(), {}, {}, false};
    std::size_t total = 0;
    for (std::size_t const i : run) {
        total += parameters[i].value().numel();
    }
    std::size_t const line = 64 / size_of(bucket.dtype);
    std::size_t const lines = (total + ranks * line - 1) / (ranks * line);
    std::size_t const part = (std::max)(lines, std::size_t{1}) * line;
    bucket.counts.assign(ranks, part);
    std::size_t offset = 0;
    for (std::size_t const i : run) {
        std::size_t left = parameters[i].value().numel();
        std::size_t begin = 0;
        do { // a parameter without elements has a piece, too
            std::size_t const owner = (std::min)(offset / part, ranks - 1);
            std::size_t const taken = (std::min)(left, (owner + 1) * part - offset);
            bucket.pieces.push_back({i, begin, taken, static_cast<int>(owner), offset});
            begin += taken;
            offset += taken;
            left -= taken;
        } while (left != 0);
    }
    return bucket;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/optimizer/detail/update_loop.hpp

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

// ---- joinable/optimizer/rules.hpp

/// @file
/// The update rules of PyTorch's optimizers of the same names: torch/optim/sgd.py, adam.py and
/// adamw.py of 2.15, with their defaults. As in PyTorch, settings are computed in double and then
/// rounded to the type of the elements.

namespace joinable { inline namespace v0 {

namespace detail {

/// @throws ContractViolation  a setting is not in [least, below).
inline void
check_setting(std::string_view rule, std::string_view name, double value, double below = HUGE_VAL) {
    if (!(value >= 0.0 && value < below)) {
        throw ContractViolation{concat(
            to_text(rule),
            "::",
            to_text(name),
            " is ",
            value,
            below == HUGE_VAL ? "; give a finite number that is not negative"
                              : "; give a number from 0 to below 1"
        )};
    }
}

/// Changes to a gradient before a rule sees it.
template <class T>
struct GradientTerms {
    T sign;  ///< -1: ascends
    T decay; ///< times the value, added to the gradient

    template <class V>
    [[gnu::always_inline]] JOINABLE_HOST_DEVICE void
    apply(V& gradient, V const& value) const noexcept {
        gradient = gradient * sign; // exact
        if (decay != T{0}) {
            add_product(gradient, value, decay);
        }
    }
};

template <class T, bool has_momentum>
struct SgdUpdate {
    static constexpr std::size_t state_count = has_momentum ? 1 : 0;
    GradientTerms<T> terms;
    T momentum;
    T undamped; ///< the share of a gradient that goes into the momentum
    T negative_rate;
    bool is_first;
    bool is_nesterov;

    template <class V>
    [[gnu::always_inline]] JOINABLE_HOST_DEVICE void
    operator()(V& value, V& gradient, V* state) const noexcept {
        terms.apply(gradient, value);
        if constexpr (has_momentum) {
            V& buffer = state[0];
            if (is_first) {
                buffer = gradient;
            } else {
                multiply(buffer, buffer, momentum);
                add_product(buffer, gradient, undamped);
            }
            if (is_nesterov) {
                add_product(gradient, buffer, momentum);
            } else {
                gradient = buffer;
            }
        }
        add_product(value, gradient, negative_rate);
    }
};

template <class T, bool is_amsgrad>
struct AdamUpdate {
    static constexpr std::size_t state_count = is_amsgrad ? 3 : 2;
    GradientTerms<T> terms;
    T kept; ///< factor of the value, for a decay that is not part of the gradient
    T first_rate;
    T beta2;
    T second_rate;
    T root_correction;
    T epsilon;
    T negative_rate;

    template <class V>
    [[gnu::always_inline]] JOINABLE_HOST_DEVICE void
    operator()(V& value, V& gradient, V* state) const noexcept {
        terms.apply(gradient, value);
        if (kept != T{1}) {
            multiply(value, value, kept);
        }
        V& average = state[0];
        V& square_average = state[1];
        V const change = gradient - average;
        add_product(average, change, first_rate);
        V square;
        multiply(square, gradient, gradient);
        multiply(square_average, square_average, beta2);
        add_product(square_average, square, second_rate);
        V denominator;
        if constexpr (is_amsgrad) {
            V& largest = state[2];
            largest = largest > square_average ? largest : square_average; // NaN stays
            root<T>(denominator, largest);
        } else {
            root<T>(denominator, square_average);
        }
        denominator = denominator / root_correction + epsilon;
        V const quotient = average / denominator;
        add_product(value, quotient, negative_rate);
    }
};

inline constexpr std::array<std::string_view, 1> sgd_state{"momentum_buffer"};
inline constexpr std::array<std::string_view, 3> adam_state{
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
};

/// Adam and AdamW, which differ in where the weight decay is applied.
template <class T, bool is_amsgrad, class Settings>
AdamUpdate<T, is_amsgrad>
adam_update(Settings const& settings, bool is_decoupled, std::uint64_t count) {
    auto const step = static_cast<double>(count);
    double const first_correction = 1.0 - std::pow(settings.beta1, step);
    double const second_correction = 1.0 - std::pow(settings.beta2, step);
    double const decay = settings.weight_decay;
    AdamUpdate<T, is_amsgrad> update;
    update.terms.sign = static_cast<T>(settings.maximize ? -1.0 : 1.0);
    update.terms.decay = static_cast<T>(is_decoupled ? 0.0 : decay);
    update.kept = static_cast<T>(is_decoupled ? 1.0 - settings.learning_rate * decay : 1.0);
    update.first_rate = static_cast<T>(1.0 - settings.beta1);
    update.beta2 = static_cast<T>(settings.beta2);
    update.second_rate = static_cast<T>(1.0 - settings.beta2);
    update.root_correction = static_cast<T>(std::sqrt(second_correction));
    update.epsilon = static_cast<T>(settings.epsilon);
    update.negative_rate = static_cast<T>(-settings.learning_rate / first_correction);
    return update;
}
/// Calls f with the update of a step.
template <class T, class Settings, class F>
decltype(auto)
visit_adam(Settings const& settings, bool is_decoupled, std::uint64_t step, F const& f) {
    return settings.amsgrad ? f(adam_update<T, true>(settings, is_decoupled, step))
                            : f(adam_update<T, false>(settings, is_decoupled, step));
}

/// Steps a range in host memory by the update that the rule gives.
template <class Rule, class T>
void run_rule(Rule const& rule, UpdateRange<T> const& range) {
    rule.template visit_update<T>(range.step, [&](auto const& update) {
        run_update(update, range);
    });
}

template <class Settings>
void check_adam(std::string_view name, Settings const& settings) {
    check_setting(name, "learning_rate", settings.learning_rate);
    check_setting(name, "beta1", settings.beta1, 1.0);
    check_setting(name, "beta2", settings.beta2, 1.0);
    check_setting(name, "epsilon", settings.epsilon);
    check_setting(name, "weight_decay", settings.weight_decay);
}

template <class List, class Settings>
void agree_on_adam(List& list, Settings const& settings) {
    list.add("learning_rate", settings.learning_rate);
    list.add("beta1", settings.beta1);
    list.add("beta2", settings.beta2);
    list.add("epsilon", settings.epsilon);
    list.add("weight_decay", settings.weight_decay);
    list.add("amsgrad", settings.amsgrad);
    list.add("maximize", settings.maximize);
}

} // namespace detail

constexpr std::span<std::string_view const> Sgd::state_names() const noexcept {
    return std::span{detail::sgd_state}.first(momentum == 0.0 ? 0 : 1);
}
template <class T>
void Sgd::update(UpdateRange<T> const& range) const {
    detail::run_rule(*this, range);
}
template <class T, class F>
decltype(auto) Sgd::visit_update(std::uint64_t step, F const& f) const {
    return momentum == 0.0 ? f(made<T, false>(step)) : f(made<T, true>(step));
}
inline void Sgd::check() const {
    detail::check_setting("Sgd", "learning_rate", learning_rate);
    detail::check_setting("Sgd", "momentum", momentum);
    detail::check_setting("Sgd", "weight_decay", weight_decay);
    if (!std::isfinite(dampening)) {
        throw ContractViolation{
            detail::concat("Sgd::dampening is ", dampening, "; give a finite number")
        };
    }
    if (nesterov && (momentum <= 0.0 || dampening != 0.0)) {
        throw ContractViolation{detail::concat(
            "Sgd::nesterov needs a momentum and no dampening, but momentum is ",
            momentum,
            " and dampening is ",
            dampening
        )};
    }
}
template <class List>
void Sgd::agree_on(List& list) const {
    list.add("learning_rate", learning_rate);
    list.add("momentum", momentum);
    list.add("dampening", dampening);
    list.add("weight_decay", weight_decay);
    list.add("nesterov", nesterov);
    list.add("maximize", maximize);
}
template <class T, bool has_momentum>
detail::SgdUpdate<T, has_momentum> Sgd::made(std::uint64_t step) const {
    detail::SgdUpdate<T, has_momentum> update;
    update.terms.sign = static_cast<T>(maximize ? -1.0 : 1.0);
    update.terms.decay = static_cast<T>(weight_decay);
    update.momentum = static_cast<T>(momentum);
    update.undamped = static_cast<T>(1.0 - dampening);
    update.negative_rate = static_cast<T>(-learning_rate);
    update.is_first = step == 1;
    update.is_nesterov = nesterov;
    return update;
}

constexpr std::span<std::string_view const> Adam::state_names() const noexcept {
    return std::span{detail::adam_state}.first(amsgrad ? 3 : 2);
}
template <class T>
void Adam::update(UpdateRange<T> const& range) const {
    detail::run_rule(*this, range);
}
template <class T, class F>
decltype(auto) Adam::visit_update(std::uint64_t step, F const& f) const {
    return detail::visit_adam<T>(*this, false, step, f);
}
inline void Adam::check() const {
    detail::check_adam("Adam", *this);
}
template <class List>
void Adam::agree_on(List& list) const {
    detail::agree_on_adam(list, *this);
}

constexpr std::span<std::string_view const> AdamW::state_names() const noexcept {
    return std::span{detail::adam_state}.first(amsgrad ? 3 : 2);
}
template <class T>
void AdamW::update(UpdateRange<T> const& range) const {
    detail::run_rule(*this, range);
}
template <class T, class F>
decltype(auto) AdamW::visit_update(std::uint64_t step, F const& f) const {
    return detail::visit_adam<T>(*this, true, step, f);
}
inline void AdamW::check() const {
    detail::check_adam("AdamW", *this);
}
template <class List>
void AdamW::agree_on(List& list) const {
    detail::agree_on_adam(list, *this);
}

}} // namespace joinable::v0

// ---- joinable/device/copy_run.hpp

#ifndef JOINABLE_DEVICE_COPY_RUN_HPP_PART_1
#define JOINABLE_DEVICE_COPY_RUN_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// Copies elements that lie one after another: on the host at once, else in the order of submissions.
inline void copy_run(Device& device, void const* from, void* to, std::size_t count, DType dtype) {
    if (count == 0 || from == to) {
        return;
    }
    if (is_on_host(device)) {
        std::memcpy(to, from, count * size_of(dtype));
        return;
    }
    auto const all = [&](void* data) {
        return AnyView{data, dtype, Shape{count}, Shape{1}, device.id()};
    };
    device.copy(all(const_cast<void*>(from)), all(to));
}

}}} // namespace joinable::v0::detail

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

// ---- joinable/optimizer/state_arrays.hpp

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

// ---- joinable/optimizer/stepped_gradients.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The rows of a parameter that are stepped. Memory grows to the most rows so far.
struct SteppedRows {
    std::vector<std::int64_t> indices;
    std::vector<std::byte> values; ///< row by row, for those that travel
};

/// The gradients by which a rank steps the parameters of a group. An active rank steps the
/// parameters of which it has a gradient. A joined rank's own gradients say nothing, because
/// it ran no pass: it steps the parameters that active ranks step. If it has no gradient of one of these,
/// no rank used the parameter, and zeros are its gradient. Local.
class SteppedGradients {
public:
    /// Makes room for the lists of other ranks, of `parameters` parameters. Without it, own gradients count.
    void reserve(std::size_t parameters) { has_gradient_.resize(parameters); }
    /// Whether the rank that called list() has a gradient, for each parameter. The buffer of a
    /// message to joined ranks.
    [[nodiscard]] std::span<std::uint8_t> listed() noexcept { return has_gradient_; }
    /// Lists this rank's gradients.
    void list(ParameterList const& parameters) {
        for (std::size_t i = 0; i < has_gradient_.size(); ++i) {
            has_gradient_[i] = elements_of_gradient(parameters[i]) ? 1 : 0;
        }
    }

    /// Before a step, on every rank. The device has the parameters and must outlive the step.
    void begin_step(bool has_joined, Device& device) {
        follows_ = has_joined && !has_gradient_.empty();
        device_ = &device;
        for (auto const& [i, zeros] : zeros_) {
            device.fill_zero(zeros.view); // a step may have written there
        }
        if (!zeros_.empty()) {
            device.submit(); // before they are read
        }
    }
    /// The gradient by which parameter `i` is stepped. Empty: it is not stepped.
    [[nodiscard]] AnyView of(ParameterList const& parameters, std::size_t i) {
        AnyView const own = parameters[i].grad();
        if (!follows_) {
            return own;
        }
        return has_gradient_[i] == 0 ? AnyView{} : own ? own : zeros(parameters[i].value(), i);
    }

    /// The same for a parameter whose gradients are rows.
    [[nodiscard]] SparseRows sparse_of(ParameterList const& parameters, std::size_t i) const {
        return follows_ && has_gradient_[i] == 0 ? SparseRows{} : parameters[i].sparse_grad();
    }
    /// The rows of parameter `i` that this step steps.
    [[nodiscard]] SteppedRows& rows(std::size_t i) { return rows_[i]; }

private:
    [[nodiscard]] AnyView zeros(AnyView const& value, std::size_t i) {
        auto at = zeros_.find(i);
        if (at == zeros_.end()) {
            Shape const& extents = value.extents();
            std::size_t const bytes = value.numel() * size_of(value.dtype());
            Arena memory = device_->allocate(bytes, Arena::default_alignment);
            Shape const strides = dense_strides(extents, value.strides());
            AnyView const view{memory.data(), value.dtype(), extents, strides, value.device()};
            at = zeros_.emplace(i, Zeros{std::move(memory), view}).first;
        }
        return at->second.view;
    }

    struct Zeros {
        Arena memory;
        AnyView view;
    };

    std::vector<std::uint8_t> has_gradient_;
    bool follows_ = false;
    Device* device_ = nullptr;
    std::map<std::size_t, Zeros> zeros_;      ///< kept, so that later rounds allocate nothing
    std::map<std::size_t, SteppedRows> rows_; ///< kept, too
};

}}} // namespace joinable::v0::detail

// ---- joinable/optimizer/shard.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// One rank's view of a bucket: its pieces, their state, and the copies between parameters,
/// gradients and the bucket. In the bucket a parameter lies whole and dense, in the order of its
/// value if that is dense. All members are local. `parameters` is the list that the bucket was cut
/// from. Parameters, state and buckets are in the memory of one device, and members that read or
/// write them there leave requests that its submit() starts.
class OptimizerShard {
public:
    /// `names` is the number of state arrays. With `has_masters`, values of 16 bits are stepped as
    /// copies of 32 bits. The device must outlive the shard.
    OptimizerShard(
        ShardBucket bucket,
        int rank,
        std::size_t names,
        bool has_masters,
        Sharding sharding,
        Device& device = detail::the_host()
    );

    /// The same shard with zeroed state, for a rule with another number of state arrays.
    [[nodiscard]] OptimizerShard with_state(std::size_t names) const {
        return {bucket_, rank_, names, has_masters_, sharding_, *device_};
    }

    [[nodiscard]] Device& device() const noexcept { return *device_; }
    [[nodiscard]] ShardBucket const& bucket() const noexcept { return bucket_; }
    [[nodiscard]] StateArrays const& state() const noexcept { return state_; }
    [[nodiscard]] std::span<ShardPiece const> own() const noexcept {
        return std::span{bucket_.pieces}.subspan(first_, own_);
    }
    /// The pieces that this rank steps: its own, or all with Sharding::none.
    [[nodiscard]] std::span<ShardPiece const> kept() const noexcept {
        return keeps_all() ? std::span{bucket_.pieces} : own();
    }
    [[nodiscard]] bool keeps_all() const noexcept { return sharding_ == Sharding::none; }
    /// The element of the arrays at which the state of a kept piece begins.
    [[nodiscard]] std::size_t place_of_state(ShardPiece const& piece) const noexcept {
        return piece.offset - (keeps_all() ? 0 : part_offset());
    }
    /// The number of elements whose state rank `rank` keeps.
    [[nodiscard]] std::size_t kept_count(std::size_t rank) const noexcept {
        return keeps_all() ? bucket_.count() : bucket_.counts[rank];
    }
    /// The size of one element of values and gradients, in bytes.
    [[nodiscard]] std::size_t element() const noexcept { return size_of(bucket_.dtype); }
    [[nodiscard]] std::size_t bucket_bytes() const noexcept { return bucket_.count() * element(); }
    /// The number of elements in this rank's part.
    [[nodiscard]] std::size_t part() const noexcept {
        return bucket_.counts[static_cast<std::size_t>(rank_)];
    }
    /// The element at which this rank's part begins.
    [[nodiscard]] std::size_t part_offset() const noexcept { return bucket_.offset_of(rank_); }
    /// The reduced gradients of this rank's part.
    [[nodiscard]] std::byte* gradients() const noexcept { return gradients_.data(); }
    [[nodiscard]] bool reduces() const noexcept { return gradients_.bytes() != 0; }

    /// A dense view of a parameter's elements, which begin at `data` in a bucket or in scratch
    /// memory.
    [[nodiscard]] static AnyView place_of(AnyView const& value, std::byte* data);

    /// Writes all gradients into a bucket, each element times `factor`. Writes zeros if the factor
    /// is 0 or there is no gradient.
    void pack_gradients(ParameterList const& parameters, double factor, std::byte* bucket) const;
    /// Writes the gradient of the parameter that begins with piece `k`.
    void pack_gradient(
        ParameterList const& parameters, std::size_t k, double factor, std::byte* bucket
    ) const;

    /// Appends the existing gradients of the pieces that this rank steps. `shift` is added to
    /// indices.
    void append_gradients(
        ParameterList const& parameters,
        detail::SteppedGradients& gradients,
        std::size_t shift,
        std::vector<ShardGradient>& list
    ) const;

    /// Steps those of the given pieces, which this rank keeps, that have gradients; with `is_packed` only those that do
    /// not travel alone. `steps` counts per parameter.
    template <class Rule>
    void step(
        std::span<ShardPiece const> pieces,
        bool is_packed,
        ParameterList const& parameters,
        detail::SteppedGradients& stepped,
        Rule const& rule,
        std::vector<std::uint64_t>& steps,
        detail::Scratch (&scratch)[2]
    ) const {
        DeviceRule const erased = detail::device_rule(rule);
        if (bucket_.is_rows) {
            step_rows(parameters, stepped, erased, steps, scratch[0]);
            return;
        }
        bool const is_host = detail::is_on_host(*device_);
        std::vector<DeviceUpdate> updates; // one launch on a device
        auto const run = [&] {
            if (!updates.empty()) {
                device_->update(erased, updates);
                updates.clear();
            }
        };
        for (ShardPiece const& piece : pieces) {
            if (is_packed && travels_alone(parameters, piece)) {
                continue;
            }
            AnyView const value = parameters[piece.parameter].value();
            std::byte const* gradients = reduces() ? gradient_at(piece) : nullptr;
            bool is_moved = !is_dense(value); // then scratch memory is used until it has run
            if (!reduces()) {
                AnyView const gradient = stepped.of(parameters, piece.parameter);
                if (!gradient) {
                    continue;
                }
                check_gradient_of(parameters, piece.parameter, value, gradient);
                is_moved = !is_laid_out_alike(value, gradient);
                gradients = elements_of(value, gradient, piece, scratch[0]);
            }
            std::byte* const values = elements_of(value, value, piece, scratch[1]);
            check_masters(parameters, piece, values);
            DeviceUpdate const update = state_.update(
                values, gradients, piece.size, place_of_state(piece), ++steps[piece.parameter]
            );
            if (is_host) {
                device_->update(erased, {&update, 1});
            } else {
                updates.push_back(update);
            }
            if (is_moved) {
                run();
            }
            if (!is_dense(value)) {
                device_->copy(place_of(value, values - piece.begin * element()), value);
                device_->submit();
            }
        }
        run();
    }

    /// Steps the parameters that this rank keeps and that have gradients by an engine's optimizer.
    /// `shift` is added to indices; `steps` counts per parameter. On a device it works in the order
    /// of the engine's stream.
    template <LocalOptimizer Optimizer>
    void step_whole(
        ParameterList const& parameters,
        detail::SteppedGradients& stepped,
        Optimizer& optimizer,
        std::vector<std::uint64_t>& steps,
        std::size_t shift
    ) const {
        device_->finish();
        for_each_whole(parameters, stepped, steps, shift, [&](WholeParameter const& parameter) {
            optimizer.step(parameter);
        });
    }
    /// Calls f(WholeParameter) for each that it steps, and counts the step.
    template <class F>
    void for_each_whole(
        ParameterList const& parameters,
        detail::SteppedGradients& stepped,
        std::vector<std::uint64_t>& steps,
        std::size_t shift,
        F const& f
    ) const {
        for (ShardPiece const& piece : kept()) {
            std::size_t const i = piece.parameter;
            AnyView const value = parameters[i].value();
            AnyView const gradient =
                reduces() ? place_of(value, gradient_at(piece)) : stepped.of(parameters, i);
            if (gradient) {
                check_gradient_of(parameters, i, value, gradient);
                WholeParameter whole{shift + i, value, gradient, ++steps[i], {}};
                for (std::size_t k = 0; k < state_.names(); ++k) {
                    std::byte* const array = state_.array(k, place_of_state(piece));
                    whole.state.push_back(place_of(value, array));
                }
                f(std::move(whole));
            }
        }
    }

    // If the gradients of the only parameter are rows. Its value is contiguous, in host memory.

    /// Lists the rows that this rank is about to step.
    /// @throws ContractViolation  they do not fit the parameter, do not ascend or are there twice. Nothing was changed.
    void list_rows(ParameterList const& parameters, SteppedGradients& stepped) const;
    /// Copies the listed rows out of the value if it `packs` them, or into it.
    void copy_rows(ParameterList const& parameters, SteppedRows& rows, bool packs) const;
    [[nodiscard]] std::size_t row_bytes(ParameterList const& parameters) const;

    // Values travel from where they lie, or packed: the pieces that do not travel alone, one after another.

    /// The pieces that travel alone while their value is dense, those of the ranks in turn.
    [[nodiscard]] std::span<ShardPiece const> lone() const noexcept { return lone_; }
    /// The run of memory from which a piece travels, if it does so alone; else an empty view.
    [[nodiscard]] AnyView lone_run(ParameterList const& parameters, ShardPiece const& piece) const;
    [[nodiscard]] bool
    travels_alone(ParameterList const& parameters, ShardPiece const& piece) const {
        return !lone_.empty() && lone_run(parameters, piece);
    }
    /// Sets the number of packed elements of each rank. Returns their sum.
    std::size_t
    count_packed(ParameterList const& parameters, std::vector<std::size_t>& counts) const;
    /// Copies the values of this rank that are packed.
    void
    pack_own(ParameterList const& parameters, std::byte* packed, detail::Scratch& scratch) const;
    /// Copies all values that other ranks own from where all are packed.
    void unpack_others(ParameterList const& parameters, std::byte const* packed) const;
    /// Copies all values of this rank to its part of a bucket.
    void take_own(ParameterList const& parameters, std::byte* part, detail::Scratch& scratch) const;

    /// Copies elements of arrays of the state.
    void copy_array(std::byte const* from, std::byte* to, std::size_t count) const {
        detail::copy_run(*device_, from, to, count, state_.computed_in());
    }

    /// Copies values of 16 bits into their masters, of parameters for which `loads(i)`.
    void load_masters(
        ParameterList const& parameters,
        detail::Scratch& scratch,
        std::function<bool(std::size_t)> const& loads = {}
    ) const;

private:
    [[nodiscard]] static bool is_dense(AnyView const& value) {
        return is_non_overlapping_and_dense(value.extents(), value.strides());
    }
    [[nodiscard]] static bool is_laid_out_alike(AnyView const& value, AnyView const& other) {
        return is_dense(value) && has_same_steps(value, other);
    }
    [[nodiscard]] static bool is_whole(ShardPiece const& piece, AnyView const& value) {
        return piece.size == value.numel();
    }
    /// Whether a piece travels alone while its value is dense.
    [[nodiscard]] bool is_lone(ShardPiece const& piece) const noexcept {
        bool const is_all = bucket_.pieces.size() == 1 && piece.size == bucket_.count();
        return piece.size != 0 && (is_all || piece.size * element() >= bucket_.alone);
    }
    /// Copies values of this rank to `place`.
    void pack_piece(
        AnyView const& value, ShardPiece const& piece, std::byte* place, detail::Scratch& scratch
    ) const;
    [[nodiscard]] AnyView run(std::byte* data, ShardPiece const& piece) const {
        return {data, bucket_.dtype, Shape{piece.size}, Shape{1}, device_->id()};
    }
    [[nodiscard]] std::byte* begin_of(AnyView const& tensor, ShardPiece const& piece) const {
        return static_cast<std::byte*>(tensor.data()) + piece.begin * element();
    }
    [[nodiscard]] std::byte* gradient_at(ShardPiece const& piece) const {
        return gradients_.data() + (piece.offset - part_offset()) * element();
    }
    [[nodiscard]] float* masters_of(ShardPiece const& piece) const {
        return reinterpret_cast<float*>(state_.array(state_.names(), place_of_state(piece)));
    }

    /// The elements of a piece in bucket order: in place if possible, otherwise copied to
    /// `scratch`, for what is submitted before the next such copy.
    [[nodiscard]] std::byte* elements_of(
        AnyView const& value,
        AnyView const& tensor,
        ShardPiece const& piece,
        detail::Scratch& scratch
    ) const;

    static void check_gradient_of(
        ParameterList const& parameters,
        std::size_t i,
        AnyView const& value,
        AnyView const& gradient
    );

    template <class F>
    void visit_sixteen_bits(F const& f) const {
        if (bucket_.dtype == DType::f16) {
            f(std::type_identity<Half>{});
        } else {
            f(std::type_identity<BFloat16>{});
        }
    }

    void step_rows(
        ParameterList const& parameters,
        SteppedGradients& stepped,
        DeviceRule const& rule,
        std::vector<std::uint64_t>& steps,
        Scratch& scratch
    ) const;

    /// Compares the first value of a piece with its master. On a device it checks nothing: the host
    /// would have to wait.
    void check_masters(
        ParameterList const& parameters, ShardPiece const& piece, std::byte const* values
    ) const;

    ShardBucket bucket_;
    int rank_;
    bool has_masters_; ///< of values of 16 bits
    Sharding sharding_;
    Device* device_;
    std::size_t first_ = 0; ///< index of this rank's first piece
    std::size_t own_ = 0;
    StateArrays state_;
    Arena gradients_;
    std::vector<ShardPiece> lone_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/optimizer/impl/shard.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION OptimizerShard::OptimizerShard(
    ShardBucket bucket,
    int rank,
    std::size_t names,
    bool has_masters,
    Sharding sharding,
    Device& device
)
    : bucket_{std::move(bucket)}, rank_{rank}, has_masters_{has_masters}, sharding_{sharding},
      device_{&device},
      state_{
          bucket_.dtype,
          kept_count(static_cast<std::size_t>(rank)),
          names,
          has_masters && is_half_precision(bucket_.dtype),
          device
      },
      gradients_{device.allocate(
          reduces_to_owners(sharding) ? part() * element() : 0, Arena::default_alignment
      )} {
    std::vector<std::size_t> counts(bucket_.counts.size()); // of lone pieces of each owner
    std::vector<std::pair<std::size_t, std::size_t>> turns; // of a lone piece, and its place
    for (std::size_t k = 0; k < bucket_.pieces.size(); ++k) {
        ShardPiece const& piece = bucket_.pieces[k];
        first_ += piece.owner < rank ? 1 : 0;
        own_ += piece.owner == rank ? 1 : 0;
        if (is_lone(piece)) {
            turns.emplace_back(counts[static_cast<std::size_t>(piece.owner)]++, k);
        }
    }
    std::sort(turns.begin(), turns.end());
    for (auto const& [turn, k] : turns) {
        lone_.push_back(bucket_.pieces[k]);
    }
}

JOINABLE_DEFINITION AnyView OptimizerShard::place_of(AnyView const& value, std::byte* data) {
    Shape const& extents = value.extents();
    Shape const strides = detail::dense_strides(extents, value.strides());
    return {data, value.dtype(), extents, strides, value.device()};
}

JOINABLE_DEFINITION void OptimizerShard::pack_gradients(
    ParameterList const& parameters, double factor, std::byte* bucket
) const {
    for (std::size_t k = 0; k < bucket_.pieces.size(); ++k) {
        if (bucket_.pieces[k].begin == 0) { // else its parameter has been packed
            pack_gradient(parameters, k, factor, bucket);
        }
    }
}

JOINABLE_DEFINITION void OptimizerShard::pack_gradient(
    ParameterList const& parameters, std::size_t k, double factor, std::byte* bucket
) const {
    ShardPiece const& piece = bucket_.pieces[k];
    AnyView const value = parameters[piece.parameter].value();
    AnyView const gradient = parameters[piece.parameter].grad();
    AnyView const place = place_of(value, bucket + piece.offset * element());
    if (!gradient && parameters[piece.parameter].sparse_grad().values.numel() != 0) {
        throw ContractViolation{detail::concat(
            detail::describe_parameter(parameters, piece.parameter),
            " has a sparse gradient, but averages that go to an owner are dense; give it dense gradients"
        )};
    }
    if (!gradient || factor == 0.0) {
        device_->fill_zero(place);
    } else {
        check_gradient_of(parameters, piece.parameter, value, gradient);
        device_->scale_copy(gradient, factor, place);
    }
}

JOINABLE_DEFINITION void OptimizerShard::append_gradients(
    ParameterList const& parameters,
    detail::SteppedGradients& gradients,
    std::size_t shift,
    std::vector<ShardGradient>& list
) const {
    for (ShardPiece const& piece : kept()) {
        AnyView const value = parameters[piece.parameter].value();
        std::size_t const i = shift + piece.parameter;
        if (reduces()) {
            std::byte* const data = gradient_at(piece);
            list.push_back({i, is_whole(piece, value) ? place_of(value, data) : run(data, piece)});
            continue;
        }
        AnyView const gradient = gradients.of(parameters, piece.parameter);
        if (!gradient) {
            continue;
        }
        check_gradient_of(parameters, piece.parameter, value, gradient);
        if (is_whole(piece, value)) {
            list.push_back({i, gradient});
        } else if (is_laid_out_alike(value, gradient)) {
            list.push_back({i, run(begin_of(gradient, piece), piece)});
        } else {
            throw ContractViolation{detail::concat(
                "ZeroOptions::before_step is given runs of elements with Partition::flat, but the "
                "gradient of ",
                detail::describe_parameter(parameters, piece.parameter),
                " is not laid out as its value; use Partition::by_parameters"
            )};
        }
    }
}

JOINABLE_DEFINITION std::size_t OptimizerShard::row_bytes(ParameterList const& parameters) const {
    AnyView const value = parameters[bucket_.pieces.front().parameter].value();
    std::size_t const rows = value.extents()[0];
    return rows == 0 ? 0 : value.numel() / rows * element();
}

JOINABLE_DEFINITION void
OptimizerShard::list_rows(ParameterList const& parameters, SteppedGradients& stepped) const {
    std::size_t const i = bucket_.pieces.front().parameter;
    std::vector<std::int64_t>& listed = stepped.rows(i).indices;
    listed.clear();
    if (kept().empty()) {
        return;
    }
    AnyView const value = parameters[i].value();
    auto const [indices, values] = stepped.sparse_of(parameters, i);
    bool const is_dense = static_cast<bool>(parameters[i].grad());
    if (!indices && !values && !is_dense) {
        return;
    }
    Shape extents = value.extents();
    extents[0] = indices.numel();
    bool fit = !is_dense && indices.extents().size() == 1 && values.dtype() == value.dtype() &&
               values.extents() == extents && detail::has_memory(values) &&
               detail::has_memory(indices);
    if (fit && indices.dtype() == DType::i64) {
        auto const numbers = indices.as<std::int64_t>();
        listed.assign(numbers.begin(), numbers.end());
    } else if (fit && indices.dtype() == DType::i32) {
        auto const numbers = indices.as<std::int32_t>();
        listed.assign(numbers.begin(), numbers.end());
    } else {
        fit = false;
    }
    for (std::size_t k = 0; k < listed.size(); ++k) {
        fit = fit && listed[k] > (k == 0 ? -1 : listed[k - 1]) &&
              static_cast<std::uint64_t>(listed[k]) < value.extents()[0];
    }
    if (!fit) {
        throw ContractViolation{concat(
            "the gradient of ",
            describe_parameter(parameters, i),
            is_dense
                ? " is dense, but its gradients were sparse when it was given; give it the rows"
                : " is not rows that ascend, each once, of a value of ",
            is_dense ? std::string{} : to_text(value) + "; give it those",
            " that a DistributedDataParallel without sparse_as_dense has set"
        )};
    }
}

JOINABLE_DEFINITION void OptimizerShard::step_rows(
    ParameterList const& parameters,
    SteppedGradients& stepped,
    DeviceRule const& rule,
    std::vector<std::uint64_t>& steps,
    Scratch& scratch
) const {
    if (kept().empty()) {
        return;
    }
    ShardPiece const& piece = kept().front();
    AnyView const gradient = stepped.sparse_of(parameters, piece.parameter).values;
    if (!gradient) {
        return;
    }
    auto const* gradients = static_cast<std::byte const*>(gradient.data());
    if (!gradient.is_contiguous()) {
        std::byte* const rows = scratch.data(gradient.numel() * element());
        Shape const& extents = gradient.extents();
        device_->copy(gradient, {rows, bucket_.dtype, extents, row_major_strides(extents)});
        gradients = rows;
    }
    auto* const values = static_cast<std::byte*>(parameters[piece.parameter].value().data());
    check_masters(parameters, piece, values);
    std::uint64_t const step = ++steps[piece.parameter];
    std::size_t const row = row_bytes(parameters) / element();
    std::vector<std::int64_t> const& indices = stepped.rows(piece.parameter).indices;
    for (std::size_t first = 0, last = 0; first < indices.size(); first = last) {
        last = first + 1;
        while (last < indices.size() && indices[last] == indices[last - 1] + 1) {
            ++last; // one update of rows side by side
        }
        std::size_t const at = static_cast<std::size_t>(indices[first]) * row;
        DeviceUpdate const update = state_.update(
            values + at * element(),
            gradients + first * row * element(),
            (last - first) * row,
            place_of_state(piece) + at,
            step
        );
        device_->update(rule, {&update, 1});
    }
}

JOINABLE_DEFINITION void
OptimizerShard::copy_rows(ParameterList const& parameters, SteppedRows& rows, bool packs) const {
    AnyView const value = parameters[bucket_.pieces.front().parameter].value();
    auto* const whole = static_cast<std::byte*>(value.data());
    std::size_t const bytes = row_bytes(parameters);
    for (std::size_t k = 0; k < rows.indices.size(); ++k) {
        std::byte* const place = whole + static_cast<std::size_t>(rows.indices[k]) * bytes;
        std::byte* const packed = rows.values.data() + k * bytes;
        copy_bytes(packs ? packed : place, packs ? place : packed, bytes);
    }
}

JOINABLE_DEFINITION AnyView
OptimizerShard::lone_run(ParameterList const& parameters, ShardPiece const& piece) const {
    if (!is_lone(piece)) {
        return {};
    }
    AnyView const value = parameters[piece.parameter].value();
    return is_dense(value) ? run(begin_of(value, piece), piece) : AnyView{};
}

JOINABLE_DEFINITION std::size_t OptimizerShard::count_packed(
    ParameterList const& parameters, std::vector<std::size_t>& counts
) const {
    counts = bucket_.counts;
    if (!lone_.empty()) { // else equal parts stay so, padding included
        std::fill(counts.begin(), counts.end(), std::size_t{0});
        for (ShardPiece const& piece : bucket_.pieces) {
            bool const is_packed = !travels_alone(parameters, piece);
            counts[static_cast<std::size_t>(piece.owner)] += is_packed ? piece.size : 0;
        }
    }
    return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

JOINABLE_DEFINITION void OptimizerShard::pack_piece(
    AnyView const& value, ShardPiece const& piece, std::byte* place, detail::Scratch& scratch
) const {
    if (is_dense(value)) {
        detail::copy_run(*device_, begin_of(value, piece), place, piece.size, bucket_.dtype);
    } else if (is_whole(piece, value)) {
        device_->copy(value, place_of(value, place));
    } else {
        std::byte* const elements = elements_of(value, value, piece, scratch);
        device_->submit();
        detail::copy_run(*device_, elements, place, piece.size, bucket_.dtype);
        device_->submit(); // before the scratch memory is used again
    }
}

JOINABLE_DEFINITION void OptimizerShard::pack_own(
    ParameterList const& parameters, std::byte* packed, detail::Scratch& scratch
) const {
    for (ShardPiece const& piece : own()) {
        if (!travels_alone(parameters, piece)) {
            pack_piece(parameters[piece.parameter].value(), piece, packed, scratch);
            packed += piece.size * element();
        }
    }
}

JOINABLE_DEFINITION void OptimizerShard::take_own(
    ParameterList const& parameters, std::byte* part, detail::Scratch& scratch
) const {
    for (ShardPiece const& piece : own()) {
        std::byte* const place = part + (piece.offset - part_offset()) * element();
        pack_piece(parameters[piece.parameter].value(), piece, place, scratch);
    }
}

JOINABLE_DEFINITION void
OptimizerShard::unpack_others(ParameterList const& parameters, std::byte const* packed) const {
    auto* from = const_cast<std::byte*>(packed);
    auto const is_other = [&](ShardPiece const& piece) { return piece.owner != rank_; };
    std::span<ShardPiece const> const pieces = bucket_.pieces;
    for (std::size_t k = 0; k < pieces.size(); ++k) {
        ShardPiece const& piece = pieces[k];
        if (travels_alone(parameters, piece)) {
            continue;
        }
        AnyView const value = parameters[piece.parameter].value();
        if (is_dense(value)) {
            if (is_other(piece)) {
                detail::copy_run(*device_, from, begin_of(value, piece), piece.size, bucket_.dtype);
            }
        } else if (piece.begin == 0) { // all pieces of the value are packed
            bool has_others = false;
            for (std::size_t p = k; p < pieces.size(); ++p) {
                if (pieces[p].parameter != piece.parameter) {
                    break;
                }
                has_others = has_others || is_other(pieces[p]);
            }
            if (has_others) {
                device_->copy(place_of(value, from), value);
            }
        }
        from += piece.size * element();
    }
}

JOINABLE_DEFINITION void OptimizerShard::load_masters(
    ParameterList const& parameters,
    detail::Scratch& scratch,
    std::function<bool(std::size_t)> const& loads
) const {
    if (!state_.has_masters()) {
        return;
    }
    detail::LoadMasters const load{};
    for (ShardPiece const& piece : kept()) {
        if (loads && !loads(piece.parameter)) {
            continue;
        }
        AnyView const value = parameters[piece.parameter].value();
        std::byte* const values = elements_of(value, value, piece, scratch);
        DeviceUpdate const update =
            state_.update(values, values, piece.size, place_of_state(piece), 1);
        device_->update(detail::device_rule(load), {&update, 1});
    }
}

JOINABLE_DEFINITION std::byte* OptimizerShard::elements_of(
    AnyView const& value, AnyView const& tensor, ShardPiece const& piece, detail::Scratch& scratch
) const {
    if (is_laid_out_alike(value, tensor)) {
        return begin_of(tensor, piece);
    }
    std::byte* const whole = scratch.data(value.numel() * element());
    device_->copy(tensor, place_of(value, whole));
    return whole + piece.begin * element();
}

JOINABLE_DEFINITION void OptimizerShard::check_gradient_of(
    ParameterList const& parameters, std::size_t i, AnyView const& value, AnyView const& gradient
) {
    detail::check_gradient(parameters, i, gradient);
    if (!detail::is_like(value, gradient)) {
        throw ContractViolation{detail::concat(
            "the gradient of ",
            detail::describe_parameter(parameters, i),
            " is ",
            detail::to_text(gradient),
            ", but its value is ",
            detail::to_text(value)
        )};
    }
}

JOINABLE_DEFINITION void OptimizerShard::check_masters(
    ParameterList const& parameters, ShardPiece const& piece, std::byte const* values
) const {
    if (!state_.has_masters() || piece.size == 0 || !detail::is_on_host(*device_)) {
        return;
    }
    visit_sixteen_bits([&]<class Stored>(std::type_identity<Stored>) {
        Stored rounded;
        detail::narrow_to<Stored>(reinterpret_cast<std::byte*>(&rounded), masters_of(piece), 1);
        if (std::memcmp(&rounded, values, sizeof(Stored)) != 0) {
            throw ContractViolation{detail::concat(
                detail::describe_parameter(parameters, piece.parameter),
                " has changed since the last step, but the optimizer steps a copy of 32 bits; call "
                "reload() on every rank when values were loaded"
            )};
        }
    });
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/participant/detail/relisted.hpp

#ifndef JOINABLE_PARTICIPANT_DETAIL_RELISTED_HPP_PART_1
#define JOINABLE_PARTICIPANT_DETAIL_RELISTED_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// A list of parameters in the place of one before: which is which. Local.
class Relisted {
public:
    Relisted() = default;
    /// A parameter is the first one of the same name that no other one is. Without a name it is the one whose value is
    /// at the same address, unless that one has other memory now. With `same_objects` the lists are the same. A
    /// value at the address of before is another one if `is_replaced(i)` says so of parameter `i` before.
    Relisted(
        ListedModel const& before,
        ParameterList const& now,
        bool same_objects,
        std::function<bool(std::size_t)> const& is_replaced = {}
    );

    [[nodiscard]] std::size_t size() const noexcept { return was_.size(); }
    /// The index of parameter `i` in the list before, if it is there.
    [[nodiscard]] std::optional<std::size_t> was(std::size_t i) const { return was_[i]; }
    /// Whether ranks have the same value of it, because it lies where they have trained it, or was sent and is frozen
    /// still. One of the same name that lies elsewhere may be another layer.
    [[nodiscard]] bool is_equal(std::size_t i) const { return is_equal_[i]; }

    /// Whether it was trained before, with the same dtype and extents: then state of it may be moved.
    [[nodiscard]] bool was_trained(std::size_t i) const { return was_trained_[i]; }

    /// Lists what each one was, because ranks do the same with it.
    void agree_on(AgreementList& list, ParameterList const& now) const;

private:
    std::vector<std::optional<std::size_t>> was_;
    std::vector<bool> is_equal_;
    std::vector<bool> was_trained_;
};

/// Gradients that were cleared hold nothing.
/// @throws ContractViolation  refresh() was called too early.
template <class F>
void require_no_window(WindowOf const& window, F const& are_cleared) {
    if (!window.window().is_empty() && !are_cleared()) {
        throw ContractViolation{
            "refresh() was called while gradients hold batches that no round has reduced; call it after a round that "
            "syncs, clear the gradients, or call discard_window() before"
        };
    }
}

inline Relisted::Relisted(
    ListedModel const& before,
    ParameterList const& now,
    bool same_objects,
    std::function<bool(std::size_t)> const& is_replaced
)
    : was_(now.size()), is_equal_(now.size()), was_trained_(now.size()) {
    std::map<std::string, std::queue<std::size_t>, std::less<>> by_name;
    std::unordered_map<void const*, std::size_t> by_value;
    auto const& identities = before.identities();
    // Memory that a value has left may be another one's.
    auto const is_at = [&](void const* address, std::size_t i) {
        return address == identities[i].value && before.parameters()[i].value().data() == address;
    };
    for (std::size_t i = 0; i < identities.size(); ++i) {
        if (auto const& [name, value] = identities[i]; !name.empty()) {
            by_name[name].push(i);
        } else if (value != nullptr && is_at(value, i)) {
            by_value.emplace(value, i);
        }
    }
    for (std::size_t i = 0; i < now.size(); ++i) {
        AnyView const value = now[i].value();
        if (same_objects) {
            was_[i] = i;
        } else if (std::string_view const name = now[i].name(); !name.empty()) {
            auto const found = by_name.find(name);
            if (found != by_name.end() && !found->second.empty()) {
                was_[i] = found->second.front();
                found->second.pop();
            }
        } else if (auto const found = by_value.find(value.data()); found != by_value.end()) {
            was_[i] = found->second;
        }
        if (was_[i]) {
            ParameterState const& listed = before.listed()[*was_[i]];
            bool const is_alike =
                listed.dtype == value.dtype() && listed.extents == value.extents();
            bool const is_there = same_objects || (is_at(value.data(), *was_[i]) &&
                                                   !(is_replaced && is_replaced(*was_[i])));
            was_trained_[i] = is_alike && listed.requires_grad;
            is_equal_[i] =
                is_alike && is_there && (listed.requires_grad || !now[i].requires_grad());
        }
    }
}

inline void Relisted::agree_on(AgreementList& list, ParameterList const& now) const {
    list.begin_section("what a model before had differs: ");
    for (std::size_t i = 0; i < now.size(); ++i) {
        list.add(
            describe_parameter(now, i),
            !was_[i] ? std::string{"new"}
                     : concat("parameter ", *was_[i], " before", is_equal_[i] ? "" : ", to be sent")
        );
    }
}

}}} // namespace joinable::v0::detail

#endif

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

// ---- joinable/communicator/substitute.hpp

#ifndef JOINABLE_COMMUNICATOR_SUBSTITUTE_HPP_PART_1
#define JOINABLE_COMMUNICATOR_SUBSTITUTE_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// As many elements of a buffer, from `begin` on.
[[nodiscard]] inline Buffer within(Buffer whole, std::size_t begin, std::size_t count) noexcept {
    std::size_t const bytes = begin * size_of(whole.dtype);
    return {static_cast<std::byte*>(whole.data) + bytes, count, whole.dtype};
}
/// For a collective that only reads it here.
[[nodiscard]] inline Buffer readable(ConstBuffer in) noexcept {
    return {const_cast<void*>(in.data), in.count, in.dtype};
}
[[nodiscard]] constexpr std::size_t sum_of(Counts counts) noexcept {
    return offset_of(counts, counts.size());
}

/// The types that a caller can give to a Substitute.
struct Provided {
    /// If parts have counts: all of them, where other ranks than the root have them, too; in an all_to_all from
    /// each rank to each.
    Counts known = {};
    Buffer memory = {}; ///< for all parts; may be `in`, which then changes, except in an all_to_all
};

/// A collective that a communicator lacks, made of sums and broadcasts of whole buffers. All are posted at once.
class Substitute {
public:
    /// If tells_parts(), all counts are provided.
    template <Communicator Comm>
    Substitute(Comm& comm, Request const& request, Provided const& provided = {})
        : Substitute{request, provided.memory, comm.rank(), comm.size(), device_of(comm)} {
        plan(request.sends, request.expects, provided.known, has_scaled_all_reduce<Comm>);
        device_.submit();
        for (Part const& part : parts_) {
            works_.push_back(post(comm, part));
        }
    }
    Substitute(Substitute&&) = default;
    Substitute& operator=(Substitute&&) = delete;
    /// Delivers, unless it unwinds: then the works abort.
    ~Substitute() {
        if (copies_.empty() || unwinding_.has_begun()) {
            return;
        }
        try {
            wait();
        } catch (...) { // NOLINT(bugprone-empty-catch): all ranks are told already
        }
    }

    void wait() {
        for (AnyWork& work : works_) {
            work.wait();
        }
        finish();
    }
    [[nodiscard]] bool test() {
        return is_done([](AnyWork& work) { return work.test(); });
    }
    [[nodiscard]] bool progress() {
        return is_done([](AnyWork& work) { return work.progress(); });
    }

private:
    using Table = std::vector<std::size_t>; ///< elements by rank, or by sender and then receiver

    /// A broadcast, or a sum if there is no root.
    struct Part {
        Buffer buffer;
        std::optional<int> root;
    };
    struct Copy {
        Buffer to;
        Buffer from;
    };

    Substitute(Request const& request, Buffer memory, int rank, int size, Device& device)
        : signature_{request.signature}, in_{request.in}, out_{request.out}, memory_{memory},
          rank_{static_cast<std::size_t>(rank)}, size_{static_cast<std::size_t>(size)},
          device_{device} {}

    void plan(PartSizes const& sends, PartSizes const& expects, Counts known, bool can_scale) {
        auto const known_of = [&](std::size_t parts) {
            return known.empty() ? Table(parts, signature_.count)
                                 : Table(known.begin(), known.end());
        };
        switch (signature_.collective) {
        case Collective::scaled_all_reduce: sum(scaled(in_, out_)); break;
        case Collective::reduce:
            sum(out_.data == nullptr ? copied(in_, memory_of(in_.count)) : out_);
            break;
        case Collective::reduce_scatter:
        case Collective::scaled_reduce_scatter: {
            bool const scales = is_scaled(signature_.collective) && !can_scale;
            Buffer const memory = memory_of(in_.count);
            sum(scales ? scaled(in_, memory) : copied(in_, memory));
            take(memory, table_of(sends));
            break;
        }
        case Collective::all_gather: gather(out_, table_of(expects)); break;
        case Collective::gather: {
            Table const counts = known_of(size_);
            gather(out_.data == nullptr ? memory_of(sum_of(counts)) : out_, counts);
            break;
        }
        case Collective::scatter: scatter(known_of(size_)); break;
        default: all_to_all(known_of(size_ * size_));
        }
    }
    void sum(Buffer buffer) { parts_.push_back({buffer, std::nullopt}); }
    void send(Buffer buffer, std::size_t from) {
        if (buffer.count != 0) {
            parts_.push_back({buffer, static_cast<int>(from)});
        }
    }
    void take(Buffer all, Counts counts) {
        copies_.push_back({out_, within(all, offset_of(counts, rank_), out_.count)});
    }
    void gather(Buffer all, Counts counts) {
        copied(in_, within(all, offset_of(counts, rank_), in_.count));
        std::size_t begin = 0;
        for (std::size_t rank = 0; rank < size_; ++rank) {
            send(within(all, begin, counts[rank]), rank);
            begin += counts[rank];
        }
    }
    void scatter(Counts counts) {
        auto const root = static_cast<std::size_t>(signature_.root);
        Buffer const all = rank_ == root ? readable(in_) : memory_of(sum_of(counts));
        send(all, root);
        take(all, counts);
    }
    /// Each rank broadcasts all that it sends.
    void all_to_all(Counts sent) {
        Buffer const others = memory_of(sum_of(sent) - in_.count);
        std::size_t begin = 0;
        std::size_t written = 0;
        for (std::size_t rank = 0; rank < size_; ++rank) {
            Counts const counts = sent.subspan(rank * size_, size_);
            bool const is_own = rank == rank_;
            Buffer const all = is_own ? readable(in_) : within(others, begin, sum_of(counts));
            begin += is_own ? 0 : all.count;
            send(all, rank);
            std::size_t const count = counts[rank_];
            copies_.push_back(
                {within(out_, written, count), within(all, offset_of(counts, rank_), count)}
            );
            written += count;
        }
    }

    template <Communicator Comm>
    [[nodiscard]] AnyWork post(Comm& comm, Part const& part) const {
        if (part.root) {
            return AnyWork{comm.broadcast(part.buffer, *part.root)};
        }
        if constexpr (has_scaled_all_reduce<Comm>) {
            if (is_scaled(signature_.collective)) {
                return AnyWork{comm.all_reduce(part.buffer, signature_.op, signature_.factor)};
            }
        }
        return AnyWork{comm.all_reduce(part.buffer, signature_.op)};
    }
    template <class Test>
    [[nodiscard]] bool is_done(Test const& test) {
        for (; tested_ < works_.size(); ++tested_) {
            if (!test(works_[tested_])) {
                return false;
            }
        }
        finish();
        return true;
    }
    void finish() {
        if (!copies_.empty()) {
            for (Copy const& copy : std::exchange(copies_, {})) {
                copied(copy.from, copy.to);
            }
            device_.submit(); // before the memory is used again
        }
    }

    // -- memory -----------------------------------------------------------------------------------

    [[nodiscard]] Buffer memory_of(std::size_t count) {
        if (memory_.count >= count) {
            return {memory_.data, count, signature_.dtype};
        }
        scratch_ = device_.allocate(count * size_of(signature_.dtype), Arena::default_alignment);
        return {scratch_.data(), count, signature_.dtype};
    }
    Buffer copied(ConstBuffer from, Buffer to) const {
        copy_run(device_, from.data, to.data, from.count, signature_.dtype);
        return to;
    }
    [[nodiscard]] Buffer scaled(ConstBuffer from, Buffer to) const {
        auto const view = [&](Buffer buffer) {
            return AnyView{buffer.data, buffer.dtype, {buffer.count}, {1}, device_.id()};
        };
        device_.scale_copy(view(readable(from)), signature_.factor, view(to));
        return to;
    }
    [[nodiscard]] Table table_of(PartSizes const& parts) const {
        Table table(size_);
        parts.copy_to(std::span{table});
        return table;
    }

    Descriptor signature_;
    ConstBuffer in_;
    Buffer out_;
    Buffer memory_; ///< of the caller
    std::size_t rank_;
    std::size_t size_;
    Device& device_;
    Arena scratch_;
    std::vector<Part> parts_;
    std::vector<Copy> copies_;   ///< when all works are done
    std::vector<AnyWork> works_; // after the memory: they end before that does
    std::size_t tested_ = 0;     ///< so many are done
    Unwinding unwinding_;
};

// Collectives of any communicator: its own, or else substitutes. All ranks know all counts, and those that `whole` is
// not for give it as memory.

template <Communicator Comm>
[[nodiscard]] auto any_all_gather(Comm& comm, ConstBuffer part, Buffer whole, Counts counts) {
    if constexpr (AllGathers<Comm>) {
        return comm.all_gather(part, whole, counts);
    } else {
        RequestsOf const requests{comm.rank(), comm.size()};
        return Substitute{comm, requests.all_gather(part, whole, counts)};
    }
}
template <Communicator Comm>
[[nodiscard]] auto any_gather(Comm& comm, ConstBuffer part, Buffer whole, int root, Counts counts) {
    if constexpr (Gathers<Comm>) {
        return comm.gather(part, whole, root, counts);
    } else {
        return any_all_gather(comm, part, whole, counts);
    }
}
template <Communicator Comm>
[[nodiscard]] auto any_scatter(Comm& comm, Buffer whole, Buffer part, int root, Counts counts) {
    if constexpr (Scatters<Comm>) {
        return comm.scatter(whole, part, root, counts);
    } else {
        RequestsOf const requests{comm.rank(), comm.size()};
        return Substitute{comm, requests.scatter(whole, part, root, counts), {counts, whole}};
    }
}
/// Sums, with a factor only on communicators whose sums scale. `whole` may change.
template <Communicator Comm>
[[nodiscard]] auto any_reduce_scatter(
    Comm& comm, Buffer whole, Buffer part, std::optional<double> factor, Counts counts
) {
    auto const start = [&](auto&& by, auto... factors) {
        return by.reduce_scatter(whole, part, ReduceOp::sum, factors..., counts);
    };
    if constexpr (ScalesScatteredSums<Comm>) {
        return factor ? start(comm, *factor) : start(comm);
    } else if constexpr (ReduceScatters<Comm>) {
        return start(comm);
    } else {
        RequestsOf const requests{comm.rank(), comm.size()};
        return Substitute{
            comm, factor ? start(requests, *factor) : start(requests), {counts, whole}
        };
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/participant/sharded/detail/value_store.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Stands for an engine's parameter of whose value this rank keeps a part. The step sees the part,
/// and everything else is the engine's.
struct PartOfParameter {
    AnyParameter whole;
    /// Has the extents of the whole value and memory for the elements that this rank owns. Empty if
    /// the parameter is not sharded.
    AnyView value = {};
};

}}} // namespace joinable::v0::detail

template <>
struct joinable::parameter_traits<joinable::detail::PartOfParameter> {
    using Part = joinable::detail::PartOfParameter;
    static std::optional<AnyView> value(Part& p) { return p.value ? p.value : p.whole.value(); }
    static std::optional<AnyView> grad(Part& p) {
        AnyView const gradient = p.whole.grad();
        return gradient ? std::optional{gradient} : std::nullopt;
    }
    static bool requires_grad(Part const& p) { return p.whole.requires_grad(); }
    static std::string_view name(Part const& p) { return p.whole.name(); }
    static void release_grad(Part& p) { p.whole.release_grad(); }
    static void set_value(Part& p, AnyView const& view) { p.whole.set_value(view); }
    static void release_value(Part& p) { p.whole.release_value(); }
};

namespace joinable { inline namespace v0 { namespace detail {

/// Checks that the elements of parameter `i` lie in the order in which `given` has them, which the state has, too.
/// @throws ContractViolation
void check_layout(ParameterList const& parameters, std::size_t i, AnyView const& given);

/// Where values lie whose memory the engine does not own.
enum class Residence : std::uint8_t {
    bucket,   ///< all of them: in the buckets in which they travel, so that no step copies them
    own_part, ///< those that this rank owns; stand-ins replace the engine's parameters
};

/// Memory for the values of a group of parameters. Local.
class ValueStore {
public:
    /// Allocates memory. Takes the current extents and order of the values.
    /// @throws ContractViolation  a value cannot be set.
    ValueStore(
        ParameterList const& parameters,
        std::span<OptimizerShard const> shards,
        Residence residence,
        BufferMemory const& memory
    );
    ValueStore(ValueStore const&) = delete;
    ValueStore& operator=(ValueStore const&) = delete;
    /// Releases values in buckets, whose memory ends here.
    ~ValueStore();

    /// Moves the engine's values into the buckets, or copies those that this rank owns; on a
    /// device, complete after its finish().
    /// @throws ContractViolation  set_value copies; or a value is missing, or has its elements in another order: then
    ///         nothing was copied.
    void take(std::span<OptimizerShard const> shards, Scratch& scratch);
    /// After take() was refused on any rank: leaves the values that were set where they are, in
    /// memory that lives as long as this process. The engine may have freed its own.
    void leave() noexcept;
    /// After take() succeeded on all ranks: frees values of which this rank keeps only a part.
    void release() const;
    /// @throws ContractViolation  the engine has moved a value out of its bucket.
    void check() const;

    /// Whether a value of the engine lies here. Forgets those that have left, whose parameters may
    /// end then.
    [[nodiscard]] bool holds_any() {
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            if (is_moved(i)) {
                parts_[i].value = {};
            }
        }
        return std::any_of(parts_.begin(), parts_.end(), [](PartOfParameter const& part) {
            return static_cast<bool>(part.value);
        });
    }

    [[nodiscard]] bool is_sharded() const noexcept { return residence_ == Residence::own_part; }
    /// The engine's parameters.
    [[nodiscard]] ParameterList const& given() const noexcept { return whole_; }
    /// The bucket of a shard, or this rank's part of it.
    [[nodiscard]] std::byte* at(std::size_t shard) const noexcept {
        return memory_.data() + begins_[shard];
    }
    [[nodiscard]] std::size_t bytes() const noexcept { return memory_.bytes(); }

    /// The parameters. Stand-ins, which live as long as `self`, replace the sharded ones.
    [[nodiscard]] static ParameterList list(std::shared_ptr<ValueStore> const& self);

private:
    void move_to_buckets();
    /// Whether the value of parameter `i` lies in a bucket and the engine has moved it.
    [[nodiscard]] bool is_moved(std::size_t i) const {
        AnyView const& place = parts_[i].value;
        if (is_sharded() || !place) {
            return false;
        }
        AnyView const value = whole_[i].value();
        return !value || value.data() != place.data();
    }

    ParameterList whole_; ///< the engine's
    Residence residence_;
    Device& device_;
    std::vector<PartOfParameter> parts_; ///< no view: of what no rank steps, or has no elements
    Arena memory_;
    std::vector<std::size_t> begins_; ///< of each shard's, in bytes: at cache lines
    bool is_taken_ = false;           ///< the engine's values were set
};

/// Memory for packed buckets and gathered values. The reduction of gradients and the exchange of
/// values take turns with it. Local.
class BucketArenas {
public:
    static constexpr std::size_t none = std::size_t(-1);

    explicit BucketArenas(BufferMemory const& memory) : memory_{memory} {}

    /// Makes the first `count` arenas at least this large. Taking no more than these allocates nothing.
    void reserve(std::size_t count, std::size_t bytes) {
        free_.reserve(count);
        for (std::size_t k = 0; k < count; ++k) {
            static_cast<void>(data(k, bytes));
        }
    }
    /// Arena `k`, of at least `bytes`. It loses its contents when it grows.
    [[nodiscard]] std::byte* data(std::size_t k, std::size_t bytes) {
        if (k >= arenas_.size()) {
            arenas_.resize(k + 1);
        }
        if (bytes > arenas_[k].bytes()) {
            arenas_[k] = memory_.allocate(bytes);
        }
        return arenas_[k].data();
    }
    /// Takes the first arena that is free, for at least `bytes`.
    [[nodiscard]] std::size_t take(std::size_t bytes) {
        if (free_.empty()) {
            free_.reserve(in_use_ + 1); // give_back() must not throw
            free_.push_back(in_use_++);
        }
        auto const first = std::min_element(free_.begin(), free_.end()); // few have memory
        static_cast<void>(data(*first, bytes)); // if this throws, it stays free
        std::size_t const k = *first;
        free_.erase(first);
        return k;
    }
    /// `arena` becomes `none`.
    void give_back(std::size_t& arena) noexcept {
        if (arena != none) {
            free_.push_back(std::exchange(arena, none));
        }
    }
    void give_back_all() noexcept {
        free_.clear();
        in_use_ = 0;
    }
    /// Whether take() needs an arena beyond the first `count`.
    [[nodiscard]] bool are_taken(std::size_t count) const noexcept {
        return free_.empty() && in_use_ >= count;
    }
    [[nodiscard]] bool are_all_free() const noexcept { return free_.size() == in_use_; }
    /// Frees all arenas but the first `count`.
    void keep(std::size_t count) noexcept {
        for (std::size_t k = count; k < arenas_.size(); ++k) {
            arenas_[k] = Arena{};
        }
    }
    [[nodiscard]] std::size_t bytes() const noexcept {
        std::size_t bytes = 0;
        for (Arena const& arena : arenas_) {
            bytes += arena.bytes();
        }
        return bytes;
    }

private:
    BufferMemory memory_;
    std::vector<Arena> arenas_;
    std::size_t in_use_ = 0; ///< including free ones
    std::vector<std::size_t> free_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/sharded/detail/impl/value_store.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <atomic>
#include <new>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void
check_layout(ParameterList const& parameters, std::size_t i, AnyView const& given) {
    AnyView const value = parameters[i].value();
    if (is_like(value, given) && value.strides() == given.strides()) {
        return; // as nearly always: as dense as it was, without a look at its dimensions
    }
    AnyView const now = OptimizerShard::place_of(value, nullptr);
    if (!is_like(now, given) || !has_same_steps(now, given)) {
        throw ContractViolation{concat(
            describe_parameter(parameters, i),
            " is ",
            to_text(now),
            " with strides ",
            to_text(now.strides()),
            " now, but was ",
            to_text(given),
            " with strides ",
            to_text(given.strides()),
            " when it was given, and the optimizer keeps its elements in that order; give the value "
            "that layout on every rank, or make a new optimizer"
        )};
    }
}

JOINABLE_DEFINITION ValueStore::ValueStore(
    ParameterList const& parameters,
    std::span<OptimizerShard const> shards,
    Residence residence,
    BufferMemory const& memory
)
    : whole_{parameters}, residence_{residence}, device_{memory.device()} {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].requires_grad() && !parameters[i].can_set_value()) {
            throw ContractViolation{concat(
                "the value of ",
                describe_parameter(parameters, i),
                is_sharded() ? " cannot be sharded" : " cannot lie in a bucket",
                ": parameter_traits of its type needs 'static void set_value(P&, AnyView)' and 'static void "
                "release_value(P&)'; or ",
                is_sharded() ? "use Sharding::gradients" : "turn parameters_as_bucket_view off"
            )};
        }
        parts_.push_back({parameters[i]});
    }
    std::size_t bytes = 0;
    for (OptimizerShard const& shard : shards) {
        begins_.push_back(bytes);
        std::size_t const count = is_sharded() ? shard.part() : shard.bucket().count();
        bytes += (count * shard.element() + 63) / 64 * 64;
    }
    if (bytes != 0) { // one arena for all, because each costs up to two more pages
        memory_ = memory.allocate(bytes);
    }
    for (std::size_t k = 0; k < shards.size(); ++k) {
        std::size_t const element = shards[k].element();
        for (ShardPiece const& piece : shards[k].bucket().pieces) {
            if (piece.begin == 0 && (is_sharded() || piece.size != 0)) {
                std::byte* const place = is_sharded() ? nullptr : at(k) + piece.offset * element;
                AnyView const value = parameters[piece.parameter].value();
                parts_[piece.parameter].value = OptimizerShard::place_of(value, place);
            }
        }
        for (ShardPiece const& piece : shards[k].own()) {
            if (is_sharded() && piece.size != 0) {
                std::byte* const own = at(k) + (piece.offset - shards[k].part_offset()) * element;
                AnyView& value = parts_[piece.parameter].value;
                value = OptimizerShard::place_of(value, own - piece.begin * element);
            }
        }
    }
}

JOINABLE_DEFINITION ValueStore::~ValueStore() {
    for (std::size_t i = 0; is_taken_ && i < parts_.size(); ++i) {
        if (parts_[i].value && !is_moved(i)) {
            parts_[i].whole.release_value();
        }
    }
}

JOINABLE_DEFINITION void
ValueStore::take(std::span<OptimizerShard const> shards, Scratch& scratch) {
    if (!is_sharded()) {
        return move_to_buckets();
    }
    for (std::size_t i = 0; i < parts_.size(); ++i) {
        AnyView const value = whole_[i].value();
        if (parts_[i].value && !(is_like(value, parts_[i].value) && has_memory(value))) {
            throw ContractViolation{concat(
                "the value of ",
                describe_parameter(whole_, i),
                value && has_memory(value)
                    ? " has another type, extents or device than when it was given; copy values into it, or make the "
                      "model anew"
                    : " is sharded and not there; call reload() on every rank while what use_all() returned lives"
            )};
        }
        if (parts_[i].value) {
            check_layout(whole_, i, parts_[i].value);
        }
    }
    for (std::size_t k = 0; k < shards.size(); ++k) {
        shards[k].take_own(whole_, at(k), scratch);
    }
}

JOINABLE_DEFINITION void ValueStore::move_to_buckets() {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
        if (is_moved(i)) {
            device_.copy(whole_[i].value(), parts_[i].value);
        }
    }
    device_.finish(); // before the engine's memory ends
    is_taken_ = true;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
        if (is_moved(i)) {
            whole_[i].set_value(parts_[i].value);
        }
        if (is_moved(i)) {
            throw ContractViolation{concat(
                "set_value copies the value of ",
                describe_parameter(whole_, i),
                ", but parameters_as_bucket_view needs a view; turn it off"
            )};
        }
    }
}

JOINABLE_DEFINITION void ValueStore::leave() noexcept {
    struct Left {
        Arena memory;
        Left* next;
    };
    static std::atomic<Left*> first{nullptr}; // so that no leak checker misses them
    if (!is_taken_) {
        return;
    }
    auto* const left = new (std::nothrow) Left{std::move(memory_), first.load()};
    if (left == nullptr) {
        return; // the destructor releases the values
    }
    while (!first.compare_exchange_weak(left->next, left)) {
    }
    is_taken_ = false;
}

JOINABLE_DEFINITION void ValueStore::release() const {
    for (PartOfParameter const& parameter : parts_) {
        if (is_sharded() && parameter.value) {
            parameter.whole.release_value();
        }
    }
}

JOINABLE_DEFINITION void ValueStore::check() const {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
        if (is_moved(i)) {
            throw ContractViolation{concat(
                "the value of ",
                describe_parameter(whole_, i),
                " is not in the bucket any more, where parameters_as_bucket_view put it; write new values "
                "into the memory of the old ones"
            )};
        }
    }
}

JOINABLE_DEFINITION ParameterList ValueStore::list(std::shared_ptr<ValueStore> const& self) {
    if (!self->is_sharded()) {
        return self->whole_;
    }
    ParameterList list;
    for (PartOfParameter& parameter : self->parts_) {
        list.push_back(AnyParameter{parameter, self});
    }
    return list;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/participant/sharded/detail/group.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// How the user wants a group cut; empty lists leave it to the rules.
struct ShardChoices {
    std::vector<int> owners = {};        ///< of each parameter
    std::vector<std::size_t> units = {}; ///< parameters in each, if values are sharded
};

/// Parameters with one rule, cut into buckets.
struct ShardGroup {
    ParameterList parameters = {};
    std::size_t first = 0; ///< index of its first parameter among those of all groups
    std::vector<OptimizerShard> shards = {};
    std::vector<std::uint64_t> steps = {}; ///< of each parameter of which this rank owns elements
    SteppedGradients gradients = {};       ///< unless they are reduced to owners
    std::vector<std::size_t> frozen = {};  ///< parameters that need no gradient
    /// The values when they were given, as dense as in a bucket: the state has elements in their order.
    std::vector<AnyView> layouts = {};
    std::vector<std::size_t> units = {
    }; ///< where each begins among the shards, if values are sharded
    /// The values, if they lie in buckets or are sharded; in the latter case `parameters` are
    /// stand-ins.
    std::shared_ptr<ValueStore> values = {};

    [[nodiscard]] bool shards_values() const noexcept { return values && values->is_sharded(); }

    /// The engine's parameters.
    [[nodiscard]] ParameterList const& given() const noexcept {
        return values ? values->given() : parameters;
    }
};

[[nodiscard]] inline std::size_t parameter_count(std::span<ShardGroup const> groups) noexcept {
    return groups.empty() ? 0 : groups.back().first + groups.back().parameters.size();
}

/// The names of a shard's arrays, masters last.
std::vector<std::string>
array_names(std::span<std::string_view const> names, StateArrays const& state);

/// Memory for messages that carry state between ranks, allocated before the first collective: a
/// rank that ran out of memory later would leave the others waiting.
class StateMessages {
public:
    StateMessages(std::span<ShardGroup const> groups, Device& device);

    /// All parts of one array, in host memory.
    [[nodiscard]] std::byte* array() const noexcept { return array_.data(); }
    /// The same in memory that communicators move.
    [[nodiscard]] std::byte* sent() const noexcept {
        return on_device_.data() == nullptr ? array() : on_device_.data();
    }
    /// Copies bytes from sent() to array(). Ends at the deadline.
    template <class Comm>
    void download(HostCollectives<Comm>& host, std::size_t bytes) {
        if (sent() != array()) {
            host.download(sent(), array(), bytes);
        }
    }
    /// Copies bytes from array() to sent(). array() must not change before a later collective is
    /// over.
    void upload(std::size_t bytes) {
        if (sent() != array()) {
            device_.upload(array(), sent(), bytes);
        }
    }

    std::vector<std::uint64_t> steps; ///< of the largest group

private:
    Device& device_;
    Arena array_;     ///< the longest array of all ranks
    Arena on_device_; ///< empty if array_ is sent
};

/// Waits until a collective is over, also on a device, whose streams have no deadline.
template <class W>
void complete(W work) {
    if constexpr (requires { work.synchronize(); }) {
        work.synchronize();
    }
    work.wait();
}

/// A parameter in a bucket that holds all parts of one array.
AnyView array_view(
    OptimizerShard const& shard, ShardPiece const& piece, AnyView const& value, std::byte* whole
);
AnyView view_of_tensor(StateTensor const& tensor);

/// Gathers one array of a bucket from all ranks into `messages` of the root. Collective.
template <Communicator Comm>
void gather_array(
    Comm& comm,
    HostCollectives<Comm>& host,
    OptimizerShard const& shard,
    std::size_t k,
    StateMessages& messages,
    int root
) {
    StateArrays const& state = shard.state();
    DType const dtype = state.computed_in();
    Buffer const all{messages.sent(), shard.bucket().count(), dtype};
    if (shard.keeps_all()) {
        if (comm.rank() == root) {
            shard.copy_array(state.array(k), messages.sent(), all.count);
            shard.device().submit();
        }
    } else {
        ConstBuffer const part{state.array(k), shard.part(), dtype};
        complete(any_gather(comm, part, all, root, shard.bucket().counts));
    }
    if (comm.rank() == root) {
        messages.download(host, all.bytes());
    }
}
/// Sends one array of a bucket from `messages` of the root back to the ranks. Collective.
template <Communicator Comm>
void scatter_array(
    Comm& comm, OptimizerShard const& shard, std::size_t k, StateMessages& messages, int root
) {
    StateArrays const& state = shard.state();
    DType const dtype = state.computed_in();
    Buffer const all{messages.sent(), shard.bucket().count(), dtype};
    if (comm.rank() == root) {
        messages.upload(all.bytes());
        shard.device().submit();
    }
    if (shard.keeps_all()) {
        complete(comm.broadcast(all, root));
        shard.copy_array(messages.sent(), state.array(k), all.count);
        shard.device().submit();
    } else {
        Buffer const part{state.array(k), shard.part(), dtype};
        complete(any_scatter(comm, all, part, root, shard.bucket().counts));
    }
}

/// Calls f(piece, tensors of its parameter) for each piece in a bucket that begins a parameter.
template <class Parameters, class F>
void for_each_tensors(
    ShardGroup const& group, OptimizerShard const& shard, Parameters&& parameters, F const& f
) {
    for (ShardPiece const& piece : shard.bucket().pieces) {
        if (piece.begin == 0) {
            f(piece, parameters[group.first + piece.parameter].tensors);
        }
    }
}

/// Allocates tensors for the state of a group. Local.
template <class Parameter>
void make_tensors(
    ShardGroup const& group,
    std::span<std::string_view const> names,
    std::span<Parameter> parameters
) {
    for (OptimizerShard const& shard : group.shards) {
        std::vector<std::string> const all = array_names(names, shard.state());
        for_each_tensors(group, shard, parameters, [&](ShardPiece const& piece, auto& tensors) {
            AnyView const value = group.parameters[piece.parameter].value();
            DType const dtype = shard.state().computed_in();
            for (std::string const& name : all) {
                std::vector<std::byte> elements(value.numel() * size_of(dtype));
                tensors.push_back({name, dtype, value.extents(), std::move(elements)});
            }
        });
    }
}

/// Gathers the state of a group into `parameters` of the root, whose tensors make_tensors() has
/// made. Collective.
template <Communicator Comm, class Parameter>
void gather_state(
    Comm& comm,
    HostCollectives<Comm>& host,
    int root,
    ShardGroup const& group,
    StateMessages& messages,
    std::span<Parameter> parameters
) {
    bool const is_root = comm.rank() == root;
    std::uint64_t* const steps = messages.steps.data();
    std::size_t const count = group.steps.size();
    std::copy(group.steps.begin(), group.steps.end(), steps);
    host.all_reduce({steps, count, DType::u64}, ReduceOp::max).wait();
    for (std::size_t i = 0; is_root && i < count; ++i) {
        parameters[group.first + i].steps = steps[i];
    }
    for (OptimizerShard const& shard : group.shards) {
        for (std::size_t k = 0; k < shard.state().arrays(); ++k) {
            gather_array(comm, host, shard, k, messages, root);
            if (is_root) {
                for_each_tensors(group, shard, parameters, [&](auto& piece, auto& tensors) {
                    AnyView const value = group.parameters[piece.parameter].value();
                    AnyView const array = array_view(shard, piece, value, messages.array());
                    copy(array, view_of_tensor(tensors[k]));
                });
            }
        }
    }
}

/// Sends the root's state of a group to the ranks that own it. The shards have been made for the
/// names. Other state does not change. Collective.
template <Communicator Comm, class Parameter>
void scatter_state(
    Comm& comm,
    HostCollectives<Comm>& host,
    int root,
    ShardGroup& group,
    StateMessages& messages,
    std::span<Parameter const> parameters
) {
    bool const is_root = comm.rank() == root;
    for (std::size_t i = 0; is_root && i < group.steps.size(); ++i) {
        group.steps[i] = parameters[group.first + i].steps;
    }
    host.broadcast({group.steps.data(), group.steps.size(), DType::u64}, root).wait();
    for (OptimizerShard const& shard : group.shards) {
        for (std::size_t k = 0; k < shard.state().arrays(); ++k) {
            if (is_root) {
                for_each_tensors(group, shard, parameters, [&](auto& piece, auto& tensors) {
                    AnyView const value = group.parameters[piece.parameter].value();
                    AnyView const array = array_view(shard, piece, value, messages.array());
                    copy(view_of_tensor(tensors[k]), array);
                });
            }
            scatter_array(comm, shard, k, messages, root);
        }
    }
}

/// Throws ContractViolation unless the state fits these parameters.
template <class Parameter>
void check_state(
    ShardGroup const& group,
    std::span<std::string_view const> names,
    std::span<Parameter const> parameters
) {
    for (OptimizerShard const& shard : group.shards) {
        for (ShardPiece const& piece : shard.bucket().pieces) {
            auto const& tensors = parameters[group.first + piece.parameter].tensors;
            std::vector<std::string> const all = array_names(names, shard.state());
            auto const text = describe_parameter(group.parameters, piece.parameter);
            if (tensors.size() != all.size()) {
                throw ContractViolation{concat(
                    "the state of ",
                    text,
                    " has ",
                    tensors.size(),
                    " tensors, but its rule keeps ",
                    all.size()
                )};
            }
            for (std::size_t k = 0; k < all.size(); ++k) {
                AnyView const value = group.parameters[piece.parameter].value();
                StateTensor const& tensor = tensors[k];
                DType const dtype = shard.state().computed_in();
                if (tensor.name != all[k] || tensor.dtype != dtype ||
                    tensor.extents != value.extents() ||
                    tensor.elements.size() != value.numel() * size_of(dtype)) {
                    throw ContractViolation{concat(
                        "the state of ",
                        text,
                        " has ",
                        tensor.name,
                        " ",
                        name_of(tensor.dtype),
                        " ",
                        to_text(tensor.extents),
                        " of ",
                        tensor.elements.size(),
                        " bytes, where the model needs ",
                        all[k],
                        " ",
                        name_of(dtype),
                        " ",
                        to_text(value.extents())
                    )};
                }
            }
        }
    }
}

// The memory that the shards of a rank, or of all ranks, take. Local.

/// A line for each rank. @see ShardedOptimizer::table
[[nodiscard]] std::string table_of_shards(std::span<ShardGroup const> groups, std::size_t ranks);
/// Bytes of averaged gradients that this rank keeps.
[[nodiscard]] std::size_t gradient_bytes_of(std::span<ShardGroup const> groups) noexcept;
/// Bytes of values that this rank keeps, or that lie in buckets.
[[nodiscard]] std::size_t value_bytes_of(std::span<ShardGroup const> groups) noexcept;
/// Bytes of optimizer state on this rank.
[[nodiscard]] std::size_t state_bytes_of(std::span<ShardGroup const> groups) noexcept;

}}} // namespace joinable::v0::detail

// ---- joinable/participant/sharded/detail/impl/group.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::vector<std::string>
array_names(std::span<std::string_view const> names, StateArrays const& state) {
    std::vector<std::string> all{names.begin(), names.end()};
    if (state.has_masters()) {
        all.emplace_back("master");
    }
    return all;
}

JOINABLE_DEFINITION StateMessages::StateMessages(std::span<ShardGroup const> groups, Device& device)
    : device_{device} {
    std::size_t bytes = 0;
    std::size_t parameters = 0;
    for (ShardGroup const& group : groups) {
        parameters = (std::max)(parameters, group.steps.size());
        for (OptimizerShard const& shard : group.shards) {
            std::size_t const size = size_of(shard.state().computed_in());
            bytes = (std::max)(bytes, shard.bucket().count() * size);
        }
    }
    array_ = device.allocate_staging(bytes);
    if (!is_on_host(device)) {
        on_device_ = device.allocate(bytes, Arena::default_alignment);
    }
    steps.resize(parameters);
}

JOINABLE_DEFINITION AnyView array_view(
    OptimizerShard const& shard, ShardPiece const& piece, AnyView const& value, std::byte* whole
) {
    DType const dtype = shard.state().computed_in();
    Shape const& extents = value.extents();
    return {
        whole + piece.offset * size_of(dtype),
        dtype,
        extents,
        dense_strides(extents, value.strides())
    };
}

JOINABLE_DEFINITION AnyView view_of_tensor(StateTensor const& tensor) {
    auto* const elements = const_cast<std::byte*>(tensor.elements.data());
    return {elements, tensor.dtype, tensor.extents, row_major_strides(tensor.extents)};
}

/// Adds size(shard) over all shards.
template <class Size>
[[nodiscard]] std::size_t sum_over(std::span<ShardGroup const> groups, Size const& size) {
    std::size_t sum = 0;
    for (ShardGroup const& group : groups) {
        for (OptimizerShard const& shard : group.shards) {
            sum += size(shard);
        }
    }
    return sum;
}

[[nodiscard]] inline std::string in_column(std::size_t number, std::size_t width) {
    std::string const digits = std::to_string(number);
    return std::string(width - (std::min)(width, digits.size()), ' ') + digits;
}

JOINABLE_DEFINITION std::string
table_of_shards(std::span<ShardGroup const> groups, std::size_t ranks) {
    std::string text = "rank    elements  bytes of state\n";
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        std::size_t const elements =
            sum_over(groups, [&](OptimizerShard const& shard) { return shard.kept_count(rank); });
        std::size_t const bytes = sum_over(groups, [&](OptimizerShard const& shard) {
            return shard.kept_count(rank) * shard.state().element_bytes();
        });
        text += in_column(rank, 4) + in_column(elements, 12) + in_column(bytes, 16) + "\n";
    }
    return text;
}

JOINABLE_DEFINITION std::size_t gradient_bytes_of(std::span<ShardGroup const> groups) noexcept {
    return sum_over(groups, [](OptimizerShard const& shard) {
        return shard.reduces() ? shard.part() * shard.element() : 0;
    });
}

JOINABLE_DEFINITION std::size_t value_bytes_of(std::span<ShardGroup const> groups) noexcept {
    std::size_t bytes = 0;
    for (ShardGroup const& group : groups) {
        bytes += group.values ? group.values->bytes() : 0;
    }
    return bytes;
}

JOINABLE_DEFINITION std::size_t state_bytes_of(std::span<ShardGroup const> groups) noexcept {
    return sum_over(groups, [](OptimizerShard const& shard) { return shard.state().bytes(); });
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/participant/sharded/detail/gradients_for_owners.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Gradients whose averages go to the owners of their parameters: a bucket for each shard. A bucket has memory from
/// its first gradient until the owners have its sum. A gradient is released when it is copied; on a device those of a
/// bucket are, when the last one is.
class GradientsForOwners final : public Gradients {
public:
    /// `parameters` are the parameters of all groups: of the list `groups` that the participant keeps, and of
    /// `next`, which it is about to add. Only this object uses `arenas` while gradients are reduced.
    GradientsForOwners(
        ParameterList parameters,
        std::vector<ShardGroup> const& groups,
        ShardGroup const& next,
        int rank,
        Device& device,
        BucketArenas& arenas
    )
        : Gradients{std::move(parameters), {}, rank, device}, groups_{groups}, arenas_{arenas},
          piece_of_(bucket_of_.size()), is_packed_(bucket_of_.size()) {
        struct Planned {
            Slot slot;
            Bucket bucket;
        };
        std::vector<Planned> planned;
        std::size_t largest = 0;
        for (std::size_t g = 0; g <= groups.size(); ++g) {
            ShardGroup const& group = g == groups.size() ? next : groups[g];
            for (std::size_t s = 0; s < group.shards.size(); ++s) {
                ShardBucket const& layout = group.shards[s].bucket();
                largest = (std::max)(largest, group.shards[s].bucket_bytes());
                Planned one{
                    {g, s, BucketArenas::none}, {{nullptr, layout.count(), layout.dtype}, {}, {}}
                };
                for (std::size_t p = 0; p < layout.pieces.size(); ++p) {
                    if (layout.pieces[p].begin == 0) {
                        std::size_t const i = group.first + layout.pieces[p].parameter;
                        piece_of_[i] = p;
                        one.bucket.parameters.push_back(i);
                        one.slot.first = (std::min)(one.slot.first, i);
                    }
                }
                planned.push_back(std::move(one));
            }
        }
        // The order in which buckets fill when gradients become ready from the last one to the first.
        std::sort(planned.begin(), planned.end(), [](Planned const& a, Planned const& b) {
            return a.slot.first > b.slot.first;
        });
        for (Planned& one : planned) {
            for (std::size_t const i : one.bucket.parameters) {
                bucket_of_[i] = buckets_.size();
            }
            slots_.push_back(one.slot);
            buckets_.push_back(std::move(one.bucket));
        }
        for (std::size_t i = bucket_of_.size(); i-- > 0;) {
            if (is_trained(i)) {
                trained_.push_back(i);
            }
        }
        arenas_.reserve((std::min)(buckets_.size(), overlapping), largest);
    }

    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept override { return buckets_; }
    [[nodiscard]] std::size_t group_of(std::size_t bucket) const noexcept {
        return slots_[bucket].group;
    }
    [[nodiscard]] OptimizerShard const& shard_of(std::size_t bucket) const {
        return groups_[slots_[bucket].group].shards[slots_[bucket].shard];
    }
    /// The parameter of a bucket whose gradient is ready last.
    [[nodiscard]] std::size_t first_in(std::size_t bucket) const noexcept {
        return slots_[bucket].first;
    }

    [[nodiscard]] bool receive_averages() const noexcept override { return false; }

    void begin(bool has_joined) override {
        has_joined_ = has_joined;
        is_packed_.assign(is_packed_.size(), false);
        arenas_.give_back_all();
        for (Slot& slot : slots_) {
            slot.arena = BucketArenas::none;
        }
    }

    void require_marked(std::size_t i) const override {
        if (!has(i) && !parameters_[i].can_set_grad()) {
            throw ContractViolation{
                describe(i) +
                " was marked ready, but has no gradient; give it one before, or give the parameter to "
                "backward() as unused"
            };
        }
    }

    void pack(std::size_t i, double factor) override {
        pack_into_bucket(i, factor);
        if (is_on_host(device())) {
            parameters_[i].release_grad();
        } else {
            is_packed_[i] = true;
        }
    }

    void zero(std::size_t i) override { pack_into_bucket(i, 0.0); }

    void submit(std::vector<std::size_t> const& parameters) override {
        if (is_on_host(device())) {
            return;
        }
        device().finish();
        for (std::size_t const i : parameters) {
            if (is_packed_[i]) {
                is_packed_[i] = false;
                parameters_[i].release_grad();
            }
        }
    }

    void complete() override {
        bool const is_first = has_joined_ && !std::exchange(is_clear_, true);
        if (is_first) { // what was sent or dropped does not count again
            for (std::size_t const i : trained_) {
                clear_gradient(parameters_[i], device());
            }
        }
    }

    void end_guard() override { is_clear_ = false; }

    [[nodiscard]] bool waits_for_memory(std::size_t bucket) const override {
        return slots_[bucket].arena == BucketArenas::none && arenas_.are_taken(overlapping);
    }
    void give_back(std::size_t bucket) override { arenas_.give_back(slots_[bucket].arena); }

private:
    /// The number of buckets with memory, unless more fill at the same time: one travels while the next one fills.
    static constexpr std::size_t overlapping = 2;

    struct Slot {
        std::size_t group;
        std::size_t shard;
        std::size_t first; ///< the lowest parameter
        std::size_t arena = BucketArenas::none;
    };

    /// Writes a gradient into its bucket, which gets memory.
    void pack_into_bucket(std::size_t i, double factor) {
        std::size_t const bucket = bucket_of_[i];
        Slot& slot = slots_[bucket];
        if (slot.arena == BucketArenas::none) {
            Buffer& buffer = buckets_[bucket].buffer;
            slot.arena =
                arenas_.take(buffer.bytes()); // if this throws, the next gradient tries again
            buffer.data = arenas_.data(slot.arena, buffer.bytes());
        }
        auto* const memory = static_cast<std::byte*>(buckets_[bucket].buffer.data);
        ParameterList const& parameters = groups_[slot.group].parameters;
        shard_of(bucket).pack_gradient(parameters, piece_of_[i], factor, memory);
    }

    std::vector<ShardGroup> const& groups_;
    BucketArenas& arenas_;
    std::vector<Slot> slots_;           ///< per bucket
    std::vector<Bucket> buckets_;       ///< without views
    std::vector<std::size_t> piece_of_; ///< of each parameter: the piece at which it begins
    std::vector<bool> is_packed_;       ///< of each parameter: its gradient is to be released
    bool has_joined_ = false;           ///< in this iteration
    bool is_clear_ = false;             ///< since this rank joined
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/sharded/detail/exchange.hpp

/// @file
/// Exchanges of sharded buckets between ranks. Collective, the same on all ranks.

namespace joinable { inline namespace v0 { namespace detail {

/// Starts to fill a bucket with the parts of all ranks. This rank's part is at `own`, which may be
/// its place in the bucket.
template <Communicator Comm>
[[nodiscard]] auto
gather_parts(Comm& comm, OptimizerShard const& shard, std::byte const* own, std::byte* bucket) {
    ShardBucket const& layout = shard.bucket();
    return any_all_gather(
        comm,
        ConstBuffer{own, shard.part(), layout.dtype},
        Buffer{bucket, layout.count(), layout.dtype},
        layout.counts
    );
}

/// Whether the sum of gradient buckets takes a factor from each rank.
template <Communicator Comm>
[[nodiscard]] bool sum_scales_parts(Comm& comm) noexcept {
    constexpr bool can = ReduceScatters<Comm> ? ScalesScatteredSums<Comm> : ScalesSums<Comm>;
    return can && !scales_before_sum(comm);
}

/// The factors of gradients: while they are packed, and while they are summed.
struct ShardFactors {
    double packed = 0; ///< 0 packs zeros
    double summed = 1;

    /// Sums that scale save one rounding.
    template <Communicator Comm>
    [[nodiscard]] static ShardFactors of(Comm& comm, double factor) noexcept {
        bool const is_summed = sum_scales_parts(comm) && factor != 0.0;
        return is_summed ? ShardFactors{1.0, factor} : ShardFactors{factor, 1.0};
    }
};

/// Submits what was packed, and starts to sum a bucket of gradients, so that each rank gets its
/// part. The bucket is then undefined.
template <Communicator Comm>
[[nodiscard]] auto
start_parts(Comm& comm, OptimizerShard const& shard, std::byte* bucket, double factor) {
    ShardBucket const& layout = shard.bucket();
    shard.device().submit();
    // If the sum scales, also with zeros: all ranks run the same collective.
    return any_reduce_scatter(
        comm,
        Buffer{bucket, layout.count(), layout.dtype},
        Buffer{shard.gradients(), shard.part(), layout.dtype},
        sum_scales_parts(comm) ? std::optional{factor} : std::nullopt,
        layout.counts
    );
}

/// Sends values of a bucket from their owners to all ranks: a large piece from where it lies, or the others packed. Values
/// that lie in the bucket are sent there.
template <Communicator Comm>
class ShardExchange {
public:
    /// Sends the `counts` values of each rank from `bucket`, where they lie, or into which they are packed by `scratch`.
    ShardExchange(
        Comm& comm,
        ParameterList const& parameters,
        OptimizerShard const& shard,
        std::byte* bucket,
        std::vector<std::size_t> const& counts,
        Scratch* scratch
    )
        : parameters_{parameters}, shard_{shard}, packed_{scratch != nullptr ? bucket : nullptr} {
        std::size_t const before =
            sum_of(std::span{counts}.first(static_cast<std::size_t>(comm.rank())));
        std::byte* const own = bucket + before * shard.element();
        if (scratch != nullptr) {
            shard.pack_own(parameters, own, *scratch);
        }
        shard.device().submit();
        DType const dtype = shard.bucket().dtype;
        std::size_t const part = counts[static_cast<std::size_t>(comm.rank())];
        static_cast<void>(parts_.emplace(any_all_gather(
            comm, ConstBuffer{own, part, dtype}, Buffer{bucket, sum_of(counts), dtype}, counts
        )));
    }
    /// Sends the stepped rows of the only parameter, whose number all ranks know.
    ShardExchange(
        Comm& comm, ParameterList const& parameters, OptimizerShard const& shard, SteppedRows& rows
    )
        : parameters_{parameters}, shard_{shard}, rows_{&rows} {
        if (!rows.indices.empty()) {
            start_rows(comm);
        }
    }
    /// Sends a piece from where it lies.
    ShardExchange(
        Comm& comm,
        ParameterList const& parameters,
        OptimizerShard const& shard,
        ShardPiece const& piece
    )
        : parameters_{parameters}, shard_{shard} {
        AnyView const run = shard.lone_run(parameters, piece);
        shard.device().submit();
        static_cast<void>( // nvcc 13 warns of a dropped reference to a work
            lone_.emplace(comm.broadcast({run.data(), run.numel(), run.dtype()}, piece.owner))
        );
    }

    void finish() {
        if (rows_ != nullptr) {
            if (row_values_) {
                lone_->wait();
                row_values_->wait();
                if (shard_.own().empty()) {
                    shard_.copy_rows(parameters_, *rows_, false);
                }
            }
        } else if (lone_) {
            lone_->wait();
        } else {
            parts_->wait();
            if (packed_ != nullptr) {
                shard_.unpack_others(parameters_, packed_);
                shard_.device().submit(); // before the bucket is filled again
            }
        }
    }

private:
    using Broadcast = std::remove_cvref_t<decltype(std::declval<Comm&>().broadcast(Buffer{}, 0))>;

    void start_rows(Comm& comm) {
        std::size_t const count = rows_->indices.size();
        std::size_t const bytes = count * shard_.row_bytes(parameters_);
        int const owner = shard_.bucket().pieces.front().owner;
        rows_->values.resize(bytes);
        if (!shard_.own().empty()) {
            shard_.copy_rows(parameters_, *rows_, true);
        }
        Buffer const indices{rows_->indices.data(), count, DType::i64};
        Buffer const values{rows_->values.data(), bytes / shard_.element(), shard_.bucket().dtype};
        static_cast<void>(lone_.emplace(comm.broadcast(indices, owner)));
        static_cast<void>(row_values_.emplace(comm.broadcast(values, owner)));
    }

    ParameterList const& parameters_;
    OptimizerShard const& shard_;
    std::byte const* packed_ = nullptr;
    SteppedRows* rows_ = nullptr;
    std::optional<Broadcast> lone_; ///< or the indices of rows
    std::optional<Broadcast> row_values_;
    std::optional<decltype(any_all_gather(std::declval<Comm&>(), ConstBuffer{}, Buffer{}, Counts{})
    )>
        parts_;
};

/// Exchanges that are in flight in turns, at most two at a time.
template <Communicator Comm>
class ShardExchanges {
public:
    /// The turn of the next exchange: 0 or 1.
    [[nodiscard]] std::size_t turn() const noexcept { return turn_; }
    [[nodiscard]] bool has_any() const noexcept { return in_flight_[0] || in_flight_[1]; }
    /// Starts one, then finishes the one before.
    template <class... What>
    void start(What&&... what) {
        static_cast<void>(in_flight_[turn_].emplace(what...));
        finish_one();
    }
    void finish_one() {
        turn_ = 1 - turn_;
        if (auto& exchange = in_flight_[turn_]) {
            exchange->finish();
            exchange.reset();
        }
    }

private:
    std::optional<ShardExchange<Comm>> in_flight_[2];
    std::size_t turn_ = 0;
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/sharded/detail/units.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Gathers sharded values, one unit of parameters at a time, and releases them after the pass has
/// used them. Every rank runs these collectives in a pass: an all-gather of each unit, once, from
/// the first unit to the last in a forward pass and in reverse order in a backward pass. In a
/// backward pass they alternate with the reductions of gradients: the reductions of a unit follow
/// the gather of the unit that the pass needs next and precede the gather of the unit after that. A
/// unit that is held from one pass to the next is gathered nevertheless, because joined ranks do
/// not know that it is held.
template <Communicator Comm>
class ShardedUnits {
public:
    /// Keeps the values of a unit in place during its lifetime.
    class [[nodiscard("the object that use() returns keeps the values")]] Held {
    public:
        Held() = default;
        Held(Held&& other) noexcept : units_{std::move(other.units_)}, unit_{other.unit_} {}
        Held& operator=(Held&& other) noexcept { // not by value: clang 14 forgets to destroy it
            auto const taken = std::move(other.units_);
            release();
            units_ = taken;
            unit_ = other.unit_;
            return *this;
        }
        ~Held() { release(); }

        /// Stops keeping the values.
        void release() noexcept {
            if (auto const units = std::exchange(units_, nullptr); units && *units) {
                (*units)->release(unit_);
            }
        }

    private:
        friend ShardedUnits;
        Held(std::shared_ptr<ShardedUnits*> units, std::size_t unit) noexcept
            : units_{std::move(units)}, unit_{unit} {}

        std::shared_ptr<ShardedUnits*> units_; ///< points to null after their destruction
        std::size_t unit_ = 0;
    };

    /// Local. `groups` is the list that the participant keeps, `next` the group that it is about to
    /// add.
    ShardedUnits(Comm& comm, std::vector<ShardGroup> const& groups, ShardGroup const& next)
        : comm_{comm}, device_{device_of(comm)}, groups_{groups},
          self_{std::make_shared<ShardedUnits*>(this)}, arenas_{BufferMemory{comm}} {
        for (std::size_t k = 0; k <= groups.size(); ++k) {
            list(k, k == groups.size() ? next : groups[k]);
        }
        arenas_.reserve((std::min)(units_.size(), overlapping), largest_);
    }
    ShardedUnits(ShardedUnits const&) = delete;
    ShardedUnits& operator=(ShardedUnits const&) = delete;
    ~ShardedUnits() { // values in this memory are released
        reset();
        *self_ = nullptr;
    }

    // A pass.

    void begin_forward() {
        require(
            Pass::none,
            "the previous forward pass had no backward pass; announce such a round with {.phase = "
            "Phase::evaluate}, and call skip() after a pass that failed"
        );
        require_released();
        begin(Pass::forward, false);
    }
    /// Ends the forward pass. Units that it did not use are gathered nevertheless; if no pass has
    /// begun, all of them.
    void finish_forward() {
        if (pass_ == Pass::none) {
            begin_forward();
        }
        if (pass_ == Pass::forward) {
            finish();
            pass_ = Pass::between;
        }
    }
    /// `reduces`: gradients are reduced during the pass.
    void begin_backward(bool reduces) {
        finish_forward();
        require(Pass::between, "a backward pass begins in another one");
        begin(Pass::backward, reduces);
    }
    /// Runs the remaining passes of a round. A training round has both, an evaluation only a
    /// forward pass.
    /// @throws ContractViolation  values are still held.
    void finish_passes(bool trains) {
        finish_forward();
        if (trains && pass_ == Pass::between) {
            begin_backward(false);
        }
        if (pass_ == Pass::backward) {
            finish();
        }
        require_released();
        pass_ = Pass::none;
    }
    /// @throws ContractViolation  values are held.
    void require_released() const {
        for (std::size_t k = 0; k < units_.size(); ++k) {
            if (units_[k].holders != 0) {
                throw ContractViolation{concat(
                    "what use() or use_all() returned for ",
                    describe(k),
                    " is still held; let go of it before the last pass of its round returns, before skip(), and "
                    "before the next round begins: a step changes values"
                )};
            }
        }
    }
    /// Discards the state of a pass after a failure.
    void reset() noexcept {
        for (Unit& unit : units_) {
            for (std::optional<Work>& work : unit.works) {
                work.reset();
            }
            arenas_.give_back(unit.landing);
            drop(unit);
        }
        pass_ = Pass::none;
        current_ = nowhere;
    }

    // The turns of gathers and reductions.

    /// Starts the next gather if it is its turn and the pass has used the previous unit. Returns
    /// whether it did.
    bool prefetch() { return is_open() && launched_ == arrived_ && launch(); }
    /// Waits for the next unit without setting its values. Returns false if no unit is left, or
    /// gradients must be reduced first.
    bool pass_by() { return is_open() && arrive(nowhere); }
    /// Whether all gradients of the next unit may be reduced now.
    [[nodiscard]] bool may_reduce() const noexcept {
        return launched_ >= (std::min)(reduced_ + 2, units_.size());
    }
    /// Whether the backward pass has gathered a unit, so that no rank reads this rank's part of it
    /// any more.
    [[nodiscard]] bool is_gathered(std::size_t unit) const noexcept {
        return pass_ != Pass::backward || position_of(unit) < arrived_;
    }
    /// Records that the gradients of a unit are in flight.
    void note_reduced() noexcept { ++reduced_; }

    // Values.

    /// Whether parameter `i` is in a unit.
    [[nodiscard]] bool has(std::size_t i) const noexcept { return unit_of(i) != nowhere; }
    [[nodiscard]] std::size_t unit_of(std::size_t i) const noexcept {
        return i < unit_of_.size() ? unit_of_[i] : nowhere;
    }
    /// Whether the values of the unit of parameter `i` are set.
    /// @throws ContractViolation  the pass is past them, or there is no pass.
    [[nodiscard]] bool is_present(std::size_t i) const {
        Unit const& unit = units_[unit_of(i)];
        if (unit.is_present) {
            return true;
        }
        if (!is_open()) {
            throw ContractViolation{concat(
                "the values of ",
                describe(unit_of(i)),
                " are used outside a pass; call use() in the pass that forward() or backward() is given"
            )};
        }
        if (position_of(unit_of(i)) < arrived_) {
            throw ContractViolation{concat(
                "the ",
                pass_ == Pass::forward ? "forward" : "backward",
                " pass is past ",
                describe(unit_of(i)),
                ", but uses it again: units come in ",
                pass_ == Pass::forward ? "ascending" : "descending",
                " order, once each; where a value is used again, keep what use() returned until then"
            )};
        }
        return false;
    }
    /// Waits for the next unit and sets its values if it is the unit of parameter `i`. Returns
    /// false if gradients must be reduced first.
    bool approach(std::size_t i) { return arrive(unit_of(i)); }
    [[nodiscard]] Held hold(std::size_t i) {
        ++units_[unit_of(i)].holders;
        return {self_, unit_of(i)};
    }
    /// Allocates memory for all units. Local.
    void reserve_all() {
        require_released();
        for (std::size_t k = 0; k < units_.size(); ++k) {
            static_cast<void>(arenas_.data(k, k < overlapping ? largest_ : units_[k].bytes));
        }
    }
    /// Frees the memory that no pass needs, unless values are held. Local.
    void free_reserve() noexcept {
        if (arenas_.are_all_free()) {
            arenas_.keep(overlapping);
        }
    }
    /// Gathers all units at once, outside of passes. Memory for them must be reserved.
    [[nodiscard]] std::vector<Held> hold_all() {
        std::vector<Held> held;
        begin_forward();
        try {
            held.reserve(units_.size());
            for (Unit const& unit : units_) {
                static_cast<void>(approach(unit.parameters.front()));
                static_cast<void>(prefetch());
                held.push_back(hold(unit.parameters.front()));
            }
        } catch (...) { // the other ranks gather all units
            held.clear();
            while (pass_by()) {
            }
            reset();
            throw;
        }
        pass_ = Pass::none;
        current_ = nowhere;
        holds_all_ = true;
        return held;
    }
    /// Whether the next unit of the pass is the unit of parameter `i` and was held from the
    /// previous pass.
    [[nodiscard]] bool is_due(std::size_t i) const noexcept {
        return is_open() && units_[unit_of(i)].is_present && position_of(unit_of(i)) == arrived_;
    }

    /// "unit 2 (parameters 4 to 6)"
    [[nodiscard]] std::string describe(std::size_t k) const {
        return concat(
            "unit ",
            k,
            " (parameters ",
            units_[k].parameters.front(),
            " to ",
            units_[k].parameters.back(),
            ")"
        );
    }
    /// The bytes of the memory in which units are gathered.
    [[nodiscard]] std::size_t bytes() const noexcept { return arenas_.bytes(); }

private:
    enum class Pass : std::uint8_t { none, forward, between, backward };

    using Work = std::remove_cvref_t<decltype(gather_parts(
        std::declval<Comm&>(), std::declval<OptimizerShard const&>(), nullptr, nullptr
    ))>;

    /// One unit is in use while the next one is in flight.
    static constexpr std::size_t overlapping = 2;
    static constexpr std::size_t nowhere = BucketArenas::none;

    struct Part {
        std::size_t shard;
        std::size_t offset; ///< in the unit's memory, in bytes
    };
    /// A run of parameters of one group.
    struct Unit {
        std::size_t group;
        std::vector<Part> parts = {};
        std::vector<std::size_t> parameters = {}; ///< indices among those of all groups
        std::size_t bytes = 0;
        std::vector<std::optional<Work>> works = {}; ///< of the parts
        std::size_t holders = 0;
        std::size_t landing = nowhere; ///< the arena of a gather in flight
        std::size_t arena = nowhere;   ///< the arena of the values
        bool is_present = false;       ///< its values are set
    };

    void list(std::size_t k, ShardGroup const& group) {
        unit_of_.resize(group.first + group.parameters.size(), nowhere);
        for (std::size_t u = 0; u < group.units.size(); ++u) {
            Unit unit{k};
            std::size_t const end =
                u + 1 < group.units.size() ? group.units[u + 1] : group.shards.size();
            for (std::size_t s = group.units[u]; s < end; ++s) {
                OptimizerShard const& shard = group.shards[s];
                unit.parts.push_back({s, unit.bytes});
                unit.bytes += (shard.bucket_bytes() + 63) / 64 * 64;
                for (ShardPiece const& piece : shard.bucket().pieces) {
                    if (piece.begin == 0) {
                        unit.parameters.push_back(group.first + piece.parameter);
                        unit_of_[group.first + piece.parameter] = units_.size();
                    }
                }
            }
            std::sort(unit.parameters.begin(), unit.parameters.end());
            unit.works = std::vector<std::optional<Work>>(unit.parts.size());
            largest_ = (std::max)(largest_, unit.bytes);
            units_.push_back(std::move(unit));
        }
    }

    [[nodiscard]] bool is_open() const noexcept {
        return pass_ == Pass::forward || pass_ == Pass::backward;
    }
    [[nodiscard]] std::size_t position_of(std::size_t unit) const noexcept {
        return pass_ == Pass::backward ? units_.size() - 1 - unit : unit; // in reverse order
    }
    void require(Pass pass, char const* otherwise) const {
        if (pass_ != pass) {
            throw ContractViolation{otherwise};
        }
    }

    void begin(Pass pass, bool reduces) {
        pass_ = pass;
        reduces_ = reduces;
        launched_ = arrived_ = reduced_ = 0;
        current_ = nowhere;
        static_cast<void>(launch());
    }
    void finish() {
        while (pass_by()) {
        }
        leave_current();
    }

    bool launch() {
        if (launched_ == units_.size() || (reduces_ && reduced_ + 1 < launched_)) {
            return false;
        }
        Unit& unit = units_[position_of(launched_)];
        unit.landing = arenas_.take(unit.bytes);
        std::byte* const memory = arenas_.data(unit.landing, unit.bytes);
        ShardGroup const& group = groups_[unit.group];
        device_.submit(); // the engine's work reads what is in this memory first
        for (std::size_t k = 0; k < unit.parts.size(); ++k) {
            Part const& part = unit.parts[k];
            static_cast<void>(unit.works[k].emplace(gather_parts(
                comm_, group.shards[part.shard], group.values->at(part.shard), memory + part.offset
            )));
        }
        ++launched_;
        return true;
    }

    bool arrive(std::size_t used) {
        if (arrived_ == units_.size() || (launched_ == arrived_ && !launch())) {
            return false;
        }
        leave_current();
        current_ = position_of(arrived_);
        Unit& unit = units_[current_];
        for (std::optional<Work>& work : unit.works) {
            work->wait();
            work.reset();
        }
        device_.finish(); // the engine's work comes after it
        ++arrived_;
        if (unit.is_present) { // held from the previous pass
            arenas_.give_back(unit.landing);
        } else if (unit.arena = std::exchange(unit.landing, nowhere); current_ == used) {
            show(unit);
        }
        return true;
    }

    void show(Unit& unit) {
        unit.is_present = true; // also if setting one throws
        ShardGroup const& group = groups_[unit.group];
        for (Part const& part : unit.parts) {
            OptimizerShard const& shard = group.shards[part.shard];
            std::byte* const bucket = arenas_.data(unit.arena, 0) + part.offset;
            for (ShardPiece const& piece : shard.bucket().pieces) {
                if (piece.begin == 0) {
                    AnyParameter const& parameter = group.parameters[piece.parameter];
                    std::byte* const begin = bucket + piece.offset * shard.element();
                    parameter.set_value(OptimizerShard::place_of(parameter.value(), begin));
                }
            }
        }
    }
    void drop(Unit& unit) noexcept {
        if (std::exchange(unit.is_present, false)) {
            for (std::size_t const i : unit.parameters) {
                ShardGroup const& group = groups_[unit.group];
                group.parameters[i - group.first].release_value();
            }
        }
        arenas_.give_back(unit.arena);
    }
    void leave_current() noexcept {
        if (std::size_t const left = std::exchange(current_, nowhere);
            left != nowhere && units_[left].holders == 0) {
            drop(units_[left]);
        }
    }
    void release(std::size_t unit) noexcept {
        if (--units_[unit].holders == 0 && unit != current_) {
            drop(units_[unit]);
        }
        if (holds_all_ && arenas_.are_all_free()) {
            holds_all_ = false;
            free_reserve();
        }
    }

    Comm& comm_;
    Device& device_;
    std::vector<ShardGroup> const& groups_;
    std::shared_ptr<ShardedUnits*> self_; ///< for what is held
    BucketArenas arenas_;
    std::vector<std::size_t> unit_of_; ///< of each parameter of all groups
    std::size_t largest_ = 0;          ///< unit, in bytes
    Pass pass_ = Pass::none;
    bool reduces_ = false;
    bool holds_all_ = false;
    std::size_t launched_ = 0; ///< gathers of the pass
    std::size_t arrived_ = 0;
    std::size_t reduced_ = 0;       ///< units whose gradients are in flight
    std::size_t current_ = nowhere; ///< the last unit that arrived, until the pass is past it
    std::vector<Unit> units_;       ///< in the order of their parameters; destroyed first
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/sharded/detail/to_owners.hpp

namespace joinable { inline namespace v0 { namespace detail {

using StepShard = std::function<void(std::size_t group, OptimizerShard const& shard)>;

/// The reduction of sharded training. Sums each bucket to the owners of its parameters, by a reduce-scatter, or, made
/// without gradients for owners, to all ranks. If values are sharded, too, the passes gather them, and gathers and
/// buckets take turns: see ShardedUnits.
template <Communicator Comm>
class ToOwners : public ReductionTurns, public PassHooks {
    using Scattered = decltype(start_parts(
        std::declval<Comm&>(), std::declval<OptimizerShard const&>(), nullptr, 1.0
    ));
    using Summed = work_of<Comm>;
    using Started = std::conditional_t<std::is_same_v<Scattered, Summed>, Summed, AnyWork>;
    using Units = ShardedUnits<Comm>;

public:
    using Held = typename Units::Held;

    static constexpr std::string_view name = "ToOwners";
    bool delivers = true;

    ToOwners() = default;
    /// Local. The reducer owns `gradients`. `units` is null if each rank has all values. `step` is called as soon as
    /// the gradients of a shard are averaged, or is empty, and `begin` before a round reduces.
    ToOwners(
        GradientsForOwners const& gradients,
        std::unique_ptr<Units> units,
        StepShard step,
        std::function<void(Round const&)> begin
    )
        : delivers{false}, gradients_{&gradients}, units_{std::move(units)}, step_{std::move(step)},
          begin_{std::move(begin)} {}

    [[nodiscard]] bool scales(Comm& comm) const noexcept {
        return delivers ? AllReduce::scales(comm) : sum_scales_parts(comm);
    }
    [[nodiscard]] Started
    start(Comm& comm, BucketRun const& run, double factor, bool contributes) const {
        if (delivers) {
            return Started{AllReduce::start(comm, run, factor, contributes)};
        }
        auto* const memory = static_cast<std::byte*>(run.buffer.data);
        return Started{start_parts(comm, gradients_->shard_of(run.bucket), memory, factor)};
    }
    void finish(Comm& /*comm*/, BucketRun const& /*run*/) {
        if (!delivers) {
            ++finished_;
            step_reduced();
        }
    }

    // -- ReductionTurns ----------------------------------------------------------------------------

    void begin_iteration() {
        if (units_) {
            units_->begin_backward(true);
        }
        finished_ = stepped_ = 0;
        is_unattended_ = false;
    }
    [[nodiscard]] bool may_start(std::size_t /*bucket*/) const noexcept {
        return !units_ || units_->may_reduce();
    }
    void note_started(std::size_t bucket) noexcept {
        if (units_) {
            std::size_t const next = bucket + 1;
            if (next == gradients_->buckets().size() || unit_of(next) != unit_of(bucket)) {
                units_->note_reduced(); // all of the unit
            }
        }
    }
    [[nodiscard]] bool proceed() {
        return units_ && (units_->prefetch() || (is_unattended_ && units_->pass_by()));
    }
    void end_pass() noexcept { is_unattended_ = true; }
    void end_iteration() {
        is_unattended_ = false;
        finish_passes(true);
        step_reduced();
    }
    void begin_guard() noexcept {
        is_unattended_ = false;
        if (units_) {
            units_->reset();
        }
    }

    // -- PassHooks ---------------------------------------------------------------------------------

    [[nodiscard]] bool gathers_values() const noexcept { return units_ != nullptr; }
    void begin_forward() {
        if (units_) {
            units_->begin_forward();
        }
    }
    void finish_forward() {
        if (units_) {
            units_->finish_forward();
        }
    }
    void begin_accumulating() {
        if (units_) {
            units_->begin_backward(false);
        }
    }
    void finish_passes(bool trains) {
        if (units_) {
            units_->finish_passes(trains);
        }
    }
    void require_released() const {
        if (units_) {
            units_->require_released();
        }
    }
    [[nodiscard]] bool meets_between_passes() const noexcept { return begin_ != nullptr; }
    void begin_round(Round const& round) const {
        if (begin_) {
            begin_(round);
        }
    }

    /// Waits for the value of parameter `i` and keeps it during the lifetime of the returned
    /// object.
    template <class R>
    [[nodiscard]] Held use(std::size_t i, R& reducer) {
        if (!units_ || !units_->has(i)) {
            return {};
        }
        if (units_->is_due(i) && units_->approach(i)) { // it was kept, and the script continues
            reducer.proceed();
        }
        while (!units_->is_present(i)) {
            if (!units_->approach(i)) {
                throw ContractViolation{concat_missing(
                    concat(
                        "the backward pass uses ",
                        units_->describe(units_->unit_of(i)),
                        " before the gradients of units before it are ready; mark them before the pass "
                        "needs the second unit after theirs, and where the backward pass uses a value early, "
                        "keep what use() returned in the forward pass"
                    ),
                    reducer.parameters(),
                    gradients_->rank(),
                    [&](std::size_t k) {
                        return reducer.is_missing(k) && units_->unit_of(k) > units_->unit_of(i) + 1;
                    }
                )};
            }
            reducer.proceed();
        }
        return units_->hold(i);
    }
    /// The gathered values; null if each rank has all of them.
    [[nodiscard]] Units* units() const noexcept { return units_.get(); }

private:
    [[nodiscard]] std::size_t unit_of(std::size_t bucket) const {
        return units_->unit_of(gradients_->first_in(bucket));
    }
    /// Steps reduced buckets. A bucket waits until its values are gathered, because a step
    /// overwrites them.
    void step_reduced() {
        while (step_ && stepped_ < finished_ && (!units_ || units_->is_gathered(unit_of(stepped_)))
        ) {
            std::size_t const bucket = stepped_++;
            step_(gradients_->group_of(bucket), gradients_->shard_of(bucket));
        }
    }

    GradientsForOwners const* gradients_ = nullptr;
    std::unique_ptr<Units> units_;
    StepShard step_;
    std::function<void(Round const&)> begin_;
    std::size_t finished_ = 0; ///< buckets whose sum the owners have
    std::size_t stepped_ = 0;
    bool is_unattended_ = false; ///< the pass uses no values any more, or there is no pass
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/sharded/detail/before_step.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Calls ZeroOptions::before_step on all ranks, and sums for it.
template <class Comm>
class ShardedBeforeStep final : ShardSums {
public:
    /// Refers to both, which connect the ranks that share the state.
    ShardedBeforeStep(Comm& comm, HostCollectives<Comm>& host, Sharding sharding)
        : comm_{comm}, host_{host}, sharding_{sharding}, sums_{device_of(comm)},
          packed_{device_of(comm)} {}

    /// Whether the ranks step; they compare it by `words`. Collective.
    /// @throws ContractViolation  they do not return the same.
    bool operator()(
        std::function<bool(ShardGradients const&)> const& before_step,
        std::span<ShardGroup> groups,
        ControlCommunicator& words
    ) {
        pieces_.clear();
        std::size_t parameters = 0;
        bool has_f16 = false;
        for (ShardGroup& group : groups) {
            for (OptimizerShard const& shard : group.shards) {
                shard.append_gradients(group.parameters, group.gradients, group.first, pieces_);
                has_f16 = has_f16 || shard.bucket().dtype == DType::f16;
            }
            parameters += group.parameters.size();
        }
        Device& device = device_of(comm_);
        device.finish(); // the engine's stream sees the gradients
        words_ = &words;
        bool const steps = before_step(ShardGradients{pieces_, parameters, device, *this, has_f16});
        std::uint64_t steppers = steps ? 1 : 0;
        words.sum({&steppers, 1});
        auto const ranks = static_cast<std::uint64_t>(words.size());
        if (steppers != 0 && steppers != ranks) {
            throw ContractViolation{concat(
                "before_step skips the step on ",
                ranks - steppers,
                " of ",
                ranks,
                " ranks",
                steps ? ", but not on this one" : ", on this one, too",
                "; return the same on all, by what ShardGradients::sum() gives"
            )};
        }
        return steps;
    }

private:
    /// Where groups share the state all ranks take the numbers of the first one: others may add up in another order.
    void take_first(std::span<double> numbers) {
        if (words_->size() != comm_.size()) {
            std::vector<std::uint64_t> bits;
            for (double const number : numbers) {
                bits.push_back(std::bit_cast<std::uint64_t>(number));
            }
            words_->broadcast(bits, 0);
            std::transform(bits.begin(), bits.end(), numbers.begin(), [](std::uint64_t number) {
                return std::bit_cast<double>(number);
            });
        }
    }
    void sum(std::span<double> numbers) override {
        if (sharding_ != Sharding::none) { // else each rank has all gradients
            host_.all_reduce({numbers.data(), numbers.size(), DType::f64}, ReduceOp::sum).wait();
        }
        take_first(numbers);
    }
    /// As integers in the order of the numbers: some transports ignore a NaN among floating-point numbers.
    void max(std::span<double> numbers) override {
        std::vector<std::int64_t> keys;
        for (double const number : numbers) {
            keys.push_back(key_of(std::bit_cast<std::int64_t>(
                std::isnan(number) ? std::numeric_limits<double>::quiet_NaN() : number
            )));
        }
        host_.all_reduce({keys.data(), keys.size(), DType::i64}, ReduceOp::max).wait();
        std::transform(keys.begin(), keys.end(), numbers.begin(), [](std::int64_t key) {
            return std::bit_cast<double>(key_of(key));
        });
        take_first(numbers);
    }
    /// Turns the bits of a number into such an integer, and back: those of negative ones fall as the number
    /// grows.
    static std::int64_t key_of(std::int64_t bits) noexcept {
        return bits < 0 ? bits ^ std::numeric_limits<std::int64_t>::max() : bits;
    }
    /// The numbers travel where the gradients are.
    void sum_powers(double power, std::span<ShardGradient const> pieces, std::span<double> sums)
        override {
        Device& device = device_of(comm_);
        std::size_t const count = sums.size();
        Buffer const all{sums_.data(count * sizeof(double)), count, DType::f64};
        auto* const first = static_cast<double*>(all.data);
        if (staged_.bytes() < all.bytes()) {
            staged_ = device.allocate_staging(all.bytes());
        }
        if (power == 2) {
            device.fill_zero({first, DType::f64, {count}, {1}, device.id()});
            own_.clear();
            for (ShardGradient const& piece : pieces) {
                own_.push_back({piece.view, first + piece.parameter, &sum_of_squares});
            }
            device.sum_squares(own_);
        } else { // on the host, because a device's pow() has other bits
            auto* const numbers = reinterpret_cast<double*>(staged_.data());
            std::fill_n(numbers, count, 0.0);
            for (ShardGradient const& piece : pieces) {
                numbers[piece.parameter] = sum_of_powers(on_host(piece.view), power);
            }
            device.upload(numbers, first, all.bytes());
            device.submit(); // before it is sent
        }
        if (sharding_ == Sharding::none) { // the same sums on each rank
            complete(comm_.broadcast(all, 0));
        } else if (std::isinf(power)) { // bits of magnitudes have their order, see max()
            complete(comm_.all_reduce({first, count, DType::i64}, ReduceOp::max));
        } else {
            complete(comm_.all_reduce(all, ReduceOp::sum));
        }
        host_.download(first, staged_.data(), all.bytes());
        copy_bytes(reinterpret_cast<std::byte*>(sums.data()), staged_.data(), all.bytes());
        take_first(sums);
    }

    /// The tensor, or a copy in host memory that the next one replaces. Blocks, up to the deadline.
    [[nodiscard]] AnyView on_host(AnyView const& tensor) {
        Device& device = device_of(comm_);
        if (detail::is_on_host(device) || tensor.numel() == 0) {
            return tensor;
        }
        Shape const& extents = tensor.extents();
        Shape const strides = row_major_strides(extents);
        std::size_t const bytes = tensor.numel() * size_of(tensor.dtype());
        std::byte* const packed = packed_.data(bytes);
        device.copy(tensor, {packed, tensor.dtype(), extents, strides, device.id()});
        device.submit();
        if (copy_.bytes() < bytes) {
            copy_ = device.allocate_staging(bytes);
        }
        host_.download(packed, copy_.data(), bytes);
        return {copy_.data(), tensor.dtype(), extents, strides};
    }

    Comm& comm_;
    HostCollectives<Comm>& host_;
    ControlCommunicator* words_ = nullptr; ///< of all ranks, during a call
    Sharding sharding_;
    std::vector<ShardGradient> pieces_;
    std::vector<SquareSum> own_;
    Arena staged_; ///< of the sums, on the host
    Arena copy_;   ///< of a gradient, on the host
    Scratch sums_;
    Scratch packed_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/sharded/zero_options.hpp

namespace joinable { inline namespace v0 {

/// An object that ZeroOptions::before_step reads or changes. If ranks have joined, they get the
/// lowest active rank's object before each step. Refers to the object, which must have no pointers,
/// because addresses are not valid on another rank.
class SharedObject {
public:
    template <class T>
        requires(!std::is_same_v<T, SharedObject>) // a copy refers to the same object
    SharedObject(T& object) noexcept : data_{std::addressof(object)}, bytes_{sizeof(T)} {
        static_assert(
            std::is_trivially_copyable_v<T> && !std::is_const_v<T>,
            "SharedObject: ranks send the object as it is in memory; give one that is trivially copyable "
            "and not const, such as a struct of numbers"
        );
        static_assert(
            !detail::has_address<std::remove_all_extents_t<T>>(),
            "SharedObject: ranks send the object as it is in memory, but it has a pointer or a reference, and an "
            "address leads nowhere on another rank; give a struct of numbers"
        );
    }

    [[nodiscard]] void* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

private:
    void* data_;
    std::size_t bytes_;
};

/// Options of a ZeroRedundancyOptimizer. All except `before_step` must be the same on every rank.
struct ZeroOptions {
    Partition partition = Partition::by_parameters;
    /// The owner of each parameter of the constructor's list, instead of the rule of by_parameters.
    std::vector<int> owners = {};
    /// Parameters are sent to the other ranks in buckets, which close when they reach this size. A
    /// rank has memory for two of them.
    std::size_t bucket_cap_bytes = std::size_t{25} << 20U;
    /// Averages gradients itself, only to their owners, for guards without a
    /// DistributedDataParallel. Weights and the divisor are those of
    /// DataParallelOptions::gradient_kind `mean`. A rank's gradients are not changed. Every
    /// parameter is stepped, with zeros if no rank has a gradient.
    bool reduces_gradients = false;
    /// Called between the reduction and the step on every rank, also on joined ones, with the
    /// gradients that this rank owns. It may clip, unscale or set a rate. Returning false skips the
    /// step. The result must be the same on every rank: base it on ShardGradients::sum(). On a
    /// device, gradients are in its memory: kernels that change them go on the engine's stream.
    std::function<bool(ShardGradients const&)> before_step = {};
    /// The state of `before_step` besides the rules. Joined ranks take it as they take settings; after a guard
    /// that failed set it again on all ranks.
    std::vector<SharedObject> shared = {};
    /// Values live in the buckets in which they travel, and a step copies none. Needs `set_value`
    /// and `release_value` in parameter_traits; set_value must keep the view. The values are
    /// released at destruction: copy them before. They stay where they are: write new values into
    /// that memory. If a rank is refused, those that were moved stay in buckets that are never freed.
    bool parameters_as_bucket_view = false;
};

}} // namespace joinable::v0

// ---- joinable/participant/sharded/detail/plan.hpp

/// @file
/// How a sharded optimizer adds a group of parameters. All functions are local; errors are
/// ContractViolations.

namespace joinable { inline namespace v0 { namespace detail {

inline bool is_flat(ZeroOptions const& options) noexcept {
    return options.partition == Partition::flat;
}

void check_units(std::span<std::size_t const> units, std::size_t count, Sharding sharding);
void check_views(ZeroOptions const& options, Sharding sharding);
/// The number of trained parameters in each unit, in list order: in those that the user chose, or
/// in runs that reach `cap` bytes. Every unit has at least one.
std::vector<std::size_t> trained_in_units(
    ParameterList const& parameters,
    std::span<std::size_t const> trained,
    std::span<std::size_t const> units,
    std::size_t cap
);

/// Checks that a device can step by a rule.
template <class Rule>
void check_kernels(Rule const& rule, Device const& device) {
    if (is_on_host(device)) {
        return;
    }
    if (!device.can_update(device_rule(rule))) {
        throw ContractViolation{concat(
            to_text(device.id()),
            " has no kernels that step by ",
            class_name<Rule>(),
            "; give the communicator's device_memory().use_kernels() what joinable::cuda_kernels() returns, or "
            "for a rule of your own cuda_kernels<",
            class_name<Rule>(),
            ">(), in a source file that nvcc compiles"
        )};
    }
    std::size_t const names = rule.state_names().size();
    std::size_t const count = rule.template visit_update<float>(1, []<class Update>(Update const&) {
        return std::size_t{Update::state_count};
    });
    if (count != names) {
        throw ContractViolation{concat(
            "the update of ",
            class_name<Rule>(),
            " has a state_count of ",
            count,
            ", but its state_names() are ",
            names,
            "; give it one number for each name"
        )};
    }
}

/// Checks that a rule steps parameter `i`, whose gradients are rows.
template <class Rule>
void check_rows_rule(ParameterList const& list, std::size_t i, Rule const& rule) {
    if (!leaves_other_rows(rule)) {
        throw ContractViolation{concat(
            describe_parameter(list, i),
            " has sparse gradients, but ",
            class_name<Rule>(),
            " with these settings also steps elements without a gradient; use a rule with steps_rows, such as "
            "Sgd without momentum and weight decay, or give it dense gradients"
        )};
    }
}
/// Checks that sharded training steps parameter `i`, whose gradients are rows.
void check_rows(
    ParameterList const& list, std::size_t i, ZeroOptions const& options, Sharding sharding
);

/// `groups` are the earlier ones. `choices` are for `list`.
template <class Rule>
void check_group(
    ParameterList const& list,
    Rule const& rule,
    ShardChoices const& choices,
    std::vector<ShardGroup> const& groups,
    ZeroOptions const& options,
    Sharding sharding,
    Device const& device,
    int world_size
) {
    std::vector<int> const& owners = choices.owners;
    if (is_flat(options) && LocalOptimizer<Rule>) {
        throw ContractViolation{
            "an engine's optimizer steps whole parameters, but Partition::flat deals out parts of them; "
            "use Partition::by_parameters"
        };
    }
    check_parameters(list, device.id());
    for (std::size_t i = 0; i < list.size(); ++i) {
        if (list[i].requires_grad() && list[i].is_sparse()) {
            check_rows(list, i, options, sharding);
            check_rows_rule(list, i, rule);
        }
        if (list[i].requires_grad() && grad_dtype(list, i) != list[i].value().dtype()) {
            throw ContractViolation{concat(
                describe_parameter(list, i),
                " has gradients of f32 beside a value of 16 bits, which sharded training does not step; give them "
                "the value's dtype: their owner steps them in f32"
            )};
        }
    }
    ParameterList all;
    for (ShardGroup const& group : groups) {
        if (!group.shards_values()) { // else the engine has no memory for them
            append(all, group.parameters);
        }
    }
    append(all, list);
    check_distinct(all, "of all groups, ", [](AnyParameter const& parameter) {
        return parameter.value();
    });
    check_gradients_apart(all);
    if (!owners.empty() && (is_flat(options) || owners.size() != list.size())) {
        throw ContractViolation{concat(
            "owners has ",
            owners.size(),
            is_flat(options)
                ? " ranks, but with Partition::flat parameters have no owner; leave it out"
                : " ranks; give one for each parameter, ",
            is_flat(options) ? "" : std::to_string(list.size())
        )};
    }
    for (int const owner : owners) {
        if (owner < 0 || owner >= world_size) {
            throw ContractViolation{
                concat("owners names rank ", owner, ", but the ranks are 0 to ", world_size - 1)
            };
        }
    }
    check_units(choices.units, list.size(), sharding);
    check_views(options, sharding);
}

/// Cuts the parameters of a group into the buckets of `rank`, and into units if values are sharded.
/// `loads` holds the elements of each rank in earlier groups and is updated. `reaches_all`: a rank reads values of the
/// others wherever they lie.
template <class Rule>
void cut_group(
    ShardGroup& group,
    Rule const& rule,
    ShardChoices const& choices,
    std::vector<std::size_t>& loads,
    ZeroOptions const& options,
    Sharding sharding,
    int rank,
    bool reaches_all,
    Device& device
) {
    std::vector<std::size_t> trained;
    std::vector<std::size_t> sizes;
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
        AnyView const value = group.parameters[i].value();
        group.layouts.push_back(OptimizerShard::place_of(value, nullptr));
        if (!group.parameters[i].requires_grad()) {
            group.frozen.push_back(i);
            continue;
        }
        if (!is_floating_point(value.dtype())) {
            throw ContractViolation{concat(
                describe_parameter(group.parameters, i),
                " is of ",
                name_of(value.dtype()),
                ", which no rule steps; give it requires_grad = false"
            )};
        }
        if (sharding == Sharding::parameters && group.parameters[i].is_complex()) {
            throw ContractViolation{concat(
                describe_parameter(group.parameters, i),
                " is complex, but values that are released are reals; use Sharding::gradients"
            )};
        }
        trained.push_back(i);
        sizes.push_back(value.numel());
    }
    if (trained.empty()) {
        throw ContractViolation{concat(
            group.parameters.size() == 0 ? "the list of parameters is empty"
                                         : "no parameter requires a gradient",
            ": there is nothing to step; give the parameters to train, with requires_grad = true, or run "
            "without this optimizer"
        )};
    }
    std::vector<int> all_owners = choices.owners;
    if (all_owners.empty() && !is_flat(options)) {
        auto const chosen = owners_by_size(sizes, loads);
        all_owners.resize(group.parameters.size());
        for (std::size_t k = 0; k < trained.size(); ++k) {
            all_owners[trained[k]] = chosen[k];
        }
    } else if (!is_flat(options)) { // a later group goes to the ranks that have less
        for (std::size_t k = 0; k < trained.size(); ++k) {
            loads[static_cast<std::size_t>(all_owners[trained[k]])] += sizes[k];
        }
    }
    auto const cut = [&](std::span<std::size_t const> chosen, std::size_t cap, std::size_t alone) {
        for (auto const& run : runs_by_size(group.parameters, chosen, cap, alone)) {
            ShardBucket bucket =
                is_flat(options)
                    ? flat_bucket(group.parameters, run, loads.size())
                    : bucket_by_owners(group.parameters, run, all_owners, loads.size());
            if (reaches_all) {
                bucket.alone = lone_bytes;
            }
            group.shards.emplace_back(
                std::move(bucket),
                rank,
                state_names_of(rule).size(),
                UpdateRule<Rule>,
                sharding,
                device
            );
        }
    };
    std::size_t const none = std::size_t(-1);
    if (sharding != Sharding::parameters) {
        // A flat bucket is as large as possible, because each one has parts of whole cache lines.
        // From a bucket in which values lie, each is sent in place, alone or not.
        bool const any_size = is_flat(options) || options.parameters_as_bucket_view;
        cut(trained, options.bucket_cap_bytes, any_size ? none : lone_bytes);
        return;
    }
    // A unit is a run of parameters of any dtypes.
    std::size_t begin = 0;
    for (std::size_t const count :
         trained_in_units(group.parameters, trained, choices.units, options.bucket_cap_bytes)) {
        group.units.push_back(group.shards.size());
        cut(std::span{trained}.subspan(begin, count), none, none);
        begin += count;
    }
}

void agree_on_options(AgreementList& list, ZeroOptions const& options);
template <class Rule>
void agree_on_rule(AgreementList& list, Rule const& rule) {
    std::span<std::string_view const> const names = state_names_of(rule);
    list.add("state of the rule", std::vector<std::string_view>{names.begin(), names.end()});
    list.add("class of the rule", type_name<Rule>());
    if constexpr (requires { rule.agree_on(list); }) {
        rule.agree_on(list);
    }
}

/// The rules of all groups, for ranks that must have the same settings.
template <class Rules>
void agree_on_rules(AgreementList& list, Rules const& rules) {
    for (std::size_t group = 0; group < rules.size(); ++group) {
        list.begin_section(
            group == 0 ? "settings differ: " : concat("settings of group ", group, " differ: ")
        );
        agree_on_rule(list, rules[group]);
    }
}

/// `averaged` are the values whose gradients a guard averages.
void check_averaged(ShardGroup const& group, std::vector<void const*> const& averaged);

/// Checks that a rule keeps as many numbers for each element as its group has room for.
template <class Rule>
void check_state_count(ShardGroup const& group, Rule const& rule) {
    std::size_t const names = group.shards.empty() ? 0 : group.shards.front().state().names();
    std::size_t const names_now = state_names_of(rule).size();
    if (names_now != names) {
        throw ContractViolation{concat(
            "the rule of a group keeps ",
            names_now,
            " numbers for each element now, but kept ",
            names,
            " when it was given; leave settings that add or drop state as they were"
        )};
    }
}
/// Checks that the elements of each stepped value lie in the order in which the state has them.
void check_layouts(ShardGroup const& group);
/// Both, for all groups and their rules.
template <class Rules>
void check_before_save(std::span<ShardGroup const> groups, Rules const& rules) {
    for (std::size_t k = 0; k < groups.size(); ++k) {
        check_state_count(groups[k], rules[k]);
        check_layouts(groups[k]);
    }
}

/// Checks that a group and its rule have not changed since they were added. `has_refresh`: see or_refresh().
template <class Rule>
void check_before_step(ShardGroup const& group, Rule const& rule, bool has_refresh) {
    check_rule(rule);
    if (group.values) {
        group.values->check();
    }
    check_state_count(group, rule);
    for (OptimizerShard const& shard : group.shards) {
        if (shard.bucket().is_rows) {
            check_rows_rule(group.parameters, shard.bucket().pieces.front().parameter, rule);
        }
    }
    for (std::size_t i = 0, frozen = 0; i < group.parameters.size(); ++i) {
        bool const was_frozen = frozen < group.frozen.size() && group.frozen[frozen] == i;
        frozen += was_frozen ? 1 : 0;
        if (group.parameters[i].requires_grad() == was_frozen) {
            throw ContractViolation{concat(
                describe_parameter(group.parameters, i),
                was_frozen
                    ? " requires a gradient now, but did not when it was given, so no rank steps it"
                    : " requires no gradient any more, but did when it was given",
                "; make a new optimizer",
                or_refresh(has_refresh)
            )};
        }
    }
    check_layouts(group);
}

}}} // namespace joinable::v0::detail

// ---- joinable/participant/sharded/detail/impl/plan.ipp

#if JOINABLE_HAS_DEFINITIONS

#include <algorithm>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void
check_units(std::span<std::size_t const> units, std::size_t count, Sharding sharding) {
    if (!units.empty() && sharding != Sharding::parameters) {
        throw ContractViolation{concat(
            "units are gathered with Sharding::parameters, but these are given with Sharding::",
            name_of(sharding),
            "; leave them out"
        )};
    }
    std::size_t left = count; // by subtraction, because a sum could overflow
    for (std::size_t k = 0; k < units.size(); ++k) {
        if (units[k] == 0) {
            throw ContractViolation{
                concat("unit ", k, " has no parameters; give each unit at least one")
            };
        }
        if (units[k] > left) {
            throw ContractViolation{concat(
                "units 0 to ",
                k,
                " have more parameters than the list, which has ",
                count,
                "; give the number of parameters in each unit"
            )};
        }
        left -= units[k];
    }
    if (!units.empty() && left != 0) {
        throw ContractViolation{concat(
            "the units have ",
            count - left,
            " parameters together, but the list has ",
            count,
            "; give each parameter a unit, frozen ones too"
        )};
    }
}

JOINABLE_DEFINITION void check_views(ZeroOptions const& options, Sharding sharding) {
    bool const sends_values = sharding == Sharding::optimizer || sharding == Sharding::gradients;
    if (options.parameters_as_bucket_view && !sends_values) {
        throw ContractViolation{concat(
            "parameters_as_bucket_view is for values that a step sends, but with Sharding::",
            name_of(sharding),
            " it sends none; leave it out"
        )};
    }
}

JOINABLE_DEFINITION std::vector<std::size_t> trained_in_units(
    ParameterList const& parameters,
    std::span<std::size_t const> trained,
    std::span<std::size_t const> units,
    std::size_t cap
) {
    std::vector<std::size_t> counts;
    if (units.empty()) {
        std::size_t bytes = 0;
        for (std::size_t const i : trained) {
            if (counts.empty() || bytes >= cap) {
                counts.push_back(0);
                bytes = 0;
            }
            AnyView const value = parameters[i].value();
            bytes += value.numel() * size_of(value.dtype());
            ++counts.back();
        }
        return counts;
    }
    std::size_t end = 0;
    std::size_t next = 0; // of `trained`
    for (std::size_t const unit : units) {
        end += unit;
        std::size_t const first = next;
        while (next < trained.size() && trained[next] < end) {
            ++next;
        }
        if (next != first) {
            counts.push_back(next - first);
        }
    }
    return counts;
}

JOINABLE_DEFINITION void check_rows(
    ParameterList const& list, std::size_t i, ZeroOptions const& options, Sharding sharding
) {
    AnyView const value = list[i].value();
    char const* const why =
        reduces_to_owners(sharding)
            ? "its averages go to an owner, which takes dense ones; use Sharding::none or Sharding::optimizer"
        : is_flat(options)
            ? "Partition::flat deals out runs of elements; use Partition::by_parameters"
        : options.before_step               ? "before_step takes dense ones; leave it out"
        : options.parameters_as_bucket_view ? "a value that lies in a bucket is sent whole; leave "
                                              "parameters_as_bucket_view out"
        : value.device() != DeviceId{} ? "its value is on a device; rows are stepped in host memory"
        : value.extents().empty() || !value.is_contiguous()
            ? "its value is not contiguous rows; give it a contiguous copy"
            : nullptr;
    if (why != nullptr) {
        throw ContractViolation{concat(
            describe_parameter(list, i),
            " has sparse gradients, but ",
            why,
            ", or give it dense gradients"
        )};
    }
}

JOINABLE_DEFINITION void agree_on_options(AgreementList& list, ZeroOptions const& options) {
    list.add("partition", is_flat(options) ? "flat" : "by_parameters");
    list.add("bucket_cap_bytes", options.bucket_cap_bytes);
    list.add("reduces_gradients", options.reduces_gradients);
    list.add("parameters_as_bucket_view", options.parameters_as_bucket_view);
    list.add("has before_step", static_cast<bool>(options.before_step));
    std::vector<std::size_t> shared;
    for (joinable::SharedObject const& object :
         options.shared) { // there is one of shared memory, too
        shared.push_back(object.bytes());
    }
    list.add("bytes of shared objects", shared);
}

JOINABLE_DEFINITION void check_layouts(ShardGroup const& group) {
    for (OptimizerShard const& shard : group.shards) {
        for (ShardPiece const& piece : shard.bucket().pieces) {
            if (piece.begin != 0) {
                continue; // the owner of its first element looks
            }
            check_layout(group.parameters, piece.parameter, group.layouts[piece.parameter]);
        }
    }
}

JOINABLE_DEFINITION void
check_averaged(ShardGroup const& group, std::vector<void const*> const& averaged) {
    std::vector<void const*> sorted = averaged;
    std::sort(sorted.begin(), sorted.end());
    for (OptimizerShard const& shard : group.shards) {
        for (ShardPiece const& piece : shard.bucket().pieces) {
            void const* const value = group.parameters[piece.parameter].value().data();
            if (!std::binary_search(sorted.begin(), sorted.end(), value)) {
                throw ContractViolation{concat(
                    describe_parameter(group.parameters, piece.parameter),
                    " is stepped by ZeroRedundancyOptimizer, but no participant of this guard averages its "
                    "gradient; give DistributedDataParallel the same parameters"
                )};
            }
        }
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/participant/sharded/detail/settings.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Sends what a step depends on to ranks that have joined: settings of the rules, shared objects,
/// and which parameters have gradients.
template <class Rule>
class ShardedSettings {
public:
    /// Makes room for a message of so many groups and parameters. Local.
    void reserve(
        std::size_t groups, std::size_t parameters, std::span<joinable::SharedObject const> shared
    ) {
        std::size_t bytes = groups * sizeof(Settings) + parameters;
        for (joinable::SharedObject const& object : shared) {
            bytes += object.bytes();
        }
        message_.resize((std::max)(message_.size(), words_of(bytes))
        ); // a refused group may need less
    }

    /// Begins the step of each group. If ranks have joined, or `always`, they take the settings of the lowest
    /// active rank by `words`, and step the parameters that it steps. Collective.
    template <class Comm>
    void share(
        Comm& comm,
        ControlCommunicator& words,
        Round const& round,
        std::deque<Rule>& rules,
        std::span<joinable::SharedObject const> shared,
        std::span<ShardGroup> groups,
        bool always
    ) {
        bool const is_source = comm.rank() == round.buffer_source();
        for (ShardGroup& group : groups) {
            group.gradients.begin_step(round.is_shadow(), device_of(comm));
            if (is_source) {
                group.gradients.list(group.parameters);
            }
        }
        if (always || round.active_count() != comm.size()) {
            send(words, round.buffer_source(), rules, shared, groups);
        }
    }

    /// Sends rules, shared objects and the parameters that these groups step from one rank to all. Collective.
    void send(
        ControlCommunicator& words,
        int source,
        std::deque<Rule>& rules,
        std::span<joinable::SharedObject const> shared,
        std::span<ShardGroup> groups
    ) {
        bool const is_source = words.rank() == source;
        auto const pass = [&](auto const& copy) {
            auto* const begin = reinterpret_cast<std::byte*>(message_.data());
            std::byte* at = begin;
            auto const one = [&](void* object, std::size_t bytes) {
                copy(static_cast<std::byte*>(object), at, bytes);
                at += bytes;
            };
            for (Rule& rule : rules) {
                one(&settings_of(rule), sizeof(Settings));
            }
            for (joinable::SharedObject const& object : shared) {
                one(object.data(), object.bytes());
            }
            for (ShardGroup& group : groups) {
                one(group.gradients.listed().data(), group.gradients.listed().size());
            }
            return static_cast<std::size_t>(at - begin);
        };
        std::size_t const bytes = pass([&](std::byte* object, std::byte* at, std::size_t n) {
            copy_bytes(at, object, is_source ? n : 0);
        });
        // Not the whole buffer: it is longer on a rank that made room for a group which another
        // rank refused.
        words.broadcast(std::span{message_}.first(words_of(bytes)), source);
        pass([&](std::byte* object, std::byte* at, std::size_t n) {
            copy_bytes(object, at, is_source ? 0 : n);
        });
        for (Rule& rule : rules) {
            apply_settings_of(rule);
        }
    }

    /// Notes the settings of the step that is about to be made in the guard of `state`, if there is
    /// one and its ranks are this rule's. Lists them again only if they have changed. Local.
    void note(JoinState const& state, std::deque<Rule>& rules) {
        if (detail::words_of(state) == nullptr) {
            return; // in a guard it steps with some of the ranks only
        }
        std::size_t const bytes = rules.size() * sizeof(Settings);
        bool is_same = used_.size() == bytes;
        used_.resize(bytes);
        for (std::size_t group = 0; group < rules.size(); ++group) {
            std::byte* const used = used_.data() + group * sizeof(Settings);
            Settings const& now = settings_of(rules[group]);
            if (std::memcmp(used, &now, sizeof now) != 0) {
                is_same = false;
                std::memcpy(used, &now, sizeof now);
            }
        }
        if (!is_same) {
            list_of_used_ = {};
            agree_on_rules(list_of_used_, rules);
            hash_of_used_ = list_of_used_.hash_from(0);
        }
        session_of(state)->note_settings(list_of_used_, hash_of_used_);
    }

private:
    using Settings = SettingsOf<Rule>;

    [[nodiscard]] static std::size_t words_of(std::size_t bytes) noexcept {
        return (bytes + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t);
    }

    std::vector<std::uint64_t> message_;
    std::vector<std::byte> used_; ///< the settings of the last step that was noted, by group
    AgreementList list_of_used_;
    std::uint64_t hash_of_used_ = 0;
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/sharded/detail/state_exchange.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The state of all ranks' shards on one rank, gathered from them or dealt out to them. The
/// collective members take `together`, which runs a function on all ranks and throws on all if it
/// throws on one.
template <class Rule>
class StateExchange {
public:
    /// Frees what was gathered. Local.
    void reset() noexcept { gathered_.reset(); }

    /// Returns the state that was gathered on this rank, and keeps none. Local.
    [[nodiscard]] OptimizerState<Rule> take() {
        OptimizerState<Rule> taken = std::move(gathered_).value();
        gathered_.reset();
        return taken;
    }

    /// @throws ContractViolation  nothing was gathered on this rank.
    [[nodiscard]] OptimizerState<Rule> const& on(int rank) const {
        if (!gathered_) {
            throw ContractViolation{concat(
                "rank ", rank, " has no state: call consolidate(", rank, ") on every rank before"
            )};
        }
        return *gathered_;
    }

    /// Collective.
    template <class Comm, class Together>
    void gather(
        Comm& comm,
        HostCollectives<Comm>& host,
        int to_rank,
        std::deque<Rule> const& rules,
        std::span<ShardGroup const> groups,
        Together const& together
    ) {
        bool const is_root = comm.rank() == to_rank;
        OptimizerState<Rule> state;
        std::optional<StateMessages> messages;
        together([&] {
            check_rank("to_rank", to_rank, comm.size());
            check_before_save(groups, rules);
        });
        gathered_.reset(); // not before all ranks agree, and then before its successor takes memory
        together([&] {
            messages.emplace(groups, device_of(comm));
            if (is_root) {
                state = {
                    {rules.begin(), rules.end()}, std::vector<Parameter>(parameter_count(groups))
                };
                for (std::size_t k = 0; k < groups.size(); ++k) {
                    auto const names = state_names_of(rules[k]);
                    make_tensors<Parameter>(groups[k], names, state.parameters);
                }
            }
        });
        for (ShardGroup const& group : groups) {
            gather_state<Comm, Parameter>(comm, host, to_rank, group, *messages, state.parameters);
        }
        if (is_root) {
            gathered_ = std::move(state);
        }
    }

    /// Replaces rules, step counts and state by those of one rank. Collective.
    template <class Comm, class Together>
    void deal(
        Comm& comm,
        HostCollectives<Comm>& host,
        int from_rank,
        OptimizerState<Rule> const& state,
        std::deque<Rule>& rules,
        std::span<ShardGroup> groups,
        Together const& together
    ) {
        bool const is_root = comm.rank() == from_rank;
        std::vector<Rule> taken;
        together([&] {
            check_rank("from_rank", from_rank, comm.size());
            for (ShardGroup const& group : groups) {
                check_layouts(group); // state comes in the order of values
            }
            if (is_root) {
                check(state, groups);
            }
            taken = is_root ? state.rules : std::vector<Rule>{rules.begin(), rules.end()};
        });
        Buffer const message{taken.data(), taken.size() * sizeof(Rule), DType::u8};
        host.broadcast(message, from_rank).wait();
        std::vector<std::vector<OptimizerShard>> shards;
        std::optional<StateMessages> messages;
        together([&] { // if rules keep as much state as before, its memory is reused
            messages.emplace(groups, device_of(comm));
            shards.resize(groups.size());
            for (std::size_t k = 0; k < groups.size(); ++k) {
                for (OptimizerShard const& shard : groups[k].shards) {
                    if (std::size_t const names = state_names_of(taken[k]).size();
                        names != shard.state().names()) {
                        shards[k].push_back(shard.with_state(names));
                    }
                }
            }
        });
        std::move(taken.begin(), taken.end(), rules.begin());
        for (std::size_t k = 0; k < groups.size(); ++k) {
            if (!shards[k].empty()) {
                groups[k].shards = std::move(shards[k]);
            }
            scatter_state<Comm, Parameter>(
                comm, host, from_rank, groups[k], *messages, state.parameters
            );
        }
        gathered_.reset(); // not before: `state` may be it
    }

    static void check_rank(char const* name, int rank, int size) {
        if (rank < 0 || rank >= size) {
            throw ContractViolation{
                concat("expected a ", name, " from 0 to ", size - 1, ", but got ", rank)
            };
        }
    }

private:
    using Parameter = typename OptimizerState<Rule>::Parameter;

    /// Throws ContractViolation unless the state fits the groups.
    static void check(OptimizerState<Rule> const& state, std::span<ShardGroup const> groups) {
        std::size_t const parameters = parameter_count(groups);
        if (state.rules.size() != groups.size() || state.parameters.size() != parameters) {
            throw ContractViolation{concat(
                "the state is of ",
                state.rules.size(),
                " groups of ",
                state.parameters.size(),
                " parameters, but the optimizer has ",
                groups.size(),
                " of ",
                parameters
            )};
        }
        for (std::size_t k = 0; k < groups.size(); ++k) {
            check_rule(state.rules[k]);
            auto const names = state_names_of(state.rules[k]);
            check_state<Parameter>(groups[k], names, state.parameters);
        }
    }

    std::optional<OptimizerState<Rule>> gathered_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/sharded/optimizer.hpp

namespace joinable { inline namespace v0 {

/// The ranks' shares of an optimizer: groups of parameters, their settings and state, and the step
/// that ZeroRedundancyOptimizer and ShardedDataParallel share. `Rule` is an UpdateRule or a
/// LocalOptimizer.
template <class Comm, class Rule>
class ShardedOptimizer {
    static_assert(models_communicator<Comm>());
    static_assert(detail::steps_shards<Rule>());
    static_assert(
        !std::same_as<typename detail::device_type_of<Comm>::type, SeveralDevices>,
        "sharded optimizer: PerDevice has several devices, but shards are dealt out on one; make an optimizer of the "
        "parameters of each device, with its communicator"
    );
    static_assert(
        detail::reduces_host_memory<Comm> || detail::has_visit_update<Rule> || LocalOptimizer<Rule>,
        "sharded optimizer: this communicator moves the memory of a device, where a rule steps by its member "
        "'template <class T, class F> decltype(auto) visit_update(std::uint64_t step, F const& f) const', which "
        "returns f(update) for an update that kernels call; see UpdateRule"
    );

public:
    /// The settings of a group. Set a learning rate here, equally on every active rank. If ranks
    /// have joined, all ranks take the settings of the lowest active rank with each step. Otherwise
    /// each element is stepped by its owner's settings, and the next roll call compares those that
    /// ranks have used, if the rule has agree_on(): a difference is a Mismatch on all ranks, one
    /// round after the step, two with look-ahead, and at the end of the guard with known lengths.
    /// The values of the step are mixed then. They are compared when a guard begins, too; where one ends, ranks that
    /// joined early take them from the highest that did not. After a guard that failed set them again on all ranks. Over a
    /// group (groups_of()) all its ranks take those of its lowest active rank with each step, and none are compared. The
    /// reference stays valid while the optimizer lives. Local.
    [[nodiscard]] Rule& rule(std::size_t group = 0) { return rules_.at(group); }

    /// Reads values of 16 bits into the masters again after the engine changed the values. If
    /// values are sharded it reads what this rank owns of all values: call it during the lifetime
    /// of the result of use_all(). Local.
    /// @throws ContractViolation  values are sharded and not gathered, a value was converted, or its elements come in
    ///         another order than when it was given.
    void reload() {
        for (Group const& group : groups_) {
            if (group.shards_values()) {
                group.values->take(group.shards, scratch_[0]);
            } else {
                detail::check_layouts(group);
            }
        }
        reload_masters([](Group const&, std::size_t) { return true; });
        device().finish();
    }

    /// Gathers the state of all ranks at `to_rank`, where state() returns it, in host memory.
    /// Collective, outside a guard.
    /// @throws ContractViolation  called in a guard, `to_rank` is out of range, or a rule keeps
    ///         another number of states than when its group was added; nothing was changed.
    /// @throws Mismatch  settings differ between ranks, as after a guard that failed; nothing was changed.
    /// @throws what the communicator throws.
    void consolidate(int to_rank = 0) {
        require_own_state();
        require_outside("consolidate()");
        state_.gather(shards_, host_, to_rank, rules_, groups_, [&](auto const& f) {
            fail_together("consolidate()", [&](AgreementList& compared) {
                detail::agree_on_rules(compared, rules_);
                f();
            });
        });
    }
    /// The result of consolidate() on this rank: rules, step counts and tensors, in the order of
    /// the parameters. The next step frees it. Local.
    /// @throws ContractViolation  nothing was gathered here since the last step.
    [[nodiscard]] OptimizerState<Rule> const& state() const { return state_.on(shards_.rank()); }
    /// Takes rules, step counts and state from rank `from_rank`; the other ranks' `state` is
    /// ignored. The state may come from any number of ranks and either partition. It has no values:
    /// load values of 16 bits before. Collective, outside a guard.
    /// @throws ContractViolation  called in a guard, `from_rank` is out of range, the state is of another model, or
    ///         the elements of a value come in another order than when it was given; then the other ranks throw
    ///         PeerFailed, and nothing was changed.
    void load(OptimizerState<Rule> const& state, int from_rank = 0) {
        require_own_state();
        require_outside("load()");
        require_same_state(state, from_rank);
        state_.deal(shards_, host_, from_rank, state, rules_, groups_, [&](auto const& f) {
            fail_together("load()", f);
        });
        if (has_groups()) { // a rule may compare no settings
            settings_.send(words_, 0, rules_, {}, {});
        }
    }

    /// The rank that steps parameter `i`. Local.
    /// @throws ContractViolation  the partition is flat, each rank steps all parameters, or `i`
    ///         needs no gradient or is out of range.
    [[nodiscard]] int owner_of(std::size_t i) const {
        bool const has_owners = !is_flat() && sharding_ != Sharding::none;
        for (Group const& group : groups_) {
            for (detail::OptimizerShard const& shard : group.shards) {
                for (detail::ShardPiece const& piece : shard.bucket().pieces) {
                    if (group.first + piece.parameter == i && has_owners) {
                        return piece.owner;
                    }
                }
            }
        }
        throw ContractViolation{detail::concat(
            "parameter ",
            static_cast<std::ptrdiff_t>(i), // which may have been -1
            has_owners  ? " has no owner: it needs no gradient, or there is none of this index"
            : is_flat() ? " has no owner: with Partition::flat ranks own runs of elements"
                        : " has no owner: with Sharding::none each rank steps all"
        )};
    }

    /// This rank's parameters, shards and step counts of each group, for Checkpoint. Adding a group
    /// invalidates references to its elements. Local.
    [[nodiscard]] std::vector<detail::ShardGroup> const& groups() const noexcept { return groups_; }
    /// The settings of all groups. Local.
    [[nodiscard]] std::deque<Rule> const& rules() const noexcept { return rules_; }
    /// Copies of what changes between steps, of all groups: UpdateRules, or what settings() refers to. Local.
    [[nodiscard]] std::vector<detail::SettingsOf<Rule>> settings() {
        std::vector<detail::SettingsOf<Rule>> all;
        for (Rule& rule : rules_) {
            all.push_back(detail::settings_of(rule));
        }
        return all;
    }
    /// Reads masters again from values that were written in place, for Checkpoint: of parameters for
    /// which `loads(group, i)`. Local.
    template <class Loads>
    void reload_masters(Loads const& loads) {
        for (Group const& group : groups_) {
            load_masters(group, [&](std::size_t i) { return loads(group, i); });
        }
    }
    /// Takes settings and step counts of another training of these parameters. Checkpoint then
    /// reads values and state in place. A shard is zeroed if the new settings keep another number
    /// of states. Local.
    /// @throws ContractViolation  there is not one rule for each group and one count for each
    ///         parameter; nothing was changed.
    void resume(std::vector<detail::SettingsOf<Rule>> rules, std::span<std::uint64_t const> steps) {
        if (rules.size() != groups_.size() || steps.size() != detail::parameter_count(groups_)) {
            throw ContractViolation{detail::concat(
                "resume() takes a rule for each of ",
                groups_.size(),
                " groups and a step count for each of ",
                detail::parameter_count(groups_),
                " parameters, but was given ",
                rules.size(),
                " rules and ",
                steps.size(),
                " counts"
            )};
        }
        state_.reset();
        for (std::size_t k = 0; k < groups_.size(); ++k) {
            Group& group = groups_[k];
            for (detail::OptimizerShard& shard : group.shards) {
                std::size_t const names = detail::state_names_of(rules[k]).size();
                if (names != shard.state().names()) {
                    shard = shard.with_state(names);
                }
            }
            auto const own = steps.subspan(group.first, group.steps.size());
            std::copy(own.begin(), own.end(), group.steps.begin());
        }
        for (std::size_t k = 0; k < groups_.size(); ++k) {
            detail::settings_of(rules_[k]) = std::move(rules[k]);
            detail::apply_settings_of(rules_[k]);
        }
    }

    /// Ranks that have joined take the settings that the lowest active rank has now, for Checkpoint.
    /// Collective.
    void take_settings(Round const& round) {
        if (round.active_count() != comm_.size()) {
            settings_.send(words(), round.buffer_source(), rules_, options_.shared, {});
        }
    }

    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    /// That of the ranks which share the state. Local.
    [[nodiscard]] Comm& shard_communicator() noexcept { return shards_; }
    /// Whether this rank's group is that of rank 0, of which a Checkpoint takes the state: other groups have the same.
    /// Collective.
    [[nodiscard]] bool writes_state() {
        if (!has_groups()) {
            return true;
        }
        std::uint64_t has_first = comm_.rank() == 0 ? 1 : 0;
        shard_words_.sum({&has_first, 1});
        return has_first != 0;
    }
    [[nodiscard]] JoinState& join_state() noexcept { return join_state_; }

    /// A line for each rank: the elements that it steps, and the bytes of its optimizer state,
    /// including masters. The same text on every rank, of a group if groups share the state. Local.
    [[nodiscard]] std::string table() const {
        return detail::table_of_shards(groups_, loads_.size());
    }
    /// Bytes of the averaged gradients, if this rank keeps only its part. Local.
    [[nodiscard]] std::size_t gradient_bytes() const noexcept {
        return detail::gradient_bytes_of(groups_);
    }
    /// Bytes of the values, if this rank keeps only its part or they lie in buckets. Local.
    [[nodiscard]] std::size_t value_bytes() const noexcept {
        return detail::value_bytes_of(groups_);
    }
    /// Bytes of the buckets in which gradients and values travel. Local.
    [[nodiscard]] std::size_t bucket_bytes() const noexcept { return arenas_.bytes(); }
    /// Bytes of optimizer state on this rank, including masters. Local.
    [[nodiscard]] std::size_t state_bytes() const noexcept {
        return detail::state_bytes_of(groups_);
    }

    /// Options, and the rule of each group.
    void agree_on(AgreementList& list) const {
        detail::agree_on_options(list, options_);
        for (std::size_t group = 0; group < groups_.size(); ++group) {
            list.add(
                detail::concat("parameters of group ", group), groups_[group].parameters.size()
            );
            detail::agree_on_rule(list, rules_[group]);
        }
    }

protected:
    using Group = detail::ShardGroup;

    /// `shards`: `comm`, or this rank's group of it, whose ranks share the state.
    ShardedOptimizer(Comm& comm, Comm& shards, ZeroOptions options, Sharding sharding)
        : comm_{comm}, shards_{shards}, host_{shards}, words_{comm}, shard_words_{shards},
          options_{std::move(options)}, sharding_{sharding},
          loads_(static_cast<std::size_t>(shards.size())), arenas_{detail::BufferMemory{shards}},
          scratch_{detail::Scratch{device()}, detail::Scratch{device()}},
          before_step_{shards, host_, sharding} {}
    ShardedOptimizer(ShardedOptimizer const&) = delete;
    ShardedOptimizer& operator=(ShardedOptimizer const&) = delete;
    ~ShardedOptimizer() = default;

    [[nodiscard]] ZeroOptions const& optimizer_options() const noexcept { return options_; }
    [[nodiscard]] Sharding sharding() const noexcept { return sharding_; }
    /// Whether refresh() takes this rule and this sharding.
    [[nodiscard]] bool can_refresh() const noexcept { return UpdateRule<Rule> && !shards_values(); }
    /// After a failure: values that were moved to buckets stay there, which are then never freed.
    static void leave_values(std::span<Group const> groups) noexcept {
        for (Group const& group : groups) {
            if (group.values) {
                group.values->leave();
            }
        }
    }
    /// By which all ranks sum a few words: see GradientParticipant::words().
    [[nodiscard]] detail::ControlCommunicator& words() noexcept {
        detail::ControlCommunicator* const words = detail::words_of(join_state_);
        return words != nullptr ? *words : words_;
    }

    /// Claims that its parameters are stepped here, and, with `averages`, that their gradients are
    /// averaged here.
    void claim(ParameterClaims& claims, bool averages) const {
        for (Group const& group : groups_) {
            claims.add_stepped(group.given(), group.first);
            if (averages) {
                claims.add_averaged(group.given(), group.first);
            }
        }
    }

    void require_outside(std::string_view verb) const {
        if (detail::session_of(join_state_) != nullptr) {
            throw ContractViolation{detail::concat(
                verb, " was called in a guard; call it before or after, on every rank"
            )};
        }
        detail::require_listed(join_state_, comm_, verb);
        detail::require_listed(join_state_, shards_, verb);
    }

    /// Runs f(), or f(list), which adds what ranks compare; if it throws on one rank, all ranks throw. Collective.
    template <class F>
    void fail_together(char const* verb, F const& f) {
        AgreementList compared;
        fail_together(compared, [&] {
            compared.begin_section("sharded optimizers differ: ");
            compared.add("verb", verb);
            if constexpr (std::invocable<F const&, AgreementList&>) {
                f(compared);
            } else {
                f();
            }
        });
    }
    /// The same; ranks compare the list that f() fills.
    template <class F>
    void fail_together(AgreementList const& compared, F const& f) {
        std::exception_ptr const error = detail::exception_of(f);
        detail::agree(words_, compared, error);
    }

    /// Adds a group. `compare(list)` adds further items to compare, and `also(group)` prepares more
    /// on each rank. If they throw on one rank, all ranks throw. Collective.
    template <class Parameters, class Compare, class F>
    void
    add(Parameters&& parameters,
        Rule rule,
        detail::ShardChoices const& choices,
        Compare const& compare,
        F const& also) {
        detail::require_unguarded(detail::identity_of(comm_), "a sharded optimizer that is made");
        std::size_t const first = groups_.size();
        std::vector<std::size_t> loads; // before
        auto const prepare = [&](Making& making) {
            loads = loads_;
            ParameterList list;
            if constexpr (std::is_invocable_r_v<
                              ParameterList,
                              Parameters>) { // what it throws is told
                list = std::forward<Parameters>(parameters)();
            } else {
                list = joinable::parameters(std::forward<Parameters>(parameters));
            }
            compare(making.compared);
            making.first = first;
            for (AnyParameter const& parameter : list) {
                making.sent.push_back(parameter.value());
            }
            Rule& kept = rules_.emplace_back(std::move(rule));
            make_group(making, std::move(list), kept, choices, also);
        };
        auto const undo = [&] {
            while (rules_.size() > first) {
                rules_.pop_back();
            }
            groups_.erase(groups_.begin() + std::ptrdiff_t(first), groups_.end());
            given_.erase(given_.begin() + std::ptrdiff_t(first), given_.end());
            std::copy(loads.begin(), loads.end(), loads_.begin());
        };
        auto const loads_all = [](std::size_t, std::size_t) { return true; };
        make_groups("group of parameters", prepare, [] {}, loads_all, undo);
    }

    /// refresh() takes no other owners than those that were given.
    static void require_owners_for(std::vector<int> const& owners, ParameterList const& list) {
        if (!owners.empty() && owners.size() != list.size()) {
            throw ContractViolation{detail::concat(
                "refresh() lists ",
                list.size(),
                " parameters, but the owners that were given are those of ",
                owners.size(),
                "; make the optimizer anew with an owner for each, and move its state with a Checkpoint"
            )};
        }
    }
    /// Makes all groups anew, of `ranges`, one for each, or of the same parameters if there are none, and moves the
    /// state. `also(group)` prepares more on each rank once the groups are all there, the last one in `group`. If it throws
    /// on one rank, all ranks throw, and the groups are those of before. Collective, outside a guard.
    template <class F, class... Ranges>
    void relist(F const& also, Ranges&&... ranges) {
        static_assert(
            UpdateRule<Rule>,
            "refresh: an engine's optimizer keeps its state itself; make the optimizer anew, of the new parameters, and "
            "move the state with a Checkpoint or on the owner of each parameter, which owner_of() names"
        );
        if constexpr (UpdateRule<Rule>) {
            std::vector<std::function<ParameterList()>> const lists{std::function<ParameterList()>{
                [&] { return joinable::parameters(std::forward<Ranges>(ranges)); }
            }...};
            relist_groups(lists, also);
        }
    }
    template <class F>
    void relist_groups(std::vector<std::function<ParameterList()>> const& lists, F const& also) {
        fail_together("refresh()", [&] { // before anything is gathered
            if (shards_values()) {
                throw ContractViolation{
                    "refresh() is not for Sharding::parameters, where no rank has whole values; write a Checkpoint, make "
                    "the ShardedDataParallel anew, and read it"
                };
            }
            detail::require_no_window(detail::WindowOf{join_state_}, [&] { return are_cleared(); });
        });
        consolidate(0); // each rank gets what it owns from there
        bool has_begun = false;
        std::vector<Group> before;
        std::vector<Given> given;
        std::vector<std::size_t> loads(loads_.size());
        std::vector<detail::Relisted> relisted;
        auto const prepare = [&](Making& making) {
            has_begun = true;
            exchange_groups(before, given, loads);
            if (!lists.empty() && lists.size() != before.size()) {
                throw ContractViolation{detail::concat(
                    "refresh() was given ",
                    lists.size(),
                    " lists of parameters, but there are ",
                    before.size(),
                    " groups; give one for each, in their order, or none for the same parameters"
                )};
            }
            former_values_.reserve(former_values_.size() + before.size());
            for (std::size_t k = 0; k < before.size(); ++k) {
                ParameterList const list = lists.empty() ? before[k].given() : lists[k]();
                require_owners_for(given[k].choices.owners, list);
                make_group(making, list, rules_[k], given[k].choices, [&](Group const& group) {
                    relisted.emplace_back(*given[k].listed, list, lists.empty());
                    relisted.back().agree_on(making.compared, list);
                    if (k + 1 == before.size()) {
                        also(group);
                    }
                });
                for (std::size_t i = 0; i < list.size(); ++i) {
                    if (!relisted[k].is_equal(i)) {
                        making.sent.push_back(list[i].value());
                    }
                }
            }
        };
        auto const undo = [&] {
            if (has_begun) {
                exchange_groups(before, given, loads);
            }
            state_.reset();
        };
        auto const loads_anew = [&](std::size_t k, std::size_t i) {
            return !relisted[k].was_trained(i) || !relisted[k].is_equal(i);
        };
        make_groups("refresh()", prepare, [&] { deal_again(before, relisted); }, loads_anew, undo);
        for (Group const& group : before) {
            if (group.values) {
                former_values_.push_back(group.values);
            }
        }
        std::erase_if(former_values_, [](auto const& values) { return !values->holds_any(); });
    }

    /// Whether all gradients are absent or zeros. Local.
    [[nodiscard]] bool are_cleared() {
        return std::all_of(groups_.begin(), groups_.end(), [&](Group const& group) {
            return detail::are_cleared(group.given(), device());
        });
    }

    /// They grow during a step only if an engine changes the layout of a tensor that was sent in
    /// place.
    [[nodiscard]] detail::BucketArenas& arenas() noexcept { return arenas_; }

    // The script of a step, the same on active and shadowing ranks. Gradients are reduced between
    // begin_step() and finish_step().

    /// `has_refresh`: see detail::or_refresh().
    void begin_step(Round const& round, bool has_refresh) {
        for (std::size_t group = 0; group < groups_.size(); ++group) {
            detail::check_before_step(groups_[group], rules_[group], has_refresh);
        }
        state_.reset(); // it is of an earlier step
        // In a guard with groups, ranks of a group do not compare them.
        bool const always =
            detail::session_of(join_state_) != nullptr && detail::words_of(join_state_) == nullptr;
        settings_.share(comm_, words(), round, rules_, options_.shared, groups_, always);
        has_all_ranks_ = round.active_count() == comm_.size();
    }
    /// Where a guard ends: a rank that joined early knows the settings of the last step, not those for the next.
    void take_settings(JoinResult const& result) {
        if (static_cast<int>(result.last_joiners.size()) != comm_.size()) {
            settings_.send(words(), result.authoritative_rank, rules_, options_.shared, {});
        }
    }
    void finish_step() {
        if (!options_.before_step || before_step_(options_.before_step, groups_, words())) {
            if constexpr (detail::steps_all_at_once<Rule>) {
                step_all_at_once();
                finish_stepped();
            } else {
                step_and_exchange([this](auto const&... which) { step_pieces(which...); });
            }
        }
    }
    /// Replaces finish_step() if each shard has been stepped.
    void finish_stepped() {
        step_and_exchange([](auto const&...) {});
    }
    /// Steps what this rank owns of a shard of group `k` whose gradients are reduced, unless the rule steps all at once.
    /// Local. No requires-clause says so, because nvcc 13 then refuses it to derived classes.
    void step_shard(std::size_t k, detail::OptimizerShard const& shard) {
        step_pieces(k, shard, shard.kept(), false);
    }

private:
    using Exchanges = detail::ShardExchanges<Comm>;

    static void require_own_state() {
        static_assert(
            !detail::keeps_state_with_shard<Rule>,
            "sharded optimizer: a Checkpoint has the state of this engine's optimizer; write and read it by Checkpoint"
        );
        static_assert(
            UpdateRule<Rule> || detail::keeps_state_with_shard<Rule>,
            "sharded optimizer: an engine's optimizer keeps its state itself; save and load it on the "
            "owner of each parameter, which owner_of() names"
        );
    }

    /// An engine's optimizer has the whole shard, because Partition::flat refuses it.
    void step_pieces(
        std::size_t k,
        [[maybe_unused]] detail::OptimizerShard const& shard,
        [[maybe_unused]] std::span<detail::ShardPiece const> pieces,
        [[maybe_unused]] bool is_packed
    ) {
        [[maybe_unused]] Group& group = groups_[k];
        if constexpr (detail::steps_all_at_once<Rule>) {
            return;
        } else if constexpr (LocalOptimizer<Rule>) {
            shard.step_whole(
                group.parameters, group.gradients, rules_[k], group.steps, group.first
            );
        } else {
            shard.step(
                pieces,
                is_packed,
                group.parameters,
                group.gradients,
                rules_[k],
                group.steps,
                scratch_
            );
        }
    }
    void step_all_at_once() {
        device().finish();
        std::vector<WholeParameter> all;
        for (std::size_t k = 0; k < groups_.size(); ++k) {
            Group& group = groups_[k];
            all.clear();
            for (detail::OptimizerShard const& shard : group.shards) {
                shard.for_each_whole(
                    group.parameters,
                    group.gradients,
                    group.steps,
                    group.first,
                    [&](WholeParameter&& parameter) { all.push_back(std::move(parameter)); }
                );
            }
            rules_[k].step(std::span<WholeParameter const>{all});
        }
    }
    /// Gives an engine's optimizer what this rank steps; only then its settings are known.
    static void hand_over(Group& group, Rule& rule) {
        std::vector<WholeParameter> own;
        for (detail::OptimizerShard const& shard : group.shards) {
            for (detail::ShardPiece const& piece : shard.kept()) {
                std::size_t const i = piece.parameter;
                own.push_back({group.first + i, group.parameters[i].value(), {}, 0, {}});
            }
        }
        rule.take(std::span<WholeParameter const>{own});
        detail::check_rule(rule);
        for (detail::OptimizerShard& shard : group.shards) {
            shard = shard.with_state(detail::state_names_of(rule).size());
        }
    }

    /// How a group was given.
    struct Given {
        detail::ShardChoices choices;
        std::optional<detail::ListedModel> listed;
    };
    /// Groups that are being made, from the first one on.
    struct Making {
        std::size_t first = 0;
        AgreementList compared = {};
        std::vector<ParameterList> kept = {}; ///< of each group: what takes their place
        std::vector<AnyView> sent = {};       ///< what all ranks take from rank 0
    };

    /// Makes the next group, of these parameters; `also(group)` prepares more before it is there. Local; a failure here
    /// becomes a failure on all ranks.
    template <class F>
    void make_group(
        Making& making,
        ParameterList list,
        Rule& rule,
        detail::ShardChoices const& choices,
        F const& also
    ) {
        Group group;
        group.parameters = std::move(list);
        plan(group, rule, choices, making.compared);
        making.kept.push_back(make_store(group));
        Given given{choices, std::nullopt};
        list_given(given, group.parameters);
        also(std::as_const(group));
        given_.push_back(std::move(given));
        groups_.push_back(std::move(group));
    }
    /// Enters the memory of the groups from `first` on.
    void enter_made(detail::ModelEntry& entry, std::size_t first) const {
        ParameterList all;
        for (std::size_t k = first; k < groups_.size(); ++k) {
            append(all, groups_[k].parameters);
        }
        entry.enter(all, false);
    }
    /// Runs prepare(making), which makes groups on each rank, then accept() once all ranks have them, and moves their
    /// values to where they are kept, with masters of those for which `loads(group, i)`. If one throws on one rank, all
    /// ranks throw after undo(), which brings back what was before. Collective.
    template <class Prepare, class Accept, class Loads, class Undo>
    void make_groups(
        char const* verb,
        Prepare const& prepare,
        Accept const& accept,
        Loads const& loads,
        Undo const& undo
    ) {
        Making making;
        std::optional<detail::CoalescedBroadcast> values;
        try {
            detail::ModelEntry entry{comm_};
            fail_together(making.compared, [&] {
                prepare(making);
                enter_made(entry, making.first);
                values.emplace(
                    detail::tensor_list(std::move(making.sent)),
                    options_.bucket_cap_bytes / 2, // there are two of them
                    "parameter",
                    detail::BufferMemory{comm_}
                );
            });
            entry.leave();
            accept();
            values->run(comm_, 0);
        } catch (...) {
            undo();
            throw;
        }
        std::span<Group> const made = std::span{groups_}.subspan(making.first);
        try {
            fail_together(verb, [&] {
                for (std::size_t k = making.first; k < groups_.size(); ++k) {
                    Group const& group = groups_[k];
                    if (group.values) {
                        group.values->take(group.shards, scratch_[0]);
                        list_given(given_[k], group.parameters); // they lie elsewhere now
                    }
                    load_masters(group, [&](std::size_t i) { return loads(k, i); });
                }
                device().finish(); // before the engine's memory ends
            });
        } catch (...) {
            leave_values(made);
            undo();
            // A refresh brings back groups whose values may have moved to those that it made.
            for (Group const& group : std::span{groups_}.subspan(making.first)) {
                if (group.values) {
                    static_cast<void>(detail::exception_of([&] {
                        group.values->take(group.shards, scratch_[0]);
                    }));
                }
            }
            throw;
        }
        for (std::size_t k = 0; k < made.size(); ++k) {
            if (made[k].values) {
                made[k].values->release();
                made[k].parameters = std::move(making.kept[k]);
            }
        }
    }

    /// Lists what refresh() compares with; it refuses values that lie in parts.
    void list_given(Given& given, ParameterList const& parameters) const {
        if (!shards_values()) {
            static_cast<void>(given.listed.emplace(parameters, true));
        }
    }
    void load_masters(Group const& group, std::function<bool(std::size_t)> const& loads) {
        for (detail::OptimizerShard const& shard : group.shards) {
            shard.load_masters(group.parameters, scratch_[0], loads);
        }
    }
    /// Makes these the groups, and the present ones these.
    void exchange_groups(
        std::vector<Group>& groups, std::vector<Given>& given, std::vector<std::size_t>& loads
    ) noexcept {
        std::swap(groups_, groups);
        std::swap(given_, given);
        std::swap(loads_, loads);
    }
    /// Memory for the values of a group, if the engine's is not used. Returns what then takes the place of its parameters.
    [[nodiscard]] ParameterList make_store(Group& group) const {
        if (!shards_values() && !options_.parameters_as_bucket_view) {
            return {};
        }
        group.values = std::make_shared<detail::ValueStore>(
            group.parameters,
            group.shards,
            shards_values() ? detail::Residence::own_part : detail::Residence::bucket,
            detail::BufferMemory{shards_}
        );
        return detail::ValueStore::list(group.values);
    }

    /// Deals out what consolidate() gathered: to each parameter that was trained before what is its own. Collective.
    void
    deal_again(std::vector<Group> const& before, std::vector<detail::Relisted> const& relisted) {
        OptimizerState<Rule> state;
        auto const together = [&](auto const& f) { fail_together("refresh()", f); };
        together([&] {
            if (shards_.rank() != 0) {
                return;
            }
            OptimizerState<Rule> former = state_.take();
            state = {
                std::move(former.rules),
                std::vector<typename OptimizerState<Rule>::Parameter>(
                    detail::parameter_count(groups_)
                )
            };
            for (std::size_t k = 0; k < groups_.size(); ++k) {
                std::span const all{state.parameters};
                detail::make_tensors(groups_[k], detail::state_names_of(rules_[k]), all);
                for (std::size_t i = 0; i < groups_[k].parameters.size(); ++i) {
                    if (relisted[k].was_trained(i) && groups_[k].parameters[i].requires_grad()) {
                        all[groups_[k].first + i] =
                            std::move(former.parameters[before[k].first + *relisted[k].was(i)]);
                    }
                }
            }
        });
        state_.deal(shards_, host_, 0, state, rules_, groups_, together);
    }

    /// Whether groups of ranks share the state, each all of it.
    [[nodiscard]] bool has_groups() const noexcept {
        return detail::identity_of(comm_) != detail::identity_of(shards_);
    }
    /// The values of groups that took other states would part. Collective.
    void require_same_state(OptimizerState<Rule> const& state, int from_rank) {
        if (!has_groups()) {
            return;
        }
        std::uint64_t common = 0;
        fail_together("load()", [&] { // before some wait in their group
            state_.check_rank("from_rank", from_rank, shards_.size());
            if (shards_.rank() != from_rank) {
                return;
            }
            AgreementList rules;
            detail::agree_on_rules(rules, state.rules);
            detail::Hash hash;
            hash.add(rules.hash_from(0));
            for (auto const& parameter : state.parameters) {
                hash.add(parameter.steps);
                for (StateTensor const& tensor : parameter.tensors) {
                    auto const* const elements =
                        reinterpret_cast<char const*>(tensor.elements.data());
                    hash.add({elements, tensor.elements.size()});
                }
            }
            common = hash.value();
        });
        fail_together("load()", [&](AgreementList& compared) {
            shard_words_.broadcast({&common, 1}, from_rank);
            compared.add("hash of the state that a group of shards loads", common);
        });
    }

    [[nodiscard]] Device& device() noexcept { return detail::device_of(comm_); }
    [[nodiscard]] bool shards_values() const noexcept { return sharding_ == Sharding::parameters; }
    /// Whether the step sends the values that owners have stepped to the other ranks.
    [[nodiscard]] bool sends_values() const noexcept {
        return sharding_ != Sharding::none && !shards_values();
    }
    /// Whether it copies them into buckets.
    [[nodiscard]] bool packs_values() const noexcept {
        return sends_values() && !options_.parameters_as_bucket_view;
    }
    [[nodiscard]] bool is_flat() const noexcept { return detail::is_flat(options_); }

    void check_groups() const {
        if (shards_.size() > comm_.size()) {
            throw ContractViolation{detail::concat(
                "the communicator of the ranks that share the state has more ranks (",
                shards_.size(),
                ") than that of all ranks (",
                comm_.size(),
                "); give that of all first"
            )};
        }
        if (has_groups() && options_.reduces_gradients) {
            throw ContractViolation{
                "ZeroOptions::reduces_gradients averages over the ranks that share the state alone; leave the option out, "
                "and average by a DistributedDataParallel over all ranks"
            };
        }
    }
    void
    plan(Group& group, Rule& rule, detail::ShardChoices const& choices, AgreementList& compared) {
        check_groups();
        detail::check_group<Rule>(
            group.parameters, rule, choices, groups_, options_, sharding_, device(), shards_.size()
        );
        group.first = detail::parameter_count(groups_);
        if constexpr (!detail::takes_parameters<Rule>) {
            detail::check_rule(rule);
        }
        detail::cut_group(
            group,
            rule,
            choices,
            loads_,
            options_,
            sharding_,
            shards_.rank(),
            detail::reaches_all(shards_),
            device()
        );
        if constexpr (detail::takes_parameters<Rule>) {
            hand_over(group, rule);
        }
        if constexpr (!detail::reduces_host_memory<Comm> && UpdateRule<Rule>) {
            detail::check_kernels(rule, device());
        }
        compared.begin_section("options differ: ");
        detail::agree_on_options(compared, options_);
        compared.add("groups of ranks share the state", has_groups());
        compared.add("owners", choices.owners);
        compared.add("units", choices.units);
        detail::agree_on_rule(compared, rule);
        compared.begin_section("models differ: ");
        static_cast<void>(detail::agree_on(compared, group.parameters, device()));
        group.steps.resize(group.parameters.size());
        group.gradients.reserve(detail::reduces_to_owners(sharding_) ? 0 : group.parameters.size());
        make_arenas(group);
        groups_.reserve(groups_.size() + 1);
    }

    /// Allocates memory for the largest packed bucket and for messages.
    void make_arenas(Group const& group) {
        std::size_t reduced = 0;
        std::size_t packed = 0;
        for (detail::OptimizerShard const& shard : group.shards) {
            reduced = (std::max)(
                reduced, detail::reduces_to_owners(sharding_) ? shard.bucket_bytes() : 0
            );
            packed = (std::max)(packed, packs_values() ? packed_bytes(group, shard) : 0);
        }
        arenas_.reserve(1, (std::max)(reduced, packed));
        arenas_.reserve(2, packed);
        std::size_t const parameters = group.first + group.parameters.size();
        settings_.reserve(groups_.size() + 1, parameters, options_.shared);
    }

    /// The bytes of a bucket's values that are not sent from where they lie. Counts them for its next exchange.
    [[nodiscard]] std::size_t
    packed_bytes(Group const& group, detail::OptimizerShard const& shard, std::size_t turn = 0) {
        return shard.count_packed(group.parameters, packed_counts_[turn]) * shard.element();
    }

    /// Lists the rows that this rank is about to step, and how many each owner steps of what it owns.
    void list_rows() {
        row_counts_.clear();
        auto const for_each = [&](auto const& f) {
            for (Group& group : groups_) {
                for (detail::OptimizerShard const& shard : group.shards) {
                    if (shard.bucket().is_rows) {
                        f(group, shard);
                    }
                }
            }
        };
        for_each([&](Group& group, detail::OptimizerShard const& shard) {
            shard.list_rows(group.parameters, group.gradients);
            std::size_t const i = shard.bucket().pieces.front().parameter;
            row_counts_.push_back(group.gradients.rows(i).indices.size());
        });
        if (row_counts_.empty() || !sends_values()) {
            return;
        }
        (has_groups() ? shard_words_ : words()).sum(row_counts_);
        auto count = row_counts_.begin();
        for_each([&](Group& group, detail::OptimizerShard const& shard) {
            std::size_t const i = shard.bucket().pieces.front().parameter;
            group.gradients.rows(i).indices.resize(static_cast<std::size_t>(*count++));
        });
    }

    /// Steps the next bucket while one travels. If values are sharded, the passes exchange them.
    template <class F>
    void step_and_exchange(F const& step) {
        if (has_all_ranks_) { // else settings have been sent
            settings_.note(join_state_, rules_);
        }
        list_rows();
        Exchanges exchanges;
        try {
            for (std::size_t k = 0; k < groups_.size(); ++k) {
                for (std::size_t s = 0; s < groups_[k].shards.size(); ++s) {
                    step_and_exchange(step, k, s, exchanges);
                }
            }
            exchanges.finish_one();
        } catch (...) {
            // Before an exchange is destroyed, which aborts without the text of the exception.
            if constexpr (Aborts<Comm>) {
                if (exchanges.has_any()) {
                    shards_.abort(detail::blamed_on(
                        shards_.rank(), detail::failure_of(std::current_exception())
                    ));
                    if (has_groups() && detail::session_of(join_state_) == nullptr) {
                        detail::abort_for(words_, detail::failure_of(std::current_exception()));
                    }
                }
            }
            throw;
        }
        device().finish();
    }
    template <class F>
    void step_and_exchange(F const& step, std::size_t k, std::size_t s, Exchanges& exchanges) {
        Group& group = groups_[k];
        ParameterList const& parameters = group.parameters;
        detail::OptimizerShard const& shard = group.shards[s];
        auto const send = [&](auto&&... what) {
            exchanges.start(shards_, parameters, shard, what...);
        };
        if (!sends_values()) {
            step(k, shard, shard.kept(), false);
        } else if (shard.bucket().is_rows) {
            step(k, shard, shard.kept(), true);
            send(group.gradients.rows(shard.bucket().pieces.front().parameter));
        } else if (group.values) {
            step(k, shard, shard.kept(), false);
            send(group.values->at(s), shard.bucket().counts, nullptr);
        } else {
            std::size_t const turn = exchanges.turn();
            std::size_t const bytes = packed_bytes(group, shard, turn);
            if (bytes != 0 || shard.lone().size() != shard.bucket().pieces.size()) {
                step(k, shard, shard.kept(), true);
                send(arenas_.data(turn, bytes), packed_counts_[turn], &scratch_[0]);
            }
            for (detail::ShardPiece const& piece : shard.lone()) {
                if (shard.travels_alone(parameters, piece)) {
                    bool const is_own = piece.owner == shards_.rank();
                    step(k, shard, std::span{&piece, is_own ? 1U : 0U}, false);
                    send(piece);
                }
            }
        }
    }

    Comm& comm_;
    Comm& shards_;                       ///< which share the state
    detail::HostCollectives<Comm> host_; ///< of these
    detail::ControlOver<Comm&> words_;   ///< outside guards
    detail::ControlOver<Comm&> shard_words_;
    ZeroOptions options_;
    Sharding sharding_;
    std::deque<Rule> rules_; ///< of the groups; none moves when one is added
    std::vector<Group> groups_;
    std::vector<Given> given_; ///< of the groups
    std::vector<std::shared_ptr<detail::ValueStore>>
        former_values_;              ///< of groups before: values of frozen parameters lie there
    std::vector<std::size_t> loads_; ///< elements of each rank, by the rule of by_parameters
    detail::BucketArenas arenas_;    ///< of the bucket in flight and the next one
    std::vector<std::size_t> packed_counts_[2]; ///< of their packed elements
    detail::Scratch scratch_[2];
    detail::ShardedSettings<Rule> settings_;
    std::vector<std::uint64_t> row_counts_; ///< of each parameter whose gradients are rows
    bool has_all_ranks_ = false;            ///< whether all ranks are active in the round
    detail::ShardedBeforeStep<Comm> before_step_;
    detail::StateExchange<Rule> state_;
    JoinState join_state_;
};

}} // namespace joinable::v0

// ---- joinable/participant/sharded/options.hpp

namespace joinable { inline namespace v0 {

/// Options of a ShardedDataParallel. All except `before_step` must be the same on every rank.
struct ShardedOptions {
    Sharding sharding = Sharding::optimizer;
    Partition partition = Partition::by_parameters;
    /// The owner of each parameter of the constructor's list, instead of the rule of by_parameters.
    std::vector<int> owners = {};
    /// Gradients and values travel in buckets, which close when they reach this size. From
    /// Sharding::gradients on a rank has memory for two of them, and for as many more as fill at
    /// the same time. With Sharding::parameters such a run of parameters is a unit, unless `units`
    /// says otherwise. The values of two units exist at a time, plus those of units that a pass
    /// holds longer.
    std::size_t bucket_cap_bytes = std::size_t{25} << 20U;
    GradientKind gradient_kind = GradientKind::mean;
    /// As in DataParallelOptions.
    bool broadcast_buffers = true;
    BufferSync buffer_sync = BufferSync::after_forward;
    bool sync_at_end = true;
    /// As in ZeroOptions.
    std::function<bool(ShardGradients const&)> before_step = {};
    std::vector<SharedObject> shared = {};
    /// Steps what this rank owns of a bucket as soon as its averages arrive, while the backward
    /// pass still runs. `ready(i)` then also means that the pass no longer reads value i, and
    /// `unused` that it reads none of the listed values. Settings must be set before backward().
    /// After a failure in the pass some owners have stepped: continue from a checkpoint. From
    /// Sharding::gradients on; not together with `before_step`, which sees all gradients before the
    /// first step.
    bool step_in_backward = false;
    /// As in DataParallelOptions, if all ranks have all averages. Off: a rank has each gradient
    /// twice, its own and the one in a bucket.
    bool gradient_as_bucket_view = false;
    /// As in DataParallelOptions, if all ranks have all averages. From Sharding::gradients on,
    /// gradients travel during the pass, and are compared at its end. One that is released at
    /// ready(i) is found if the pass makes it anew.
    bool verify_ready = false;
    /// With Sharding::parameters: the number of parameters in each unit, in list order, such as
    /// those of each layer, instead of runs of bucket_cap_bytes. For the constructor's list;
    /// frozen parameters count, and a unit of only frozen ones is not gathered.
    std::vector<std::size_t> units = {};
    /// As in ZeroOptions, with Sharding::optimizer or Sharding::gradients.
    bool parameters_as_bucket_view = false;
};

namespace detail {

/// The options that the optimizer needs.
[[nodiscard]] inline ZeroOptions zero_options(ShardedOptions const& options) {
    return {
        // If each rank steps everything, it steps whole parameters.
        .partition =
            options.sharding == Sharding::none ? Partition::by_parameters : options.partition,
        .owners = options.owners,
        .bucket_cap_bytes = options.bucket_cap_bytes,
        .reduces_gradients = detail::reduces_to_owners(options.sharding),
        .before_step = options.before_step,
        .shared = options.shared,
        .parameters_as_bucket_view = options.parameters_as_bucket_view,
    };
}

/// The options that the passes need.
[[nodiscard]] inline DataParallelOptions data_parallel_options(ShardedOptions const& options) {
    return {
        .bucket_cap_bytes = options.bucket_cap_bytes,
        .gradient_as_bucket_view = options.gradient_as_bucket_view,
        .broadcast_buffers = options.broadcast_buffers,
        .gradient_kind = options.gradient_kind,
        .buffer_sync = options.buffer_sync,
        .sync_at_end = options.sync_at_end,
        .verify_ready = options.verify_ready,
    };
}

} // namespace detail

}} // namespace joinable::v0

// ---- joinable/participant/sharded/data_parallel.hpp

namespace joinable { inline namespace v0 {

namespace detail {

/// Checks the communicator before a base class does.
template <class Comm, class Times>
struct ShardedParticipantOver {
    static_assert(models_communicator<Comm>());
    using type = GradientParticipant<Comm, Reducer<Comm, ToOwners<Comm>, Times>>;
};

} // namespace detail

/// Trains replicas of a model and shards a part of it among the ranks: the state of the optimizer,
/// or also the averaged gradients, or also the values (ShardedOptions::sharding; the stages 1, 2
/// and 3 of ZeRO, Rajbhandari et al., 2020), or nothing, for comparison. It combines
/// DistributedDataParallel and ZeroRedundancyOptimizer in one participant.
///
/// @code
/// joinable::ShardedDataParallel sharded{
///     comm, model.parameters(), joinable::Adam{.learning_rate = 1e-2},
///     joinable::ShardedOptions{.sharding = joinable::Sharding::gradients}};
/// joinable::Join guard{joinable::participants(sharded)};
/// for (auto const& batch : my_shard) {
///     sharded.forward([&] { loss = model.forward(batch); });
///     sharded.backward([&](auto ready) { model.backward(ready); });
///     sharded.step();
/// }
/// guard.finish();
/// @endcode
///
/// The values equal those of an unsharded optimizer on every rank, bit for bit, in whatever round a
/// rank runs out of inputs. They are equal up to rounding if gradients of 16 bits use a
/// communicator that does not model ScalesScatteredSums, or if a communicator's reduce-scatter sums in
/// another order than its all-reduce, as that of MPICH does. With Sharding::gradients a parameter's own
/// gradient keeps what the pass wrote. It is released if parameter_traits have `release_grad`, and
/// counts as zeros if the pass does not use the parameter. Averages are visible in
/// ShardedOptions::before_step. Zero gradients before the pass or after the step.
///
/// With Sharding::parameters a pass also takes `use`. `use(i)` waits for value i, which exists
/// during the lifetime of the returned object:
/// @code
/// sharded.forward([&](auto use) {
///     for (std::size_t i = 0; i < layers; ++i) {
///         auto const held = use(i);
///         model.forward(i, batch);
///     }
/// });
/// sharded.backward([&](auto ready, auto use) { ... });
/// @endcode
/// All ranks gather units of parameters once per pass: in ascending order in a forward pass, in
/// descending order in a backward pass. Joined ranks follow. Hold a value that is used again in
/// between. The gradients of a unit must be ready before the backward pass needs the second unit
/// after it. Values are released at construction and destruction: read them during the lifetime of
/// the result of use_all().
///
/// `Rule` is an UpdateRule or a LocalOptimizer. `Times` is notified when rounds and buckets of
/// gradients begin and end.
template <class Comm, class Rule, Timeline Times>
class ShardedDataParallel : public ShardedOptimizer<Comm, Rule>, // outlives gradients in flight
                            public detail::ShardedParticipantOver<Comm, Times>::type {
    using Training = typename detail::ShardedParticipantOver<Comm, Times>::type;
    using Optimizer = ShardedOptimizer<Comm, Rule>;

public:
    /// The result of use() in a pass: values exist during its lifetime, or until its release().
    /// Move-only.
    using HeldValues = typename detail::ToOwners<Comm>::Held;

    /// Collective. `parameters` is a range that joinable::parameters() takes, `buffers` the result
    /// of joinable::buffers(). All ranks agree on them, on the rule and on the options, then take
    /// rank 0's values. The parameters must outlive this object.
    /// @throws ContractViolation  as for ZeroRedundancyOptimizer and DistributedDataParallel; with
    ///         Sharding::parameters also if a value cannot be set. The other ranks throw
    ///         PeerFailed.
    /// @throws Mismatch  ranks differ; the text names the first parameter or setting that does.
    template <class Parameters>
    ShardedDataParallel(
        Comm& comm,
        Parameters&& parameters,
        BufferList buffers,
        Rule rule,
        ShardedOptions const& options = {}
    )
        : Optimizer{comm, comm, detail::zero_options(options), options.sharding},
          Training{
              comm, Optimizer::join_state(), options.gradient_kind, true, Optimizer::can_refresh()
          },
          steps_in_backward_{options.step_in_backward},
          buckets_{detail::bucket_options(detail::data_parallel_options(options))} {
        std::optional<detail::CoalescedBroadcast> start;
        DataParallelOptions passes = detail::data_parallel_options(options);
        auto const compare = [&](AgreementList& list) {
            check(options);
            list.begin_section("options differ: ");
            detail::add_requested_checks(list, passes, false, detail::device_of(comm));
            compare_sharding(list);
            detail::agree_on(list, passes);
            list.begin_section("models differ: ");
            detail::agree_on(list, buffers, "buffer", detail::device_of(comm));
        };
        detail::ShardChoices const choices{options.owners, options.units};
        try {
            add(std::forward<Parameters>(parameters), std::move(rule), choices, compare, [&] {
                this->module_ = std::make_unique<detail::ModuleState<Comm>>(
                    comm, ParameterList{}, std::move(buffers), passes
                );
                start.emplace(this->module_->plan_sync());
            });
            start->run(comm, 0);
        } catch (...) {
            Optimizer::leave_values(this->groups());
            throw;
        }
    }
    /// A model without buffers.
    template <class Parameters>
    ShardedDataParallel(
        Comm& comm, Parameters&& parameters, Rule rule, ShardedOptions const& options = {}
    )
        : ShardedDataParallel{
              comm,
              std::forward<Parameters>(parameters),
              joinable::buffers(),
              std::move(rule),
              options
          } {}

    /// Adds parameters with their own settings. Collective, outside a guard. Their indices follow
    /// those of earlier groups, also for ready(i). `owners` and `units` as in ShardedOptions. Throws
    /// what the constructor throws; the groups are then unchanged.
    template <class Parameters>
    void add_parameter_group(
        Parameters&& parameters,
        Rule rule,
        std::vector<int> const& owners = {},
        std::vector<std::size_t> const& units = {}
    ) {
        Training::require_outside("add_parameter_group()");
        auto const nothing = [](AgreementList&) {};
        detail::ShardChoices const choices{owners, units};
        add(std::forward<Parameters>(parameters), std::move(rule), choices, nothing, [] {});
    }

    /// Lists the parameters again: see ZeroRedundancyOptimizer::refresh(). Buffers and attached state stay as they are.
    /// Collective, outside a guard and a round.
    /// @throws ContractViolation  also with Sharding::parameters, whose values are nowhere as a whole.
    template <class... Parameters>
    void refresh(Parameters&&... parameters) {
        Training::require_outside("refresh()");
        auto const nothing = [](detail::ShardGroup const&) {};
        with_reducer(nothing, [&](Last const& last) {
            this->relist(last, std::forward<Parameters>(parameters)...);
        });
        this->forget_window(false);
    }

    /// Gathers all values and keeps them during the lifetime of the returned object. Collective,
    /// outside a guard. If ranks keep parts of the values, read them here, or write them equally on
    /// all ranks and then call reload(). Does nothing with another sharding. Destroy the returned
    /// object before the next pass.
    /// @throws ContractViolation  called in a guard, or values are held.
    /// @throws std::bad_alloc  there is not enough memory for all values; then the other ranks
    ///         throw PeerFailed.
    [[nodiscard]] std::vector<HeldValues> use_all() {
        Training::require_outside("use_all()");
        auto* const units = this->hooks().units();
        if (units == nullptr) {
            return {};
        }
        try {
            this->fail_together("use_all()", [&] { units->reserve_all(); });
            return units->hold_all();
        } catch (...) {
            units->free_reserve();
            throw;
        }
    }
    [[nodiscard]] Times& timeline() noexcept { return this->reducer_->timeline(); }
    /// Bytes of the memory in which passes gather values. Local.
    [[nodiscard]] std::size_t unit_bytes() const noexcept {
        auto const* const units = this->hooks().units();
        return units == nullptr ? 0 : units->bytes();
    }

    /// Steps what this rank owns and exchanges it. Call it once after each backward pass that syncs
    /// and after each skip(). Collective; blocks until all parameters are written. Throws what
    /// ZeroRedundancyOptimizer::step() throws.
    /// @throws ContractViolation  no gradients have been reduced since the last step.
    void step() {
        this->guarded([&] {
            if (this->stage_ != Training::Stage::reduced) {
                throw ContractViolation{
                    "step() follows a backward pass that syncs, once; call it after backward() or skip(), and "
                    "not in rounds that accumulate"
                };
            }
            run(this->round_);
            this->end_round();
        });
    }
    /// As step(closure) of ZeroRedundancyOptimizer. The closure calls forward() and backward().
    template <class Closure>
    decltype(auto) step(Closure&& closure) {
        return detail::step_after(*this, std::forward<Closure>(closure), [this] { step(); });
    }

    /// Runs on joined ranks: what the passes run there, and the same steps.
    class Hook : public Training::Hook {
    public:
        Hook(ShardedDataParallel& sharded, bool divides_by_initial_world_size) noexcept
            : Training::Hook{sharded, divides_by_initial_world_size}, sharded_{sharded} {}

        void main_hook(Round const& round) {
            Training::Hook::main_hook(round);
            if (round.will_sync()) {
                sharded_.run(round);
            }
        }
        void post_hook(JoinResult const& result) {
            Training::Hook::post_hook(result);
            sharded_.take_settings(result);
        }

    private:
        ShardedDataParallel& sharded_;
    };

    using Optimizer::join_communicator;
    using Optimizer::join_state;
    using typename Training::join_keywords;
    [[nodiscard]] Hook join_hook(arguments<join_keywords> const& args) {
        return Hook{*this, Training::divides(args)};
    }
    [[nodiscard]] std::string_view join_name() const noexcept { return "ShardedDataParallel"; }
    /// Options, and the rule of each group.
    void agree_on(AgreementList& list) const {
        compare_sharding(list);
        this->module_->agree_on(list);
        this->model_collectives_.agree_on(list);
        Optimizer::agree_on(list);
    }
    /// @throws ContractViolation  another participant that steps has no averages to step by.
    void check_guard(GuardView const& guard) const {
        if (guard.steps && guard.lists_all_averaged && guard.averaged.empty()) {
            throw ContractViolation{
                "another participant of this guard steps, but only ShardedDataParallel averages gradients, and it "
                "steps by them itself; leave the other one out, or make a Step that steps nothing an Action"
            };
        }
    }
    void list_claims(ParameterClaims& claims) const { this->claim(claims, true); }
    /// For GuardView::averaged: empty, because no other participant steps by these averages.
    void list_averaged(std::vector<void const*>&) const noexcept {}

private:
    using Averages = Reducer<Comm, detail::ToOwners<Comm>, Times>;

    void compare_sharding(AgreementList& list) const {
        list.add("sharding", name_of(this->sharding()));
        list.add("step_in_backward", steps_in_backward_);
    }
    static void check(ShardedOptions const& options) {
        if (!options.step_in_backward) {
            return;
        }
        if (detail::steps_all_at_once<Rule>) {
            throw ContractViolation{
                "step_in_backward steps a bucket as soon as its averages arrive, but this optimizer steps all "
                "parameters at once; leave it out"
            };
        }
        if (options.before_step) {
            throw ContractViolation{
                "step_in_backward steps a bucket before the gradients of others are there, but before_step is "
                "to see all of them; leave one of the two out"
            };
        }
        if (!detail::reduces_to_owners(options.sharding)) {
            throw ContractViolation{detail::concat(
                "step_in_backward steps buckets that are averaged to their owners, but with Sharding::",
                name_of(options.sharding),
                " gradients are averaged on all ranks; use Sharding::gradients or Sharding::parameters"
            )};
        }
    }

    template <class Parameters, class Compare, class F>
    void
    add(Parameters&& parameters,
        Rule rule,
        detail::ShardChoices const& choices,
        Compare const& compare,
        F const& prepare) {
        auto const also = [&](detail::ShardGroup const&) {
            if (this->reducer_) { // in the agreement, or a rank alone would refuse
                this->hooks().require_released();
                if (this->window().window().is_open()) {
                    throw ContractViolation{
                        "add_parameter_group() was called while gradients hold batches that no round has reduced; add "
                        "groups after a round that syncs, or call discard_window() before"
                    };
                }
            }
            prepare();
        };
        with_reducer(also, [&](Last const& last) {
            Optimizer::add(
                std::forward<Parameters>(parameters), std::move(rule), choices, compare, last
            );
        });
    }

    using Last = std::function<void(detail::ShardGroup const&)>;

    /// Calls make(last), which makes groups and, by last(group), a reducer of the gradients of all.
    template <class Also, class Make>
    void with_reducer(Also const& also, Make const& make) {
        typename Training::Model made;
        Last const last = [&](detail::ShardGroup const& group) {
            also(group);
            ParameterList const all = parameters_with(group);
            former_.reserve(former_.size() + 1); // after the agreement a rank alone would throw
            made.reducer_ = reducer_with(group, all);
            made.listed_ = std::make_unique<detail::ListedModel>(
                all, this->sharding() != Sharding::parameters
            );
            if (this->module_->options().verify_ready) {
                made.ready_check_ = std::make_unique<detail::ReadyCheck>(
                    all,
                    detail::device_of(Training::comm_),
                    detail::reduces_to_owners(this->sharding()) ? detail::CheckedMarks::at_once
                                                                : detail::CheckedMarks::after_pass
                );
            }
        };
        make(last);
        if (this->reducer_ && !detail::reduces_to_owners(this->sharding())) {
            former_.push_back(std::move(this->reducer_)); // gradients may lie in its buckets
        }
        made.module_ = std::move(this->module_);
        this->model() = std::move(made);
        detail::abort_if_throws(Training::comm_, [&] { this->reducer_->take_gradients(); });
        this->reducer_->register_memory();
        std::erase_if(former_, [](auto const& one) { return !one->holds_gradients(); });
    }

    /// Those of the groups before and of the next one.
    [[nodiscard]] ParameterList parameters_with(detail::ShardGroup const& next) const {
        ParameterList all;
        for (detail::ShardGroup const& before : this->groups()) {
            append(all, before.given());
        }
        append(all, next.given());
        return all;
    }
    [[nodiscard]] std::unique_ptr<Averages>
    reducer_with(detail::ShardGroup const& group, ParameterList all) {
        Comm& comm = Training::comm_;
        auto const rank = static_cast<int>(comm.rank());
        auto times = this->reducer_ ? this->reducer_->shared_timeline() : std::make_shared<Times>();
        if (!detail::reduces_to_owners(this->sharding())) {
            return std::make_unique<Averages>(
                comm,
                std::make_shared<detail::ToOwners<Comm>>(),
                detail::gradients_in_buckets(
                    std::move(all),
                    buckets_,
                    rank,
                    static_cast<int>(comm.size()),
                    detail::BufferMemory{comm}
                ),
                buckets_,
                std::move(times)
            );
        }
        std::unique_ptr<detail::ShardedUnits<Comm>> units;
        if (this->sharding() == Sharding::parameters) {
            units = std::make_unique<detail::ShardedUnits<Comm>>(comm, this->groups(), group);
        }
        detail::StepShard step;
        std::function<void(Round const&)> begin;
        if (steps_in_backward_) {
            step = [this](std::size_t k, detail::OptimizerShard const& s) {
                this->step_shard(k, s);
            };
            begin = [this](Round const& round) { this->begin_step(round, this->has_refresh()); };
        }
        auto gradients = std::make_unique<detail::GradientsForOwners>(
            std::move(all), this->groups(), group, rank, detail::device_of(comm), this->arenas()
        );
        auto reduction = std::make_shared<detail::ToOwners<Comm>>(
            *gradients, std::move(units), std::move(step), std::move(begin)
        );
        return std::make_unique<Averages>(
            comm,
            std::move(reduction),
            std::move(gradients),
            BucketOptions{.find_unused = true},
            std::move(times)
        );
    }

    /// The same on active and shadowing ranks.
    void run(Round const& round) {
        if (steps_in_backward_) {
            this->finish_stepped();
        } else {
            this->begin_step(round, this->has_refresh());
            this->finish_step();
        }
    }

    bool steps_in_backward_;
    std::vector<std::unique_ptr<Averages>> former_; ///< of earlier group lists
    BucketOptions buckets_;                         ///< used if all ranks have all averages
};

template <class Comm, class Parameters, class Rule>
ShardedDataParallel(Comm&, Parameters&&, Rule) -> ShardedDataParallel<Comm, Rule>;
template <class Comm, class Parameters, class Rule>
ShardedDataParallel(Comm&, Parameters&&, Rule, ShardedOptions) -> ShardedDataParallel<Comm, Rule>;
template <class Comm, class Parameters, class Rule>
ShardedDataParallel(Comm&, Parameters&&, BufferList, Rule) -> ShardedDataParallel<Comm, Rule>;
template <class Comm, class Parameters, class Rule>
ShardedDataParallel(Comm&, Parameters&&, BufferList, Rule, ShardedOptions)
    -> ShardedDataParallel<Comm, Rule>;

/// The class for arguments that fit no constructor. It holds only the explanation.
template <class Options>
class ShardedDataParallel<detail::NoCommunicator, Options> {
    static_assert(
        !std::is_same_v<Options, ShardedOptions>,
        "ShardedDataParallel: expected a communicator, parameters, buffers(ranges...) if the model has any, "
        "the optimizer as in Adam{...}, then options in braces with the names and the order of "
        "ShardedOptions; write ShardedOptions{...} to be told which name is wrong"
    );

public:
    explicit ShardedDataParallel(...);
};
/// `...` takes missing arguments, too many, or braces with a wrong name.
ShardedDataParallel(detail::AnyArgument, ...)
    -> ShardedDataParallel<detail::NoCommunicator, ShardedOptions>;

}} // namespace joinable::v0

// ---- joinable/participant/sharded/zero_memory.hpp

namespace joinable { inline namespace v0 {

/// The bytes that a rank of a training needs for its model, without activations. See zero_memory().
struct ZeroMemory {
    std::size_t values = 0;
    std::size_t gradients = 0;
    std::size_t state = 0;   ///< of the optimizer, without masters
    std::size_t masters = 0; ///< copies of 32 bits of values of 16 bits
    std::size_t buckets = 0; ///< copies of gradients and values that travel

    [[nodiscard]] constexpr std::size_t total() const noexcept {
        return values + gradients + state + masters + buckets;
    }
    friend bool operator==(ZeroMemory const&, ZeroMemory const&) = default;
};

/// The bytes that a rank needs to train `parameters` elements of `dtype`, the type of values and
/// gradients, by `rule` on `ranks` ranks. The formulas are those of ZeRO (Rajbhandari et al., 2020,
/// figure 1), and buckets in addition. Local; no model is needed.
///
/// `masters`: values of 16 bits are stepped as copies of 32 bits, as every UpdateRule does; without
/// them the state has the type of the values. `views`: gradients and values lie in the buckets in
/// which they travel, as far as the sharding has these options: gradient_as_bucket_view with
/// Sharding::none and `optimizer`, parameters_as_bucket_view with `optimizer` and `gradients`.
///
/// A part is divided evenly and rounded up. Partition::flat adds less than a cache line for each
/// bucket; with by_parameters a rank may have more or less, see ShardedOptimizer::table().
/// Gradients count as freed by `release_grad` from Sharding::gradients on. Buckets are as large as
/// `bucket_cap_bytes`, or as the whole model if it is smaller; a parameter that is larger makes its
/// bucket larger.
/// @throws ContractViolation  there is no rank, or `dtype` is of integers.
template <UpdateRule Rule>
[[nodiscard]] constexpr ZeroMemory zero_memory(
    std::size_t parameters,
    DType dtype,
    Sharding sharding,
    int ranks,
    bool masters = true,
    bool views = false,
    Rule const& rule = {},
    std::size_t bucket_cap_bytes = std::size_t{25} << 20U
) {
    if (ranks < 1) {
        throw ContractViolation{
            detail::concat("zero_memory() was asked about ", ranks, " ranks; give at least 1")
        };
    }
    if (!is_floating_point(dtype)) {
        throw ContractViolation{detail::concat(
            "zero_memory() was asked about parameters of ",
            name_of(dtype),
            "; give a floating-point type, and count a complex number as two of its reals"
        )};
    }
    auto const divided_by = static_cast<std::size_t>(ranks);
    std::size_t const part = parameters / divided_by + (parameters % divided_by != 0 ? 1 : 0);
    std::size_t const stepped = sharding == Sharding::none ? parameters : part;
    std::size_t const whole = parameters * size_of(dtype);
    bool const has_masters = masters && is_half_precision(dtype);
    std::size_t const computed_in = size_of(has_masters ? DType::f32 : dtype);

    ZeroMemory memory;
    memory.values = (sharding == Sharding::parameters ? part : parameters) * size_of(dtype);
    memory.gradients = (detail::reduces_to_owners(sharding) ? part : parameters) * size_of(dtype);
    memory.state = stepped * rule.state_names().size() * computed_in;
    memory.masters = has_masters ? stepped * computed_in : 0;

    std::size_t const bucket = (std::min)(whole, bucket_cap_bytes);
    std::size_t const overlapping = whole > bucket ? 2 * bucket : bucket; // one fills, one travels
    switch (sharding) {
    case Sharding::none: memory.buckets = views ? 0 : whole; break;
    case Sharding::optimizer: memory.buckets = views ? 0 : whole + 2 * bucket; break;
    case Sharding::gradients: memory.buckets = views ? overlapping : 2 * bucket; break;
    case Sharding::parameters: memory.buckets = 2 * overlapping; break; // of gradients and of units
    }
    return memory;
}

}} // namespace joinable::v0

// ---- joinable/participant/sharded/zero_redundancy_optimizer.hpp

namespace joinable { inline namespace v0 {

/// An optimizer whose state is dealt out to ranks. Each rank keeps the state of the elements it
/// owns, steps these elements, and sends them to the others. This is the first stage of ZeRO
/// (Rajbhandari et al., 2020): a rank has 1 / size() of the state.
///
/// @code
/// joinable::DistributedDataParallel ddp{comm, model.parameters()};
/// joinable::ZeroRedundancyOptimizer zero{comm, model.parameters(), joinable::Adam{.learning_rate = 1e-2}};
/// joinable::Join guard{joinable::participants(ddp, zero)};
/// for (auto const& batch : my_shard) {
///     ddp.forward([&] { loss = model.forward(batch); });
///     ddp.backward([&](auto ready) { model.backward(ready); });
///     zero.step();
/// }
/// guard.finish();
/// @endcode
///
/// The result equals that of an unsharded optimizer on every rank, bit for bit, also when ranks run
/// out of inputs: a joined owner steps by the same averages as the others. Numbers of 16 bits are
/// stepped as masters of 32 bits, which their owner keeps. A parameter without a gradient on its
/// owner is not stepped; a joined owner steps those that have a gradient on the lowest active rank.
/// Which parameters need gradients is fixed when they are added, until refresh(). A parameter whose gradients are rows is stepped
/// row by row, by a rule with UpdateRule's steps_rows: its owner sends the rows that it has stepped.
///
/// `Rule` is an UpdateRule or a LocalOptimizer: an engine's optimizer that keeps its own state.
///
/// If the communicator moves the memory of a device, parameters and state are there, and kernels
/// (CudaDevice::use_kernels) step them in the order of the engine's stream, to the bits of the
/// host. What blocks then blocks the stream and not the host.
template <class Comm, class Rule>
class ZeroRedundancyOptimizer : public ShardedOptimizer<Comm, Rule> {
    using Base = ShardedOptimizer<Comm, Rule>;

public:
    /// Collective. `parameters` is a range that joinable::parameters() takes. All ranks agree on
    /// parameters, rule and options, then take rank 0's values. The parameters must outlive it.
    /// @throws ContractViolation  a parameter is not where the communicator's memory is, one of
    ///         integers needs a gradient, none needs one, the rule or the options are invalid, the
    ///         device has no kernels for the rule, or thread ranks train the same memory. The other
    ///         ranks throw PeerFailed.
    /// @throws Mismatch  ranks differ; the text names the first parameter or setting that does.
    template <class Parameters>
    ZeroRedundancyOptimizer(
        Comm& comm, Parameters&& parameters, Rule rule, ZeroOptions options = {}
    )
        : ZeroRedundancyOptimizer{
              comm, comm, std::forward<Parameters>(parameters), std::move(rule), std::move(options)
          } {}

    /// The same for hybrid sharding: groups of ranks, such as those of one node, share the state, and each group has all of
    /// it. `shards` is this rank's group, of one split() of `comm` on all ranks. Values travel in the group alone, while
    /// DistributedDataParallel averages their gradients over `comm`:
    ///
    /// @code
    /// auto node = comm.split(comm.rank() / ranks_per_node, comm.rank());
    /// joinable::DistributedDataParallel ddp{comm, model.parameters()};
    /// joinable::ZeroRedundancyOptimizer zero{comm, node, model.parameters(), joinable::Adam{}};
    /// joinable::Join guard{joinable::participants(ddp, zero), joinable::groups_of(comm)};
    /// @endcode
    ///
    /// A rank has 1 / shards.size() of the state. Owners, and the ranks of consolidate(), load() and table(), are numbers
    /// in the group. consolidate() gathers on such a rank of each group, and load() takes the same state in each.
    /// ZeroOptions::before_step sums over the group, which has all gradients; all ranks take the sums of rank 0's group. A
    /// Checkpoint has the state of one group.
    /// @throws ContractViolation  also with ZeroOptions::reduces_gradients, which would average over the group alone.
    template <class Parameters>
    ZeroRedundancyOptimizer(
        Comm& comm, Comm& shards, Parameters&& parameters, Rule rule, ZeroOptions options = {}
    )
        : Base{
              comm,
              shards,
              options,
              options.reduces_gradients ? Sharding::gradients : Sharding::optimizer
          } {
        add(std::forward<Parameters>(parameters), std::move(rule), this->optimizer_options().owners
        );
    }

    /// Adds parameters with their own settings. Collective, outside a guard. Their indices follow
    /// those of earlier groups. `owners` as in ZeroOptions. Throws what the constructor throws; the
    /// groups are then unchanged.
    template <class Parameters>
    void
    add_parameter_group(Parameters&& parameters, Rule rule, std::vector<int> const& owners = {}) {
        require_outside("add_parameter_group()");
        add(std::forward<Parameters>(parameters), std::move(rule), owners);
    }

    /// Lists the parameters again, after some became trainable or frozen or were added. Without arguments these are the
    /// same; otherwise give a range for each group, in their order. Collective, outside a guard, on all ranks in the same
    /// way.
    ///
    /// Ranks compare what the constructor compares. Parameters that are new or newly trained take rank 0's values, and their
    /// state begins anew. That of others moves to its new owners, by way of rank 0, whose host memory holds all of it
    /// meanwhile. A parameter is the one of the same name in its group, or, without a name, the one whose value is at the
    /// same address, unless that one has other memory now; with another dtype it is a new one. What is frozen now loses its state. Those that were listed before
    /// must exist until this returns; one that is left out while its gradient (or, with parameters_as_bucket_view, its value)
    /// lies in a bucket must live as long as this object.
    /// @throws ContractViolation  in a guard; gradients hold batches that no round has reduced, and are not all absent or
    ///         zeros; there is not one range for each group; a value has other extents than when it was given; or what
    ///         the constructor throws. The other ranks throw PeerFailed.
    /// @throws Mismatch  ranks list different parameters, or other ranks do something else. After this and a
    ///         ContractViolation the optimizer is as it was before.
    template <class... Parameters>
    void refresh(Parameters&&... parameters) {
        require_outside("refresh()");
        this->relist([](auto const&) {}, std::forward<Parameters>(parameters)...);
        discard_window();
    }

    /// Steps what this rank owns and exchanges it. Call it once in each round that syncs, after the
    /// gradients are reduced. Collective; blocks until all parameters are written. `notice` has the
    /// weight of this rank's batch, for ZeroOptions::reduces_gradients. Some parameters may be
    /// stepped after an error.
    /// @throws ContractViolation  a gradient does not fit its value; a value has other extents, or its elements
    ///         another order, than when it was given; a setting is invalid or
    ///         changes the amount of state; a value of 16 bits in host memory is not its rounded
    ///         master, see reload(); the round of the guard, enabled or not, does not sync.
    /// @throws what the communicator throws.
    void step(RoundNotice const& notice = {}) {
        detail::require_listed(this->join_state(), this->shard_communicator(), join_name());
        Round const round = notify_join_context(*this, notice);
        detail::run_part(*this, round, [&] { run(round); });
    }
    /// Runs the closure once, then step(notice), and returns what the closure returned, such as the loss. The closure
    /// runs the passes; joined ranks do not run it. What it throws is as thrown by a pass: nothing is stepped.
    template <class Closure>
        requires(!std::convertible_to<Closure, RoundNotice>)
    decltype(auto) step(Closure&& closure, RoundNotice const& notice = {}) {
        return detail::step_after(*this, std::forward<Closure>(closure), [&] { step(notice); });
    }

    /// Runs the same steps on joined ranks.
    class Hook {
    public:
        using label = labels::shards;
        using runs_after = labels_of<labels::gradients>;

        Hook(ZeroRedundancyOptimizer& zero, bool divides_by_initial_world_size) noexcept
            : zero_{zero},
              divides_{
                  zero.averaging_.divides_by_initial_world_size, divides_by_initial_world_size
              } {}
        Hook(Hook const&) = delete;
        Hook& operator=(Hook const&) = delete;

        static bool takes_part(Round const& round) noexcept { return round.will_sync(); }
        void main_hook(Round const& round) {
            zero_.run(round);
            if (!std::exchange(is_clear_, true)) { // what was sent or dropped
                zero_.clear_gradients();
            }
        }
        void post_hook(JoinResult const& result) { zero_.take_settings(result); }

    private:
        ZeroRedundancyOptimizer& zero_;
        detail::ScopedFlag divides_; ///< set for the guard
        bool is_clear_ = false;
    };

    /// Forgets what this rank accumulated since the last round that synced, the batch that a loop announced last
    /// included, because its gradients were cleared. A guard does so by itself where it begins and all gradients of
    /// its participants are absent or zeros. Inside an enabled guard all its participants forget their weights; call
    /// it for each of them. Local, between rounds.
    /// @throws ContractViolation  a round of an enabled guard is open, or one that syncs is announced: by next(), with
    ///                            look-ahead, or with known lengths. Nothing was changed.
    void discard_window() {
        detail::WindowOf window{this->join_state()};
        window.require_between_rounds();
        window.clear(false);
        window.end(); // also the batch that a loop has announced, of which this object sees no pass
    }
    /// For guards, before they begin: what was accumulated, and how to forget it.
    [[nodiscard]] detail::Accumulated accumulated_before_guard() {
        return detail::WindowOf{this->join_state()}.before_guard([this] {
            return this->are_cleared();
        });
    }
    void forget_cleared() { detail::WindowOf{this->join_state()}.clear(false); }
    /// For guards.
    [[nodiscard]] bool averages_gradients() const noexcept {
        return optimizer_options().reduces_gradients;
    }

    using Base::join_communicator;
    using join_keywords = keywords<divide_by_initial_world_size_t>;
    [[nodiscard]] Hook join_hook(arguments<join_keywords> const& args) noexcept {
        return Hook{*this, args.get(divide_by_initial_world_size, true)};
    }
    [[nodiscard]] std::string_view join_name() const noexcept { return "ZeroRedundancyOptimizer"; }
    static constexpr std::string_view join_verb = "step()";
    /// @throws ContractViolation  the gradients of this guard or of a parameter are averaged by no
    ///         participant, or other gradients of this guard are averaged by another participant.
    void check_guard(GuardView const& guard) const {
        if (guard.reduces == optimizer_options().reduces_gradients) {
            throw ContractViolation{
                guard.reduces
                    ? "ZeroOptions::reduces_gradients averages gradients that another participant of "
                      "this guard has averaged; leave the option out"
                    : "no participant of this guard averages the gradients that "
                      "ZeroRedundancyOptimizer steps by; add the DistributedDataParallel to "
                      "participants(...), or set ZeroOptions::reduces_gradients"
            };
        }
        if (!optimizer_options().reduces_gradients && guard.lists_all_averaged) {
            for (detail::ShardGroup const& group : this->groups()) {
                detail::check_averaged(group, guard.averaged);
            }
        }
    }
    void list_claims(ParameterClaims& claims) const {
        this->claim(claims, optimizer_options().reduces_gradients);
    }

private:
    using Base::optimizer_options;
    using Base::require_outside;

    template <class Parameters>
    void add(Parameters&& parameters, Rule rule, std::vector<int> const& owners) {
        auto const nothing = [](auto const&) {};
        Base::add(
            std::forward<Parameters>(parameters), std::move(rule), {owners, {}}, nothing, nothing
        );
    }

    void run(Round const& round) {
        this->begin_step(round, this->can_refresh());
        if (optimizer_options().reduces_gradients) {
            auto const any = [](double) {}; // ranks' factors of a mean add up to 1
            reduce(averaging_.factor(this->words(), round, any));
        }
        this->finish_step();
    }

    /// Averages all gradients, each only to its owner.
    void reduce(double factor) {
        auto const factors = detail::ShardFactors::of(join_communicator(), factor);
        for (detail::ShardGroup const& group : this->groups()) {
            for (detail::OptimizerShard const& shard : group.shards) {
                std::byte* const bucket = this->arenas().data(0, shard.bucket_bytes());
                shard.pack_gradients(group.parameters, factors.packed, bucket);
                detail::start_parts(join_communicator(), shard, bucket, factors.summed).wait();
            }
        }
    }

    /// On a joined rank whose gradients were averaged here. See WithoutPass.
    void clear_gradients() {
        if (optimizer_options().reduces_gradients) {
            Device& device = detail::device_of(join_communicator());
            for (detail::ShardGroup const& group : this->groups()) {
                for (AnyParameter const& parameter : group.parameters) {
                    if (parameter.requires_grad()) {
                        detail::clear_gradient(parameter, device);
                    }
                }
            }
            device.finish();
        }
    }

    detail::Averaging averaging_{GradientKind::mean};
};

template <class Comm, class Parameters, class Rule>
ZeroRedundancyOptimizer(Comm&, Parameters&&, Rule) -> ZeroRedundancyOptimizer<Comm, Rule>;
template <class Comm, class Parameters, class Rule>
ZeroRedundancyOptimizer(Comm&, Parameters&&, Rule, ZeroOptions)
    -> ZeroRedundancyOptimizer<Comm, Rule>;
template <class Comm, class Parameters, class Rule>
ZeroRedundancyOptimizer(Comm&, Comm&, Parameters&&, Rule) -> ZeroRedundancyOptimizer<Comm, Rule>;
template <class Comm, class Parameters, class Rule>
ZeroRedundancyOptimizer(Comm&, Comm&, Parameters&&, Rule, ZeroOptions)
    -> ZeroRedundancyOptimizer<Comm, Rule>;

/// The class for arguments that fit no constructor. It holds only the explanation.
template <class Options>
class ZeroRedundancyOptimizer<detail::NoCommunicator, Options> {
    static_assert(
        !std::is_same_v<Options, ZeroOptions>,
        "ZeroRedundancyOptimizer: expected a communicator, parameters, the optimizer as in Adam{...}, then "
        "options in braces with the names and the order of ZeroOptions; write ZeroOptions{...} to be told "
        "which name is wrong"
    );

public:
    explicit ZeroRedundancyOptimizer(...);
};
/// `...` takes missing arguments, too many, or braces with a wrong name.
ZeroRedundancyOptimizer(detail::AnyArgument, ...)
    -> ZeroRedundancyOptimizer<detail::NoCommunicator, ZeroOptions>;

}} // namespace joinable::v0

// ---- joinable/zero.hpp

/// @file
/// Sharded optimizers: what ZeRO needs in addition to <joinable/join.hpp>, which this header
/// includes.
