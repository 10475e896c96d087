// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/optimizer/before_step.hpp>

#include <cmath>
#include <numeric>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION bool ClipNorm::operator()(ShardGradients const& gradients) {
    if (gradients.device() != DeviceId{}) {
        throw ContractViolation{detail::concat(
            "ClipNorm reads gradients on the host, but these are on ",
            detail::to_text(gradients.device()),
            "; give a before_step of your own, whose kernels sum squares and scale, and which adds up the sums "
            "of all ranks by ShardGradients::sum()"
        )};
    }
    squares_.assign(gradients.parameter_count(), 0.0);
    for (auto const& [parameter, view] : gradients) {
        double square = 0;
        detail::for_each_element(view, [&]<class T>(T const& element) {
            double const number = static_cast<detail::wide_of<T>>(element);
            square += number * number;
        });
        squares_[parameter] += square;
    }
    gradients.sum(squares_);
    norm_ = std::sqrt(std::accumulate(squares_.begin(), squares_.end(), 0.0));
    double const factor = max_norm_ / (norm_ + 1e-6);
    if (!(factor >= 1.0)) { // also for NaN: it spreads to the gradients, as in PyTorch
        for (auto const& gradient : gradients) {
            detail::for_each_element(gradient.view, [&]<class T>(T& element) {
                using Wide = detail::wide_of<T>;
                element = T(static_cast<Wide>(element) * static_cast<Wide>(factor));
            });
        }
    }
    return true;
}

}} // namespace joinable::v0
