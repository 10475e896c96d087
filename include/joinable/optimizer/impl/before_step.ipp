// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/optimizer/before_step.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION void ShardGradients::sum_squares(std::span<double> squares) const {
    if (squares.size() != parameters_) {
        throw ContractViolation{detail::concat(
            "sum_squares gives a number for each of ",
            parameters_,
            " parameters, but was given room for ",
            squares.size(),
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
        sums_.sum_squares(pieces_, squares);
    }
}

JOINABLE_DEFINITION void ShardGradients::scale(double factor) const {
    for (ShardGradient const& piece : pieces_) {
        device_.scale_copy(piece.view, factor, piece.view);
    }
    device_.finish(); // later kernels of the engine see it
}

JOINABLE_DEFINITION bool ClipNorm::operator()(ShardGradients const& gradients) {
    squares_.resize(gradients.parameter_count());
    gradients.sum_squares(squares_);
    norm_ = std::sqrt(std::accumulate(squares_.begin(), squares_.end(), 0.0));
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
