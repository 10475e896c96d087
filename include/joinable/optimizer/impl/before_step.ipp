// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/optimizer/before_step.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <string_view>
#include <type_traits>

#include <joinable/detail/text.hpp>
#include <joinable/device/combined_terms.hpp>
#include <joinable/device/squares.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>

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
