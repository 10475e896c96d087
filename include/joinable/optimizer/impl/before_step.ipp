// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/optimizer/before_step.hpp>

#include <cmath>
#include <numeric>

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

}} // namespace joinable::v0
